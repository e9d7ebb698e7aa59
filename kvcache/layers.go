package kvcache

import (
	"context"
	"errors"
	"fmt"
	"slices"
)

// Layers is a range of a model's layers.
type Layers struct {
	// From is the first, and To the one behind the last.
	From, To int
	// NewestFirst asks for the last layers before the first ones, and of a chain for the last block
	// before the others.
	NewestFirst bool
}

// Validate says what is wrong with a range.
func (l Layers) Validate() error {
	if l.From < 0 || l.To <= l.From {
		return fmt.Errorf("layers %d to %d: there are none", l.From, l.To)
	}
	return nil
}

// Parts returns the indices of the parts that hold the layers, in the order in which they are
// wanted, behind those that belong to no layer.
func (l Layers) Parts(h *Header) []int {
	list := h.PartsOf(l.From, l.To)
	slices.SortStableFunc(list, func(a, b int) int {
		p, q := h.Parts[a], h.Parts[b]
		switch {
		case p.Layers == 0 || q.Layers == 0:
			return min(int(p.Layers), 1) - min(int(q.Layers), 1)
		case l.NewestFirst:
			return int(q.Layer) - int(p.Layer)
		}
		return int(p.Layer) - int(q.Layer)
	})
	return list
}

// Ranged is the ability of a store to read some layers of a block without the others, where that
// saves time or memory. A store that lends its own memory has no use for it.
type Ranged interface {
	// GetLayers is Get for a range of layers. The parts of others may be absent; see ErrAbsent.
	// A block that has none of the layers has the parts that belong to none.
	GetLayers(ctx context.Context, ref Ref, l Layers) (*Lent, error)
}

// GetLayers lends what a store has of some layers of a block, and the other layers too if the
// store knows no less.
func GetLayers(ctx context.Context, s Store, ref Ref, l Layers) (*Lent, error) {
	if err := l.Validate(); err != nil {
		return nil, err
	}
	if r, ok := s.(Ranged); ok {
		return r.GetLayers(ctx, ref, l)
	}
	return s.Get(ctx, ref)
}

// Pieces makes a frame of which some parts are there. There are as many pieces as parts, nil for
// those that are not; the others are as long as their parts. Like all frames it owns no memory,
// and Part verifies each.
func Pieces(h Header, pieces [][]byte) (*Frame, error) {
	if len(pieces) != len(h.Parts) {
		return nil, fmt.Errorf("%d pieces of %d parts", len(pieces), len(h.Parts))
	}
	for i, b := range pieces {
		if b != nil && int64(len(b)) != h.Parts[i].Size {
			return nil, fmt.Errorf("a piece of %d bytes, part %d has %d", len(b), i, h.Parts[i].Size)
		}
	}
	return &Frame{Header: h, pieces: pieces}, nil
}

// ahead is how many blocks ReadLayers reads at once.
const ahead = 4

// ReadLayers reads layers of the blocks of a chain, some at once, and gives each to take in the
// order asked for: from the first on, or from the last one back. It returns how many followed each
// other without a gap when the context ended, a block was not there or was refused, or take had
// an error, which ends it too and is returned. Take verifies the parts that it reads, and what it
// is lent is released behind it.
func ReadLayers(ctx context.Context, s Store, chain []Found, l Layers, take func(Found, *Lent) error) (n int, err error) {
	if err := l.Validate(); err != nil {
		return 0, err
	}
	ctx, cancel := context.WithCancel(ctx)
	order := slices.Clone(chain)
	if l.NewestFirst {
		slices.Reverse(order)
	}
	reads := make(chan chan read, ahead-1) // in order; closed behind the last
	go func() {
		defer close(reads)
		for _, b := range order {
			r := make(chan read, 1)
			select {
			case reads <- r:
			case <-ctx.Done():
				return
			}
			go func() {
				lent, err := GetLayers(ctx, s, b.Ref, l)
				r <- read{lent, err}
			}()
		}
	}()
	defer func() {
		cancel()
		go drain(reads) // a store may take its time to see that nobody waits
	}()
	for _, b := range order {
		got, ok := next(ctx, reads)
		if !ok || got.err != nil {
			return n, nil
		}
		err := take(b, got.lent)
		got.lent.Release()
		if _, refused := errors.AsType[*Refusal](err); refused {
			return n, nil
		}
		if err != nil {
			return n, err
		}
		n++
	}
	return n, nil
}

// read is the end of one read.
type read struct {
	lent *Lent
	err  error
}

// next waits for the next read until ctx ends. What it leaves is released when it comes.
func next(ctx context.Context, reads chan chan read) (read, bool) {
	if ctx.Err() != nil {
		return read{}, false
	}
	var r chan read
	select {
	case r = <-reads:
	case <-ctx.Done():
	}
	if r == nil {
		return read{}, false
	}
	select {
	case got := <-r:
		return got, true
	case <-ctx.Done():
		go release(r)
		return read{}, false
	}
}

// drain releases what nobody takes.
func drain(reads chan chan read) {
	for r := range reads {
		release(r)
	}
}

// release waits for a read and releases what it has.
func release(r chan read) {
	if got := <-r; got.lent != nil {
		got.lent.Release()
	}
}
