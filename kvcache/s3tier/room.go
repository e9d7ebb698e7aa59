package s3tier

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/kvmesh/kvmesh/kvcache"
)

// room is the count of bytes. It is safe for concurrent use.
type room struct {
	mu sync.Mutex
	// listed is what the last survey found and what was written and removed since;
	// pending is what is being written.
	listed, pending int64

	// surveying lets one goroutine list and make room; the others find that it has.
	surveying sync.Mutex
}

// used is the bytes in use.
func (r *room) used() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.listed + r.pending
}

// take adds bytes that are about to be written, if they fit.
func (r *room) take(size, limit int64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.listed+r.pending+size > limit {
		return false
	}
	r.pending += size
	return true
}

// settle ends what take began: the bytes are there, or not.
func (r *room) settle(size int64, there bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.pending -= size; there {
		r.listed += size
	}
}

// set notes what a survey found.
func (r *room) set(listed int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.listed = listed
}

// free notes that bytes were removed.
func (r *room) free(size int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.listed = max(0, r.listed-size)
}

// reserve finds room for a block, and makes some where there is none.
func (s *Store) reserve(ctx context.Context, size int64) error {
	if size <= s.cfg.Limit {
		if s.room.take(size, s.cfg.Limit) {
			return nil
		}
		s.room.surveying.Lock()
		defer s.room.surveying.Unlock()
		if s.room.take(size, s.cfg.Limit) {
			return nil // somebody else has made room
		}
		if err := s.survey(ctx, min(s.cfg.Limit-size, s.cfg.Limit/10*9)); err != nil {
			return fmt.Errorf("make room: %w", err)
		}
		if s.room.take(size, s.cfg.Limit) {
			return nil
		}
	}
	s.ops.Count.Full.Add(1)
	return fmt.Errorf("block of %d bytes, limit %d: %w", size, s.cfg.Limit, kvcache.ErrFull)
}

// Survey lists everything, corrects the count of bytes and removes what is too old, and
// what is too much. The store does so by itself every Config.SurveyEvery.
func (s *Store) Survey(ctx context.Context) error {
	s.room.surveying.Lock()
	defer s.room.surveying.Unlock()
	return s.survey(ctx, s.cfg.Limit)
}

// survey leaves at most the given bytes. The caller holds surveying.
func (s *Store) survey(ctx context.Context, most int64) error {
	found, err := s.list(ctx, s.cfg.Prefix+"/", 0)
	if err != nil {
		return err
	}
	total := int64(0)
	for _, o := range found {
		total += o.size
	}
	s.room.set(total)
	old, evict := s.choose(found, most, time.Now())
	if err := s.removeAll(ctx, old); err != nil {
		return err
	}
	s.ops.Count.Expired.Add(uint64(len(old)))
	if err := s.removeAll(ctx, evict); err != nil {
		return err
	}
	for _, o := range evict {
		s.ops.Count.Evictions.Add(1)
		s.ops.Count.EvictedBytes.Add(uint64(o.size))
	}
	return nil
}

// choose says what is too old, and what goes besides so that at most the given bytes
// stay: the longest unused first, where the use of a block is one of those before it.
func (s *Store) choose(found []object, most int64, now time.Time) (old, evict []object) {
	used := make(map[kvcache.Key]time.Time, len(found))
	for _, o := range found {
		at := o.stored
		if here := s.memory.usedAt(o.Key); here.After(at) {
			at = here
		}
		used[o.Key] = at
	}
	// Children first: what a block passes on to its parent is complete.
	slices.SortFunc(found, func(a, b object) int { return cmp.Compare(b.First, a.First) })
	total := int64(0)
	for _, o := range found {
		total += o.size
		if parent, ok := used[o.parent]; ok && used[o.Key].After(parent) {
			used[o.parent] = used[o.Key]
		}
	}
	slices.SortStableFunc(found, func(a, b object) int { return used[a.Key].Compare(used[b.Key]) })
	for _, o := range found {
		switch {
		case now.Sub(used[o.Key]) > s.cfg.TTL:
			old = append(old, o)
		case total > most:
			evict = append(evict, o)
		default:
			return old, evict
		}
		total -= o.size
	}
	return old, evict
}

// removeAll removes objects, a thousand with each request.
func (s *Store) removeAll(ctx context.Context, list []object) error {
	if len(list) == 0 {
		return nil
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	names := make(chan minio.ObjectInfo)
	go func() {
		defer close(names)
		for _, o := range list {
			s.memory.forget(o.Key)
			select {
			case names <- minio.ObjectInfo{Key: o.path}:
			case <-ctx.Done():
				return
			}
		}
	}()
	var failed error
	for e := range s.core.RemoveObjects(ctx, s.cfg.Bucket, names, minio.RemoveObjectsOptions{}) {
		failed = cmp.Or(failed, e.Err)
	}
	if failed == nil {
		failed = ctx.Err()
	}
	if failed != nil {
		return fmt.Errorf("remove blocks: %w", failed)
	}
	for _, o := range list {
		s.room.free(o.size)
	}
	return nil
}

// refresh copies a block onto itself, which begins its life anew.
func (s *Store) refresh(ctx context.Context, path string) error {
	_, err := s.core.Client.CopyObject(ctx,
		minio.CopyDestOptions{Bucket: s.cfg.Bucket, Object: path, ReplaceMetadata: true, UserMetadata: map[string]string{"used": time.Now().UTC().Format(time.RFC3339)}},
		minio.CopySrcOptions{Bucket: s.cfg.Bucket, Object: path})
	if err != nil {
		return fmt.Errorf("make a block new: %w", err)
	}
	return nil
}

// refreshEvery is how long a block that is to be made new may wait.
const refreshEvery = time.Minute

// background surveys at once and then now and then, until ctx ends.
func (s *Store) background(ctx context.Context) {
	survey, fresh := time.NewTicker(s.cfg.SurveyEvery), time.NewTicker(refreshEvery)
	defer survey.Stop()
	defer fresh.Stop()
	s.note(ctx, "survey", s.Survey)
	for {
		select {
		case <-ctx.Done():
			return
		case <-survey.C:
			s.note(ctx, "survey", s.Survey)
		case <-fresh.C:
			s.note(ctx, "refresh", s.refreshAll)
		}
	}
}

// refreshAll makes the blocks new that were used in the last part of their life.
func (s *Store) refreshAll(ctx context.Context) error {
	for _, path := range s.memory.aged() {
		if err := s.refresh(ctx, path); err != nil {
			return err // it is tried again when it is used again
		}
	}
	return nil
}

// note does something in the background, for a while at most, and logs what goes wrong.
func (s *Store) note(ctx context.Context, what string, do func(context.Context) error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.SurveyEvery)
	defer cancel()
	if err := do(ctx); err != nil && ctx.Err() == nil {
		s.cfg.Log.Warn("KV store in S3: "+what, "err", err)
	}
}
