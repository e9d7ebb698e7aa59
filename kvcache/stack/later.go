package stack

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/remote"
)

// later is a far store that is still being opened: until then it is away.
type later struct {
	done chan struct{} // closed when it is open, or will never be

	// Set before done is closed.
	store kvcache.Store
	err   error

	mu     sync.Mutex
	closed bool
}

// Later opens a far store, and returns it when it is open or, if that takes longer than
// within, one that is away until it is: a disk with a million blocks, or one that hangs,
// keeps nobody from serving what is near. What goes wrong by then is an error, and later
// is told to failed.
func Later(open func() (kvcache.Store, error), within time.Duration, failed func(error)) (kvcache.Store, error) {
	l := &later{done: make(chan struct{})}
	go func() {
		l.store, l.err = open()
		close(l.done)
	}()
	select {
	case <-l.done:
		return l.store, l.err
	case <-time.After(within):
	}
	go func() {
		<-l.done
		if l.err != nil {
			failed(l.err)
		} else if l.isClosed() {
			_ = l.store.Close() // nobody has used it
		}
	}()
	return l, nil
}

// isClosed says whether Close was called.
func (l *later) isClosed() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.closed
}

// open returns the store if it is open.
func (l *later) open() (kvcache.Store, error) {
	select {
	case <-l.done:
		if l.err != nil {
			return nil, fmt.Errorf("%w: %w", remote.ErrAway, l.err)
		}
		return l.store, nil
	default:
		return nil, fmt.Errorf("%w: it is still being opened", remote.ErrAway)
	}
}

// Put implements kvcache.Store.
func (l *later) Put(ctx context.Context, f *kvcache.Frame) error {
	s, err := l.open()
	if err != nil {
		return err
	}
	return s.Put(ctx, f)
}

// Longest implements kvcache.Store.
func (l *later) Longest(ctx context.Context, q kvcache.Query) (kvcache.Match, error) {
	s, err := l.open()
	if err != nil {
		return kvcache.Match{}, err
	}
	return s.Longest(ctx, q)
}

// Get implements kvcache.Store.
func (l *later) Get(ctx context.Context, ref kvcache.Ref) (*kvcache.Lent, error) {
	s, err := l.open()
	if err != nil {
		return nil, err
	}
	return s.Get(ctx, ref)
}

// GetLayers implements kvcache.Ranged, where the store is that, and else lends the whole block.
func (l *later) GetLayers(ctx context.Context, ref kvcache.Ref, layers kvcache.Layers) (*kvcache.Lent, error) {
	s, err := l.open()
	if err != nil {
		return nil, err
	}
	return kvcache.GetLayers(ctx, s, ref, layers)
}

// Drop implements kvcache.Store.
func (l *later) Drop(ctx context.Context, f kvcache.Fingerprint) error {
	s, err := l.open()
	if err != nil {
		return err
	}
	return s.Drop(ctx, f)
}

// Label implements kvcache.Labeled, for stores that remember labels. It waits until the
// store is open.
func (l *later) Label(ctx context.Context, f kvcache.Fingerprint, label kvcache.Label) error {
	select {
	case <-l.done:
	case <-ctx.Done():
		return ctx.Err()
	}
	s, err := l.open()
	if n, ok := s.(kvcache.Labeled); ok && err == nil {
		return n.Label(ctx, f, label)
	}
	return err
}

// Labels implements kvcache.Lister, for stores that can.
func (l *later) Labels(ctx context.Context) (map[kvcache.Fingerprint]kvcache.Label, error) {
	s, err := l.open()
	if n, ok := s.(kvcache.Lister); ok && err == nil {
		return n.Labels(ctx)
	}
	return nil, err
}

// Close implements kvcache.Store. A store that is not open yet is closed when it is.
func (l *later) Close() error {
	l.mu.Lock()
	first := !l.closed
	l.closed = true
	l.mu.Unlock()
	s, err := l.open()
	if errors.Is(err, remote.ErrAway) || !first {
		return nil
	}
	return s.Close()
}

// EraseTenant implements kvcache.Eraser, for stores that can.
func (l *later) EraseTenant(ctx context.Context, e kvcache.Erasure) (int, error) {
	s, err := l.open()
	if err != nil {
		return 0, err
	}
	if n, ok := s.(kvcache.Eraser); ok {
		return n.EraseTenant(ctx, e)
	}
	return 0, errors.New("the store cannot erase a tenant's blocks")
}

// Walk implements kvcache.Walker, for stores that can.
func (l *later) Walk(ctx context.Context, each func(kvcache.Seen) error) error {
	s, err := l.open()
	if err != nil {
		return err
	}
	if w, ok := s.(kvcache.Walker); ok {
		return w.Walk(ctx, each)
	}
	return errors.New("the store cannot show its blocks")
}

// Check implements kvcache.Walker, for stores that can.
func (l *later) Check(ctx context.Context, ref kvcache.Ref) error {
	s, err := l.open()
	if err != nil {
		return err
	}
	if w, ok := s.(kvcache.Walker); ok {
		return w.Check(ctx, ref)
	}
	return errors.New("the store cannot check its blocks")
}
