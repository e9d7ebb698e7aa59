//go:build unix

package lmcache

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// dropping is what the node is still to drop. It is guarded by the server's mutex.
type dropping struct {
	list    map[kvcache.Fingerprint]bool
	running chan struct{} // closed when nothing is being dropped any more; nil: nothing is
	pause   time.Duration // after the last try, which has failed; 0: it has not
	next    time.Time     // when it is tried again
}

const (
	// dropTime bounds one drop: the node asks its tiers, which may be slow, but not as long
	// as its connections last.
	dropTime = 20 * time.Second
	// leastPause and mostPause bound the time between two tries, which doubles.
	leastPause = time.Second
	mostPause  = 5 * time.Minute
)

// drop has the node drop what was cleared, unless it fails and was tried a moment before
// now; zero is always. Nobody has to wait for it: the channel is closed at its end.
func (s *Server) drop(now time.Time) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := &s.drops
	if d.running != nil {
		return d.running
	}
	done := make(chan struct{})
	if len(d.list) == 0 || !now.IsZero() && now.Before(d.next) {
		close(done)
		return done
	}
	d.running = done
	list := slices.Collect(maps.Keys(d.list))
	s.work.Go(func() {
		err := s.dropAll(list)
		s.mu.Lock()
		defer s.mu.Unlock()
		defer close(done)
		d.running = nil
		if err == nil {
			d.pause = 0
			return
		}
		d.pause = min(max(2*d.pause, leastPause), mostPause)
		d.next = time.Now().Add(d.pause)
		s.cfg.Log.Warn("what was cleared is still there, and not used", "err", err, "again_in", d.pause)
	})
	return done
}

// dropAll drops one after the other, up to the first that fails.
func (s *Server) dropAll(list []kvcache.Fingerprint) error {
	for _, f := range list {
		ctx, cancel := context.WithTimeout(s.ctx, dropTime)
		err := s.node.Drop(ctx, f)
		cancel()
		if err != nil {
			return err
		}
		s.mu.Lock()
		delete(s.drops.list, f)
		s.mu.Unlock()
	}
	return nil
}
