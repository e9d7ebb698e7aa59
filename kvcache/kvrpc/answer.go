//go:build unix

package kvrpc

import (
	"context"
	"encoding/json"
	"errors"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/kvrpc/kvrpcpb"
)

// control answers the calls of the control channel.
type control struct {
	kvrpcpb.UnimplementedPeerServer
	s *Server
}

// Longest implements the service. The store's own look-up is what grants the lease.
func (c *control) Longest(ctx context.Context, r *kvrpcpb.LongestRequest) (*kvrpcpb.LongestResponse, error) {
	space, err1 := spaceFrom(r.Space)
	from, err2 := keyFrom(r.From)
	first, err3 := countFrom(r.First)
	if err := errors.Join(err1, err2, err3); err != nil {
		return nil, controlStatus(err)
	}
	m, err := c.s.store.Longest(ctx, kvcache.Query{Space: space, From: from, First: first, IDs: r.Ids})
	if err != nil {
		return nil, controlStatus(err)
	}
	return matchTo(m), nil
}

// Refused implements the service: it reads the block, whose store removes and counts what
// is wrong.
func (c *control) Refused(ctx context.Context, r *kvrpcpb.RefusedRequest) (*kvrpcpb.RefusedResponse, error) {
	space, err1 := spaceFrom(r.Space)
	parent, err2 := keyFrom(r.Parent)
	key, err3 := keyFrom(r.Key)
	if err := errors.Join(err1, err2, err3); err != nil {
		return nil, controlStatus(err)
	}
	l, err := c.s.store.Get(ctx, kvcache.Ref{Space: space, Parent: parent, Key: key})
	if err == nil {
		err = l.Verify()
		l.Release()
	}
	_, wrong := errors.AsType[*kvcache.Refusal](err)
	return &kvrpcpb.RefusedResponse{Wrong: wrong}, nil
}

// Drop implements the service.
func (c *control) Drop(ctx context.Context, r *kvrpcpb.DropRequest) (*kvrpcpb.DropResponse, error) {
	f, err := keyFrom(r.Fingerprint)
	drop := c.s.store.Drop
	if c.s.cfg.Forget != nil {
		drop = c.s.cfg.Forget.Drop
	}
	if err == nil {
		err = drop(ctx, kvcache.Fingerprint(f))
	}
	return &kvrpcpb.DropResponse{}, controlStatus(err)
}

// Label implements the service. A store without labels needs none.
func (c *control) Label(ctx context.Context, r *kvrpcpb.LabelRequest) (*kvrpcpb.LabelResponse, error) {
	f, err := keyFrom(r.Fingerprint)
	if l, ok := c.s.store.(kvcache.Labeled); ok && err == nil {
		err = l.Label(ctx, kvcache.Fingerprint(f), kvcache.Label{Model: r.Model, Text: r.Text})
	}
	return &kvrpcpb.LabelResponse{}, controlStatus(err)
}

// Stats implements the service. What was refused before it came to the store is refused.
func (c *control) Stats(context.Context, *kvrpcpb.StatsRequest) (*kvrpcpb.StatsResponse, error) {
	st := kvcache.Stats{}
	if counted, ok := c.s.store.(kvcache.Counted); ok {
		st = counted.Stats()
	}
	for i, n := range c.s.Stats().Refused {
		st.Refused[i] += n
	}
	b, err := json.Marshal(st)
	return &kvrpcpb.StatsResponse{Stats: b, Memory: []byte(c.s.cfg.MemoryID)}, controlStatus(err)
}

// OpenTail implements the service.
func (c *control) OpenTail(ctx context.Context, r *kvrpcpb.OpenTailRequest) (*kvrpcpb.OpenTailResponse, error) {
	space, err1 := spaceFrom(r.Space)
	parent, err2 := keyFrom(r.Parent)
	attempt, err3 := countFrom(r.Attempt)
	first, err4 := countFrom(r.First)
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		return nil, controlStatus(err)
	}
	no, err := c.s.tails.begin(ctx, kvcache.TailSpec{
		Space: space, Stream: string(r.Stream), Choice: int(r.Choice), Attempt: attempt, Parent: parent, First: first,
	})
	return &kvrpcpb.OpenTailResponse{Tail: no}, controlStatus(err)
}

// RotateTail implements the service.
func (c *control) RotateTail(ctx context.Context, r *kvrpcpb.RotateTailRequest) (*kvrpcpb.RotateTailResponse, error) {
	next, err1 := countFrom(r.Next)
	parent, err2 := keyFrom(r.Parent)
	first, err3 := countFrom(r.First)
	if err := errors.Join(err1, err2, err3); err != nil {
		return nil, controlStatus(err)
	}
	no, err := c.s.tails.rotate(ctx, r.Tail, next, parent, first)
	return &kvrpcpb.RotateTailResponse{Tail: no}, controlStatus(err)
}

// CloseTail implements the service.
func (c *control) CloseTail(_ context.Context, r *kvrpcpb.CloseTailRequest) (*kvrpcpb.CloseTailResponse, error) {
	c.s.tails.end(r.Tail)
	return &kvrpcpb.CloseTailResponse{}, nil
}

// DropTail implements the service.
func (c *control) DropTail(ctx context.Context, r *kvrpcpb.DropTailRequest) (*kvrpcpb.DropTailResponse, error) {
	space, err := spaceFrom(r.Space)
	if err == nil {
		err = c.s.tails.drop(ctx, space, string(r.Stream))
	}
	return &kvrpcpb.DropTailResponse{}, controlStatus(err)
}
