package gpu

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvmesh/kvmesh/internal/health"
)

// scripted is a library that answers what a test says.
type scripted struct {
	mu      sync.Mutex
	devices []Device
	err     error // of every reading
	events  chan [2]int
	closed  bool
}

func newScripted(n int) *scripted {
	s := &scripted{}
	for i := range n {
		s.devices = append(s.devices, Device{Index: i, UUID: "GPU-" + string(rune('a'+i)), MemoryTotalMB: 1000})
	}
	return s
}

func (s *scripted) Count() (int, error) { return len(s.devices), nil }

func (s *scripted) Read(i int) (Device, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return Device{Index: i}, s.err
	}
	return s.devices[i], nil
}

func (s *scripted) WaitXID(d time.Duration) (int, int, error) {
	select {
	case e, ok := <-s.events:
		if !ok {
			return 0, 0, errors.New("no events here")
		}
		return e[0], e[1], nil
	case <-time.After(d):
		return 0, 0, nil
	}
}

func (s *scripted) Close() error {
	s.closed = true
	return nil
}

// set changes the first device.
func (s *scripted) set(change func(*Device)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(&s.devices[0])
}

// probe runs a Probe in a bubble until the test's part of it ends.
func probe(t *testing.T, s *scripted, cfg Config, test func(p *Probe)) {
	synctest.Test(t, func(t *testing.T) {
		s.events = make(chan [2]int) // of the bubble
		p, err := open(cfg, s)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() {
			defer close(done)
			p.Run(ctx)
		}()
		test(p)
		cancel()
		<-done
		if !s.closed {
			t.Error("the library is still open")
		}
	})
}

// Throttled is the share of the last ten readings, and forgets.
// It runs in probe's bubble.
func TestThrottled(t *testing.T) {
	s := newScripted(1)
	probe(t, s, Config{}, func(p *Probe) {
		time.Sleep(20*time.Second + 1)
		s.set(func(d *Device) { d.Reasons = swThermal })
		time.Sleep(5 * time.Second)
		if d := p.Devices()[0]; d.Throttled < 0.49 || d.Throttled > 0.51 || d.Throttle[0] != "sw_thermal_slowdown" {
			t.Errorf("after 5 s: %+v", d)
		}
		time.Sleep(10 * time.Second)
		if d := p.Devices()[0]; d.Throttled < 0.99 || d.Throttled > 1.01 {
			t.Errorf("after 15 s: %+v", d)
		}
		s.set(func(d *Device) { d.Reasons = swPowerCap })
		time.Sleep(10 * time.Second)
		if d := p.Devices()[0]; d.Throttled != 0 || d.Throttle[0] != "sw_power_cap" {
			t.Errorf("at its power cap: %+v", d)
		}
	})
}

// A device that does not answer keeps its last values, and is logged once.
// It runs in probe's bubble.
func TestDeviceThatDoesNotAnswer(t *testing.T) {
	s := newScripted(1)
	var log strings.Builder
	probe(t, s, Config{Log: slog.New(slog.NewTextHandler(&log, nil))}, func(p *Probe) {
		s.mu.Lock()
		s.err = errors.New("busy")
		s.mu.Unlock()
		time.Sleep(10 * time.Second)
		if d := p.Devices()[0]; d.MemoryTotalMB != 1000 || d.Lost {
			t.Errorf("%+v", d)
		}
	})
	if n := strings.Count(log.String(), "cannot be read"); n != 1 {
		t.Errorf("%d lines: %s", n, log.String())
	}
}

// A fatal XID stands, whatever the driver reports after it, and shows at once.
// It runs in probe's bubble.
func TestXIDs(t *testing.T) {
	s := newScripted(2)
	probe(t, s, Config{Devices: []string{"0"}, Every: time.Hour}, func(p *Probe) {
		check := func(index, xid, last, fatal int) {
			s.events <- [2]int{index, xid}
			synctest.Wait()
			if d := p.Devices()[0]; d.XID != last || d.FatalXID != fatal {
				t.Errorf("after XID %d of GPU %d: %+v", xid, index, d)
			}
		}
		check(0, 13, 13, 0)
		check(1, 79, 13, 0) // another worker's GPU
		check(0, 79, 79, 79)
		check(0, 45, 45, 79)
		time.Sleep(2 * time.Hour) // a reading keeps it
		if d := p.Devices()[0]; d.Facts().Fault() == "" || len(p.Devices()) != 1 {
			t.Errorf("%+v", p.Devices())
		}
		close(s.events)
	})
}

// Memory errors count from the start of the worker; a reset of the driver's
// counter starts anew.
// It runs in probe's bubble.
func TestMemoryErrors(t *testing.T) {
	s := newScripted(1)
	s.devices[0].ECCTotal = 7
	probe(t, s, Config{}, func(p *Probe) {
		for _, c := range []struct{ total, fresh uint64 }{{7, 0}, {9, 2}, {0, 0}, {1, 1}} {
			s.set(func(d *Device) { d.ECCTotal = c.total })
			time.Sleep(time.Second + 1)
			if d := p.Devices()[0]; d.ECC != c.fresh {
				t.Errorf("total %d: %d new, want %d", c.total, d.ECC, c.fresh)
			}
		}
	})
}

func TestFacts(t *testing.T) {
	d := Device{Lost: true, FatalXID: 79, XID: 45, ECC: 2, ECCTotal: 9, RemapFailed: true, Throttled: 0.5}
	if got, want := d.Facts(), (health.GPU{Lost: true, XID: 79, ECC: 2, RemapFailed: true, Throttled: 0.5}); got != want {
		t.Errorf("%+v", got)
	}
}

func TestNoDevices(t *testing.T) {
	if _, err := open(Config{}, newScripted(0)); !errors.Is(err, ErrAbsent) {
		t.Error(err)
	}
}
