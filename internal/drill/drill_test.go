package drill

import (
	"slices"
	"strconv"
	"testing"
)

// answer is n different tokens from the first on.
func answer(first, n int) []string {
	var out []string
	for i := range n {
		out = append(out, strconv.Itoa(first+i))
	}
	return out
}

func TestJudge(t *testing.T) {
	want := answer(0, 40)
	for _, c := range []struct {
		name string
		got  []string
		v    Verdict
	}{
		{"equal", want, Verdict{Equal: true, DivergedAt: -1}},
		{"one lost", slices.Delete(answer(0, 40), 15, 16), Verdict{Lost: 1, DivergedAt: -1}},
		{"three lost", slices.Delete(answer(0, 40), 15, 18), Verdict{Lost: 3, DivergedAt: -1}},
		{"two repeated", slices.Insert(answer(0, 40), 15, "13", "14"), Verdict{Repeated: 2, DivergedAt: -1}},
		{"all anew", slices.Concat(answer(0, 15), answer(0, 40)), Verdict{Repeated: 15, DivergedAt: -1}},
		{"another way", slices.Concat(answer(0, 20), answer(100, 20)), Verdict{DivergedAt: 20}},
		{"another way before the cut", slices.Concat(answer(0, 10), answer(100, 30)), Verdict{DivergedAt: 10}},
		{"ended early", answer(0, 15), Verdict{Missing: 25, DivergedAt: -1}},
		{"the last ones lost", slices.Concat(answer(0, 15), answer(38, 2)), Verdict{Lost: 23, DivergedAt: -1}},
		{"nothing", nil, Verdict{Missing: 40, DivergedAt: -1}},
	} {
		if v := Judge(want, c.got, 15); v != c.v {
			t.Errorf("%s: %+v, want %+v", c.name, v, c.v)
		}
	}
}

// Whatever is dropped or repeated at the cut is counted as that, to the token.
func FuzzJudge(f *testing.F) {
	f.Add(uint8(40), uint8(15), uint8(3), true)
	f.Fuzz(func(t *testing.T, length, at, shift uint8, lost bool) {
		n, cut, k := int(length), int(at), int(shift)
		if cut > n || k == 0 || lost && n-cut-k < proof || !lost && (k > cut || n-cut+k < proof) {
			t.Skip()
		}
		want := answer(0, n)
		got := slices.Concat(want[:cut], want[max(cut-k, 0):])
		v := Verdict{Repeated: k, DivergedAt: -1}
		if lost {
			got, v = slices.Concat(want[:cut], want[cut+k:]), Verdict{Lost: k, DivergedAt: -1}
		}
		if g := Judge(want, got, cut); g != v {
			t.Errorf("%d tokens, cut at %d, shift %d: %+v, want %+v", n, cut, k, g, v)
		}
	})
}
