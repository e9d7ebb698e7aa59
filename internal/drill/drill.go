// Package drill judges an answer that something happened to: it holds the tokens of a
// disturbed run against those of an undisturbed one.
package drill

// Verdict is what became of an answer's tokens.
type Verdict struct {
	// Equal says that all tokens are those of the undisturbed run.
	Equal bool `json:"equal"`
	// Lost and Repeated count tokens at the place where the answer moved.
	Lost     int `json:"tokens_lost"`
	Repeated int `json:"tokens_repeated"`
	// DivergedAt is the number of tokens that are equal before the answer goes another
	// way, which a replay may do at a near-tie of two tokens; -1 where it does not.
	DivergedAt int `json:"diverged_at"`
	// Missing is how many tokens the answer is short of the undisturbed one when it
	// ended early; 0 where it did not.
	Missing int `json:"tokens_missing"`
}

// proof is how many tokens in a row must agree for a shift to count as one: fewer
// agree by chance, as in a text that repeats itself.
const proof = 8

// Judge compares the tokens of a disturbed answer with those of an undisturbed one.
// cut is how many tokens had come when the answer moved.
func Judge(want, got []string, cut int) Verdict {
	v := Verdict{DivergedAt: -1}
	same := prefix(want, got)
	if same == len(want) && same == len(got) {
		v.Equal = true
		return v
	}
	if same == len(got) { // right as far as it came
		v.Missing = len(want) - len(got)
		return v
	}
	cut = min(cut, len(got))
	if same >= cut {
		after := got[cut:]
		for shift := 1; shift <= max(cut, len(want)-cut); shift++ {
			if fits(want, after, cut+shift) {
				v.Lost = shift
				return v
			}
			if fits(want, after, cut-shift) {
				v.Repeated = shift
				return v
			}
		}
	}
	v.DivergedAt = same
	return v
}

// fits reports whether after is what want has from the token at on.
func fits(want, after []string, at int) bool {
	if at < 0 || at >= len(want) {
		return false
	}
	n := prefix(want[at:], after)
	return n >= proof || n == len(after) && n > 0 && n == len(want)-at
}

// prefix is the length of what a and b have in common at their beginning.
func prefix(a, b []string) int {
	n := 0
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return n
}
