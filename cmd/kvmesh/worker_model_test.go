package main

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/worker/modelstore"
)

// A model of the store sets what flags and environment leave open.
func TestModelRef(t *testing.T) {
	src, dir := t.TempDir(), t.TempDir()
	manifest := filepath.Join(src, "m.yaml")
	text := fmt.Sprintf("name: demo\nversion: v1\nengine: sim\nmain: w.gguf\nconfig: {contextLength: 2048, maxNumSeqs: 3, threads: 2}\n"+
		"files:\n- {path: notes, size: 0, sha256: %x}\n- {path: w.gguf, size: 1, sha256: %x}\n", sha256.Sum256(nil), sha256.Sum256([]byte("w")))
	for name, content := range map[string]string{manifest: text, filepath.Join(src, "notes"): "", filepath.Join(src, "w.gguf"): "w"} {
		if err := os.WriteFile(name, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := modelstore.Open(dir).Pull(t.Context(), modelstore.Sources{}, manifest, nil); err != nil {
		t.Fatal(err)
	}
	f := workerFlagSet(t, "--model-ref", "demo@v1", "--store", dir, "--threads", "7")
	if err := applyWorkerEnv(environment("MAX_NUM_SEQS", "5"), f); err != nil {
		t.Fatal(err)
	}
	m := modelOptions{ref: "demo@v1", store: dir}
	if err := m.apply(&env{getenv: environment()}, f); err != nil {
		t.Fatal(err)
	}
	for flag, want := range map[string]string{
		"weights": filepath.Join(dir, "demo", "v1", "w.gguf"), "model": "demo", "engine": "sim",
		"context-length": "2048", "threads": "7", "max-num-seqs": "5", "kv-tokens": "0",
	} {
		if got := f.Lookup(flag).Value.String(); got != want {
			t.Errorf("--%s is %q, want %q", flag, got, want)
		}
	}
}

func TestStoreFolder(t *testing.T) {
	t.Setenv("HOME", "/home/me")
	for want, pairs := range map[string][]string{
		"/flag":                               {"KVMESH_STORE", "/env", "flag", "/flag"},
		"/env":                                {"KVMESH_STORE", "/env", "XDG_DATA_HOME", "/data"},
		"/data/kvmesh/models":                 {"XDG_DATA_HOME", "/data"},
		"/home/me/.local/share/kvmesh/models": {"XDG_DATA_HOME", "relative"},
	} {
		e := &env{getenv: environment(pairs...)}
		s, err := e.store(environment(pairs...)("flag"))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Find(modelstore.Ref{Name: "a", Version: "b"}); err == nil || !strings.HasSuffix(err.Error(), " "+want) {
			t.Errorf("%v: %v, want %s", pairs, err, want)
		}
	}
}

func TestVisibleDevices(t *testing.T) {
	for list, want := range map[string]struct {
		devices []string
		hidden  bool
	}{
		"":                  {nil, false},
		"0,2":               {[]string{"0", "2"}, false},
		" GPU-a , 1,-1,3":   {[]string{"GPU-a", "1"}, false},
		"-1":                {nil, true},
		"NoDevFiles":        {nil, true},
		",0":                {nil, true},
		"MIG-1,NoDevFiles,": {[]string{"MIG-1"}, false},
	} {
		devices, hidden := visibleDevices(list)
		if !slices.Equal(devices, want.devices) || hidden != want.hidden {
			t.Errorf("%q: %v, %v", list, devices, hidden)
		}
	}
}
