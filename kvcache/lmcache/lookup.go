//go:build unix

package lmcache

import (
	"context"
	"slices"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/kvnode"
	"github.com/kvmesh/kvmesh/kvcache/lmcache/lmcachepb"
)

// jobKey names a look-up: requests of two engines may have one name.
type jobKey struct{ client, request string }

// jobTime is how long chunks that a look-up found stay if nobody reads them.
const jobTime = 10 * time.Minute

const (
	// mostJobs is how many look-ups are remembered at once, and mostLooking how many tokens
	// those have together that still look. One more finds nothing.
	mostJobs    = 16384
	mostLooking = 1 << 26
)

// job is a look-up. It holds the chunks that it found, so that what an engine was promised
// is there when it reads, also if the node is away by then.
type job struct {
	key   jobKey
	conn  *conn
	begun time.Time
	done  chan struct{} // closed when it looks no more

	// Guarded by the server's mutex.
	found    int             // chunks from the first on that all ranks have, verified
	loans    map[int][]*loan // by chunk
	answered bool            // the engine knows the number, which must not change any more
	ended    bool            // nobody waits for it
}

// loan is a block that is held for several.
type loan struct {
	kvnode.Placed
	ref kvcache.Ref

	// Guarded by the server's mutex.
	uses    int
	readers int // that are expected to read it, of a look-up's
}

// releaseLocked ends one use.
func (l *loan) releaseLocked() {
	if l.uses--; l.uses == 0 {
		l.Release()
	}
}

// borrow takes a block and verifies all of it.
func (s *Server) borrow(ctx context.Context, ref kvcache.Ref) (*loan, error) {
	p, err := s.node.Place(ctx, ref)
	if err != nil {
		return nil, err
	}
	if err := p.Verify(); err != nil {
		p.Release()
		return nil, err
	}
	return &loan{Placed: p, ref: ref, uses: 1}, nil
}

// Lookup implements the service: it begins a look-up, whose outcome QueryPrefetchStatus
// tells.
func (s *Server) Lookup(ctx context.Context, r *lmcachepb.LookupRequest) (*lmcachepb.LookupResponse, error) {
	req, err := runOf(r.GetKey(), s.cfg.Chunk)
	if err != nil {
		s.count.refused.Add(1)
		s.cfg.Log.Warn("a look-up of an engine cannot be served", "err", err)
		return &lmcachepb.LookupResponse{}, nil
	}
	s.count.lookups.Add(1)
	s.count.lookupChunks.Add(uint64(req.end))
	now := time.Now()
	j := &job{key: jobKey{clientID(ctx), req.request}, conn: connOf(ctx), begun: now, done: make(chan struct{}), loans: map[int][]*loan{}}
	s.mu.Lock()
	if old := s.jobs[j.key]; old != nil {
		s.endLocked(old)
	}
	if len(s.jobs) >= mostJobs || s.looking+len(req.ids) > mostLooking {
		s.mu.Unlock()
		s.count.refused.Add(1)
		s.cfg.Log.Warn("a look-up is one too many and finds nothing", "look_ups", mostJobs, "tokens", mostLooking)
		return &lmcachepb.LookupResponse{}, nil
	}
	kinds := s.bindingsLocked(req.model, req.world, now)
	s.jobs[j.key] = j
	s.byRequest[req.request] = append(s.byRequest[req.request], j)
	s.mu.Unlock()
	var spaces []kvcache.Space
	for _, i := range kinds {
		for rank := range req.world {
			spaces = append(spaces, s.space(i, &req, rank))
		}
	}
	if len(spaces) == 0 || req.end == 0 {
		close(j.done)
		return &lmcachepb.LookupResponse{}, nil
	}
	s.mu.Lock()
	s.looking += len(req.ids)
	s.mu.Unlock()
	s.work.Go(func() {
		s.gather(j, &req, spaces)
		s.mu.Lock()
		s.looking -= len(req.ids)
		s.mu.Unlock()
	})
	return &lmcachepb.LookupResponse{}, nil
}

// gather finds, holds and verifies chunks, in order, as long as all ranks have them. It goes
// on while the engine asks how far it is; what it has found by the end of the budget, or by
// the answer, counts. A chunk that is wrong ends it as a missing one does: an engine is told
// of nothing that it could not read.
func (s *Server) gather(j *job, r *run, spaces []kvcache.Space) {
	defer close(j.done)
	ctx, cancel := context.WithTimeout(s.ctx, s.cfg.Budget)
	defer cancel()
	n := r.end
	refs := make([][]kvcache.Ref, len(spaces))
	// The node may use the time to bring what it has further away, but for what verifying takes,
	// and the same for each rank: if nothing comes for one, the others still have what is near.
	asking, asked := context.WithTimeout(ctx, s.cfg.Budget*3/4)
	defer asked()
	end, _ := asking.Deadline()
	for i, space := range spaces {
		share := max(time.Until(end)/time.Duration(len(spaces)-i), 1)
		m, err := s.node.LongestWithin(asking, share, kvcache.Query{Space: space, IDs: r.ids[:n*s.cfg.Chunk]})
		if err != nil {
			s.cfg.Log.Debug("a look-up finds nothing", "err", err)
			return
		}
		refs[i] = r.refs(space, s.cfg.Chunk)
		if n = min(n, agree(m.Blocks, refs[i])); n == 0 {
			return
		}
	}
	for at := range n {
		var got []*loan
		for i := range spaces {
			l, err := s.borrow(ctx, refs[i][at])
			if err != nil {
				break
			}
			l.readers = r.readers
			got = append(got, l)
		}
		if !s.add(j, at, got, len(got) == len(spaces)) {
			return
		}
	}
}

// agree is how many of the blocks that were found are the chunks that are wanted.
func agree(found []kvcache.Found, refs []kvcache.Ref) int {
	n := min(len(found), len(refs))
	for i := range n {
		if found[i].Ref != refs[i] {
			return i
		}
	}
	return n
}

// add gives a look-up its next chunk, of all ranks, and says whether it goes on.
func (s *Server) add(j *job, at int, got []*loan, all bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !all || j.ended || j.answered {
		for _, l := range got {
			l.releaseLocked()
		}
		return false
	}
	j.loans[at] = got
	j.found = at + 1
	return true
}

// endLocked ends a look-up and gives up what it holds.
func (s *Server) endLocked(j *job) {
	j.ended = true
	for at := range j.loans {
		j.freeLocked(at)
	}
	if s.jobs[j.key] == j { // else the client has begun another one meanwhile
		delete(s.jobs, j.key)
	}
	rest := slices.DeleteFunc(s.byRequest[j.key.request], func(o *job) bool { return o == j })
	if len(rest) == 0 {
		delete(s.byRequest, j.key.request)
	} else {
		s.byRequest[j.key.request] = rest
	}
}

// freeLocked gives up one chunk.
func (j *job) freeLocked(at int) {
	for _, l := range j.loans[at] {
		l.releaseLocked()
	}
	delete(j.loans, at)
}

// readLocked notes that one of its readers has read a chunk that look-ups for the request
// hold, and gives it up after the last.
func (s *Server) readLocked(request string, at int, ref kvcache.Ref) {
	for _, j := range s.byRequest[request] {
		j.loans[at] = slices.DeleteFunc(j.loans[at], func(l *loan) bool {
			if l.ref != ref {
				return false
			}
			if l.readers--; l.readers > 0 {
				return false
			}
			l.releaseLocked()
			return true
		})
	}
}

// jobOf is a client's look-up, or nil.
func (s *Server) jobOf(ctx context.Context, request string) *job {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.jobs[jobKey{clientID(ctx), request}]
}

// answer is what a look-up has found, once: nil while it looks and there is time.
func (s *Server) answer(j *job, now time.Time) *int64 {
	if j == nil {
		return new(int64)
	}
	over := false
	select {
	case <-j.done:
		over = true
	default:
		over = now.Sub(j.begun) >= s.cfg.Budget
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if j.answered || j.ended {
		return new(int64)
	}
	if !over {
		return nil
	}
	j.answered = true
	n := int64(j.found)
	s.count.foundChunks.Add(uint64(n))
	return &n
}

// QueryPrefetchStatus implements the service.
func (s *Server) QueryPrefetchStatus(ctx context.Context, r *lmcachepb.QueryPrefetchStatusRequest) (*lmcachepb.QueryPrefetchStatusResponse, error) {
	return &lmcachepb.QueryPrefetchStatusResponse{ChunkCount: s.answer(s.jobOf(ctx, r.GetRequestId()), time.Now())}, nil
}

// WaitPrefetchStatus implements the service.
func (s *Server) WaitPrefetchStatus(ctx context.Context, r *lmcachepb.WaitPrefetchStatusRequest) (*lmcachepb.WaitPrefetchStatusResponse, error) {
	j := s.jobOf(ctx, r.GetRequestId())
	if j != nil {
		wait := time.Duration(min(max(r.GetTimeout(), 0), time.Hour.Seconds()) * float64(time.Second))
		timer := time.NewTimer(min(wait, s.cfg.Budget))
		defer timer.Stop()
		select {
		case <-j.done:
		case <-timer.C:
		case <-ctx.Done():
		}
	}
	return &lmcachepb.WaitPrefetchStatusResponse{ChunkCount: s.answer(j, time.Now())}, nil
}

// FreeLookupLocks implements the service: chunks that were found will not be read.
func (s *Server) FreeLookupLocks(ctx context.Context, r *lmcachepb.FreeLookupLocksRequest) (*lmcachepb.FreeLookupLocksResponse, error) {
	k := r.GetKey()
	j := s.jobOf(ctx, k.GetRequestId())
	if j == nil || k.GetStart() < 0 || k.GetEnd() < k.GetStart() {
		return &lmcachepb.FreeLookupLocksResponse{}, nil
	}
	first, end := int(k.GetStart())/s.cfg.Chunk, int(k.GetEnd())/s.cfg.Chunk
	s.mu.Lock()
	defer s.mu.Unlock()
	for at := range j.loans {
		if at >= first && at < end {
			j.freeLocked(at)
		}
	}
	return &lmcachepb.FreeLookupLocksResponse{}, nil
}

// EndSession implements the service: the request is over.
func (s *Server) EndSession(ctx context.Context, r *lmcachepb.EndSessionRequest) (*lmcachepb.EndSessionResponse, error) {
	if j := s.jobOf(ctx, r.GetRequestId()); j != nil {
		s.mu.Lock()
		s.endLocked(j)
		s.mu.Unlock()
	}
	return &lmcachepb.EndSessionResponse{}, nil
}
