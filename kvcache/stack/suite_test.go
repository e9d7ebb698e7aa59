//go:build unix

package stack_test

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/arena"
	"github.com/kvmesh/kvmesh/kvcache/kvtest"
	"github.com/kvmesh/kvmesh/kvcache/nvmetier"
	"github.com/kvmesh/kvmesh/kvcache/stack"
)

// owned is a stack that closes its stores.
type owned struct {
	*stack.Stack
	stores []kvcache.Store
}

// Put implements kvcache.Store, and waits until the block is everywhere, so that what the
// suite finds does not depend on who is faster.
func (o owned) Put(ctx context.Context, f *kvcache.Frame) error {
	err := o.Stack.Put(ctx, f)
	for o.Behind() > 0 {
		<-time.After(20 * time.Microsecond)
	}
	return err
}

// Close implements kvcache.Store.
func (o owned) Close() error {
	err := o.Stack.Close()
	for _, s := range o.stores {
		err = errors.Join(err, s.Close())
	}
	return err
}

// TestSuite: a stack of memory on a disk keeps the promises of a store.
func TestSuite(t *testing.T) {
	kvtest.Run(t, kvtest.Harness{Open: func(dir string, limit int64) (kvcache.Store, error) {
		near, err := arena.Open(arena.Config{Dir: filepath.Join(dir, "near"), Limit: limit})
		if err != nil {
			return nil, err
		}
		far, err := nvmetier.Open(nvmetier.Config{Dir: filepath.Join(dir, "far")})
		if err != nil {
			near.Close()
			return nil, err
		}
		s, err := stack.New(stack.Config{Near: near, Far: []stack.Tier{{Name: "nvme", Store: far}}})
		return owned{s, []kvcache.Store{near, far}}, err
	}})
}
