//go:build unix

package dirstore

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// reserve takes room for n bytes, and makes some if there is none. On success
// settle must follow.
func (s *Store) reserve(ctx context.Context, n int64) error {
	s.pending.Add(n)
	if s.control.addUsed(n) <= s.cfg.Limit {
		return nil
	}
	// What can never fit shall not push everything else out first.
	if n <= s.cfg.Limit {
		if err := s.evict(ctx); err != nil {
			s.settle(n, false)
			return s.count.Failure(fmt.Errorf("make room: %w", err))
		}
	}
	if s.control.used() > s.cfg.Limit {
		s.settle(n, false)
		s.count.Full.Add(1)
		return kvcache.ErrFull
	}
	return nil
}

// settle ends a reservation: the file is there, or its room is free again.
func (s *Store) settle(n int64, written bool) {
	if !written {
		s.control.addUsed(-n)
	}
	s.pending.Add(-n)
}

// low is the use at which eviction ends: it walks the directory, so it makes
// room for many blocks at once.
func (s *Store) low() int64 { return s.cfg.Limit - s.cfg.Limit/8 }

// evict removes the least used blocks until use is low. Other processes may do
// the same at the same time: each file is removed, and counted, once.
func (s *Store) evict(ctx context.Context) error {
	s.evicting.Lock()
	defer s.evicting.Unlock()
	if s.control.used() <= s.low() {
		return nil // somebody else has
	}
	// The walk also corrects the count, so the loop ends when there really is
	// room, or nothing more may go.
	inv, err := s.takeStock()
	if err != nil {
		return err
	}
	for _, b := range slices.Backward(inv.keepOrder()) {
		if s.control.used() <= s.low() || ctx.Err() != nil {
			break
		}
		if s.removeBlock(b.ref, b.size) {
			s.count.Evictions.Add(1)
			s.count.EvictedBytes.Add(uint64(b.size))
		}
	}
	return nil
}

// recount corrects the shared count of bytes by what is there. What other
// processes reserve meanwhile may be missed, until the next time.
func (s *Store) recount() error {
	_, err := s.takeStock()
	return err
}

// inventory is what a walk over the directory found.
type inventory struct {
	// blocks are by key, which no two models share.
	blocks map[kvcache.Key]*stock
	// pinned are the blocks that live tails follow.
	pinned []kvcache.Key
}

// stock is one block's file.
type stock struct {
	ref  kvcache.Ref // without the root
	size int64       // of the file
	used time.Time   // the file's time of change
	kept bool        // keepOrder has placed it
}

// takeStock walks the directory and corrects the count of bytes.
func (s *Store) takeStock() (*inventory, error) {
	// Corrected by the difference, not set: others go on counting meanwhile.
	before := s.control.used()
	inv := &inventory{blocks: map[kvcache.Key]*stock{}}
	own := writersDir + "/" + s.writer.id + "."
	total := int64(0)
	err := fs.WalkDir(s.root.FS(), ".", func(name string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // removed meanwhile
		}
		if err != nil {
			return err
		}
		// What this process is writing is in pending.
		if !d.Type().IsRegular() || strings.HasPrefix(name, own) {
			return nil
		}
		st, err := d.Info()
		if err != nil {
			return nil // removed meanwhile
		}
		total += room(st.Size())
		inv.add(s, name, st)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("take stock: %w", err)
	}
	s.control.addUsed(total + s.pending.Load() - before)
	return inv, nil
}

// add takes one file into the inventory.
func (inv *inventory) add(s *Store, name string, st fs.FileInfo) {
	parts := strings.Split(name, "/")
	if len(parts) != 5 || parts[0] != modelsDir {
		return
	}
	model, err := kvcache.ParseKey(parts[1])
	if err != nil {
		return
	}
	if parts[2] == "tails" {
		if h, err := s.readTailHeader(name); err == nil {
			inv.pinned = append(inv.pinned, h.Parent)
		}
		return
	}
	parent, err1 := kvcache.ParseKey(parts[3])
	key, err2 := kvcache.ParseKey(parts[4])
	if err1 != nil || err2 != nil {
		return
	}
	ref := kvcache.Ref{Space: kvcache.Space{Fingerprint: kvcache.Fingerprint(model)}, Parent: parent, Key: key}
	inv.blocks[key] = &stock{ref: ref, size: st.Size(), used: st.ModTime()}
}

// keepOrder lists the blocks that may go, the last first to go: by the last use
// of a block or of any behind it, and the head of a chain before its tail. Blocks
// before a live tail are not in it.
func (inv *inventory) keepOrder() []*stock {
	for _, key := range inv.pinned {
		inv.path(key)
	}
	// From the last used on: each takes those before it along, which are then at
	// least as useful as it is. What remains of a path when a later block comes to
	// it has its own place. So every block is visited once.
	byUse := make([]*stock, 0, len(inv.blocks))
	for _, b := range inv.blocks {
		byUse = append(byUse, b)
	}
	slices.SortFunc(byUse, func(a, b *stock) int {
		// Keys decide between equal times, so that all processes choose alike.
		if c := b.used.Compare(a.used); c != 0 {
			return c
		}
		return slices.Compare(a.ref.Key[:], b.ref.Key[:])
	})
	order := make([]*stock, 0, len(byUse))
	for _, b := range byUse {
		order = append(order, inv.path(b.ref.Key)...)
	}
	return order
}

// path returns a block and those before it that are not placed yet, head first,
// and marks them as placed.
func (inv *inventory) path(key kvcache.Key) (path []*stock) {
	for {
		b := inv.blocks[key]
		if b == nil || b.kept {
			break
		}
		b.kept = true
		path = append(path, b)
		key = b.ref.Parent
	}
	slices.Reverse(path)
	return path
}
