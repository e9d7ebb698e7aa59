package extproc

import (
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/kvmesh/kvmesh/internal/policy"
)

const (
	// small is the largest announced body that needs no room among those on their
	// way: nearly every request. So uploads that never end cost others like them.
	small = 64 << 10
	// drainTimes is up to how many times max_body a refused body is read.
	drainTimes = 4
)

// expect takes room among the bodies on their way. A large one takes what it
// announced, one of unknown length what it may have at most.
func (e *Exchange) expect(limit int64) bool {
	n := e.head.length
	if n < 0 {
		n = policy.BufferTimes * limit
	}
	if n <= small {
		return true
	}
	if !e.s.arriving.TryAcquire(n) {
		return false
	}
	e.arriving = n
	return true
}

// arrived gives that room back.
func (e *Exchange) arrived() {
	if e.arriving > 0 {
		e.s.arriving.Release(e.arriving)
		e.arriving = 0
	}
}

// hold takes room among the bodies that are here. It never waits: Envoy gives an
// answer a second at most.
func (e *Exchange) hold(n int64) bool {
	if !e.s.cfg.Held.TryAcquire(n) {
		return false
	}
	e.held = n
	e.arrived()
	return true
}

// later puts a refusal off until the body was read: a client that sends and does
// not listen meanwhile would see a reset connection in place of the answer. What is
// read goes nowhere and is held nowhere. A body that would take too long is refused
// at once.
func (e *Exchange) later(refusal *extprocv3.ProcessingResponse) *extprocv3.ProcessingResponse {
	most := drainTimes * int64(e.s.cfg.Policy.Mesh.MaxBody)
	if e.head.length > most {
		return refusal
	}
	e.phase, e.refusal, e.rest = draining, refusal, most
	return streamBody()
}

// drain takes one piece of a refused body.
func (e *Exchange) drain(m *extprocv3.HttpBody) *extprocv3.ProcessingResponse {
	e.rest -= int64(len(m.GetBody()))
	if m.GetEndOfStream() || e.rest < 0 {
		return e.drained()
	}
	return nil
}

// drained is the refusal that was put off.
func (e *Exchange) drained() *extprocv3.ProcessingResponse {
	e.phase = answered
	return e.refusal
}
