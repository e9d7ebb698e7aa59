//go:build unix

package kvrpc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/kvrpc/kvrpcpb"
)

const (
	// mostTenant bounds the name of a tenant in bytes.
	mostTenant = 1 << 10
	// eraseTell is the time between two messages about an erasure: a client that hears
	// nothing for several of them gives the peer up.
	eraseTell = time.Second
)

// errNoErase says that the peer has no store that could.
var errNoErase = errors.New("the store cannot erase a tenant's blocks")

// Erase implements the service.
func (c *control) Erase(r *kvrpcpb.EraseRequest, to grpc.ServerStreamingServer[kvrpcpb.EraseResponse]) error {
	store := c.s.cfg.Forget
	switch {
	case len(r.Tenant) == 0 || len(r.Tenant) > mostTenant:
		return controlStatus(fmt.Errorf("%w: a tenant's name of %d bytes", errBad, len(r.Tenant)))
	case store == nil:
		return controlStatus(errNoErase)
	}
	var looked atomic.Int64
	type result struct {
		blocks int
		err    error
	}
	ended := make(chan result, 1)
	go func() {
		n, err := store.EraseTenant(to.Context(), kvcache.ErasureOf(string(r.Tenant), func(n int) { looked.Add(int64(n)) }))
		ended <- result{n, err}
	}()
	tick := time.NewTicker(eraseTell)
	defer tick.Stop()
	for {
		select {
		case end := <-ended:
			if end.err != nil {
				return controlStatus(end.err)
			}
			return to.Send(&kvrpcpb.EraseResponse{Looked: uint64(looked.Load()), Blocks: uint64(end.blocks), Done: true})
		case <-tick.C:
			// Where nobody hears it, the context ends, and with it the erasure.
			_ = to.Send(&kvrpcpb.EraseResponse{Looked: uint64(looked.Load())})
		}
	}
}

// opErase is the name of the call.
const opErase = "erase"

// errSilent says that a peer was given up that had stopped telling how far it is.
var errSilent = fmt.Errorf("it has not said anything for too long: %w", context.DeadlineExceeded)

// EraseTenant implements kvcache.Eraser. It takes as long as the peer needs, which is given
// up when it says nothing for Config.PutTimeout, or 3 s.
func (c *Client) EraseTenant(ctx context.Context, e kvcache.Erasure) (blocks int, err error) {
	if e.Tenant == "" || len(e.Tenant) > mostTenant {
		return 0, fmt.Errorf("erase a tenant: its name has %d bytes, want 1 to %d", len(e.Tenant), mostTenant)
	}
	outer, call, err := c.ops.BeginLong(ctx, opErase)
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithCancelCause(outer)
	defer cancel(nil)
	patience := max(c.cfg.PutTimeout, 3*eraseTell)
	silent := time.AfterFunc(patience, func() { cancel(errSilent) })
	defer silent.Stop()
	blocks, err = c.erase(ctx, e, func() { silent.Reset(patience) })
	if err = controlError(outer, err); err != nil && outer.Err() == nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return blocks, call.End(err)
}

// erase has the peer erase, and calls heard with each word of it.
func (c *Client) erase(ctx context.Context, e kvcache.Erasure, heard func()) (int, error) {
	from, err := c.control.Erase(ctx, &kvrpcpb.EraseRequest{Tenant: []byte(e.Tenant)})
	if err != nil {
		return 0, err
	}
	for looked := uint64(0); ; {
		a, err := from.Recv()
		if errors.Is(err, io.EOF) {
			err = errNonsense // it has not said that it is done
		}
		if err != nil {
			return 0, err
		}
		heard()
		blocks, err := countFrom(a.Blocks)
		if more := int(a.Looked - looked); err == nil && a.Looked >= looked && more >= 0 {
			e.Looked(more)
			looked = a.Looked
		}
		if err != nil || a.Done {
			return blocks, err
		}
	}
}
