//go:build unix

package nvmetier

import (
	"fmt"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// BenchmarkTier writes and reads blocks on the file system of temporary files, with direct
// reads and through the page cache; all that is read is verified.
func BenchmarkTier(b *testing.B) {
	for _, size := range []int{1 << 20, 8 << 20, 64 << 20} {
		space := kvcache.NewSpace("m", nil)
		f := sealed(b, space, space.Root, 0, []int32{1}, size)
		b.Run(fmt.Sprintf("put/%dMiB", size>>20), func(b *testing.B) {
			s := newStore(b, Config{Dir: filepath.Join(b.TempDir(), "kv"), Limit: 4 << 30})
			b.SetBytes(f.Total)
			for b.Loop() {
				if err := s.put(f); err != nil {
					b.Fatal(err)
				}
				s.drop(f.Fingerprint)
			}
		})
		for _, buffered := range []bool{false, true} {
			b.Run(fmt.Sprintf("get/%dMiB/cached=%v", size>>20, buffered), func(b *testing.B) {
				s := newStore(b, Config{Dir: filepath.Join(b.TempDir(), "kv"), Limit: 4 << 30})
				if err := s.put(f); err != nil {
					b.Fatal(err)
				}
				s.buffered.Store(buffered)
				b.SetBytes(f.Total)
				for b.Loop() {
					l, err := s.Get(b.Context(), f.Ref)
					if err != nil || l.Verify() != nil {
						b.Fatal(err)
					}
					l.Release()
				}
			})
		}
	}
}

// BenchmarkKeys: a million blocks in chains of 8 of 16 tenants, in the index: what they take
// of the heap, how long it takes to fill it from names, to look a chain's children up and to
// find who leaves.
func BenchmarkKeys(b *testing.B) {
	const chains, length = 125_000, 8
	for b.Loop() {
		var found []placed
		for c := range int32(chains) {
			space := kvcache.NewSpace("m", []byte{byte(c % 16)})
			parent := space.Root
			for i := range int32(length) {
				ids := []int32{c, i, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}
				h := kvcache.Header{Ref: space.Child(parent, ids), First: int(16 * i), IDs: ids, Total: 1 << 20}
				found = append(found, placed{space, blockOf(&h, int64(c))})
				parent = h.Key
			}
		}
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		x, begin := newIndex(0), time.Now()
		x.fill(found)
		b.ReportMetric(time.Since(begin).Seconds(), "fill-s")
		runtime.GC()
		runtime.ReadMemStats(&after)
		b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/(chains*length), "B/key")
		var looks, leaves []time.Duration
		for i := range 20_000 {
			p := found[i*41%len(found)]
			begin := time.Now()
			x.list(p.space, p.parent, nil)
			looks = append(looks, time.Since(begin))
			begin = time.Now()
			x.victim(p.key, begin)
			leaves = append(leaves, time.Since(begin))
		}
		for name, took := range map[string][]time.Duration{"list": looks, "victim": leaves} {
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Nanoseconds())/1000, name+"-p50-µs")
			b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds())/1000, name+"-p99-µs")
		}
	}
}
