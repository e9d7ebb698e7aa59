//go:build unix

package arena

import (
	"context"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// The shapes of BenchmarkKeys: chains of blocks that take one grain each.
const (
	keysChain  = 8
	keysTokens = 16
)

// keysFrame is the i-th block of a chain of blocks.
func keysFrame(b *testing.B, space kvcache.Space, parent kvcache.Key, c, i int) *kvcache.Frame {
	b.Helper()
	f, err := kvcache.Encode(nil, kvcache.Meta{Space: space, Parent: parent, First: i * keysTokens, IDs: keysIDs(c)[i*keysTokens:][:keysTokens]},
		[]kvcache.Part{{Size: 256}}, make([]byte, 256))
	if err != nil {
		b.Fatal(err)
	}
	return f
}

// keysIDs are the tokens of a chain.
func keysIDs(c int) []int32 {
	ids := make([]int32, keysChain*keysTokens)
	for j := range ids {
		ids[j] = int32(c*31 + j)
	}
	return ids
}

// keysPut puts one chain.
func keysPut(b *testing.B, s *Store, c int) {
	b.Helper()
	space := kvcache.NewSpace("m", []byte{byte(c % 16)})
	parent := space.Root
	for i := range keysChain {
		f := keysFrame(b, space, parent, c, i)
		if err := s.Put(context.Background(), f); err != nil {
			b.Fatal(err)
		}
		parent = f.Key
	}
}

// quantiles reports the middle and the 99th percentile of durations.
func quantiles(b *testing.B, name string, all []time.Duration) {
	slices.Sort(all)
	b.ReportMetric(float64(all[len(all)/2])/1e3, name+"-p50-µs")
	b.ReportMetric(float64(all[len(all)*99/100])/1e3, name+"-p99-µs")
}

// BenchmarkKeys fills an arena with a hundred thousand keys, or a million with
// -arena-large, and times look-ups of whole chains, puts that evict, and reopening.
func BenchmarkKeys(b *testing.B) {
	keys := 100_000
	if *large {
		keys = 1_000_000
	}
	cfg := Config{Dir: shmDir(b), Limit: int64(keys+1) * grain, Lease: time.Millisecond}
	for b.Loop() {
		s := newStore(b, cfg)
		begin := time.Now()
		for c := range keys / keysChain {
			keysPut(b, s, c)
		}
		b.ReportMetric(float64(time.Since(begin))/1e3/float64(keys), "put-µs")
		if n := s.policy.Len(); n != keys {
			b.Fatalf("%d keys, want %d", n, keys)
		}
		r := rand.New(rand.NewPCG(1, 1))
		quantiles(b, "lookup", lookUps(b, s, r, keys/keysChain))

		var evicts []time.Duration
		space := kvcache.NewSpace("m", []byte("new"))
		for i := range 20_000 {
			f := keysFrame(b, space, space.Root, 1<<24+i, 0)
			begin := time.Now()
			if err := s.Put(context.Background(), f); err != nil {
				b.Fatal(err)
			}
			evicts = append(evicts, time.Since(begin))
		}
		quantiles(b, "evicting-put", evicts)
		if n := s.Stats().Evictions; n < 20_000 {
			b.Fatalf("%d evictions", n)
		}
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		b.ReportMetric(float64(m.HeapAlloc)/float64(keys), "heap-B/key")
		s.Close()

		begin = time.Now()
		s = newStore(b, cfg)
		b.ReportMetric(float64(time.Since(begin))/1e6, "reopen-ms")
		quantiles(b, "first-lookup", lookUps(b, s, r, keys/keysChain))
		s.Close()
	}
}

// lookUps times look-ups of random chains.
func lookUps(b *testing.B, s *Store, r *rand.Rand, chains int) (all []time.Duration) {
	b.Helper()
	found := 0
	for range 20_000 {
		c := r.IntN(chains)
		q := kvcache.Query{Space: kvcache.NewSpace("m", []byte{byte(c % 16)}), IDs: keysIDs(c)}
		begin := time.Now()
		m, err := s.Longest(context.Background(), q)
		all = append(all, time.Since(begin))
		if err != nil {
			b.Fatal(err)
		}
		found += len(m.Blocks)
	}
	if found < 20_000*keysChain/2 {
		b.Fatalf("%d blocks found by 20,000 look-ups", found)
	}
	return all
}

// BenchmarkGet verifies blocks in place, and BenchmarkPut writes them into a full arena.
func BenchmarkGet(b *testing.B) {
	s := newStore(b, Config{Dir: shmDir(b), Limit: 128 << 20, Prefault: true})
	buf := fillBuffer()
	var refs []kvcache.Ref
	for i := range 64 {
		f, err := filler(buf, i)
		if err == nil {
			err = s.Put(context.Background(), f)
		}
		if err != nil {
			b.Fatal(err)
		}
		refs = append(refs, f.Ref)
	}
	b.SetBytes(int64(len(buf)))
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		i++
		l, err := s.Get(context.Background(), refs[i%64])
		if err == nil {
			err = l.Verify()
			l.Release()
		}
		if err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkSum is what BenchmarkGet cannot be faster than: the checksum alone.
func BenchmarkSum(b *testing.B) {
	buf := make([]byte, 64*fillBlock)
	for i := range buf {
		buf[i] = byte(i)
	}
	b.SetBytes(fillBlock)
	i := 0
	for b.Loop() {
		i++
		kvcache.Sum(buf[i%64*fillBlock:][:fillBlock])
	}
}

// BenchmarkPut writes into a full arena.
func BenchmarkPut(b *testing.B) {
	s := newStore(b, Config{Dir: shmDir(b), Limit: 128 << 20, Prefault: true})
	buf := fillBuffer()
	b.SetBytes(int64(len(buf)))
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		i++
		f, err := filler(buf, i)
		if err == nil {
			err = s.Put(context.Background(), f)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
}
