package sampling

import (
	"errors"
	"math"
	"slices"
	"testing"

	"github.com/kvmesh/kvmesh/worker"
)

// onlySome allows fixed tokens, and fails the test when it accepts another.
type onlySome struct {
	t        testing.TB
	allowed  func(id int32) bool
	accepted []int32
	asked    int
}

func (c *onlySome) Allow(ids []int32, ok []bool) {
	if len(ids) != len(ok) {
		c.t.Fatalf("%d ids with %d answers", len(ids), len(ok))
	}
	c.asked += len(ids)
	for i, id := range ids {
		ok[i] = c.allowed(id)
	}
}

func (c *onlySome) Accept(id int32) {
	if !c.allowed(id) {
		c.t.Errorf("accepted %d, which is not allowed", id)
	}
	c.accepted = append(c.accepted, id)
}

func (c *onlySome) Close() {}

func constrainedSampler(t testing.TB, p worker.Params, allowed func(int32) bool) (*Sampler, *onlySome) {
	t.Helper()
	c := &onlySome{t: t, allowed: allowed}
	s := New(p)
	if err := s.Constrain(c, nil); err != nil {
		t.Fatal(err)
	}
	return s, c
}

func TestConstrainedGreedy(t *testing.T) {
	const n = 5000
	for _, allowed := range []func(int32) bool{
		func(int32) bool { return true },
		func(id int32) bool { return id%3 == 1 },
		func(id int32) bool { return id == 4321 },
	} {
		for seed := range uint64(20) {
			logits := gaussian(n, seed)
			want := int32(-1)
			for i, l := range logits {
				if allowed(int32(i)) && (want < 0 || l > logits[want]) {
					want = int32(i)
				}
			}
			s, c := constrainedSampler(t, off(), allowed)
			got, err := s.Next(logits, new(Buffer))
			if err != nil || got.ID != want || !slices.Equal(c.accepted, []int32{want}) {
				t.Fatalf("%d, %v (accepted %v), want %d", got.ID, err, c.accepted, want)
			}
		}
	}
	s, c := constrainedSampler(t, off(), func(int32) bool { return true })
	if _, err := s.Next(gaussian(n, 1), new(Buffer)); err != nil || c.asked != 1 {
		t.Errorf("asked about %d tokens where the first is allowed, %v", c.asked, err)
	}
}

// TestConstrainedDrawIsFair compares how often each token comes with its share of
// the allowed weight, whether few or many are drawn in vain.
func TestConstrainedDrawIsFair(t *testing.T) {
	const rounds = 12000
	for name, c := range map[string]struct {
		n       int
		allowed func(int32) bool
	}{
		"some of few": {12, func(id int32) bool { return id%3 == 0 }},
		"one in many": {600, func(id int32) bool { return id%97 == 5 }},
	} {
		base := gaussian(c.n, 11)
		p := off()
		p.Temperature = 2
		total := 0.0
		weight := func(id int) float64 { return math.Exp(float64(base[id]) / 2) }
		for i := range base {
			if c.allowed(int32(i)) {
				total += weight(i)
			}
		}
		counts, buf := make([]int, c.n), new(Buffer)
		for seed := range uint64(rounds) {
			p.Seed = seed
			s, _ := constrainedSampler(t, p, c.allowed)
			got, err := s.Next(slices.Clone(base), buf)
			if err != nil {
				t.Fatal(err)
			}
			counts[got.ID]++
		}
		for i := range base {
			want := 0.0
			if c.allowed(int32(i)) {
				want = weight(i) / total * rounds
			}
			if d := math.Abs(float64(counts[i]) - want); d > 5*math.Sqrt(want)+1 {
				t.Errorf("%s: token %d came %d times, want about %.0f", name, i, counts[i], want)
			}
		}
	}
}

// TestConstrainedBehindLimits: where top_k leaves nothing that is allowed, the draw
// is among what is allowed.
func TestConstrainedBehindLimits(t *testing.T) {
	p := off()
	p.Temperature, p.TopK, p.TopP = 1, 2, 0.9
	for seed := range uint64(50) {
		p.Seed = seed
		s, _ := constrainedSampler(t, p, func(id int32) bool { return id >= 3 })
		got, err := s.Next([]float32{9, 8, 7, 1, 0.5, -30}, new(Buffer))
		if err != nil || got.ID != 3 && got.ID != 4 {
			t.Fatalf("%d, %v; want 3 or 4", got.ID, err)
		}
	}
}

func TestConstraintAllowsNothing(t *testing.T) {
	for _, temperature := range []float64{0, 1} {
		p := off()
		p.Temperature = temperature
		s, _ := constrainedSampler(t, p, func(int32) bool { return false })
		if _, err := s.Next(gaussian(100, 1), new(Buffer)); !errors.Is(err, ErrStuck) {
			t.Errorf("temperature %g: %v, want ErrStuck", temperature, err)
		}
	}
}

// TestConstrainedResume: told of what was accepted, another sampler goes on alike;
// tokens that the constraint would not have let through are refused.
func TestConstrainedResume(t *testing.T) {
	p := off()
	p.Temperature, p.TopLogprobs, p.Seed = 1.3, 2, 5
	allowed := func(id int32) bool { return id%5 != 0 }
	whole, _ := constrainedSampler(t, p, allowed)
	var picks []Pick
	var ids []int32
	for i := range 30 {
		pick, err := whole.Next(gaussian(60, uint64(i)), new(Buffer))
		if err != nil {
			t.Fatal(err)
		}
		picks, ids = append(picks, pick), append(ids, pick.ID)
	}
	for _, at := range []int{0, 1, 29} {
		s, c := New(p), &onlySome{t: t, allowed: allowed}
		s.Observe(ids[:at]...)
		if err := s.Constrain(c, ids[:at]); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(c.accepted, ids[:at]) {
			t.Errorf("the constraint was told of %v, want %v", c.accepted, ids[:at])
		}
		for i := at; i < 30; i++ {
			pick, err := s.Next(gaussian(60, uint64(i)), new(Buffer))
			if err != nil || pick.ID != picks[i].ID || pick.Logprob != picks[i].Logprob {
				t.Fatalf("resumed at %d, token %d is %+v, %v; want %+v", at, i, pick, err, picks[i])
			}
		}
	}
	if err := New(p).Constrain(&onlySome{t: t, allowed: allowed}, []int32{1, 5}); !errors.Is(err, ErrOutside) {
		t.Errorf("a token that is not allowed: %v, want ErrOutside", err)
	}
}
