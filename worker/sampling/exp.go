package sampling

import "math"

// exp approximates e^x for x <= 0 with a relative error below 2e-7; below -700 it
// is 0. A step may need one for each token of the vocabulary, and this takes about
// 0.6 of the time of math.Exp. The conversions forbid fused multiply-adds, so that
// every processor gives the same bits, which math.Exp does not promise.
func exp(x float64) float64 {
	if x < -700 {
		return 0
	}
	// x = k·ln2 + r with |r| <= ln2/2; adding and subtracting 1.5·2^52 rounds.
	const round = 3 << 51
	k := float64(x*math.Log2E) + round - round
	r := x - float64(k*math.Ln2)
	p := float64(r*(1.0/720)) + 1.0/120
	p = float64(p*r) + 1.0/24
	p = float64(p*r) + 1.0/6
	p = float64(p*r) + 1.0/2
	p = float64(p*r) + 1
	p = float64(p*r) + 1
	return p * math.Float64frombits(uint64(int64(k)+1023)<<52)
}
