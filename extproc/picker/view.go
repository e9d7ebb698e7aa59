package picker

import (
	"time"
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
