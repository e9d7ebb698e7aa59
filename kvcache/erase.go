package kvcache

import (
	"context"
	"slices"
)

// Erasure says whose blocks and tails are to be erased.
type Erasure struct {
	// Tenant is the tenant's name, for stores that pass the erasure on.
	Tenant string
	// Roots returns the roots of the tenant's spaces with a fingerprint.
	Roots func(Fingerprint) []Key
	// Looked is told of blocks that were looked at, so that somebody knows how far it is.
	// It may be called by several goroutines. Required.
	Looked func(blocks int)
}

// ErasureOf is the erasure of a tenant in all of its spaces; see TenantRoots.
func ErasureOf(tenant string, looked func(blocks int)) Erasure {
	return Erasure{Tenant: tenant, Roots: func(f Fingerprint) []Key { return f.TenantRoots(tenant) }, Looked: looked}
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

// Forgetter forgets what there is of a model or a tenant. A Store that is an Eraser is one.
type Forgetter interface {
	Eraser
	// Drop is that of Store.
	Drop(ctx context.Context, f Fingerprint) error
}
