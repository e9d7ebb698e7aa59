//go:build unix

package lmcache

import (
	"context"
	"encoding/hex"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/lmcache/lmcachepb"
)

// read is what an engine is reading. It stays until the engine says that it has done, or
// registers off, or ends.
type read struct {
	conn  *conn
	first int // chunk
	loans []*loan
}

// dropReadLocked gives up what an engine was reading.
func (s *Server) dropReadLocked(key opKey) {
	if r := s.reads[key]; r != nil {
		for _, l := range r.loans {
			l.releaseLocked()
		}
		delete(s.reads, key)
	}
}

// PrepareRetrieve implements the service: it says where the chunks are, all of them or
// none. An engine recomputes what it does not get.
func (s *Server) PrepareRetrieve(ctx context.Context, r *lmcachepb.PrepareRetrieveRequest) (*lmcachepb.PrepareRetrieveResponse, error) {
	slots := s.prepareRetrieve(ctx, r)
	if slots == nil {
		return &lmcachepb.PrepareRetrieveResponse{}, nil
	}
	return &lmcachepb.PrepareRetrieveResponse{Success: true, EncodedContext: retrieveContext(slots)}, nil
}

func (s *Server) prepareRetrieve(ctx context.Context, r *lmcachepb.PrepareRetrieveRequest) []slot {
	i, ok := s.caller(ctx, r.GetInstanceId())
	if !ok {
		s.count.unknown.Add(1)
		return nil
	}
	req, space, ok := s.ranked(r.GetKey(), i)
	if !ok {
		return nil
	}
	refs := req.refs(space, s.cfg.Chunk)
	loans := s.borrowAll(&req, refs)
	if loans == nil {
		s.count.unread.Add(1)
		s.cfg.Log.Warn("chunks that an engine was promised are not there: it computes them", "instance", i.ID, "chunks", req.end-req.first)
		return nil
	}
	key := keyOf(i.ID, &req)
	s.mu.Lock()
	defer s.mu.Unlock()
	slots := make([]slot, 0, len(loans))
	for _, l := range loans {
		if hex.EncodeToString(l.Arena[:]) != i.Pool || l.Total-l.Len != i.Layout.size() {
			break // it has mapped another memory
		}
		slots = append(slots, slot{l.At + l.Len, l.Total - l.Len, i.Layout.shape(), i.Layout.DType})
	}
	if len(slots) < len(loans) || !s.isStillLocked(i) {
		for _, l := range loans {
			l.releaseLocked()
		}
		s.count.unread.Add(1)
		return nil
	}
	s.dropReadLocked(key)
	s.reads[key] = &read{connOf(ctx), req.first, loans}
	s.count.read.Add(uint64(len(loans)))
	s.count.readBytes.Add(uint64(int64(len(loans)) * i.Layout.size()))
	return slots
}

// borrowAll takes all chunks of a run and verifies them; nil if one is missing or wrong.
// What a look-up holds needs no node.
func (s *Server) borrowAll(r *run, refs []kvcache.Ref) (loans []*loan) {
	ctx, cancel := s.nodeContext()
	defer cancel()
	for at := r.first; at < r.end; at++ {
		l := s.held(r.request, at, refs[at])
		var err error
		if l == nil {
			l, err = s.borrow(ctx, refs[at])
		} else if err = l.Verify(); err != nil {
			loans = append(loans, l)
		}
		if err != nil {
			s.mu.Lock()
			for _, l := range loans {
				l.releaseLocked()
			}
			s.mu.Unlock()
			return nil
		}
		loans = append(loans, l)
	}
	return loans
}

// held is a chunk that a look-up for the request holds, with one more use.
func (s *Server) held(request string, at int, ref kvcache.Ref) *loan {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, j := range s.byRequest[request] {
		for _, l := range j.loans[at] {
			if l.ref == ref {
				l.uses++
				return l
			}
		}
	}
	return nil
}

// CommitRetrieve implements the service: the engine has read.
func (s *Server) CommitRetrieve(ctx context.Context, r *lmcachepb.CommitRetrieveRequest) (*lmcachepb.CommitRetrieveResponse, error) {
	s.caller(ctx, r.GetInstanceId()) // it lives
	req, err := runOf(r.GetKey(), s.cfg.Chunk)
	if err != nil {
		s.count.refused.Add(1)
		return &lmcachepb.CommitRetrieveResponse{}, nil
	}
	key := keyOf(r.GetInstanceId(), &req)
	s.mu.Lock()
	defer s.mu.Unlock()
	if rd := s.reads[key]; rd != nil {
		for i, l := range rd.loans {
			s.readLocked(req.request, rd.first+i, l.ref)
		}
		s.dropReadLocked(key)
	}
	return &lmcachepb.CommitRetrieveResponse{Success: true}, nil
}
