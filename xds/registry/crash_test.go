package registry

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
)

// promises is what a registry of unlimited memory and no disk would hold.
type promises struct {
	drained map[string]bool
	highest map[string]uint64 // latest incarnation that was accepted, while registered
}

// Random operations with crashes in between: what was promised is there after
// every crash, whatever the order. A drain is promised once acknowledged, a
// registration once flushed.
func TestCrashes(t *testing.T) {
	for seed := range uint64(12) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(seed, 1))
			dir, now := t.TempDir(), start
			e := open(t, dir, now)
			m := promises{drained: map[string]bool{}, highest: map[string]uint64{}}
			for step := range 200 {
				now = now.Add(time.Duration(rnd.IntN(100)) * time.Millisecond)
				id := fmt.Sprint("w", rnd.IntN(5))
				switch rnd.IntN(6) {
				case 0, 1:
					m.register(t, e, id, uint64(1+rnd.IntN(20)), now)
				case 2:
					m.drain(t, e, id, rnd.IntN(2) == 0, now)
				case 3:
					if err := e.Deregister(id, 0, now); (err == nil) != (m.highest[id] != 0) {
						t.Fatalf("step %d: goodbye of %s: %v, registered %d", step, id, err, m.highest[id])
					}
					delete(m.highest, id)
				case 4:
					if err := e.Flush(now); err != nil {
						t.Fatal(err)
					}
				case 5:
					if err := e.Flush(now); err != nil {
						t.Fatal(err)
					}
					dir = clone(t, dir)
					e = open(t, dir, now)
				}
				m.check(t, step, e)
			}
		})
	}
}

func (m *promises) register(t *testing.T, e *Embedded, id string, incarnation uint64, now time.Time) {
	t.Helper()
	// Each worker has its own address: taking over is another test's.
	_, err := e.Register(registration(id, "127.0.0.1:100"+id[1:], incarnation), now)
	if stale := incarnation < m.highest[id]; stale != errors.Is(err, ErrStale) {
		t.Fatalf("incarnation %d after %d: %v", incarnation, m.highest[id], err)
	}
	if err == nil {
		m.highest[id] = incarnation
	}
}

func (m *promises) drain(t *testing.T, e *Embedded, id string, on bool, now time.Time) {
	t.Helper()
	err := e.Drain(id, Drain{On: on}, now)
	if known := m.highest[id] != 0 || m.drained[id]; known != (err == nil) {
		t.Fatalf("drain %s: %v, known %v", id, err, known)
	}
	if err == nil {
		m.drained[id] = on
	}
}

func (m *promises) check(t *testing.T, step int, e *Embedded) {
	t.Helper()
	got := map[string]uint64{}
	for _, w := range e.Members() {
		got[w.ID] = w.Incarnation
		if w.Drained != m.drained[w.ID] {
			t.Fatalf("step %d: %s drained %v, want %v", step, w.ID, w.Drained, m.drained[w.ID])
		}
	}
	if fmt.Sprint(got) != fmt.Sprint(m.highest) {
		t.Fatalf("step %d: registered %v, want %v", step, got, m.highest)
	}
	for id, on := range m.drained {
		if e.Drained(id).On != on {
			t.Fatalf("step %d: drain of %s is %v, want %v", step, id, e.Drained(id).On, on)
		}
	}
}

// clone copies a directory as a crash leaves it, with a half-written file beside.
func clone(t *testing.T, dir string) string {
	t.Helper()
	to := t.TempDir()
	raw, err := os.ReadFile(filepath.Join(dir, "registry.json"))
	if errors.Is(err, os.ErrNotExist) {
		return to
	}
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string][]byte{"registry.json": raw, "registry.json.123.tmp": raw[:len(raw)/2]} {
		if err := os.WriteFile(filepath.Join(to, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return to
}

// Many at once: no race, and in the end everybody is there.
func TestConcurrentUse(t *testing.T) {
	e := open(t, t.TempDir(), start)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			id := fmt.Sprint("w", i)
			for n := range 20 {
				now := start.Add(time.Duration(n) * 50 * time.Millisecond)
				if _, err := e.Register(registration(id, fmt.Sprint("127.0.0.1:", 1000+i), uint64(1+n/5)), now); err != nil {
					t.Error(err)
				}
				if n%7 == 0 {
					if err := e.Drain(id, Drain{On: n%2 == 0}, now); err != nil {
						t.Error(err)
					}
				}
				e.Expire(now, time.Hour, nobody)
				_ = e.Members()
			}
		})
	}
	wg.Wait()
	if n := len(e.Members()); n != 8 {
		t.Errorf("%d members, want 8", n)
	}
}

// Whatever is in the file, opening ends, and what comes out is valid.
func FuzzOpen(f *testing.F) {
	f.Add([]byte(`{"workers":[{"id":"w0","address":"127.0.0.1:1","pool":"p","incarnation":7,"ready_since":"2026-01-02T03:04:05Z"}],"drains":{"w0":"2026-01-02T03:04:05Z"}}`))
	f.Add([]byte(`{"workers":[{"id":"static","address":"[::1]:1","pool":"p","incarnation":1}]}`))
	f.Add([]byte(`{"drains":null}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "registry.json"), raw, 0o600); err != nil {
			t.Fatal(err)
		}
		e, err := Open(Config{Dir: dir, Static: []string{"static"}, Log: slog.New(slog.DiscardHandler)}, start)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range e.Members() {
			if m.Validate() != nil || m.ID == "static" {
				t.Errorf("%+v", m)
			}
		}
		if _, err := e.Register(fleet.Registration{ID: "new", Address: "192.0.2.1:1", Pool: "p", Incarnation: 1 << 63}, start); err != nil {
			t.Error(err)
		}
	})
}
