package kvcache

import (
	"context"
	"slices"
)

// Erasure says whose blocks and tails are to be erased.
type Erasure struct {
	// Roots returns the roots of the tenant's spaces with a fingerprint.
	Roots func(Fingerprint) []Key
	// Looked is told of blocks that were looked at, so that somebody knows how far it is.
	// It may be called by several goroutines. Required.
	Looked func(blocks int)
}

// Has says whether a space is to be erased.
func (e Erasure) Has(s Space) bool {
	return slices.Contains(e.Roots(s.Fingerprint), s.Root)
}

// Eraser is the ability of a store to erase what it has of a tenant, whatever the model.
type Eraser interface {
	// EraseTenant removes blocks and tails and says how many blocks that was. What is
	// put meanwhile may stay. After an error some may be gone; it may be called again.
	// It may take long where blocks have to be looked at one by one.
	EraseTenant(ctx context.Context, e Erasure) (blocks int, err error)
}
