//go:build unix

package lmcache

import (
	"context"
	"encoding/hex"
	"fmt"
	"slices"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/kvnode"
	"github.com/kvmesh/kvmesh/kvcache/lmcache/lmcachepb"
)

// opKey names what an engine has begun and will end: by the engine, its request, and what
// it is for. It does not depend on what the engine is registered as meanwhile.
type opKey struct {
	instance int64
	request  string
	first    int
	rank     int
	last     kvcache.Key // of the last chunk, as if there were one kind of engines only
}

// keyOf is the key of an engine's operation on the chunks of a run.
func keyOf(instance int64, r *run) opKey {
	space := kvcache.NewSpace("", r.salt)
	return opKey{instance, r.request, r.first, r.rank, space.Key(space.Root, r.ids)}
}

// write is what an engine is writing. Its room stays as long as the engine may write, which
// is until it commits, registers off, or ends: an engine that was stopped for an hour wakes
// up in room that is still its own.
type write struct {
	conn  *conn
	model string
	// weights is the hash of those that the engine has loaded.
	weights string
	text    string // of the fingerprint
	layout  layout
	chunks  []chunk
	bytes   int64
	clears  uint64    // Server.clears when it began
	until   time.Time // of a late one: when it is given up
}

// chunk is one of them.
type chunk struct {
	place int // in the request
	ref   kvcache.Ref
	ids   []int32
	first int // position of ids[0]
	room  *kvnode.Room
}

// cancel gives up all room.
func (w *write) cancel() {
	for _, c := range w.chunks {
		c.room.Cancel()
	}
}

// in says whether all room is in the arena with this identity.
func (w *write) in(pool string) bool {
	return !slices.ContainsFunc(w.chunks, func(c chunk) bool { return hex.EncodeToString(c.room.Arena[:]) != pool })
}

// dropWriteLocked gives up what an engine was writing.
func (s *Server) dropWriteLocked(key opKey) {
	if w := s.writes[key]; w != nil {
		w.cancel()
		delete(s.writes, key)
	}
}

// slots are where an engine writes, and the places of the chunks in its request.
func (w *write) slots(chunkTokens int) (slots []slot, places []int) {
	l := w.layout
	head := int64(kvcache.HeaderLen(chunkTokens, l.Planes*l.Layers))
	for _, c := range w.chunks {
		slots = append(slots, slot{c.room.At + head, l.size(), l.shape(), l.DType})
		places = append(places, c.place)
	}
	return slots, places
}

// PrepareStore implements the service: it gives room for the chunks that are not there
// yet. No room is an answer that engines take for all of them being there.
func (s *Server) PrepareStore(ctx context.Context, r *lmcachepb.PrepareStoreRequest) (*lmcachepb.PrepareStoreResponse, error) {
	return &lmcachepb.PrepareStoreResponse{EncodedContext: storeContext(s.prepareStore(ctx, r))}, nil
}

func (s *Server) prepareStore(ctx context.Context, r *lmcachepb.PrepareStoreRequest) (slots []slot, places []int) {
	i, ok := s.caller(ctx, r.GetInstanceId())
	if !ok {
		s.count.unknown.Add(1)
		return nil, nil
	}
	req, space, ok := s.ranked(r.GetKey(), i)
	if !ok {
		return nil, nil
	}
	refs := req.refs(space, s.cfg.Chunk)
	key := keyOf(i.ID, &req)
	s.mu.Lock()
	if w := s.writes[key]; w != nil {
		if w.in(i.Pool) {
			defer s.mu.Unlock()
			return w.slots(s.cfg.Chunk) // it asks again, and writes where it was told
		}
		s.dropWriteLocked(key) // in memory that it has not mapped any more
	}
	room, clears := s.roomLocked(i.ID), s.clears
	s.mu.Unlock()
	w := &write{conn: connOf(ctx), model: i.Model, weights: i.Weights, text: i.text(s.cfg, req.rank), layout: i.Layout, clears: clears}
	s.reserve(w, &req, refs, room)
	slots, places = w.slots(s.cfg.Chunk)
	if len(slots) == 0 || !s.begin(key, w, i) {
		return nil, nil
	}
	return slots, places
}

// begin notes what an engine is to write, and says whether it may. It may not if it asks
// twice at once, or is not what it was when it asked any more.
func (s *Server) begin(key opKey, w *write, i instance) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.writes[key] != nil || !s.isStillLocked(i) || !w.in(i.Pool) {
		w.cancel()
		return false
	}
	s.writes[key] = w
	return true
}

// ranked reads the key of a call of one rank, which must be of the model and world that the
// engine has registered, and ask for at least one chunk.
func (s *Server) ranked(k *lmcachepb.IpcCacheServerKey, i instance) (r run, space kvcache.Space, ok bool) {
	r, err := runOf(k, s.cfg.Chunk)
	chunk := int64(s.cfg.Chunk)
	switch {
	case err != nil:
	case r.rank == allRanks:
		err = fmt.Errorf("no rank")
	case k.GetStart()%chunk != 0:
		err = fmt.Errorf("tokens from %d on are not whole chunks", k.GetStart())
	case r.model != i.Model || r.world != i.World:
		err = fmt.Errorf("another model or world than it has registered")
	}
	if err != nil {
		s.count.refused.Add(1)
		s.cfg.Log.Warn("a call of an engine cannot be served", "instance", i.ID, "err", err)
		return r, space, false
	}
	return r, s.space(i, &r, r.rank), r.first < r.end
}

// share is the part of the pool that one engine may have in writing: a half.
const share = 2

// roomLocked is how many bytes more an engine may have in writing.
func (s *Server) roomLocked(instance int64) int64 {
	room := s.pool.size / share
	for key, w := range s.writes {
		if key.instance == instance {
			room -= w.bytes
		}
	}
	return room
}

// reserve takes room for the chunks that are not there, up to the first for which there is
// none: later ones would not be found without it.
func (s *Server) reserve(w *write, r *run, refs []kvcache.Ref, most int64) {
	ctx, cancel := s.nodeContext()
	defer cancel()
	size := w.layout.frame(s.cfg.Chunk)
	for at := r.first; at < r.end; at++ {
		if w.bytes += size; w.bytes > most {
			s.count.full.Add(1)
			break
		}
		room, err := s.node.Reserve(ctx, refs[at], size)
		if err != nil {
			s.count.unstored.Add(1)
			s.cfg.Log.Debug("a chunk is not stored", "err", err)
			break
		}
		if room == nil {
			w.bytes -= size
			continue
		}
		n := s.cfg.Chunk
		w.chunks = append(w.chunks, chunk{at - r.first, refs[at], r.ids[at*n : (at+1)*n], at * n, room})
	}
}

// CommitStore implements the service: what was written becomes blocks.
func (s *Server) CommitStore(ctx context.Context, r *lmcachepb.CommitStoreRequest) (*lmcachepb.CommitStoreResponse, error) {
	return &lmcachepb.CommitStoreResponse{Success: s.commitStore(ctx, r)}, nil
}

func (s *Server) commitStore(ctx context.Context, r *lmcachepb.CommitStoreRequest) bool {
	if _, ok := s.caller(ctx, r.GetInstanceId()); !ok {
		s.count.unknown.Add(1)
	}
	if len(r.GetData()) > 0 {
		s.count.refused.Add(1)
		s.cfg.Log.Warn("an engine sends its state instead of writing it: can it open the pool?", "instance", r.GetInstanceId(), "dir", s.cfg.ShmDir)
		return false
	}
	req, err := runOf(r.GetKey(), s.cfg.Chunk)
	if err != nil {
		s.count.refused.Add(1)
		return false
	}
	key := keyOf(r.GetInstanceId(), &req)
	s.mu.Lock()
	w := s.writes[key]
	delete(s.writes, key)
	s.mu.Unlock()
	return w != nil && s.seal(w)
}

// lateTime is how long what is written waits for a node that is away.
const lateTime = time.Minute

// seal makes blocks of what was written, and says whether all are there. Those for which the
// node is away wait for it: their room is theirs.
func (s *Server) seal(w *write) bool {
	for _, c := range w.chunks {
		meta := kvcache.Meta{Space: c.ref.Space, Parent: c.ref.Parent, First: c.first, IDs: c.ids}
		if _, err := kvcache.Seal(c.room.Bytes(), meta, w.layout.parts()); err != nil {
			s.cfg.Log.Error("a chunk cannot be sealed", "err", err) // of this module's own making
			w.cancel()
			return false
		}
	}
	all := len(w.chunks)
	ctx, cancel := s.nodeContext()
	defer cancel()
	// Without a label a model has no name to people, and is found all the same.
	_ = s.node.Label(ctx, w.chunks[0].ref.Fingerprint, kvcache.Label{Model: w.model, Weights: "lmcache:" + w.weights, Text: w.text})
	done := s.publish(ctx, w)
	if len(w.chunks) > 0 {
		w.until = time.Now().Add(lateTime)
		s.mu.Lock()
		s.late = append(s.late, w)
		s.mu.Unlock()
		s.count.late.Add(uint64(len(w.chunks)))
	}
	return done == all
}

// publish publishes chunks in order and takes those out of the list that are no more to be
// published. It returns how many are there now.
func (s *Server) publish(ctx context.Context, w *write) (done int) {
	for len(w.chunks) > 0 {
		c := w.chunks[0]
		err := s.publishOne(ctx, w, c.room)
		switch {
		case err == nil:
			done++
			s.count.stored.Add(1)
			s.count.storedBytes.Add(uint64(w.layout.size()))
		case kvnode.Lost(err):
			s.count.unstored.Add(1)
			c.room.Cancel()
			s.cfg.Log.Warn("a chunk is lost", "err", err)
		default:
			return done
		}
		w.chunks = w.chunks[1:]
	}
	return done
}

// errCleared says that everything was cleared since a chunk was begun.
var errCleared = fmt.Errorf("everything was cleared: %w", kvcache.ErrClosed)

// publishOne publishes one chunk, unless everything is being cleared, or was since.
func (s *Server) publishOne(ctx context.Context, w *write, room *kvnode.Room) error {
	s.clearing.RLock()
	defer s.clearing.RUnlock()
	s.mu.Lock()
	stale := w.clears != s.clears
	s.mu.Unlock()
	if stale {
		return errCleared
	}
	return room.Publish(ctx)
}

// publishLate tries again what waits for the node.
func (s *Server) publishLate(now time.Time) {
	s.mu.Lock()
	list := s.late
	s.late = nil
	s.mu.Unlock()
	var left []*write
	for _, w := range list {
		ctx, cancel := s.nodeContext()
		s.publish(ctx, w)
		cancel()
		switch {
		case len(w.chunks) == 0:
		case now.After(w.until):
			s.count.unstored.Add(uint64(len(w.chunks)))
			w.cancel()
		default:
			left = append(left, w)
		}
	}
	s.mu.Lock()
	s.late = append(left, s.late...)
	s.mu.Unlock()
}
