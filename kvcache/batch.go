package kvcache

import (
	"context"
	"iter"
)

// Batched is the ability of a store to lend the blocks of a chain for less time than it takes
// to ask for each.
type Batched interface {
	// GetEach lends blocks in order, each as Get does. It ends behind the first that cannot be
	// lent, with its error. What it has given out is the caller's to release. The sequence is
	// for one use and one goroutine.
	GetEach(ctx context.Context, refs []Ref) iter.Seq2[*Lent, error]
}

// GetEach lends the blocks of a chain as Batched does, from any store: from one that is not
// Batched each is got when its turn comes.
func GetEach(ctx context.Context, s Store, refs []Ref) iter.Seq2[*Lent, error] {
	if b, ok := s.(Batched); ok {
		return b.GetEach(ctx, refs)
	}
	return func(yield func(*Lent, error) bool) {
		for _, ref := range refs {
			l, err := s.Get(ctx, ref)
			if !yield(l, err) || err != nil {
				return
			}
		}
	}
}
