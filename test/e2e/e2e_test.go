package e2e

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/kvmesh/kvmesh/test/testmesh"
)

// bin is the binary under test, built once.
var bin string

func TestMain(m *testing.M) {
	asCurl()
	flag.Parse()
	dir, err := os.MkdirTemp("", "kvmesh-e2e-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if bin, err = testmesh.Build(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	_ = os.RemoveAll(dir) // the temporary folder is swept anyway
	os.Exit(code)
}

func TestScripts(t *testing.T) {
	// Three-process meshes on small machines: one script at a time.
	files, err := filepath.Glob("testdata/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatalf("scripts: %v, %v", files, err)
	}
	for _, f := range files {
		t.Run(filepath.Base(f), func(t *testing.T) { runScript(t, f) })
	}
}

func runScript(t *testing.T, file string) {
	c := &commands{t: t}
	testscript.Run(t, testscript.Params{
		Files:               []string{file},
		RequireExplicitExec: true,
		Setup:               c.setup,
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"mesh": c.mesh, "http": c.http, "signal": c.signal, "status": c.status, "gone": c.gone, "kvmesh": c.kvmesh,
		},
	})
}
