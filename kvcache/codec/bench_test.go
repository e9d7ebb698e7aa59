//go:build unix

package codec_test

import (
	"fmt"
	"syscall"
	"testing"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/codec"
)

// BenchmarkCodec measures one part of 64 tokens and 1024 channels. MB are of f16;
// MB/core-s is by this process's processor time, for machines that do other work too.
func BenchmarkCodec(b *testing.B) {
	for name, plane := range map[string]kvcache.Plane{"keys": kvcache.PlaneKeys, "values": kvcache.PlaneValues} {
		s := codec.Shape{Elem: codec.F16, Rows: 64, Cols: 1024, Prefix: 12, Plane: plane}
		part := matrix(s, 6)
		for _, c := range lossy() {
			enc, err := codec.Append(nil, c, s, part)
			if err != nil {
				b.Fatal(err)
			}
			b.Run(fmt.Sprintf("encode/%v/%s", c, name), func(b *testing.B) {
				b.ReportMetric(float64(len(part))/float64(len(enc)), "ratio")
				measure(b, len(part), func() error {
					_, err := codec.Append(enc[:0], c, s, part)
					return err
				})
			})
			b.Run(fmt.Sprintf("decode/%v/%s", c, name), func(b *testing.B) {
				out := make([]byte, 0, len(part))
				measure(b, len(part), func() error {
					_, err := codec.AppendDecoded(out, c, enc)
					return err
				})
			})
		}
	}
}

// measure runs what takes size bytes of f16.
func measure(b *testing.B, size int, run func() error) {
	b.SetBytes(int64(size))
	begin := processor(b)
	for b.Loop() {
		if err := run(); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(size)*float64(b.N)/1e6/(processor(b)-begin), "MB/core-s")
}

// processor is the processor time of this process in seconds.
func processor(b *testing.B) float64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}
