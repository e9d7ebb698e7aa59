package fetch

import (
	"encoding/hex"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestPinnedTable(t *testing.T) {
	keys := map[string]bool{}
	for _, a := range pinned() {
		if keys[a.key()] {
			t.Errorf("two entries with key %s", a.key())
		}
		keys[a.key()] = true
		if a.main == "" || a.link == "" || len(a.files) == 0 || a.unpacked < a.files[0].size {
			t.Errorf("%s: incomplete: %+v", a.key(), a)
		}
		for _, p := range a.pkgs {
			if sum, err := hex.DecodeString(p.sha256); err != nil || len(sum) != 32 || p.size == 0 || len(p.take) == 0 {
				t.Errorf("%s: %s is not pinned", a.key(), p.file)
			}
			// The client names the file, so a version changed in one place only
			// would be looked for under the wrong name.
			if !strings.Contains(p.file, p.version) || (a.os != "" && p.client == pip) != (p.platform != "") {
				t.Errorf("%s: %s %s comes as %s", a.key(), p.name, p.version, p.file)
			}
		}
		for _, f := range a.files {
			if sum, err := hex.DecodeString(f.sha256); err != nil || len(sum) != 32 || f.size == 0 {
				t.Errorf("%s: %s is not pinned", a.key(), f.name)
			}
		}
	}
	for _, name := range []string{Envoy, Llama, Model, Redis, S3} {
		for _, p := range [][2]string{{"linux", "amd64"}, {"linux", "arm64"}, {"darwin", "arm64"}} {
			if Version(name, p[0], p[1]) == "" {
				t.Errorf("no %s for %v", name, p)
			}
		}
	}
	if v := Version(Envoy, "darwin", "amd64"); v != "" {
		t.Errorf("an Envoy %s for Intel Macs, which no wheel offers", v)
	}
}

func TestProgressLine(t *testing.T) {
	tests := []struct {
		n     int64
		after time.Duration
		want  string
	}{
		{0, 0, "envoy 1               0 kB of 10.0 MB    0 %"},
		{50_000, 5 * time.Second, "envoy 1              50 kB of 10.0 MB    0 %"},
		{2_500_000, 500 * time.Millisecond, "envoy 1             2.5 MB of 10.0 MB   25 %"},
		{2_500_000, 5 * time.Second, "envoy 1             2.5 MB of 10.0 MB   25 %  500 kB/s  15s left"},
		{10_000_000, 5 * time.Second, "envoy 1            10.0 MB of 10.0 MB  100 %  2.0 MB/s"},
	}
	for _, tt := range tests {
		if got := progressLine("envoy 1", tt.n, 10_000_000, tt.after); got != tt.want {
			t.Errorf("%d after %v:\n%q, want\n%q", tt.n, tt.after, got, tt.want)
		}
	}
}

func TestMeterRedrawsOnTerminalsOnly(t *testing.T) {
	for _, terminal := range []bool{true, false} {
		var b strings.Builder
		m := newMeter(Config{Progress: &b, Terminal: terminal}, "x", 100)
		m.draw(50)
		m.finish()
		if got := strings.Contains(b.String(), "\r"); got != terminal {
			t.Errorf("terminal %v: %q", terminal, b.String())
		}
		if !strings.HasSuffix(b.String(), "\n") || !strings.Contains(b.String(), "100 %") {
			t.Errorf("terminal %v: the end is %q", terminal, b.String())
		}
	}
}

func TestAnnounce(t *testing.T) {
	got := Announce([]Item{{"envoy", "1", 37e6, 107e6}, {"model", "2", 1.1e9, 2e9}})
	want := "to fetch: envoy 1 (37.0 MB), model 2 (1.10 GB): 1.14 GB in all, 2.11 GB on disk; about 2 minutes at 100 Mbit/s, 8 minutes at 20 Mbit/s"
	if got != want {
		t.Errorf("%q, want\n%q", got, want)
	}
	if got := Announce(nil); !strings.Contains(got, "nothing to fetch") {
		t.Errorf("of nothing: %q", got)
	}
}

func TestUnpackStaysInsideItsFolder(t *testing.T) {
	dir := t.TempDir()
	in, out := filepath.Join(dir, "in.whl"), filepath.Join(dir, "a", "out")
	if err := os.WriteFile(in, zipOf(t, map[string]string{"../../evil": "x"}), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		t.Fatal(err)
	}
	root, err := os.OpenRoot(out)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	if err := unpack(t.Context(), in, root, []member{{from: "../../*"}}); err != nil {
		t.Fatal(err)
	}
	if err := unpack(t.Context(), in, root, []member{{from: "../../*", to: "../up"}}); err == nil {
		t.Error("a name outside the folder was written")
	}
	if got := tree(t, dir); !slices.Equal(got, []string{"a", "a/out", "a/out/evil", "in.whl"}) {
		t.Errorf("files: %q", got)
	}
}

// tree lists all names below dir.
func tree(t testing.TB, dir string) []string {
	t.Helper()
	var names []string
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if path != dir {
			names = append(names, strings.TrimPrefix(path, dir+"/"))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// FuzzUnpack feeds archives from outside: whatever is in them, nothing but the
// wanted names may appear, and nothing outside the folder.
func FuzzUnpack(f *testing.F) {
	f.Add(zipOf(f, map[string]string{"p/lib1": "x", "p/lib2": "y", "../lib3": "z"}), false)
	f.Add(tgzOf(f, map[string]string{"p/lib1": "x", "/lib": "y"}), true)
	f.Fuzz(func(t *testing.T, archive []byte, tgz bool) {
		dir := t.TempDir()
		in, out := filepath.Join(dir, "in.whl"), filepath.Join(dir, "out")
		if tgz {
			in = filepath.Join(dir, "in.tgz")
		}
		if err := os.WriteFile(in, archive, 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Mkdir(out, 0o755); err != nil {
			t.Fatal(err)
		}
		root, err := os.OpenRoot(out)
		if err != nil {
			t.Fatal(err)
		}
		defer root.Close()
		_ = unpack(t.Context(), in, root, []member{{from: "*/lib*"}})
		for _, name := range tree(t, dir) {
			base, inside := strings.CutPrefix(name, "out/")
			if name != "out" && name != filepath.Base(in) && !(inside && strings.HasPrefix(base, "lib")) {
				t.Errorf("unpacked %q", name)
			}
		}
	})
}
