package sampling

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvmesh/kvmesh/worker"
)

// off has everything switched off: greedy, no log-probabilities.
func off() worker.Params { return worker.Params{TopP: 1, TopLogprobs: -1} }

// uniform is the first number of a step.
func uniform(seed uint64, choice int, offset uint64) float64 {
	return newNumbers(seed, choice, offset).next()
}

// gaussian makes logits that look like a model's: a wide bulk, some of it equal.
func gaussian(n int, seed uint64) []float32 {
	r := rand.New(rand.NewPCG(seed, 7))
	out := make([]float32, n)
	for i := range out {
		out[i] = float32(math.Round(r.NormFloat64()*40) / 10)
	}
	return out
}

// naive is the textbook: sort, cut, renormalize, and walk in order of ids.
func naive(logits []float32, p worker.Params, u float64) int32 {
	type tok struct {
		id int32
		w  float64
	}
	var all []tok
	best := slices.Max(logits)
	for i, l := range logits {
		all = append(all, tok{int32(i), exp(float64(l-best) / p.Temperature)})
	}
	all = slices.DeleteFunc(all, func(t tok) bool { return t.w < p.MinP })
	slices.SortFunc(all, func(a, b tok) int {
		if a.w != b.w {
			if a.w > b.w {
				return -1
			}
			return 1
		}
		return int(a.id - b.id)
	})
	if p.TopK > 0 && p.TopK < len(all) {
		all = all[:p.TopK]
	}
	total := 0.0
	for _, t := range all {
		total += t.w
	}
	sum := 0.0
	for i, t := range all {
		if sum += t.w; sum >= p.TopP*total {
			all = all[:i+1]
			break
		}
	}
	slices.SortFunc(all, func(a, b tok) int { return int(a.id - b.id) })
	total = 0
	for _, t := range all {
		total += t.w
	}
	left := u * total
	for _, t := range all {
		if left -= t.w; left < 0 {
			return t.id
		}
	}
	return all[len(all)-1].id
}

func TestDrawsLikeTheTextbook(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 3))
	var buf Buffer
	pick := func(vs ...float64) float64 { return vs[r.IntN(len(vs))] }
	for i := range 3000 {
		p := off()
		p.Temperature = pick(0.1, 0.7, 1, 1.3, 2)
		p.TopP = pick(1, 1, 0.95, 0.5, 0.1, 0.001)
		p.TopK = int(pick(0, 0, 1, 2, 17, 100, 10000))
		p.MinP = pick(0, 0, 0.02, 0.3, 1)
		p.Seed, p.Choice = r.Uint64(), r.IntN(3)
		logits := gaussian(1+r.IntN(400), uint64(i))
		want := naive(logits, p, uniform(p.Seed, p.Choice, 0))
		got, err := New(p).Next(logits, &buf)
		if err != nil || got.ID != want {
			t.Fatalf("case %d, %+v over %d tokens: %d, %v; want %d", i, p, len(logits), got.ID, err, want)
		}
	}
}

func TestExp(t *testing.T) {
	for x := 0.0; x > -700; x -= 0.0137 {
		if got, want := exp(x), math.Exp(x); math.Abs(got-want) > 2e-7*want {
			t.Fatalf("exp(%v) = %v, want %v", x, got, want)
		}
	}
	if got := exp(-1e9); got != 0 {
		t.Errorf("exp(-1e9) = %v, want 0", got)
	}
}

func TestFrequenciesFollowTheSoftmax(t *testing.T) {
	logits := []float32{2, 1, 0, -1, float32(math.Inf(-1)), 1}
	const n, temperature = 40000, 0.8
	total, counts := 0.0, make([]int, len(logits))
	for _, l := range logits {
		total += math.Exp(float64(l) / temperature)
	}
	p := off()
	p.Temperature, p.Seed = temperature, 11
	s := New(p)
	var buf Buffer
	for range n {
		got, err := s.Next(logits, &buf)
		if err != nil {
			t.Fatal(err)
		}
		counts[got.ID]++
	}
	for i, l := range logits {
		want := n * math.Exp(float64(l)/temperature) / total
		if dev := math.Abs(float64(counts[i]) - want); dev > 4*math.Sqrt(want)+1e-9 { // four standard deviations
			t.Errorf("token %d came %d times, want about %.0f", i, counts[i], want)
		}
	}
}

func TestGreedy(t *testing.T) {
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	for name, c := range map[string]struct {
		logits []float32
		want   int32
	}{
		"largest":        {[]float32{1, 3, 2}, 1},
		"first of equal": {[]float32{1, 3, 3}, 1},
		"past NaN":       {[]float32{nan, 1, nan, 2}, 3},
		"infinite":       {[]float32{1, inf, 2}, 1},
		"one":            {[]float32{-5}, 0},
	} {
		for _, temperature := range []float64{0, 1e-300} {
			p := off()
			p.Temperature = temperature
			got, err := New(p).Next(slices.Clone(c.logits), new(Buffer))
			if temperature > 0 && name == "first of equal" {
				continue // either may be drawn
			}
			if err != nil || got.ID != c.want {
				t.Errorf("%s at temperature %g: %d, %v; want %d", name, temperature, got.ID, err, c.want)
			}
		}
	}
	for name, logits := range map[string][]float32{"none": nil, "all NaN": {nan, nan}, "all impossible": {-inf, -inf}} {
		p := off()
		p.Temperature, p.TopLogprobs = 1, 2
		if _, err := New(p).Next(logits, new(Buffer)); !errors.Is(err, ErrNoLogits) {
			t.Errorf("%s: %v, want ErrNoLogits", name, err)
		}
	}
}

func TestPenaltiesCountWhatWasGenerated(t *testing.T) {
	base := []float32{5, 4.4, 4, 0}
	for name, c := range map[string]struct {
		presence, frequency float64
		want                []int32
	}{
		"none":      {0, 0, []int32{0, 0, 0, 0, 0, 0}},
		"presence":  {0.8, 0, []int32{0, 1, 0, 0, 0, 0}}, // 4.2 > 3.6: a token that came is not punished again
		"frequency": {0, 0.5, []int32{0, 0, 1, 0, 2, 1}},
		"reward":    {0, -0.5, []int32{0, 0, 0, 0, 0, 0}},
	} {
		p := off()
		p.Presence, p.Frequency = c.presence, c.frequency
		s := New(p)
		var got []int32
		for range c.want {
			pick, err := s.Next(slices.Clone(base), new(Buffer))
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, pick.ID)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

// TestRepetitionPenalty: every token of prompt and answer is divided once, however
// often it came; one with a negative logit gets further below.
func TestRepetitionPenalty(t *testing.T) {
	p := off()
	p.Repetition = 2
	s := New(p)
	s.Prompt([]int32{0, 0, 7})
	base := []float32{8, 5, 4.5, -1, -1.5} // 0 counts as 4 from the start
	var got []int32
	for range 3 {
		pick, err := s.Next(slices.Clone(base), new(Buffer))
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, pick.ID)
	}
	if want := []int32{1, 2, 0}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	s = New(p)
	s.Prompt([]int32{0})
	if pick, err := s.Next([]float32{-1, -1.5}, new(Buffer)); err != nil || pick.ID != 1 {
		t.Errorf("%d, %v; want 1: a penalized negative logit gets lower", pick.ID, err)
	}
}

func TestLogitBias(t *testing.T) {
	p := off()
	p.LogitBias = map[int32]float64{2: 100, 0: -100, 99: 5, -1: 5}
	if got, err := New(p).Next([]float32{9, 5, 0}, new(Buffer)); err != nil || got.ID != 2 {
		t.Errorf("biased: %d, %v; want 2", got.ID, err)
	}
	p.LogitBias = map[int32]float64{0: -100}
	if got, err := New(p).Next([]float32{9, 5, 0}, new(Buffer)); err != nil || got.ID != 1 {
		t.Errorf("banned: %d, %v; want 1", got.ID, err)
	}
}

// TestResume shows that a sampler told of the tokens so far goes on as the one
// that chose them.
func TestResume(t *testing.T) {
	p := off()
	p.Temperature, p.TopP, p.Presence, p.Frequency, p.Repetition, p.Seed = 1.2, 0.9, 0.5, 0.3, 1.3, 99
	var buf Buffer
	whole := New(p)
	var ids []int32
	for i := range 40 {
		pick, err := whole.Next(gaussian(50, uint64(i)), &buf)
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, pick.ID)
	}
	for _, at := range []int{0, 1, 17, 39} {
		s := New(p)
		s.Observe(ids[:at]...)
		for i := at; i < 40; i++ {
			pick, err := s.Next(gaussian(50, uint64(i)), new(Buffer))
			if err != nil || pick.ID != ids[i] {
				t.Fatalf("resumed at %d, token %d is %d, %v; want %d", at, i, pick.ID, err, ids[i])
			}
		}
	}
}

func TestLogprobsAreTheModels(t *testing.T) {
	logits := []float32{1, 3, 2, 3, -40}
	sum := 0.0
	for _, l := range logits {
		sum += math.Exp(float64(l))
	}
	want := func(id int32) float64 { return float64(logits[id]) - math.Log(sum) }
	p := off()
	p.TopLogprobs, p.Temperature = 3, 0
	p.LogitBias = map[int32]float64{4: 100} // chooses 4, changes no reported number
	pick, err := New(p).Next(slices.Clone(logits), new(Buffer))
	if err != nil {
		t.Fatal(err)
	}
	if pick.ID != 4 || math.Abs(pick.Logprob-want(4)) > 1e-5 {
		t.Errorf("chose %d at %g, want 4 at %g", pick.ID, pick.Logprob, want(4))
	}
	for i, id := range []int32{1, 3, 2} {
		if a := pick.Top[i]; a.ID != id || math.Abs(a.Logprob-want(id)) > 1e-5 {
			t.Errorf("alternative %d is %+v, want %d at %g", i, a, id, want(id))
		}
	}
	p.TopLogprobs = 99
	if pick, err := New(p).Next(slices.Clone(logits), new(Buffer)); err != nil || len(pick.Top) != 5 {
		t.Errorf("asked for 99 of 5: %d alternatives, %v", len(pick.Top), err)
	}
}

// TestUniform pins the generator: streams that began on one release must go on
// the same on the next.
func TestUniform(t *testing.T) {
	seen := make(map[float64]bool)
	for seed := range uint64(20) {
		for choice := range 5 {
			for offset := range uint64(20) {
				u := uniform(seed, choice, offset)
				if u < 0 || u >= 1 || seen[u] {
					t.Fatalf("uniform(%d,%d,%d) = %v: outside [0,1) or seen before", seed, choice, offset, u)
				}
				seen[u] = true
			}
		}
	}
	for _, c := range []struct {
		seed   uint64
		choice int
		offset uint64
		want   float64
	}{{0, 0, 0, 0.45219306300127404}, {42, 1, 1000, 0.8576596973309251}, {math.MaxUint64, 127, 1 << 40, 0.7568589196887305}} {
		if got := uniform(c.seed, c.choice, c.offset); got != c.want {
			t.Errorf("uniform(%d,%d,%d) = %v, want %v", c.seed, c.choice, c.offset, got, c.want)
		}
	}
}

func FuzzNext(f *testing.F) {
	f.Add(uint64(1), 0.7, 0.9, 40, 0.05, uint16(300))
	f.Add(uint64(2), 2.0, 0.0, 0, 1.0, uint16(1))
	f.Fuzz(func(t *testing.T, seed uint64, temperature, topP float64, topK int, minP float64, n uint16) {
		if !(temperature >= 0 && temperature <= 2 && topP >= 0 && topP <= 1 && minP >= 0 && minP <= 1) || n == 0 {
			t.Skip()
		}
		p := worker.Params{Temperature: temperature, TopP: topP, TopK: topK, MinP: minP, Seed: seed, TopLogprobs: 2}
		logits := gaussian(int(n), seed)
		pick, err := New(p).Next(slices.Clone(logits), new(Buffer))
		if err != nil {
			t.Fatal(err)
		}
		if pick.ID < 0 || int(pick.ID) >= len(logits) {
			t.Fatalf("chose %d of %d", pick.ID, len(logits))
		}
		if greedy := topK == 1 || topP == 0 || temperature == 0; greedy && logits[pick.ID] != slices.Max(logits) {
			t.Fatalf("chose %g, the largest is %g", logits[pick.ID], slices.Max(logits))
		}
	})
}

func BenchmarkNext(b *testing.B) {
	const vocabulary = 262144
	for name, p := range map[string]worker.Params{
		"greedy":          {TopP: 1, TopLogprobs: -1},
		"temperature":     {Temperature: 1, TopP: 1, TopLogprobs: -1},
		"top_p":           {Temperature: 0.7, TopP: 0.95, TopLogprobs: -1},
		"top_k_top_p":     {Temperature: 0.7, TopP: 0.95, TopK: 40, TopLogprobs: -1},
		"min_p":           {Temperature: 0.7, TopP: 1, MinP: 0.05, TopLogprobs: -1},
		"greedy_logprobs": {TopP: 1, TopLogprobs: 5},
	} {
		b.Run(name, func(b *testing.B) {
			logits := gaussian(vocabulary, 1)
			s := New(p)
			var buf Buffer
			for b.Loop() {
				if _, err := s.Next(logits, &buf); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
