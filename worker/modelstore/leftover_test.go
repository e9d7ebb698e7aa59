package modelstore

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// What no later pull can go on with does not stay, and neither do locks.
func TestNothingUselessStays(t *testing.T) {
	whole := randomBytes(7, 1000)
	for name, c := range map[string]struct {
		source []byte // nil = missing
		old    bool   // an earlier pull of the version, by another manifest, left a file
		left   string
	}{
		"wrong hash": {source: randomBytes(8, 1000)},
		"too long":   {source: append(bytes.Clone(whole), 'x')},
		"too short":  {source: whole[:500]},
		"missing":    {},
		"renamed":    {old: true},
		"well":       {source: whole, left: "m m/v1 m/v1/deep m/v1/deep/x m/v1/manifest.json"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o, dir := newOrigin(t), t.TempDir()
			s := Open(dir)
			url := o.publish(t, "m", "v1", map[string][]byte{"deep/x": whole})
			if o.files["/m/v1/deep/x"] = c.source; c.source == nil {
				delete(o.files, "/m/v1/deep/x")
			}
			if c.old {
				if err := os.MkdirAll(s.staging(Ref{"m", "v1"}), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(s.staging(Ref{"m", "v1"}), "y"), whole, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			_, err := s.Pull(t.Context(), Sources{}, url, nil)
			if (err == nil) != (c.left != "") {
				t.Error(err)
			}
			var left []string
			_ = filepath.WalkDir(dir, func(path string, _ os.DirEntry, _ error) error {
				if name := strings.TrimPrefix(path, dir+"/"); name != locksDir && name != partialDir {
					left = append(left, name)
				}
				return nil
			})
			if got := strings.Join(left[1:], " "); got != c.left {
				t.Errorf("%v leaves %s", err, got)
			}
		})
	}
}

// A link in the place of a pull's folder is refused, and nothing behind it is touched.
func TestNothingBehindALink(t *testing.T) {
	for _, name := range []string{partialDir, filepath.Join(partialDir, "m@v1")} {
		o, dir, other := newOrigin(t), t.TempDir(), t.TempDir()
		kept := filepath.Join(other, "kept")
		if err := os.WriteFile(kept, []byte("x"), 0o644); err != nil {
			t.Fatal(err)
		}
		link := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(link), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(other, link); err != nil {
			t.Fatal(err)
		}
		url := o.publish(t, "m", "v1", map[string][]byte{"x": randomBytes(7, 10)})
		if _, err := Open(dir).Pull(t.Context(), Sources{}, url, nil); err == nil || !strings.Contains(err.Error(), link+" is no folder") {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := os.Stat(kept); err != nil {
			t.Error(err)
		}
	}
}
