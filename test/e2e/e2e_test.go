package e2e

import (
	"flag"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"golang.org/x/sys/unix"

	"github.com/kvmesh/kvmesh/internal/supervise"
	"github.com/kvmesh/kvmesh/test/testmesh"
)

// bin is the binary under test, built once.
var bin string

// reaper ends the processes that it was told of when this one is gone.
var reaper *supervise.Reaper

// endWithParent ends this process when the one that started it is gone: `go test` passes
// no signal on to the tests when it is killed.
func endWithParent() {
	for parent := os.Getppid(); os.Getppid() == parent; time.Sleep(time.Second) {
	}
	fmt.Fprintln(os.Stderr, "the process that started the tests is gone")
	os.Exit(1)
}

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
	// What the tests start ends with them, also where they are killed.
	if reaper, err = supervise.StartReaper(slog.New(slog.DiscardHandler), bin, []string{"reap"}, dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	go endWithParent()
	code := m.Run()
	_ = reaper.Close()    // what it did not end ended by itself
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

// condition is what scripts can ask of the machine: [shm] is shared memory with room for
// a KV node.
func condition(name string) (bool, error) {
	if name != "shm" {
		return false, fmt.Errorf("no such condition: %s", name)
	}
	var s unix.Statfs_t
	const least = 256 << 20
	return unix.Statfs("/dev/shm", &s) == nil && int64(s.Bavail)*int64(s.Bsize) >= least, nil
}

func runScript(t *testing.T, file string) {
	c := &commands{t: t}
	testscript.Run(t, testscript.Params{
		Files:               []string{file},
		RequireExplicitExec: true,
		Condition:           condition,
		Setup:               c.setup,
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"mesh": c.mesh, "http": c.http, "signal": c.signal, "status": c.status, "gone": c.gone, "kvmesh": c.kvmesh,
		},
	})
}
