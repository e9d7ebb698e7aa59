//go:build unix

package kvnode

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/arena"
	"github.com/kvmesh/kvmesh/kvcache/stack"
)

// Survey is what a node has in all of its tiers, or how far it is in finding out.
type Survey struct {
	// Looked is how many blocks were looked at.
	Looked int  `json:"looked"`
	Done   bool `json:"done"`
	// Tiers are complete once Done.
	Tiers []TierSurvey `json:"tiers"`
}

// TierSurvey is what one tier has.
type TierSurvey struct {
	Tier   string        `json:"tier"`
	Models []ModelSurvey `json:"models"`
	// Bad is how many blocks cannot be used, of which Faults names the first.
	Bad    int     `json:"bad"`
	Faults []Fault `json:"faults"`
	// Copies says that only the blocks of this node's memory were looked for here, and
	// Missing how many of them are not there.
	Copies  bool `json:"copies,omitempty"`
	Missing int  `json:"missing,omitempty"`
	// Hosts are those of the tier that is other hosts' memory.
	Hosts []PeerNode `json:"hosts,omitempty"`
	// Error is why the rest is not known; "" = it is.
	Error string `json:"error,omitempty"`
}

// ModelSurvey is what a tier has of one fingerprint.
type ModelSurvey struct {
	Fingerprint kvcache.Fingerprint `json:"fingerprint"`
	Label       kvcache.Label       `json:"label"` // as the memory has it, or a name that it had
	Blocks      int                 `json:"blocks"`
	Bytes       int64               `json:"bytes"`
	Tokens      int64               `json:"tokens"`
	Tenants     int                 `json:"tenants"`
	Codecs      map[string]int      `json:"codecs"` // blocks
	// Tails are the open ends of streams, which are in memory only.
	Tails     int   `json:"tails,omitempty"`
	TailBytes int64 `json:"tail_bytes,omitempty"`

	roots map[kvcache.Key]bool
}

// Fault is one block that cannot be used. It has been removed, as any reader does.
type Fault struct {
	Block string `json:"block"`
	Error string `json:"error"`
}

const (
	// mostFaults is how many a tier names.
	mostFaults = 1000
	// surveyAbreast is how many blocks are read at once.
	surveyAbreast = 4
	// surveyPatience is how long one goes on that nobody asks about.
	surveyPatience = 30 * time.Second
)

// surveys are those that run: one that reads headers, and one that reads everything. It is
// safe for concurrent use.
type surveys struct {
	mu   sync.Mutex
	runs map[bool]*survey
}

// survey is one of them.
type survey struct {
	verify bool
	done   chan struct{}

	mu    sync.Mutex
	state Survey
	asked time.Time
}

// ask begins a survey, or says how far it is. Who is told that it is done is the last.
func (s *surveys) ask(ctx context.Context, verify bool, walk func(context.Context, *survey)) Survey {
	s.mu.Lock()
	defer s.mu.Unlock()
	run := s.runs[verify]
	if run == nil {
		run = &survey{verify: verify, done: make(chan struct{}), asked: time.Now()}
		if s.runs == nil {
			s.runs = map[bool]*survey{}
		}
		s.runs[verify] = run
		go func() {
			defer close(run.done)
			walk(ctx, run)
		}()
	}
	done := false
	select {
	case <-run.done:
		delete(s.runs, verify)
		done = true
	default:
	}
	run.mu.Lock()
	defer run.mu.Unlock()
	run.asked = time.Now()
	if !done {
		return Survey{Looked: run.state.Looked}
	}
	run.state.Done = true
	return run.state
}

// errLeft says that nobody asks any more.
var errLeft = errors.New("nobody has asked for this for a while")

// seen counts a block, and says whether to go on.
func (v *survey) seen(n int) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.state.Looked += n
	if time.Since(v.asked) > surveyPatience {
		return errLeft
	}
	return nil
}

// survey is the operation.
func (s *Server) survey(ctx context.Context, c *cursor) ([]byte, error) {
	b := c.Take(1)
	if b == nil {
		return nil, errBad
	}
	return json.Marshal(s.surveys.ask(ctx, b[0] == 1, s.walk))
}

// walk looks at all tiers, one after another. One that cannot be looked at does not keep the
// others from it.
func (s *Server) walk(ctx context.Context, v *survey) {
	near := map[kvcache.Fingerprint]arena.Model{}
	if models, err := s.store.Models(ctx); err == nil {
		for _, m := range models {
			near[m.Fingerprint] = m
		}
	}
	tiers := []stack.Tier{{Name: "memory", Store: s.store}}
	if s.stack != nil {
		tiers = append(tiers, s.stack.Tiers()...)
	}
	names := s.epochs.named()
	for _, t := range tiers {
		one := TierSurvey{Tier: t.Name, Models: []ModelSurvey{}, Faults: []Fault{}}
		err := v.tier(ctx, t.Store, s.store, &one)
		if err != nil {
			one.Error = err.Error()
		}
		for i := range one.Models {
			m := &one.Models[i]
			known := near[m.Fingerprint]
			m.Label, m.Tenants = known.Label, len(m.roots)
			if n := names[m.Fingerprint]; m.Label.Model == "" && len(n) > 0 {
				m.Label.Model = n[0]
			}
			if t.Store == s.store {
				m.Tails, m.TailBytes = known.Tails, known.TailBytes
			}
		}
		if one.Copies && s.peers != nil {
			one.Hosts = s.peers().Nodes
		}
		v.mu.Lock()
		v.state.Tiers = append(v.state.Tiers, one)
		v.mu.Unlock()
		if errors.Is(err, errLeft) || ctx.Err() != nil {
			return
		}
	}
}

// tier looks at one tier: at all of its blocks where it can show them, else for those of the
// memory. Blocks are named one after the other, and read several at once, because a server
// takes longer to begin than to send. What leaves between the two is no fault; what cannot be
// read for another reason than itself ends the look at the tier, whose rest is not known.
func (v *survey) tier(ctx context.Context, s kvcache.Store, near *arena.Store, to *TierSurvey) error {
	w, ok := s.(kvcache.Walker)
	if !ok {
		w, to.Copies = copies{near, s}, true
	}
	if to.Copies && !v.verify {
		return nil // whether a copy is there is known when it has come
	}
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(surveyAbreast)
	var mu sync.Mutex // of to
	err := w.Walk(gctx, func(b kvcache.Seen) error {
		if b.Err != nil || !v.verify {
			mu.Lock()
			to.add(b)
			mu.Unlock()
			return v.seen(1)
		}
		g.Go(func() error {
			err := w.Check(gctx, b.Header.Ref)
			_, refused := errors.AsType[*kvcache.Refusal](err)
			missing := errors.Is(err, kvcache.ErrNotFound)
			if err != nil && !refused && !missing {
				return fmt.Errorf("read block %s: %w", b.Name, err)
			}
			mu.Lock()
			defer mu.Unlock()
			if b.Err = err; missing {
				to.Missing += btoi(to.Copies) // else it has left meanwhile
			} else {
				to.add(b)
			}
			return v.seen(1)
		})
		return gctx.Err()
	})
	if waited := g.Wait(); waited != nil {
		return waited
	}
	return err
}

// btoi is 1 for true.
func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// add counts a block.
func (t *TierSurvey) add(b kvcache.Seen) {
	if b.Err != nil {
		if t.Bad++; len(t.Faults) < mostFaults {
			t.Faults = append(t.Faults, Fault{b.Name, b.Err.Error()})
		}
		return
	}
	m := t.model(b.Header.Fingerprint)
	m.Blocks++
	m.Bytes += b.Header.Total
	m.Tokens += int64(len(b.Header.IDs))
	m.Codecs[b.Header.Codec().String()]++
	m.roots[b.Header.Root] = true
}

// model returns the count of a fingerprint.
func (t *TierSurvey) model(f kvcache.Fingerprint) *ModelSurvey {
	for i := range t.Models {
		if t.Models[i].Fingerprint == f {
			return &t.Models[i]
		}
	}
	t.Models = append(t.Models, ModelSurvey{Fingerprint: f, Codecs: map[string]int{}, roots: map[kvcache.Key]bool{}})
	return &t.Models[len(t.Models)-1]
}

// copies shows the blocks of a near store, and checks them in another one.
type copies struct {
	*arena.Store
	of kvcache.Store
}

// Check reads a copy, which is verified as it comes.
func (c copies) Check(ctx context.Context, ref kvcache.Ref) error {
	return kvcache.CheckBy(ctx, c.of.Get, ref)
}

// Survey has the node look at all blocks in all of its tiers, at their headers or, to verify
// them, at all of their bytes; what is wrong it removes. It tells each now and then how far
// that is. What keeps a tier from being looked at is in the tier's survey.
func (c *Client) Survey(ctx context.Context, verify bool, each func(Survey)) (Survey, error) {
	for {
		var state Survey
		err := c.ask(ctx, opSurvey, func(b []byte) []byte { return append(b, byte(btoi(verify))) }, func(_ *conn, body cursor) error {
			return json.Unmarshal(body.Rest(), &state)
		})
		if err != nil {
			return state, fmt.Errorf("survey the KV node: %w", err)
		}
		each(state)
		if state.Done {
			return state, nil
		}
		select {
		case <-ctx.Done():
			return state, ctx.Err()
		case <-time.After(eraseLook):
		}
	}
}
