//go:build unix

package kvnode

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/arena"
	"github.com/kvmesh/kvmesh/kvcache/kvwire"
)

// FarTails are copies of tails on other hosts. Package peers has them.
type FarTails interface {
	// Grew says that a tail ends at a position now. It must not wait.
	Grew(spec kvcache.TailSpec, next int)
	// ReadTail reads copies as kvcache.Tails does.
	ReadTail(ctx context.Context, s kvcache.Space, stream string, choice int) ([]kvcache.Tail, error)
	// DropTail drops copies as kvcache.Tails does.
	DropTail(ctx context.Context, s kvcache.Space, stream string) error
}

const (
	// mostNames is how many tails are known by name; each time there are more, all names
	// are forgotten, and clients asked again.
	mostNames = 1 << 16
	// ownMoment is how long other hosts are asked for a stream that this host had last.
	ownMoment = 20 * time.Millisecond
	// dropTime bounds the dropping of copies.
	dropTime = 5 * time.Second
)

// ownTails are the tails that were opened here, by their number in the arena, which knows
// streams by a hash only. A nil one knows nothing and is told nothing.
type ownTails struct {
	far FarTails

	mu   sync.Mutex
	byNo map[uint64]kvcache.TailSpec
}

// name notes what a tail is.
func (o *ownTails) name(no uint64, spec kvcache.TailSpec) {
	if o == nil {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.byNo) >= mostNames {
		clear(o.byNo)
	}
	o.byNo[no] = spec
}

// rotated notes that a tail has begun anew under another number.
func (o *ownTails) rotated(from, to uint64, parent kvcache.Key, first int) {
	if o == nil {
		return
	}
	o.mu.Lock()
	spec, ok := o.byNo[from]
	delete(o.byNo, from)
	o.mu.Unlock()
	if ok {
		spec.Parent, spec.First = parent, first
		o.name(to, spec)
		o.far.Grew(spec, first)
	}
}

// spec is what a tail was opened as.
func (o *ownTails) spec(no uint64) (kvcache.TailSpec, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	spec, ok := o.byNo[no]
	return spec, ok
}

// last says whether an attempt at a stream was made here.
func (o *ownTails) last(t kvcache.TailSpec) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, spec := range o.byNo {
		if spec.Attempt == t.Attempt && spec.Stream == t.Stream && spec.Choice == t.Choice && spec.Space == t.Space {
			return true
		}
	}
	return false
}

// grew tells of a tail that was appended to, and returns the answer: that its name is not
// known, after a restart, or nothing.
func (p *peer) grew(no uint64, err error) []byte {
	w := p.writers[no]
	if err != nil || p.s.own == nil || w == nil {
		return nil
	}
	spec, ok := p.s.own.spec(no)
	if !ok {
		return []byte{1}
	}
	p.s.own.far.Grew(spec, w.Next())
	return nil
}

// farTails reads the tails of a choice here and on other hosts.
func (p *peer) farTails(ctx context.Context, c *cursor) ([]byte, error) {
	within, space, choice := time.Duration(c.Size()), c.Space(), c.U32()
	stream := string(c.Rest())
	if c.Bad || p.s.own == nil {
		return nil, errBad
	}
	tails, err := p.s.store.ReadTail(ctx, space, stream, choice)
	if err != nil {
		return nil, err
	}
	// Copies are older than what they are of; but the stream may have been elsewhere since.
	if len(tails) > 0 && len(tails[0].Ranges) > 0 && p.s.own.last(tails[0].TailSpec) {
		within = min(within, ownMoment)
	}
	ctx, cancel := context.WithTimeout(ctx, min(within, stall/2))
	defer cancel()
	far, err := p.s.own.far.ReadTail(ctx, space, stream, choice)
	if err != nil {
		p.s.log.Debug("read tails of other hosts", "err", err)
	}
	return appendTails(nil, kvcache.SortTails(append(tails, far...))), nil
}

// dropFar drops the copies of a stream's tails, in the background.
func (s *Server) dropFar(space kvcache.Space, stream string) {
	if s.own == nil {
		return
	}
	s.done.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), dropTime)
		defer cancel()
		if err := s.own.far.DropTail(ctx, space, stream); err != nil {
			s.log.Debug("drop tails on other hosts", "err", err)
		}
	})
}

// append appends to a tail at the place that the client knows. Usually that is where the
// writer of this connection is; else the client has gone on elsewhere, or has not heard
// of its last append, and a writer is made that begins there.
func (p *peer) append(ctx context.Context, c cursor) (no uint64, err error) {
	no, r := uint64(c.Size()), kvcache.Range{First: c.Size()}
	if b := c.Take(1); b != nil {
		r.Codec = kvcache.Codec(b[0])
	}
	p.ids = c.IDs(len(c.B)/4, p.ids)
	r.IDs, r.Data = p.ids, p.data
	if c.Bad || len(c.B) != 0 {
		return no, errBad
	}
	w := p.writers[no]
	if w == nil || w.Next() != r.First {
		return no, p.appendAnew(ctx, no, r)
	}
	if err = w.Append(r); errors.Is(err, kvcache.ErrGap) {
		err = p.appendAnew(ctx, no, r) // somebody went on elsewhere
	}
	return no, err
}

// appendAnew appends with a writer that begins where the client is.
func (p *peer) appendAnew(ctx context.Context, no uint64, r kvcache.Range) error {
	w, err := p.writer(ctx, no, r.First)
	if err != nil {
		return err
	}
	return w.Append(r)
}

// mostWriters bounds the writers that a connection remembers.
const mostWriters = 1024

// writer returns a writer of a tail at a position.
func (p *peer) writer(ctx context.Context, no uint64, next int) (*arena.TailWriter, error) {
	w, err := p.s.store.Writer(ctx, no, next)
	if err != nil {
		return nil, err
	}
	if len(p.writers) >= mostWriters {
		clear(p.writers)
	}
	p.writers[no] = w
	return w, nil
}

// tail does the operations of tails but for append.
func (p *peer) tail(ctx context.Context, what op, c *cursor) ([]byte, error) {
	st := p.s.store
	switch what {
	case opOpen:
		spec := c.spec()
		if c.Bad {
			return nil, errBad
		}
		w, err := st.OpenTail(ctx, spec)
		if err != nil {
			return nil, err
		}
		no := w.(*arena.TailWriter).No()
		p.s.own.name(no, spec)
		return kvwire.AppendSize(nil, int(no)), nil
	case opRotate:
		no, next, parent, first := uint64(c.Size()), c.Size(), c.Key(), c.Size()
		if c.Bad {
			return nil, errBad
		}
		w, err := p.writer(ctx, no, next)
		if err == nil {
			err = w.Rotate(parent, first)
		}
		if err != nil {
			return nil, err
		}
		delete(p.writers, no)
		p.writers[w.No()] = w
		p.s.own.rotated(no, w.No(), parent, first)
		return kvwire.AppendSize(nil, int(w.No())), nil
	case opRead:
		space, choice := c.Space(), c.U32()
		tails, err := st.ReadTail(ctx, space, string(c.Rest()), choice)
		return appendTails(nil, tails), err
	case opTails:
		return p.farTails(ctx, c)
	case opName:
		no, spec := uint64(c.Size()), c.spec()
		if c.Bad || p.s.own == nil {
			return nil, errBad
		}
		p.s.own.name(no, spec)
		p.grew(no, nil)
		return nil, nil
	default:
		space, stream := c.Space(), string(c.Rest())
		p.s.dropFar(space, stream)
		return nil, st.DropTail(ctx, space, stream)
	}
}
