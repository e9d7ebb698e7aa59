package kvcache

import (
	"cmp"
	"slices"
)

// SortTails puts tails of one choice that come from several stores into the order that
// Tails has: the highest attempt first, and in it, for nobody knows which is newer, the one
// that leads further. It sorts in place and returns its argument.
func SortTails(tails []Tail) []Tail {
	slices.SortStableFunc(tails, func(a, b Tail) int {
		return cmp.Or(cmp.Compare(b.Attempt, a.Attempt), cmp.Compare(b.End(), a.End()))
	})
	return tails
}

// End is the position behind the last token.
func (t Tail) End() int {
	if n := len(t.Ranges); n > 0 {
		return t.Ranges[n-1].First + len(t.Ranges[n-1].IDs)
	}
	return t.First
}
