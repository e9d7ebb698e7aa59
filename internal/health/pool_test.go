package health_test

import (
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/health"
)

// letters makes a pool: one letter per worker, in order of its last sign of life.
// h healthy at half load, b in its blackout, s silent, f failed, d draining, n
// registered without report.
func letters(spec string) []health.Verdict {
	var out []health.Verdict
	for _, l := range spec {
		in := fine()
		switch l {
		case 'b':
			in.Since = t0
		case 's':
			in.Report.At = t0.Add(-time.Minute)
		case 'f':
			in.Failed = "broken"
		case 'd':
			in.Draining = true
		case 'n':
			in.Report = health.Report{}
		}
		out = append(out, health.Assess(t0, usual(), in, health.Verdict{}))
	}
	return out
}

// takes writes which workers take traffic: + or -.
func takes(vs []health.Verdict) string {
	var b strings.Builder
	for _, v := range vs {
		if v.Status.Takes() {
			b.WriteByte('+')
		} else {
			b.WriteByte('-')
		}
	}
	return b.String()
}

func TestMinimumShare(t *testing.T) {
	for _, c := range []struct{ pool, want string }{
		{"hhh", "+++"},
		{"hss", "+--"}, // one of three is 30 %
		{"sss", "+--"}, // the one heard last comes back
		{"hsssss", "++----"},
		{"ssssssssss", "+++-------"}, // exactly 30 % of ten, not 40
		{"fss", "-+-"},               // the dead never come back
		{"fff", "---"},
		{"ddd", "---"},
		{"dds", "--+"}, // draining workers are no members
		{"n", "+"},     // says it is ready: better than nobody
		{"fn", "-+"},
		{"hn", "+-"},
		{"", ""},
	} {
		vs := letters(c.pool)
		health.Pool(usual(), vs)
		if got := takes(vs); got != c.want {
			t.Errorf("%s: %s, want %s", c.pool, got, c.want)
		}
		for i, v := range vs {
			if c.pool[i] == 's' && v.Status.Takes() && (v.Weight != health.MinWeight || !strings.Contains(v.Reason, "minimum share")) {
				t.Errorf("%s: the silent one came back as %+v", c.pool, v)
			}
		}
	}
}

// Thirty workers at 10 % need three, whatever 0.1 × 30 is in binary.
func TestMinimumShareIsExact(t *testing.T) {
	c := usual()
	c.MinShare = 0.1
	vs := letters(strings.Repeat("s", 30))
	health.Pool(c, vs)
	if got := strings.Count(takes(vs), "+"); got != 3 {
		t.Errorf("%d came back, want 3", got)
	}
	c.MinShare = 0
	vs = letters("sss")
	health.Pool(c, vs)
	if got := takes(vs); got != "---" {
		t.Errorf("share 0: %s", got)
	}
}

// A worker without data gets the mean of those that have some.
func TestMissingWeights(t *testing.T) {
	for _, c := range []struct {
		pool string
		want uint32 // of the first worker
	}{
		{"bhh", 200},
		{"bsf", health.MaxWeight}, // nobody to compare with
		{"bdh", 200},              // draining ones do not count
	} {
		vs := letters(c.pool)
		health.Pool(usual(), vs)
		if vs[0].Weight != c.want {
			t.Errorf("%s: weight %d, want %d", c.pool, vs[0].Weight, c.want)
		}
	}
}
