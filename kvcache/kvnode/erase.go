//go:build unix

package kvnode

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// Erased is how far the erasure of a tenant is.
type Erased struct {
	// Looked is how many blocks were looked at, in all tiers, and Blocks how many of those
	// were erased, once Done.
	Looked int  `json:"looked"`
	Blocks int  `json:"blocks"`
	Done   bool `json:"done"`
	// Error is why some may still be there; "" = none.
	Error string `json:"error,omitempty"`
}

const (
	// mostTenant bounds the name of a tenant in bytes.
	mostTenant = 1 << 10
	// mostErasures is how many run at once, or wait for somebody to ask how they ended.
	mostErasures = 16
	// eraseLook is the time between two looks at how far one is.
	eraseLook = 100 * time.Millisecond
)

// erasures are those that run, by tenant. It is safe for concurrent use.
type erasures struct {
	mu   sync.Mutex
	runs map[string]*erasure
}

// erasure is one of them.
type erasure struct {
	looked atomic.Int64
	done   chan struct{}
	blocks int
	err    error
}

// ask begins an erasure, or says how far it is. Who is told that it is done is the last.
func (e *erasures) ask(ctx context.Context, tenant string, store kvcache.Eraser) (Erased, error) {
	if tenant == "" || len(tenant) > mostTenant {
		return Erased{}, errBad
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	run := e.runs[tenant]
	if run == nil {
		if len(e.runs) >= mostErasures {
			return Erased{}, fmt.Errorf("%d tenants are being erased", mostErasures)
		}
		run = &erasure{done: make(chan struct{})}
		if e.runs == nil {
			e.runs = map[string]*erasure{}
		}
		e.runs[tenant] = run
		go func() {
			defer close(run.done)
			run.blocks, run.err = store.EraseTenant(ctx, kvcache.ErasureOf(tenant, func(n int) { run.looked.Add(int64(n)) }))
		}()
	}
	state := Erased{Looked: int(run.looked.Load())}
	select {
	case <-run.done:
		delete(e.runs, tenant)
		state.Done, state.Blocks, state.Looked = true, run.blocks, int(run.looked.Load())
		if run.err != nil {
			state.Error = run.err.Error()
		}
	default:
	}
	return state, nil
}

// erase is the operation. The node goes on with it when the client has left.
func (s *Server) erase(ctx context.Context, tenant string) ([]byte, error) {
	var store kvcache.Eraser = s.store
	if s.stack != nil {
		store = s.stack
	}
	state, err := s.erasures.ask(ctx, tenant, store)
	if err != nil {
		return nil, err
	}
	return json.Marshal(state)
}

// EraseTenant has the node erase a tenant in all of its tiers, and tells each now and then
// how far that is. The error is of what could not be erased; then it may be asked for again.
func (c *Client) EraseTenant(ctx context.Context, tenant string, each func(Erased)) (Erased, error) {
	for {
		var state Erased
		err := c.ask(ctx, opErase, func(b []byte) []byte { return append(b, tenant...) }, func(_ *conn, body cursor) error {
			return json.Unmarshal(body.Rest(), &state)
		})
		if err != nil {
			return state, fmt.Errorf("erase a tenant: %w", err)
		}
		each(state)
		if state.Done {
			if state.Error != "" {
				err = fmt.Errorf("erase a tenant: %w", errors.New(state.Error))
			}
			return state, err
		}
		select {
		case <-ctx.Done():
			return state, ctx.Err()
		case <-time.After(eraseLook):
		}
	}
}
