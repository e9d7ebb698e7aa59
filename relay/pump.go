package relay

import (
	"errors"
	"net/http"
	"sync"

	"github.com/kvmesh/kvmesh/internal/h2"
	"github.com/kvmesh/kvmesh/internal/openai"
)

// pump reads the events of one attempt. An event that has to wait for nothing is handled
// by the goroutine that reads the connection to Envoy, at once: to hand it to the attempt's
// own goroutine, and from there to the one that writes, costs more than all else that is
// done for it. Whatever may have to wait, and all but plain events of an answer that has
// begun, is left to the attempt, which has the pump except while next waits.
type pump struct {
	a      *attempt
	resp   *http.Response
	body   *h2.Body // nil where the answer comes from elsewhere
	events *openai.EventReader

	mu    sync.Mutex // the pump's owner holds it
	alone bool       // the attempt handles all from now on
	batch *h2.Batch  // of the goroutine that reads the connection, while that is the owner
	to    inBatch    // the same, and the client

	// What that has left to the attempt.
	left openai.Event
	err  error
	has  bool
	o    outcome
	over bool // with o
}

// inBatch is how an event is sent without waiting.
type inBatch struct {
	batch *h2.Batch
	w     *h2.Writer
}

// newPump returns a pump that is the caller's until close.
func newPump(a *attempt, resp *http.Response) *pump {
	p := &pump{a: a, resp: resp}
	p.events = openai.NewEventReader(p, a.j.r.cfg.MaxEvent)
	p.mu.Lock()
	if body, ok := resp.Body.(*h2.Body); ok {
		p.body = body
		body.Inline(p.inline)
	}
	return p
}

// close leaves nothing to the goroutine that reads the connection.
func (p *pump) close() {
	p.alone = true
	p.mu.Unlock()
	if p.body != nil {
		p.body.Inline(nil)
	}
}

// Read implements io.Reader for events. It does not wait where the body allows that.
func (p *pump) Read(b []byte) (int, error) {
	if p.body == nil {
		return p.resp.Body.Read(b)
	}
	n, err := p.body.ReadNow(p.batch, b)
	if errors.Is(err, h2.ErrNotYet) {
		err = openai.ErrNotYet
	}
	return n, err
}

// next waits for the next event, or for the end of the attempt, which is in over. It is
// the attempt's.
func (p *pump) next() (openai.Event, error) {
	for {
		if p.has || p.over {
			p.has = false
			return p.left, p.err
		}
		ev, err := p.events.Next()
		if !errors.Is(err, openai.ErrNotYet) {
			return ev, err
		}
		p.mu.Unlock()
		p.body.Wait()
		p.mu.Lock()
	}
}

// inline handles what has come, in the goroutine that reads the connection. It returns
// false when there is something left for the attempt.
func (p *pump) inline(b *h2.Batch) bool {
	a, j := p.a, p.a.j
	if !p.mu.TryLock() {
		return false
	}
	defer p.mu.Unlock()
	if p.alone || p.has || p.over {
		return false
	}
	select {
	case <-j.pen:
	default:
		return false
	}
	defer j.put()
	if !a.mine || j.owner != a || a.thaw != nil || j.whole != nil || a.later && !a.moved || a.ctx.Err() != nil {
		return false
	}
	w := j.out.enter()
	if w == nil {
		return false
	}
	defer j.out.leave()
	p.batch, a.now = b, &p.to
	p.to = inBatch{b, w}
	defer func() { p.batch, a.now = nil, nil }()
	for !p.has && !p.over {
		ev, err := p.events.Next()
		if errors.Is(err, openai.ErrNotYet) {
			return true
		}
		p.handle(ev, err)
	}
	return false
}

// roomFor is what an event may take on its way to the client, where an id is added and what
// all events of an answer have in common.
func roomFor(ev openai.Event) int { return 2*len(ev.Raw) + 1<<10 }

// handle sends a plain event, or leaves it to the attempt. The pen is held.
func (p *pump) handle(ev openai.Event, err error) {
	a := p.a
	if err != nil || ev.Done() || ev.Data == nil || !p.to.w.Room(roomFor(ev)) {
		p.left, p.err, p.has = ev, err, true
		return
	}
	v, err := a.scan(ev.Data)
	if err != nil || v.isFailure() {
		p.left, p.has = ev, true
		return
	}
	a.j.r.inlined.Add(1)
	p.o, p.over = a.pass(ev, v, nil)
}
