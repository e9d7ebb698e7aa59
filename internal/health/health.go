// Package health decides, without clocks or I/O, what a worker's reports mean:
// its status in Envoy's words and its endpoint weight. Assess judges one worker,
// Pool the workers of one pool together. The names and meanings of blackout,
// expiration, error penalty come from gRFC A58 (weighted round robin).
package health

import (
	"fmt"
	"math"
	"time"
)

// Status is a worker's health in Envoy's words; the values are those of
// envoy.config.core.v3.HealthStatus.
type Status int32

// The statuses.
const (
	Unknown   Status = 0
	Healthy   Status = 1
	Unhealthy Status = 2
	Draining  Status = 3
	Timeout   Status = 4
	Degraded  Status = 5
)

// String returns Envoy's word.
func (s Status) String() string {
	switch s {
	case Healthy:
		return "HEALTHY"
	case Unhealthy:
		return "UNHEALTHY"
	case Draining:
		return "DRAINING"
	case Timeout:
		return "TIMEOUT"
	case Degraded:
		return "DEGRADED"
	}
	return "UNKNOWN"
}

// Takes reports whether new requests go to a worker of this status.
func (s Status) Takes() bool { return s == Healthy || s == Degraded }

// Weight bounds. Weight 0 does not exist in EDS; "dead" is a status.
const (
	MaxWeight = 1000
	MinWeight = 1
	fullAt    = 100 // weight of a worker whose utilization is 1
)

// Config holds the policy of one pool. The zero value of a field is its literal
// value, not a default (internal/policy fills those in).
type Config struct {
	Blackout     time.Duration // a new worker's own weight counts only after this
	Expiration   time.Duration // without reports a weight is forgotten after this
	Silence      time.Duration // without reports the worker is TIMEOUT after this
	ErrorPenalty float64       // utilization added per share of failed requests
	Hysteresis   float64       // smallest relative change that moves a weight
	MinShare     float64       // share of a pool that keeps taking traffic
	// ThrottlePenalty is how much more load weighs on a GPU that is slowed all the
	// time: 1 halves its weight.
	ThrottlePenalty float64
}

// Report is one load report.
type Report struct {
	At          time.Time
	Utilization float64 // 1 is full, more is overload
	RPS         float64 // finished requests per second
	EPS         float64 // failed requests per second
	GPU         GPU     // the worst of the worker's
	// SelfCheckFailed says that the engine did not generate when the worker tried.
	SelfCheckFailed bool
}

// Input is all that is known of a worker.
type Input struct {
	Draining  bool      // asked to drain, or stopping
	Loading   bool      // registered, model not ready
	Failed    string    // why it is certainly broken (connection refused), "" = not
	Sick      string    // why it says itself that it cannot serve, "" = it does not
	Since     time.Time // of the first report of this incarnation, zero = none yet
	Report    Report    // the last one; At is zero when there was none
	Heard     time.Time // last sign of life of any kind
	Heartbeat bool      // judged by Heard alone: a worker that cannot report load
}

// Verdict is the judgement. Weight 0 means "no data: take the mean of the
// others"; Pool replaces it.
type Verdict struct {
	Status Status
	Weight uint32
	Reason string
	// dead workers are never brought back by the pool's minimum share.
	dead bool
}

// Assess judges one worker. prev is its last verdict, for hysteresis; the zero
// Verdict stands for none.
func Assess(now time.Time, c Config, in Input, prev Verdict) Verdict {
	fault := in.fault()
	switch {
	case in.Draining:
		v := Verdict{Status: Draining, Weight: MinWeight, Reason: "draining", dead: true}
		if fault != "" {
			v.Reason += "; " + fault
		}
		return v
	case fault != "":
		return Verdict{Status: Unhealthy, Weight: MinWeight, Reason: fault, dead: true}
	case in.Loading:
		return Verdict{Status: Unhealthy, Weight: MinWeight, Reason: "loading", dead: true}
	}
	last := in.Report.At
	if in.Heartbeat || in.Heard.After(last) && last.IsZero() {
		last = in.Heard
	}
	if age := now.Sub(last); age > c.Silence {
		return Verdict{Status: Timeout, Weight: MinWeight, Reason: fmt.Sprintf("silent for more than %v", c.Silence)}
	}
	if in.Report.At.IsZero() && !in.Heartbeat {
		// It says it is ready and only its load is unknown: better than nobody.
		return Verdict{Status: Unhealthy, Weight: MinWeight, Reason: "no report yet"}
	}
	// Since may have been stored before the clock was set back; then it is of no
	// use and must not keep the weight away.
	young := now.Sub(in.Since) < c.Blackout && !in.Since.After(now)
	if in.Report.At.IsZero() || now.Sub(in.Report.At) > c.Expiration || young {
		return Verdict{Status: Healthy}
	}
	w := weigh(c, in.Report)
	if w == 0 {
		return Verdict{Status: Healthy, Reason: "its load report is no number"}
	}
	return Verdict{Status: Healthy, Weight: settle(w, prev, c.Hysteresis)}
}

// fault says why the worker is certainly broken, "" when it is not. It stands until
// the worker reports otherwise, however long that takes.
func (in Input) fault() string {
	gpu := in.Report.GPU.Fault()
	switch {
	case in.Failed != "":
		return in.Failed
	case gpu != "":
		return gpu
	case in.Sick != "":
		return in.Sick
	case in.Report.SelfCheckFailed:
		return "self-check failed"
	}
	return ""
}

// weigh turns a load into a weight: inversely proportional to utilization, as in
// A58 at equal request rates, with failed requests counted as load, and all of it
// counted more on a GPU that is slowed down. It is 0 when the report makes no sense: a worker that cannot count must not get the most.
func weigh(c Config, r Report) uint32 {
	u := r.Utilization
	if r.EPS > 0 {
		u += c.ErrorPenalty * r.EPS / (max(r.RPS, 0) + r.EPS)
	}
	if math.IsNaN(u) || r.Utilization < 0 {
		return 0
	}
	u = max(u, 0.1) * r.GPU.slowed(c.ThrottlePenalty)
	return uint32(min(max(math.Round(fullAt/u), MinWeight), MaxWeight))
}

// settle keeps the previous weight when the new one is too near to it.
func settle(w uint32, prev Verdict, hysteresis float64) uint32 {
	if prev.Status != Healthy || prev.Weight == 0 {
		return w
	}
	if math.Abs(float64(w)-float64(prev.Weight)) < hysteresis*float64(prev.Weight) {
		return prev.Weight
	}
	return w
}

// Minimum is how many of a pool's members keep taking traffic.
func (c Config) Minimum(members int) int {
	// The small step down keeps 0.1 × 30 from being 3.0000000000000004.
	return int(math.Ceil(c.MinShare*float64(members) - 1e-9))
}

// Pool replaces missing weights by the mean of the others, and keeps a minimum
// share of the pool taking traffic: when fewer members take it, those that are
// only silent come back with the smallest weight, the first in order first. Dead
// and draining workers never come back. It changes vs in place; order the input
// by last sign of life, latest first.
func Pool(c Config, vs []Verdict) {
	var sum, n, takes, members uint32
	for _, v := range vs {
		if v.Status != Draining {
			members++
		}
		if v.Status.Takes() {
			takes++
		}
		if v.Status.Takes() && v.Weight > 0 {
			sum, n = sum+v.Weight, n+1
		}
	}
	mean := uint32(MaxWeight)
	if n > 0 {
		mean = max(sum/n, MinWeight)
	}
	need := uint32(c.Minimum(int(members)))
	for i := range vs {
		if vs[i].Weight == 0 {
			vs[i].Weight = mean
		}
		if takes < need && !vs[i].dead && !vs[i].Status.Takes() {
			vs[i].Status, vs[i].Weight = Healthy, MinWeight
			vs[i].Reason += "; kept by the pool's minimum share"
			takes++
		}
	}
}
