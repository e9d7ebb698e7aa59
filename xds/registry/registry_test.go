package registry

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvmesh/kvmesh/internal/fleet"
)

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func open(t *testing.T, dir string, now time.Time) *Embedded {
	t.Helper()
	e, err := Open(Config{Dir: dir, Static: []string{"static"}, Log: slog.New(slog.DiscardHandler)}, now)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func registration(id, addr string, incarnation uint64) fleet.Registration {
	return fleet.Registration{ID: id, Address: addr, Pool: "p", Zone: "z", Model: "m", Engine: "sim", Incarnation: incarnation}
}

func register(t *testing.T, e *Embedded, r fleet.Registration, now time.Time) bool {
	t.Helper()
	changed, err := e.Register(r, now)
	if err != nil {
		t.Fatal(err)
	}
	return changed
}

// A killed control plane finds the same workers, with a full TTL each.
func TestRestart(t *testing.T) {
	dir := t.TempDir()
	e := open(t, dir, start)
	r := registration("w0", "127.0.0.1:1", 10)
	r.Aliases, r.PID, r.Host, r.Fingerprint = []string{"a"}, 5, "h", "f"
	register(t, e, r, start)
	loading := registration("w1", "127.0.0.1:2", 11)
	loading.State = fleet.StateLoading
	register(t, e, loading, start) // too soon after the first to be written at once
	if err := e.Flush(start); err != nil {
		t.Fatal(err)
	}
	if err := e.Drain("w1", Drain{On: true}, start); err != nil {
		t.Fatal(err)
	}
	if err := e.Drain("static", Drain{On: true}, start); err != nil {
		t.Fatal(err)
	}

	later := start.Add(time.Hour)
	again := open(t, dir, later)
	want := []Member{
		{Registration: r, ReadySince: start, Heard: later},
		{Registration: loading, Drained: true, Heard: later},
	}
	if d := cmp.Diff(want, again.Members()); d != "" {
		t.Errorf("after restart (-want +got):\n%s", d)
	}
	if !again.Drained("static").On {
		t.Error("the drain of a static server was forgotten")
	}
	if gone := again.Expire(later.Add(14*time.Second), 15*time.Second, nobody); gone != nil {
		t.Errorf("%v expired before their TTL", gone)
	}
	if gone := again.Expire(later.Add(16*time.Second), 15*time.Second, func(id string) bool { return id == "w0" }); len(gone) != 1 || gone[0] != "w1" {
		t.Errorf("%v expired, want w1: w0 is vouched for", gone)
	}
}

func nobody(string) bool { return false }

func TestRegister(t *testing.T) {
	e := open(t, t.TempDir(), start)
	r := registration("w0", "127.0.0.1:1", 10)
	if !register(t, e, r, start) {
		t.Error("a first registration changed nothing")
	}
	if register(t, e, r, start.Add(time.Second)) {
		t.Error("a renewal changed something")
	}
	for name, stale := range map[string]fleet.Registration{
		"an earlier start":                registration("w0", "127.0.0.1:1", 9),
		"an earlier one at the address":   registration("w9", "127.0.0.1:1", 9),
		"a worker with a server's own id": registration("static", "127.0.0.1:7", 99),
	} {
		if _, err := e.Register(stale, start); !errors.Is(err, ErrStale) {
			t.Errorf("%s: %v, want ErrStale", name, err)
		}
	}
	if !register(t, e, registration("w0", "127.0.0.1:2", 11), start.Add(2*time.Second)) {
		t.Error("a new start changed nothing")
	}
	register(t, e, registration("w5", "127.0.0.1:2", 12), start.Add(3*time.Second))
	if ms := e.Members(); len(ms) != 1 || ms[0].ID != "w5" {
		t.Errorf("%v, want only w5, which took the address", ms)
	}
	if err := e.Deregister("w5", 11, start); !errors.Is(err, ErrStale) {
		t.Errorf("goodbye of an earlier start: %v", err)
	}
	if err := e.Deregister("w5", 12, start); err != nil {
		t.Error(err)
	}
	if err := e.Deregister("w5", 0, start); !errors.Is(err, ErrUnknown) {
		t.Errorf("second goodbye: %v", err)
	}
}

// ReadySince is when this incarnation was first ready, whatever came after.
func TestReadySince(t *testing.T) {
	e := open(t, t.TempDir(), start)
	r := registration("w0", "127.0.0.1:1", 10)
	for i, c := range []struct {
		incarnation uint64
		state       string
		want        time.Time
	}{
		{10, fleet.StateLoading, time.Time{}},
		{10, fleet.StateReady, start.Add(1 * time.Second)},
		{10, fleet.StateDraining, start.Add(1 * time.Second)},
		{11, fleet.StateLoading, time.Time{}},
		{11, "", start.Add(4 * time.Second)},
	} {
		r.Incarnation, r.State = c.incarnation, c.state
		register(t, e, r, start.Add(time.Duration(i)*time.Second))
		if got := e.Members()[0].ReadySince; !got.Equal(c.want) {
			t.Errorf("step %d: ready since %v, want %v", i, got, c.want)
		}
	}
}

// Drains hold over restarts of the worker, and a drain that cannot be stored is
// refused.
func TestDrain(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	e := open(t, dir, start)
	if err := e.Drain("w0", Drain{On: true}, start); !errors.Is(err, ErrUnknown) {
		t.Errorf("drain of nobody: %v", err)
	}
	register(t, e, registration("w0", "127.0.0.1:1", 10), start)
	if err := errors.Join(e.Drain("w0", Drain{On: true}, start), e.Drain("w0", Drain{On: true}, start)); err != nil {
		t.Error(err)
	}
	if err := e.Deregister("w0", 10, start); err != nil {
		t.Fatal(err)
	}
	register(t, e, registration("w0", "127.0.0.1:1", 11), start)
	if !e.Members()[0].Drained {
		t.Error("a restart of the worker lifted its drain")
	}
	keeping := Drain{On: true, KeepStreams: true}
	if err := e.Drain("w0", keeping, start); err != nil || open(t, dir, start).Drained("w0") != keeping {
		t.Errorf("that streams stay was not stored: %v, %v", err, open(t, dir, start).Drained("w0"))
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if err := e.Drain("w0", Drain{On: true}, start); err == nil || e.Drained("w0") != keeping {
		t.Errorf("streams move although that could not be stored (%v)", err)
	}
	if err := e.Drain("w0", Drain{On: false}, start); err == nil || !e.Members()[0].Drained {
		t.Errorf("a drain that could not be stored was lifted (%v)", err)
	}
	if register(t, e, registration("w1", "127.0.0.1:2", 1), start.Add(time.Minute)); len(e.Members()) != 2 {
		t.Error("a full disk kept a worker out")
	}
}

// Drains of workers that never came back are dropped in the end.
func TestForgottenDrains(t *testing.T) {
	e := open(t, t.TempDir(), start)
	register(t, e, registration("w0", "127.0.0.1:1", 10), start)
	if err := errors.Join(e.Drain("w0", Drain{On: true}, start), e.Drain("static", Drain{On: true}, start), e.Deregister("w0", 0, start)); err != nil {
		t.Fatal(err)
	}
	register(t, e, registration("w1", "127.0.0.1:2", 10), start.Add(25*time.Hour))
	if e.Drained("w0").On || !e.Drained("static").On {
		t.Errorf("w0 drained %v, static drained %v; want only static's kept", e.Drained("w0").On, e.Drained("static").On)
	}
}

// A damaged file is no reason not to start, and is kept for the curious.
func TestDamagedFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "registry.json")
	if err := os.WriteFile(path, []byte(`{"workers":[{"id":"w0"`), 0o600); err != nil {
		t.Fatal(err)
	}
	e := open(t, dir, start)
	if len(e.Members()) != 0 {
		t.Errorf("members %v", e.Members())
	}
	if _, err := os.Stat(path + ".damaged"); err != nil {
		t.Error(err)
	}
	register(t, e, registration("w0", "127.0.0.1:1", 10), start)
	if err := os.WriteFile(path, []byte(`{"workers":[{"id":"bad id","address":"x"},{"id":"static","address":"127.0.0.1:1","pool":"p","incarnation":1}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if ms := open(t, dir, start).Members(); len(ms) != 0 {
		t.Errorf("invalid entries were taken: %v", ms)
	}
}

// A crash while writing leaves the old file.
func TestWriteFileIsAtomic(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	for text, write := range map[string]func(string, []byte) error{"one": WriteFile, "two": WriteSynced} {
		if err := write(path, []byte(text)); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != text {
			t.Errorf("%q, %v", got, err)
		}
	}
	if left, err := filepath.Glob(path + ".*"); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v %v", left, err)
	}
	if err := WriteFile(filepath.Join(t.TempDir(), "none", "f"), nil); err == nil {
		t.Error("no error without a directory")
	}
}
