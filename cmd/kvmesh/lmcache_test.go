package main

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestWeightsOfModels: the hash of a model's weights is found by its folder, by the cache of
// Hugging Face where that leaves no choice, and by --model before both.
func TestWeightsOfModels(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		t.Helper()
		name = filepath.Join(dir, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return filepath.Dir(name)
	}
	one := write("one/model.safetensors", "weights")
	write("hub/models--org--name/snapshots/abc/model.safetensors", "weights")
	two := write("two/model.safetensors", "other weights")
	file := filepath.Join(two, "model.safetensors")
	e := &env{getenv: func(name string) string {
		return map[string]string{"HF_HUB_CACHE": filepath.Join(dir, "hub"), "XDG_CACHE_HOME": filepath.Join(dir, "cache"), "HOME": dir}[name]
	}}
	w, err := newWeights(e, []string{"named=" + two, "hashed=sha256:0123", "gguf=" + file})
	if err != nil {
		t.Fatal(err)
	}
	hash := func(model string) string {
		h, err := w.hash(t.Context(), model)
		if err != nil {
			return err.Error()
		}
		return h
	}
	if h := hash(one); !strings.HasPrefix(h, "sha256:") || hash("org/name") != h || hash("named") == h {
		t.Errorf("%s, %s, %s", h, hash("org/name"), hash("named"))
	}
	if h := hash("hashed##lmcache-dcp-layout-v1-d2-interleave1"); h != "sha256:0123" {
		t.Errorf("by hash %s", h)
	}
	if h := hash("gguf"); !strings.HasPrefix(h, "sha256:") || h == hash("named") {
		t.Errorf("one file %s", h)
	}
	write("hub/models--org--name/snapshots/def/model.safetensors", "new weights")
	for _, model := range []string{"org/name", "nobody/nothing", "/no/such/folder"} {
		if h := hash(model); strings.HasPrefix(h, "sha256:") {
			t.Errorf("%s has the hash %s", model, h)
		}
	}
	for _, bad := range []string{"x", "=y", "x="} {
		if _, err := newWeights(e, []string{bad}); err == nil {
			t.Errorf("--model %s is accepted", bad)
		}
	}
}

// TestListenLocal: engines connect from this host only.
func TestListenLocal(t *testing.T) {
	for _, addr := range []string{"0.0.0.0:0", ":0", "[::]:0", "example.com:80", "nonsense", "192.0.2.1:0"} {
		if l, err := listenLocal(t.Context(), "--listen", addr); err == nil {
			l.Close()
			t.Errorf("listens on %s", addr)
		}
	}
	path := filepath.Join(t.TempDir(), "s")
	if err := os.WriteFile(path, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := listenLocal(t.Context(), "--listen", "unix:"+path); err == nil {
		t.Error("listens in the place of a file")
	}
	if raw, err := os.ReadFile(path); string(raw) != "mine" {
		t.Fatalf("somebody's file is now %q, %v", raw, err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		t.Fatal(err)
	}
	dead.SetUnlinkOnClose(false) // as a killed one leaves it
	dead.Close()
	l, err := listenLocal(t.Context(), "--listen", "unix:"+path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", st.Mode(), err)
	}
	if _, err := listenLocal(t.Context(), "--listen", "unix:"+path); err == nil {
		t.Error("two listen on one socket")
	}
}
