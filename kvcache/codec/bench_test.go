//go:build unix

package codec_test

import (
	"fmt"
	"os"
	"runtime"
	"slices"
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
				measure(b, len(part), leastEncode(c), func() error {
					_, err := codec.Append(enc[:0], c, s, part)
					return err
				})
			})
			b.Run(fmt.Sprintf("decode/%v/%s", c, name), func(b *testing.B) {
				out := make([]byte, 0, len(part))
				measure(b, len(part), leastDecode(c), func() error {
					_, err := codec.AppendDecoded(out, c, enc)
					return err
				})
			})
		}
	}
}

// BenchmarkFrame measures what a worker does with a whole block of 64 tokens, keys and
// values of 18 layers with 256 channels: pack it into a buffer that it has and seal the
// frame, and verify and decode it into a new one. Raw is the same without a codec. It
// only tells: new memory and checksums, which are no codec's, are in it.
func BenchmarkFrame(b *testing.B) {
	s := codec.Shape{Elem: codec.F16, Rows: 64, Cols: 256, Prefix: 12}
	shape := func(kvcache.Part, []byte) (codec.Shape, bool) { return s, true }
	var parts []kvcache.Part
	var payload []byte
	for i := range 36 {
		s.Plane = kvcache.PlaneKeys + kvcache.Plane(i/18)
		payload = append(payload, matrix(s, uint64(i))...)
		parts = append(parts, kvcache.Part{Layer: uint16(i % 18), Layers: 1, Plane: s.Plane, Size: int64(s.Len())})
	}
	space := kvcache.NewSpace("model", nil)
	meta := kvcache.Meta{Space: space, Parent: space.Root, IDs: make([]int32, s.Rows)}
	room := kvcache.HeaderLen(s.Rows, len(parts))
	for _, c := range append(lossy(), kvcache.CodecRaw) {
		buf := make([]byte, room, room+len(payload))
		pack := func() (*kvcache.Frame, error) {
			out, list := codec.Pack(buf, c, slices.Clone(parts), payload, shape)
			return kvcache.Seal(out, meta, list)
		}
		f, err := pack()
		if err != nil {
			b.Fatal(err)
		}
		b.Run(fmt.Sprintf("pack/%v", c), func(b *testing.B) {
			measure(b, len(payload), 0, func() error { _, err := pack(); return err })
		})
		b.Run(fmt.Sprintf("payload/%v", c), func(b *testing.B) {
			measure(b, len(payload), 0, func() error { _, err := codec.Payload(nil, f); return err })
		})
	}
}

// leastEncode and leastDecode are what is promised for a machine without other load, in
// MB of f16 per second of one core; 0 = nothing is.
func leastEncode(c kvcache.Codec) float64 { return leastDecode(c) / 2 }

func leastDecode(c kvcache.Codec) float64 {
	switch c {
	case kvcache.CodecInt8:
		return 1000
	case kvcache.CodecInt4:
		return 500
	default:
		return 0
	}
}

// measure runs what takes size bytes of f16. It fails below least on a machine with less
// load than cores, if the processor has kernels; elsewhere it only tells.
func measure(b *testing.B, size int, least float64, run func() error) {
	busy, known := hostLoad()
	b.SetBytes(int64(size))
	begin := processor(b)
	for b.Loop() {
		if err := run(); err != nil {
			b.Fatal(err)
		}
	}
	took := processor(b) - begin
	rate := float64(size) * float64(b.N) / 1e6 / took
	b.ReportMetric(rate, "MB/core-s")
	b.ReportMetric(busy, "load-avg")
	idle := known && busy < float64(runtime.NumCPU())
	if idle && codec.HasKernels() && took > fewSeconds && rate < least {
		b.Errorf("%.0f MB/core-s with a load average of %.2f before it, want at least %.0f", rate, busy, least)
	}
}

// fewSeconds of processor time are measured well enough.
const fewSeconds = 0.2

// hostLoad returns the load average of the last minute, where the system tells.
func hostLoad() (load float64, ok bool) {
	raw, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0, false
	}
	_, err = fmt.Sscan(string(raw), &load)
	return load, err == nil
}

// processor is the processor time of this process in seconds.
func processor(b *testing.B) float64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}
