package worker

import (
	"math"
	"sync/atomic"
	"time"
)

// average is a moving average that forgets: each value added counts share of the
// whole, those before it the rest. It is 0 until the first. Safe for concurrent use.
type average struct {
	share float64
	bits  atomic.Uint64 // of the float64
}

// add takes a value in.
func (a *average) add(x float64) {
	for {
		old := a.bits.Load()
		next := x
		if old != 0 {
			was := math.Float64frombits(old)
			next = was + a.share*(x-was)
		}
		if a.bits.CompareAndSwap(old, math.Float64bits(next)) {
			return
		}
	}
}

// value is the average now.
func (a *average) value() float64 { return math.Float64frombits(a.bits.Load()) }

// pace is how fast the engine answers. Safe for concurrent use.
type pace struct {
	interToken average // seconds between two tokens of one choice
	latency    average // seconds of a whole answer
	// observe takes each inter-token time, nil = nobody does.
	observe func(seconds float64)
}

// newPace remembers about the last hundred tokens and the last twenty answers.
func newPace() *pace {
	return &pace{interToken: average{share: 0.02}, latency: average{share: 0.1}}
}

// choicePace times the tokens of one choice.
type choicePace struct {
	of      *pace
	arrived time.Time     // of the last token, zero before the first
	sending time.Duration // what passing it on took
}

// token notes that a token has come. A gap in which the client took more than half
// of the time says nothing about the engine.
func (c *choicePace) token(now time.Time) {
	if c.of == nil {
		return
	}
	if gap := now.Sub(c.arrived); !c.arrived.IsZero() && c.sending <= gap/2 {
		c.of.interToken.add(gap.Seconds())
		if c.of.observe != nil {
			c.of.observe(gap.Seconds())
		}
	}
	c.arrived = now
}

// sent notes that the token has been passed on.
func (c *choicePace) sent(now time.Time) { c.sending = now.Sub(c.arrived) }
