package picker

import (
	"time"

	"github.com/kvmesh/kvmesh/internal/health"
)

// View is one worker as this gateway sees it, for people and for health checks.
type View struct {
	ID          string  `json:"id"`
	Address     string  `json:"address"`
	Pool        string  `json:"pool"`
	Zone        string  `json:"zone"`
	Status      string  `json:"status"` // Envoy's word
	Active      bool    `json:"active"` // takes new requests
	Weight      uint32  `json:"weight"`
	Running     uint32  `json:"running"`
	Waiting     uint32  `json:"waiting"`
	MaxRunning  uint32  `json:"max_running"`
	Utilization float64 `json:"utilization"`
	InFlight    int64   `json:"in_flight"` // requests of this gateway
	Broken      bool    `json:"broken"`    // this gateway's breaker is open
}

// Workers lists the fleet by id, nil when none was received yet.
func (p *Picker) Workers(now time.Time) []View {
	s := p.snap.Load()
	if s == nil {
		return nil
	}
	out := make([]View, len(s.all))
	for i, w := range s.all {
		out[i] = View{
			ID: w.ID, Address: w.Address, Pool: w.Pool, Zone: w.Zone,
			Status: w.status.String(), Active: w.status.Takes(), Weight: uint32(w.weight),
			Running: w.load.running, Waiting: w.load.waiting, MaxRunning: w.load.maxRunning,
			Utilization: w.load.utilization,
			InFlight:    w.c.inflight.Load(), Broken: w.c.open(now),
		}
	}
	return out
}

// Info is what the fleet says of a worker to the relay.
type Info struct {
	Status                         health.Status
	KeepStreams                    bool // while it drains, its streams end where they are
	Engine, RelayMark, Fingerprint string
	Incarnation                    uint64 // another one was started anew
	Running, Waiting, MaxRunning   uint32 // requests as last reported; MaxRunning 0 = not known
	Left                           int64  // requests that this gateway has fewer there since
	Foreign                        int64  // of those reported, how many are not this gateway's
}

// Info returns what is known of a worker, false when the fleet has none of that id.
func (p *Picker) Info(id string) (Info, bool) {
	w := p.snap.Load().worker(id)
	if w == nil {
		return Info{}, false
	}
	return Info{
		Status: w.status, KeepStreams: w.keepStreams, Engine: w.engine, RelayMark: w.relayMark, Fingerprint: w.fingerprint,
		Incarnation: w.incarnation, Running: w.load.running, Waiting: w.load.waiting, MaxRunning: w.load.maxRunning,
		Left:    max(w.c.base.Load()-w.c.inflight.Load(), 0),
		Foreign: max(int64(w.load.running)+int64(w.load.waiting)-w.c.base.Load(), 0),
	}, true
}

// Members returns how many workers a pool has, and how many of them take requests.
func (p *Picker) Members(pool string) (takers, all int) {
	s := p.snap.Load()
	if s == nil {
		return 0, 0
	}
	for _, w := range s.all {
		if w.Pool == pool {
			all++
		}
	}
	return len(s.takers[pool]), all
}
