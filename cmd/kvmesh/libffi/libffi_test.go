//go:build linux && (amd64 || arm64)

package libffi

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestInstalled(t *testing.T) {
	none := func(string) (string, bool) { return "", false }
	tests := map[string]struct {
		files map[string]string
		env   map[string]string
		want  bool
	}{
		"nothing":            {map[string]string{"etc/ld.so.cache": "libfoo.so.1\x00/lib/libfoo.so.1\x00"}, nil, false},
		"an older one":       {map[string]string{"etc/ld.so.cache": "libffi.so.7\x00/lib/libffi.so.7\x00"}, nil, false},
		"in the cache":       {map[string]string{"etc/ld.so.cache": "x\x00libffi.so.8\x00/lib/x/libffi.so.8\x00"}, nil, true},
		"in a folder":        {map[string]string{"etc/ld.so.cache": "", "usr/lib64/libffi.so.8": ""}, nil, true},
		"in LD_LIBRARY_PATH": {map[string]string{"etc/ld.so.cache": "", "opt/libffi.so.8": ""}, map[string]string{"LD_LIBRARY_PATH": "/none:ROOT/opt"}, true},
		"no cache at all":    {nil, nil, true},
		"preloaded":          {map[string]string{"etc/ld.so.cache": ""}, map[string]string{"LD_PRELOAD": "x"}, true},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			for file, content := range tt.files {
				path := filepath.Join(root, file)
				if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			getenv := none
			if tt.env != nil {
				getenv = func(name string) (string, bool) {
					value, ok := tt.env[name]
					return strings.ReplaceAll(value, "ROOT", root), ok
				}
			}
			if got := installed(root+"/", getenv); got != tt.want {
				t.Errorf("installed: %v, want %v", got, tt.want)
			}
		})
	}
}

// TestComesFirst asks the runtime for the order of initializers in the real
// command: this package's must run before the one that panics.
func TestComesFirst(t *testing.T) {
	if testing.Short() {
		t.Skip("builds the command")
	}
	bin := filepath.Join(t.TempDir(), "kvmesh")
	build := exec.Command("go", "build", "-buildvcs=false", "-o", bin, "..")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	run := exec.Command(bin, "version")
	run.Env = append(os.Environ(), "GODEBUG=inittrace=1")
	out, err := run.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var order []string
	for line := range strings.Lines(string(out)) {
		if fields := strings.Fields(line); len(fields) > 1 && fields[0] == "init" {
			order = append(order, fields[1])
		}
	}
	ours := slices.Index(order, "github.com/kvmesh/kvmesh/cmd/kvmesh/libffi")
	theirs := slices.Index(order, "github.com/jupiterrider/ffi")
	if ours < 0 || theirs >= 0 && theirs < ours {
		t.Errorf("this package is initialized as %d, the one that panics as %d of\n%s", ours, theirs, strings.Join(order, "\n"))
	}
}
