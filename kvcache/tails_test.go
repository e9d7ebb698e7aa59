package kvcache_test

import (
	"testing"

	"github.com/kvmesh/kvmesh/kvcache"
)

func TestSortTails(t *testing.T) {
	tail := func(attempt, first, ranges int) kvcache.Tail {
		t := kvcache.Tail{TailSpec: kvcache.TailSpec{Attempt: attempt, First: first}}
		for range ranges {
			t.Ranges = append(t.Ranges, kvcache.Range{First: t.End(), IDs: []int32{1, 2}})
		}
		return t
	}
	got := kvcache.SortTails([]kvcache.Tail{tail(1, 64, 30), tail(2, 64, 1), tail(2, 128, 0), tail(1, 0, 2), tail(2, 64, 1)})
	for i, want := range []struct{ attempt, end int }{{2, 128}, {2, 66}, {2, 66}, {1, 124}, {1, 4}} {
		if got[i].Attempt != want.attempt || got[i].End() != want.end {
			t.Errorf("tail %d is attempt %d up to %d, want %+v", i, got[i].Attempt, got[i].End(), want)
		}
	}
}
