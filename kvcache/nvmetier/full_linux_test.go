package nvmetier

import (
	"errors"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvmesh/kvmesh/kvcache"
)

// TestRealDiskFull fills a file system of 2 MiB, where this user may make one: blocks are
// given up, and what has no room is an error that is counted.
func TestRealDiskFull(t *testing.T) {
	mount := t.TempDir()
	if err := unix.Mount("tmpfs", mount, "tmpfs", 0, "size=2m"); err != nil {
		t.Skipf("no file system to fill: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(mount, unix.MNT_DETACH) }) // what is open ends with the test
	s := newStore(t, Config{Dir: filepath.Join(mount, "kv")})
	space := kvcache.NewSpace("m", nil)
	for i := range int32(60) {
		f := sealed(t, space, space.Root, 0, []int32{i}, 100_000)
		if err := s.Put(t.Context(), f); err != nil {
			t.Fatalf("block %d: %v", i, err)
		}
		l, err := s.Get(t.Context(), f.Ref)
		if err != nil || l.Verify() != nil {
			t.Fatalf("block %d: %v", i, err)
		}
		l.Release()
	}
	if err := s.Put(t.Context(), sealed(t, space, space.Root, 0, []int32{-1}, 3<<20)); !errors.Is(err, kvcache.ErrFull) {
		t.Errorf("a block larger than the disk: %v", err)
	}
	if st := s.Stats(); st.Evictions < 40 || st.Full != 1 || st.Failed != 0 || st.Used > 2<<20 {
		t.Errorf("counted %+v", st)
	}
}
