package peers

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// Put implements kvcache.Store: it returns when Copies-1 other hosts have the block, or as
// many as there are. Without any it is remote.ErrAway, or kvcache.ErrFull where one had no
// room and no other could be asked.
func (s *Store) Put(ctx context.Context, f *kvcache.Frame) error {
	if s.isClosed() {
		return kvcache.ErrClosed
	}
	if int64(len(f.Bytes())) != f.Total {
		return kvcache.ErrClosed // it was lent and given back
	}
	list, passed := s.writers(f.Space, s.place(f.Ref))
	have, want := 0, s.cfg.Copies-1
	var failed error
	var asked []*member // and have answered
	for _, m := range list {
		if have == want {
			break
		}
		err := s.putTo(ctx, m, f)
		if err == nil || answered(err) {
			asked = append(asked, m)
		}
		switch {
		case err == nil:
			have++
		case ctx.Err() != nil:
			return err
		default:
			failed, passed = errors.Join(failed, err), passed || !answered(err)
		}
	}
	switch {
	case have > 0:
		if have < want {
			s.missedBy(asked)
		}
		return nil
	case passed || failed == nil:
		return errors.Join(errNobody(), failed)
	}
	return failed // they are there, and all refuse it
}

// putTo writes a block to one member.
func (s *Store) putTo(ctx context.Context, m *member, f *kvcache.Frame) error {
	if err := s.admit(ctx, f.Total); err != nil {
		return fmt.Errorf("wait for bandwidth: %w", err)
	}
	begin, memories := time.Now(), s.memories(m)
	err := m.peer.Put(ctx, f)
	if s.called(ctx, m, begin, err) != nil {
		if errors.Is(err, kvcache.ErrFull) {
			s.metrics.full.WithLabelValues(m.ID).Inc()
		}
		return fmt.Errorf("put block to KV peer %s: %w", m.ID, err)
	}
	if !s.heard(m, memories, f.Ref, len(f.IDs)) {
		return fmt.Errorf("put block to KV peer %s: %w", m.ID, errLost)
	}
	s.took(m)
	s.metrics.blocks.Inc()
	s.metrics.bytes.WithLabelValues("block").Add(float64(f.Total))
	return nil
}

// isClosed says whether the store takes no more calls.
func (s *Store) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

// moment is how much longer than the first one that has something, or has failed, the
// others are waited for, and at least how long.
const moment = 5 * time.Millisecond

// Get implements kvcache.Store. The members that are known to have the block are asked first;
// the next one is asked beside the one before when that has no answer for a while.
func (s *Store) Get(ctx context.Context, ref kvcache.Ref) (*kvcache.Lent, error) {
	return s.read(ctx, ref, func(ctx context.Context, p Peer) (*kvcache.Lent, error) { return p.Get(ctx, ref) })
}

// GetLayers implements kvcache.Ranged, as Get.
func (s *Store) GetLayers(ctx context.Context, ref kvcache.Ref, l kvcache.Layers) (*kvcache.Lent, error) {
	return s.read(ctx, ref, func(ctx context.Context, p Peer) (*kvcache.Lent, error) { return kvcache.GetLayers(ctx, p, ref, l) })
}

// reading is how one member is asked for a block.
type reading func(context.Context, Peer) (*kvcache.Lent, error)

// read asks the members for a block.
func (s *Store) read(ctx context.Context, ref kvcache.Ref, how reading) (*kvcache.Lent, error) {
	if s.isClosed() {
		return nil, kvcache.ErrClosed
	}
	list := s.readers(ref.Space, s.holdersOf(ref.Key), s.start(ref.Key), s.start(ref.Parent), ref.Key)
	if len(list) == 0 {
		return nil, fmt.Errorf("block %s: %w", ref.Key, errNobody())
	}
	ctx, cancel := context.WithCancel(ctx)
	answers := make(chan got, len(list))
	l, left, err := s.readFrom(ctx, list, ref, how, answers)
	// Who is still reading stops, and what has come in the meantime is given back.
	cancel()
	if left > 0 {
		go func() {
			for range left {
				if g := <-answers; g.l != nil {
					g.l.Release()
				}
			}
		}()
	}
	return l, err
}

// got is an answer to Get.
type got struct {
	l   *kvcache.Lent
	err error
}

// beside is how long one member may take for a block until the next is asked too.
const beside = 100 * time.Millisecond

// readFrom asks members one after another, and says how many answers are still to come.
func (s *Store) readFrom(ctx context.Context, list []*member, ref kvcache.Ref, how reading, answers chan got) (l *kvcache.Lent, left int, err error) {
	next := func() {
		m := list[0]
		list = list[1:]
		left++
		go func() {
			l, err := s.readOne(ctx, m, ref, how)
			answers <- got{l, err}
		}()
	}
	next()
	timer := time.NewTimer(beside)
	defer timer.Stop()
	for left > 0 {
		select {
		case g := <-answers:
			left--
			if g.err == nil {
				return g.l, left, nil
			}
			err = worse(err, g.err)
			if len(list) > 0 {
				s.metrics.around.Inc()
				next()
			}
		case <-timer.C:
			if len(list) > 0 {
				s.metrics.around.Inc()
				next()
				timer.Reset(beside)
			}
		case <-ctx.Done():
			return nil, left, fmt.Errorf("block %s: %w", ref.Key, ctx.Err())
		}
	}
	return nil, 0, err
}

// worse returns the one of two errors that says more: that a block is wrong, then that
// somebody could not be asked, then that it is not there.
func worse(a, b error) error {
	rank := func(err error) int {
		_, refused := errors.AsType[*kvcache.Refusal](err)
		switch {
		case err == nil:
			return 0
		case refused:
			return 3
		case errors.Is(err, kvcache.ErrNotFound):
			return 1
		}
		return 2
	}
	if rank(b) > rank(a) {
		return b
	}
	return a
}

// readOne reads a block from one member.
func (s *Store) readOne(ctx context.Context, m *member, ref kvcache.Ref, how reading) (*kvcache.Lent, error) {
	begin, memories := time.Now(), s.memories(m)
	l, err := how(ctx, m.peer)
	if s.called(ctx, m, begin, err) != nil {
		if answered(err) {
			s.unheard(ref.Key, m.ID)
		}
		return nil, fmt.Errorf("KV peer %s: %w", m.ID, err)
	}
	s.heard(m, memories, ref, len(l.IDs))
	return l, nil
}

// start is the first block of the run that a block is in, as far as is known.
func (s *Store) start(key kvcache.Key) kvcache.Key {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r, ok := s.runs[key]; ok {
		return r.start
	}
	return key
}
