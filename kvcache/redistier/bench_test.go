package redistier

import (
	"fmt"
	"testing"

	"github.com/kvmesh/kvmesh/internal/redislink"
	"github.com/kvmesh/kvmesh/internal/redislink/redistest"
	"github.com/kvmesh/kvmesh/kvcache"
)

// BenchmarkTier measures one caller's reads and writes on one server over loopback TCP,
// and beside each what go-redis alone does with a value of the same length. Reading the
// tier includes the manifest and the check of all bytes.
func BenchmarkTier(b *testing.B) {
	server := redistest.Start(b)
	s := newStore(b, Config{Redis: redislink.Config{URL: server.URL()}, Single: true})
	space := kvcache.NewSpace("m", nil)
	for _, mib := range []int{1, 8, 64} {
		size := mib << 20
		id := int32(0)
		next := func() *kvcache.Frame {
			id++
			return sealed(b, space, space.Root, []int32{int32(mib), id}, size)
		}
		f := next()
		b.Run(fmt.Sprintf("put/%dMiB", mib), func(b *testing.B) {
			b.SetBytes(int64(size))
			for b.Loop() {
				b.StopTimer()
				f = next()
				b.StartTimer()
				if err := s.Put(b.Context(), f); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(fmt.Sprintf("get/%dMiB", mib), func(b *testing.B) {
			b.SetBytes(int64(size))
			for b.Loop() {
				l, err := s.Get(b.Context(), f.Ref)
				if err == nil {
					err = l.Verify()
				}
				if err != nil {
					b.Fatal(err)
				}
				l.Release()
			}
		})
		b.Run(fmt.Sprintf("plain set/%dMiB", mib), func(b *testing.B) {
			b.SetBytes(int64(size))
			for b.Loop() {
				if err := s.client.Set(b.Context(), "plain", f.Bytes(), 0).Err(); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(fmt.Sprintf("plain get/%dMiB", mib), func(b *testing.B) {
			b.SetBytes(int64(size))
			for b.Loop() {
				if _, err := s.client.Get(b.Context(), "plain").Bytes(); err != nil {
					b.Fatal(err)
				}
			}
		})
		if err := s.Drop(b.Context(), space.Fingerprint); err != nil {
			b.Fatal(err)
		}
	}
}
