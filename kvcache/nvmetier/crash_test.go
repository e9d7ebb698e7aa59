//go:build unix

package nvmetier

import (
	"bytes"
	"context"
	"errors"
	"testing"

	"github.com/kvmesh/kvmesh/kvcache"
)

// script is what a store does until its disk stops: it writes chains of two models, reads,
// drops one of the models, and writes again.
type script struct {
	frames  []*kvcache.Frame // of the model that stays, in order
	dropped []*kvcache.Frame
	acked   int  // of frames
	gone    bool // the drop was acknowledged
}

func newScript(t *testing.T) *script {
	t.Helper()
	s := &script{}
	for i, space := range []kvcache.Space{kvcache.NewSpace("stays", []byte("t")), kvcache.NewSpace("goes", nil)} {
		for c := range int32(2) {
			parent := space.Root
			for b := range int32(4) {
				ids := []int32{c, b, 7, 8}
				f := sealed(t, space, parent, int(4*b), ids, 5000+int(b)*1000)
				parent = f.Key
				if i == 0 {
					s.frames = append(s.frames, f)
				} else {
					s.dropped = append(s.dropped, f)
				}
			}
		}
	}
	return s
}

// run does it, and says whether it came to its end.
func (sc *script) run(s *Store) bool {
	ctx := context.Background()
	for i, f := range sc.frames {
		if i < len(sc.dropped)/2 && s.Put(ctx, sc.dropped[i]) != nil {
			return false
		}
		if i == len(sc.frames)/2 {
			if s.Drop(ctx, sc.dropped[0].Fingerprint) != nil {
				return false
			}
			sc.gone = true
		}
		if s.Put(ctx, f) != nil {
			return false
		}
		sc.acked++
		if l, err := s.Get(ctx, f.Ref); err == nil {
			l.Release()
		}
	}
	return true
}

// check reads everything from a store on what is left of the disk.
func (sc *script) check(t *testing.T, d *memDisk, limit int64, want crash) {
	t.Helper()
	s, err := open(Config{Dir: "d", Limit: limit}, d, func() {})
	if err != nil {
		t.Fatalf("open again: %v", err)
	}
	defer s.Close()
	for i, f := range append(sc.frames[:len(sc.frames):len(sc.frames)], sc.dropped...) {
		l, err := s.Get(t.Context(), f.Ref)
		_, refused := errors.AsType[*kvcache.Refusal](err)
		stays := i < len(sc.frames)
		switch {
		case err == nil:
			if b, err := l.Payload(); err != nil && !want.damages || err == nil && !bytes.Equal(l.Bytes(), f.Bytes()) {
				t.Fatalf("block %d is not as it was written: %d bytes, %v", i, len(b), err)
			}
			l.Release()
			if !stays && sc.gone && want.keeps {
				t.Fatalf("block %d of a dropped model is back", i)
			}
		case refused && !want.damages:
			t.Fatalf("block %d was visible and torn: %v", i, err)
		case !refused && !errors.Is(err, kvcache.ErrNotFound):
			t.Fatalf("block %d: %v", i, err)
		case stays && i < sc.acked && want.keeps:
			t.Fatalf("block %d was acknowledged and is missing: %v", i, err)
		}
	}
	if st := s.Stats(); st.Used > limit {
		t.Fatalf("%d bytes in use, limit %d", st.Used, limit)
	}
	// And it goes on.
	for _, f := range sc.frames[:4] {
		if err := s.Put(t.Context(), f); err != nil {
			t.Fatal(err)
		}
	}
	if m, err := s.Longest(t.Context(), kvcache.Query{Space: sc.frames[0].Space, IDs: []int32{0, 0, 7, 8, 0, 1, 7, 8, 0, 2, 7, 8, 0, 3, 7, 8}}); err != nil || len(m.Blocks) != 4 {
		t.Fatalf("%d blocks after all were written again: %v", len(m.Blocks), err)
	}
}

// crash is a way to end.
type crash struct {
	after func(*memDisk) *memDisk
	lies  bool
	// keeps says that what was acknowledged is there, and damages that the disk may have
	// lost what it said it has.
	keeps, damages bool
}

// TestCrash stops the disk at each of its changes, in the middle of the last write: what is
// visible then is whole, and what was acknowledged is there if only the process has died.
// With a disk that lies about syncing, what is torn is refused.
func TestCrash(t *testing.T) {
	const plenty, tight = 1 << 30, 6 * 3 * page
	for name, c := range map[string]crash{
		"killed":  {after: (*memDisk).killed, keeps: true},
		"power":   {after: (*memDisk).unpowered},
		"lies":    {after: (*memDisk).unpowered, lies: true, damages: true},
		"evicted": {after: (*memDisk).killed},
	} {
		t.Run(name, func(t *testing.T) {
			limit := int64(plenty)
			if name == "evicted" {
				limit = tight
			}
			stops := 0
			for stop, done := 1, false; !done; stop++ {
				for seed := range uint64(3) {
					d := newMemDisk(seed)
					d.stop, d.lies = stop, c.lies
					sc := newScript(t)
					s, err := open(Config{Dir: "d", Limit: limit}, d, func() {})
					if err == nil {
						done = sc.run(s)
						s.Close()
					}
					sc.check(t, c.after(d), limit, c)
				}
				stops = stop
			}
			if stops < 60 {
				t.Errorf("only %d changes", stops)
			}
			t.Logf("%d changes, each the last one in 3 runs", stops)
		})
	}
}

// TestLyingDiskTears keeps the test above honest: such a disk does leave torn blocks under
// their names.
func TestLyingDiskTears(t *testing.T) {
	for seed := range uint64(200) {
		d := newMemDisk(seed)
		d.lies = true
		s, err := open(Config{Dir: "d"}, d, func() {})
		if err != nil {
			t.Fatal(err)
		}
		newScript(t).run(s)
		s.Close()
		again, err := open(Config{Dir: "d"}, d.unpowered(), func() {})
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range newScript(t).frames {
			l, err := again.Get(t.Context(), f.Ref)
			if err == nil {
				err = l.Verify()
				l.Release()
			}
			if _, ok := errors.AsType[*kvcache.Refusal](err); ok {
				if n := again.Stats().Refused; n == (kvcache.Stats{}.Refused) {
					t.Error("not counted")
				}
				return
			}
		}
	}
	t.Error("no block was torn: a crash of this disk proves nothing")
}

// TestDiskFull: others fill the disk. Blocks are given up for new ones, and what does not
// fit even so is an error that says so and is counted; when there is room again all is well.
func TestDiskFull(t *testing.T) {
	d := newMemDisk(1)
	d.room = 10 * page
	s, err := open(Config{Dir: "d"}, d, func() {})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	space := kvcache.NewSpace("m", nil)
	for i := range int32(30) {
		f := sealed(t, space, space.Root, 0, []int32{i}, 3000)
		if err := s.Put(t.Context(), f); err != nil {
			t.Fatalf("block %d: %v", i, err)
		}
		if l, err := s.Get(t.Context(), f.Ref); err != nil {
			t.Fatalf("block %d: %v", i, err)
		} else {
			l.Release()
		}
	}
	if st := s.Stats(); st.Evictions != 20 || st.Used > d.room || st.Full != 0 {
		t.Errorf("counted %+v", st)
	}
	huge := sealed(t, space, space.Root, 0, []int32{-1}, 11*page)
	for range 5 { // full is no fault of the disk, which is not left alone for it
		if err := s.Put(t.Context(), huge); !errors.Is(err, kvcache.ErrFull) || !bytes.Contains([]byte(err.Error()), []byte("the disk is full")) {
			t.Errorf("more than there is room for: %v", err)
		}
	}
	if st := s.Stats(); st.Full != 5 || st.Failed != 0 {
		t.Errorf("%d full, %d failed", st.Full, st.Failed)
	}
	d.room = 1 << 30
	if err := s.Put(t.Context(), huge); err != nil {
		t.Error(err)
	}
	if n := len(d.names); n > 40 {
		t.Errorf("%d names: temporary files are left", n)
	}
}

// TestDiskFails: a disk that fails is left alone for a while, and a miss until then.
func TestDiskFails(t *testing.T) {
	d := newMemDisk(1)
	s, err := open(Config{Dir: "d"}, d, func() {})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	d.stop = d.changes
	before := d.changes
	space := kvcache.NewSpace("m", nil)
	for i := range int32(10) {
		if err := s.Put(t.Context(), sealed(t, space, space.Root, 0, []int32{i}, 10)); err == nil {
			t.Fatal("written to a dead disk")
		}
	}
	if st := s.Stats(); st.Failed != 3 || st.Late != 7 || st.Used != 0 {
		t.Errorf("counted %+v", st)
	}
	if d.changes == before {
		t.Error("the disk was never asked")
	}
}

// TestRemoveFails: a block whose file cannot be removed is still there, and counted.
func TestRemoveFails(t *testing.T) {
	d := newMemDisk(1)
	s, err := open(Config{Dir: "d", Limit: 2 * page}, d, func() {})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	space := kvcache.NewSpace("m", nil)
	var frames []*kvcache.Frame
	for i := range int32(3) {
		frames = append(frames, sealed(t, space, space.Root, 0, []int32{i}, 10))
	}
	for _, f := range frames[:2] {
		if err := s.Put(t.Context(), f); err != nil {
			t.Fatal(err)
		}
	}
	d.stop = d.changes
	if err := s.Put(t.Context(), frames[2]); err == nil {
		t.Fatal("written to a dead disk")
	}
	if st := s.Stats(); st.Used != 2*page || st.Evictions != 0 {
		t.Errorf("counted %+v", st)
	}
	for i, f := range frames[:2] {
		l, err := s.Get(t.Context(), f.Ref)
		if err != nil {
			t.Errorf("block %d: %v", i, err)
			continue
		}
		l.Release()
	}
	d.stop = 0
	if err := s.Put(t.Context(), frames[2]); err != nil || s.Stats().Used != 2*page {
		t.Errorf("%d bytes in use: %v", s.Stats().Used, err)
	}
}
