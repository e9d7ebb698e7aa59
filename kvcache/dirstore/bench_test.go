//go:build unix

package dirstore

import (
	"context"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/kvmesh/kvmesh/kvcache"
)

// perToken is the state of one token of the model that the quick start uses.
const perToken = 18_432

// benchStore opens a store in shared memory.
func benchStore(b *testing.B, limit int64) *Store {
	b.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "kvmesh-bench-")
	if err != nil {
		dir = b.TempDir()
	}
	b.Cleanup(func() { os.RemoveAll(dir) })
	s, err := Open(Config{Dir: dir, Limit: limit})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { s.Close() })
	return s
}

// benchChain makes n blocks of 64 tokens, each behind the one before, all with
// the same payload.
func benchChain(b *testing.B, space kvcache.Space, n int) (ids []int32, frames []*kvcache.Frame) {
	b.Helper()
	payload := make([]byte, 64*perToken)
	for i := range payload {
		payload[i] = byte(rand.Uint32())
	}
	parent := space.Root
	for i := range n {
		run := make([]int32, 64)
		for j := range run {
			run[j] = rand.Int32N(262_144)
		}
		f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: parent, First: 64 * i, IDs: run},
			[]kvcache.Part{{Size: int64(len(payload))}}, payload)
		if err != nil {
			b.Fatal(err)
		}
		ids, parent, frames = append(ids, run...), f.Key, append(frames, f)
	}
	return ids, frames
}

func BenchmarkSeal(b *testing.B) {
	space := kvcache.NewSpace("model", nil)
	_, frames := benchChain(b, space, 1)
	f := frames[0]
	meta := kvcache.Meta{Space: space, Parent: f.Parent, IDs: f.IDs}
	b.SetBytes(f.Total)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := kvcache.Seal(f.Bytes(), meta, f.Parts); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkPut writes blocks until the store is full and evicts.
func BenchmarkPut(b *testing.B) {
	s := benchStore(b, 512<<20)
	space := kvcache.NewSpace("model", nil)
	_, frames := benchChain(b, space, 1)
	f := frames[0]
	b.SetBytes(f.Total)
	b.ReportAllocs()
	id := int32(0)
	for b.Loop() {
		id++
		f.IDs[0] = id
		g, err := kvcache.Seal(f.Bytes(), kvcache.Meta{Space: space, Parent: space.Root, IDs: f.IDs}, f.Parts)
		if err != nil {
			b.Fatal(err)
		}
		if err := s.Put(context.Background(), g); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkGet(b *testing.B) {
	s := benchStore(b, 512<<20)
	_, frames := benchChain(b, kvcache.NewSpace("model", nil), 64)
	for _, f := range frames {
		if err := s.Put(context.Background(), f); err != nil {
			b.Fatal(err)
		}
	}
	b.SetBytes(frames[0].Total)
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		i++
		l, err := s.Get(context.Background(), frames[i%64].Ref)
		if err != nil {
			b.Fatal(err)
		}
		if err := l.Verify(); err != nil {
			b.Fatal(err)
		}
		l.Release()
	}
}

// BenchmarkSum is what BenchmarkGet cannot be faster than: the checksum alone,
// over as many bytes in ordinary memory.
func BenchmarkSum(b *testing.B) {
	_, frames := benchChain(b, kvcache.NewSpace("model", nil), 64)
	b.SetBytes(frames[0].Total)
	i := 0
	for b.Loop() {
		i++
		if err := frames[i%64].Verify(); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkLongest(b *testing.B) {
	for _, c := range []struct {
		name    string
		changed bool
	}{{"known", false}, {"changed", true}} {
		b.Run(c.name, func(b *testing.B) {
			s := benchStore(b, 512<<20)
			space := kvcache.NewSpace("model", nil)
			ids, frames := benchChain(b, space, 64)
			for _, f := range frames {
				if err := s.Put(context.Background(), f); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportAllocs()
			for b.Loop() {
				if c.changed {
					for _, f := range frames {
						s.control.changed(f.Parent)
					}
				}
				m, err := s.Longest(context.Background(), kvcache.Query{Space: space, IDs: ids})
				if err != nil || len(m.Blocks) != 64 {
					b.Fatal(len(m.Blocks), err)
				}
			}
		})
	}
}

func BenchmarkTailAppend(b *testing.B) {
	for _, c := range []struct {
		name   string
		tokens int
	}{{"1", 1}, {"16", 16}} {
		b.Run(c.name, func(b *testing.B) {
			s := benchStore(b, 512<<20)
			t, err := s.OpenTail(context.Background(), kvcache.TailSpec{Space: kvcache.NewSpace("model", nil), Stream: "s"})
			if err != nil {
				b.Fatal(err)
			}
			defer t.Close()
			r := kvcache.Range{IDs: make([]int32, c.tokens), Data: make([]byte, c.tokens*perToken)}
			b.SetBytes(int64(len(r.Data)))
			b.ReportAllocs()
			for b.Loop() {
				if r.First == 64 {
					r.First = 0
					// As a worker does when a block is full.
					if err := t.Rotate(kvcache.Key{}, 0); err != nil {
						b.Fatal(err)
					}
				}
				if err := t.Append(r); err != nil {
					b.Fatal(err)
				}
				r.First += c.tokens
			}
		})
	}
}
