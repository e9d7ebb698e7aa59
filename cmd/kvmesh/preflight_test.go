package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// `make demo` refuses what it cannot do before it builds for minutes.
func TestPreflight(t *testing.T) {
	const (
		goNew  = "echo go version go1.99.0 linux/amd64"
		goOld  = "echo go version go1.19.8 linux/amd64"
		python = "exit 0"
	)
	for name, tt := range map[string]struct {
		tools  map[string]string // name → script
		cached string            // an asset that is in the cache
		env    []string
		args   []string
		want   string // of stderr
		fails  bool
	}{
		"no go":             {nil, "", nil, nil, "no Go found", true},
		"old go":            {map[string]string{"go": goOld}, "", nil, nil, "Go 1.19 is too old", true},
		"only a build":      {map[string]string{"go": goNew}, "", nil, nil, "", false},
		"no python":         {map[string]string{"go": goNew}, "", nil, []string{"fetch"}, "hint: Debian, Ubuntu: apt install python3-pip", true},
		"no pip":            {map[string]string{"go": goNew, "python3": "exit 1"}, "", nil, []string{"fetch"}, "python3 has no pip", true},
		"no npm":            {map[string]string{"go": goNew, "python3": python}, "", nil, []string{"fetch"}, "no npm found", true},
		"all there":         {map[string]string{"go": goNew, "python3": python, "npm": "exit 0"}, "", nil, []string{"fetch"}, "fetches Go modules", false},
		"llama in cache":    {map[string]string{"go": goNew, "python3": python}, "llama-3-x", nil, []string{"fetch"}, "fetches Go modules", false},
		"everything is own": {map[string]string{"go": goNew}, "", []string{"KVMESH_ENVOY=a", "KVMESH_MODEL=b", "KVMESH_LLAMA_LIB=c"}, []string{"fetch"}, "", false},
	} {
		t.Run(name, func(t *testing.T) {
			bin, cache := t.TempDir(), t.TempDir()
			for _, tool := range []string{"sed", "cut", "dirname"} {
				path, err := exec.LookPath(tool)
				if err != nil {
					t.Fatal(err)
				}
				if err := os.Symlink(path, filepath.Join(bin, tool)); err != nil {
					t.Fatal(err)
				}
			}
			for tool, script := range tt.tools {
				if err := os.WriteFile(filepath.Join(bin, tool), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			if tt.cached != "" {
				if err := os.MkdirAll(filepath.Join(cache, "kvmesh", "assets", tt.cached), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			cmd := exec.Command("/bin/sh", append([]string{"../../scripts/preflight.sh"}, tt.args...)...)
			cmd.Env = append(tt.env, "PATH="+bin, "HOME="+bin, "XDG_CACHE_HOME="+cache)
			out, err := cmd.CombinedOutput()
			if (err != nil) != tt.fails || !strings.Contains(string(out), tt.want) || (tt.want == "") != (len(out) == 0) {
				t.Errorf("%v\n%s\nwant %q", err, out, tt.want)
			}
			if tt.fails && !strings.Contains(string(out), "hint: ") {
				t.Errorf("no hint:\n%s", out)
			}
		})
	}
}
