package peers

import (
	"context"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// Longest implements kvcache.Store. What the members have between them is one chain: each
// round asks for what follows what was found, until nobody has more or ctx ends.
func (s *Store) Longest(ctx context.Context, q kvcache.Query) (kvcache.Match, error) {
	if s.isClosed() {
		return kvcache.Match{}, kvcache.ErrClosed
	}
	var m kvcache.Match
	at, from := 0, q.From
	ends := map[string]int{} // the places behind which members have said that they have nothing
	for at < len(q.IDs) && ctx.Err() == nil {
		rest := kvcache.Query{Space: q.Space, From: from, First: q.First + at, IDs: q.IDs[at:]}
		best, err := s.ask(ctx, rest, at, ends)
		if best.Common > 0 || len(best.Blocks) > 0 {
			m.Partial, m.Common = best.Partial, best.Common
		}
		if len(best.Blocks) == 0 {
			if len(m.Blocks) == 0 && m.Common == 0 {
				return m, err
			}
			break
		}
		m.Blocks = append(m.Blocks, best.Blocks...)
		at += best.Tokens()
		from = best.Blocks[len(best.Blocks)-1].Key
	}
	if len(m.Blocks) == 0 && m.Common == 0 {
		return m, ctx.Err()
	}
	return m, nil
}

// said is one member's answer to a look-up.
type said struct {
	from     *member
	memories int // how often that had had another memory before
	m        kvcache.Match
	err      error
}

// ask asks all that may have what a query is for, and returns the longest answer of those
// that come in time. There is an error only where nobody has answered.
func (s *Store) ask(ctx context.Context, q kvcache.Query, at int, ends map[string]int) (best kvcache.Match, err error) {
	list := s.readers(q.Space, nil, s.keys(q)...)
	if len(list) == 0 {
		return best, errNobody()
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	answers, asked := make(chan said, len(list)), 0
	for _, m := range list {
		if end, known := ends[m.ID]; known && end == at {
			continue
		}
		asked++
		go func() {
			begin, memories := time.Now(), s.memories(m)
			found, err := m.peer.Longest(ctx, q)
			answers <- said{m, memories, found, s.called(ctx, m, begin, err)}
		}()
	}
	w, heard := waiting{begin: time.Now()}, false
	for asked > 0 {
		select {
		case a := <-answers:
			asked--
			if a.err != nil {
				err = a.err
				continue
			}
			heard = true
			for _, b := range a.m.Blocks {
				s.heard(a.from, a.memories, b.Ref, b.Tokens)
			}
			if a.m.Common > 0 {
				s.heard(a.from, a.memories, a.m.Partial.Ref, a.m.Partial.Tokens)
			}
			ends[a.from.ID] = at + a.m.Tokens()
			if n, has := a.m.Tokens(), best.Tokens(); n > has || n == has && a.m.Common > best.Common {
				best = a.m
			}
			if best.Tokens() == len(q.IDs) {
				return best, nil
			}
			if len(best.Blocks) > 0 {
				w.start()
			}
		case <-w.over:
			return best, nil
		case <-ctx.Done():
			return best, ctx.Err()
		}
	}
	if heard {
		return best, nil
	}
	return best, err
}

// waiting is how long those are waited for who are slower than the first.
type waiting struct {
	begin time.Time
	over  <-chan time.Time // nil = as long as the caller likes
}

// start sets the end, the first time.
func (w *waiting) start() {
	if w.over == nil {
		w.over = time.After(max(moment, time.Since(w.begin)))
	}
}

// keys are what placement knows what a query is for by: the run that goes on, and the block
// that would come next and may begin one.
func (s *Store) keys(q kvcache.Query) []kvcache.Key {
	s.mu.Lock()
	size := s.size
	r, known := s.runs[q.From]
	s.mu.Unlock()
	if size == 0 {
		size = 64
	}
	from := q.From
	if from == (kvcache.Key{}) {
		from = q.Root
	}
	next := q.Key(from, q.IDs[:min(size, len(q.IDs))])
	if known && r.n < runBlocks {
		return []kvcache.Key{r.start, next}
	}
	return []kvcache.Key{next}
}
