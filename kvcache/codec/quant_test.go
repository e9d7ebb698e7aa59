package codec

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/kvmesh/kvmesh/kvcache"
)

// TestNarrow: codes reach all numbers of a group where many are at its ends, and where
// there are no codes; and not where few are there.
func TestNarrow(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4))
	for name, tt := range map[string]struct {
		next   func(i int) float32
		narrow bool
	}{
		"at the ends": {func(i int) float32 { return float32(i%2*2 - 1) }, false},
		"equal":       {func(int) float32 { return 0.25 }, false},
		"one far off": {func(i int) float32 { return float32(max(0, 100*(1-i))) + rnd.Float32() }, false},
		"too large":   {func(i int) float32 { return float32(i%2*2-1) * 1e6 }, false},
		"bell":        {func(int) float32 { return float32(rnd.NormFloat64()) }, true},
	} {
		t.Run(name, func(t *testing.T) {
			p, err := planOf(kvcache.CodecInt4, Shape{Elem: F16, Rows: 1, Cols: wideGroup, Plane: kvcache.PlaneValues})
			if err != nil || p.group != wideGroup {
				t.Fatal(p.group, err)
			}
			var x [wideGroup]float32
			for i := range x {
				x[i] = tt.next(i)
			}
			lo, hi := p.span(x[:])
			var k scales
			from, to := p.narrow(&x, lo, hi, &k)
			if narrow := from > lo && to < hi; narrow != tt.narrow || !narrow && (from != lo || to != hi) {
				t.Errorf("codes from %v to %v for numbers from %v to %v", from, to, lo, hi)
			}
			whole, less := float64(p.lost(&x, lo, hi, &k)), float64(p.lost(&x, from, to, &k))
			if less > whole || tt.narrow && less == whole || name == "too large" != math.IsInf(whole, 1) {
				t.Errorf("%v lost, and %v of all", less, whole)
			}
		})
	}
}
