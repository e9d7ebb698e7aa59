//go:build unix

package kvtest

import (
	"fmt"
	"syscall"
	"testing"
)

// testZombie stops a writer, lets a successor take over and wakes the writer up:
// its late writes are refused and counted, and change nothing.
func testZombie(t *testing.T, h Harness) {
	h.shared(t)
	dir := newDir(t)
	ts := tails(t, h.open(t, dir, plenty))
	first, second := spec(space(), "stream", 0, 1), spec(space(), "stream", 0, 2)
	c := start(t, job{Mode: "zombie", Dir: dir})
	ask := func(want string) {
		t.Helper()
		fmt.Fprintln(c.in)
		if got, ok := c.line(t); !ok || got != want {
			t.Fatalf("the writer says %q, want %q", got, want)
		}
	}
	for range 5 {
		ask("appended")
	}
	signal := func(s syscall.Signal) {
		t.Helper()
		if err := c.cmd.Process.Signal(s); err != nil {
			t.Fatal(err)
		}
	}
	signal(syscall.SIGSTOP)
	w := openTail(t, ts, second)
	appendRanges(t, w, second, run{64, 70, 2})
	signal(syscall.SIGCONT)
	ask("stale 1")
	ask("stale 2")
	got := readTail(t, ts, first)
	if len(got) != 2 || got[0].Attempt != 2 || len(got[0].Ranges) != 3 || len(got[1].Ranges) != 5 {
		t.Fatalf("the tails read as %+v", got)
	}
	checkTail(t, got[0], 2)
	checkTail(t, got[1], 1)
	appendRanges(t, w, second, run{70, 72, 2})
}
