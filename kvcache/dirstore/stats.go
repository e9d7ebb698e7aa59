//go:build unix

package dirstore

import (
	"context"

	"github.com/kvmesh/kvmesh/kvcache"
)

// Stats implements kvcache.Counted.
func (s *Store) Stats() kvcache.Stats {
	st := s.count.Stats()
	st.Limit = s.cfg.Limit
	if s.enter(context.Background()) == nil {
		defer s.leave()
		st.Used = s.control.used()
	}
	return st
}
