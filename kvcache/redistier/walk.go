package redistier

import (
	"context"
	"fmt"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/remote"
)

// Walk implements kvcache.Walker. It reads the manifests of all blocks that are counted. What
// the count has lost, in a failover, is not shown, and goes by its life. A manifest that
// cannot be read, or is under another block's name, is removed as by any reader.
func (s *Store) Walk(ctx context.Context, each func(kvcache.Seen) error) error {
	shown := map[kvcache.Key]bool{} // a scan may name one twice
	for cursor := uint64(0); ; {
		found, next, err := s.page(ctx, cursor)
		if err != nil {
			return err
		}
		for _, b := range found {
			if b.text == nil || shown[b.key] {
				continue
			}
			shown[b.key] = true
			seen := kvcache.Seen{Name: s.keys.manifest(b.key), Err: b.err}
			if seen.Err == nil && b.header.Key != b.key {
				seen.Err = kvcache.Refuse(kvcache.ReasonKey, "another block than the name says")
			}
			if h := b.header; seen.Err == nil {
				seen.Header = &h
			} else if s.ops.Refused(seen.Err) {
				s.purge(b)
			}
			if err := each(seen); err != nil {
				return err
			}
		}
		if cursor = next; cursor == 0 {
			return nil
		}
	}
}

// page reads some manifests from a cursor on, and returns the next one, 0 behind the last.
func (s *Store) page(ctx context.Context, cursor uint64) (found []block, next uint64, err error) {
	ctx, op, err := s.ops.Begin(ctx, remote.OpLookUp)
	if err != nil {
		return nil, 0, err
	}
	found, next, err = s.scan(ctx, cursor)
	return found, next, op.End(err)
}

// scan does that within the time of a call.
func (s *Store) scan(ctx context.Context, cursor uint64) (found []block, next uint64, err error) {
	list, next, err := s.client.ZScan(ctx, s.keys.lru()[0], cursor, "", batch).Result()
	if err != nil {
		return nil, 0, fmt.Errorf("list blocks: %w", err)
	}
	var keys []kvcache.Key
	for i := 0; i < len(list); i += 2 { // each with its score
		if key, err := keyOf(list[i]); err == nil {
			keys = append(keys, key)
		}
	}
	if len(keys) > 0 {
		found, err = s.look(ctx, keys)
	}
	return found, next, err
}

// Check implements kvcache.Walker. To the server's count it is a use of the block.
func (s *Store) Check(ctx context.Context, ref kvcache.Ref) error {
	return kvcache.CheckBy(ctx, s.Get, ref)
}
