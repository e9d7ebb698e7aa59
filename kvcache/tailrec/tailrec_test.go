package tailrec

import (
	"bytes"
	"errors"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvmesh/kvmesh/kvcache"
)

// record is a record at an offset, with what is before and behind it.
func record(at int64, mark uint64, r kvcache.Range) []byte {
	b := append(bytes.Repeat([]byte{0xaa}, int(at)), AppendHeader(nil, at, mark, r)...)
	return append(append(b, r.Data...), 0xbb)
}

func sample() kvcache.Range {
	return kvcache.Range{First: 70, IDs: []int32{1, -2, 3}, Data: []byte("the state of three tokens")}
}

// TestRoundTrip: at every offset, and the data begins where vector loads like it.
func TestRoundTrip(t *testing.T) {
	for at := range int64(130) {
		b := record(at, 9, sample())
		r, end, err := Parse(b, at, Want{Mark: 9, First: 70})
		if err != nil || end != int64(len(b))-1 {
			t.Fatalf("at %d: ends at %d of %d, %v", at, end, len(b), err)
		}
		if diff := cmp.Diff(sample(), r); diff != "" {
			t.Fatalf("at %d: %s", at, diff)
		}
		if (at+HeaderLen(at, 3))%dataAlign != 0 {
			t.Fatalf("at %d: the data is not aligned", at)
		}
	}
}

// TestEveryBit: a record with one bit flipped, or cut anywhere, is none.
func TestEveryBit(t *testing.T) {
	b := record(0, 9, sample())
	b = b[:len(b)-1]
	want := Want{Mark: 9, First: 70}
	for i := range 8 * len(b) {
		b[i/8] ^= 1 << (i % 8)
		if r, _, err := Parse(b, 0, want); err == nil {
			t.Fatalf("bit %d of byte %d can flip: %+v", i%8, i/8, r)
		}
		b[i/8] ^= 1 << (i % 8)
	}
	for n := range b {
		if _, _, err := Parse(b[:n], 0, want); !errors.Is(err, ErrEnd) {
			t.Fatalf("%d of %d bytes: %v", n, len(b), err)
		}
	}
}

// TestAnother: a record that is whole and not the one that is wanted ends the tail.
func TestAnother(t *testing.T) {
	b := record(64, 9, sample())
	for name, c := range map[string]struct {
		at   int64
		want Want
	}{
		"mark": {64, Want{8, 70}}, "position": {64, Want{9, 71}}, "offset": {65, Want{9, 70}},
		"behind the end": {int64(len(b)), Want{9, 70}}, "before the beginning": {-1, Want{9, 70}},
	} {
		if _, _, err := Parse(b, c.at, c.want); !errors.Is(err, ErrEnd) {
			t.Errorf("another %s: %v", name, err)
		}
	}
	// The offset decides how far the data is aligned.
	if _, _, err := Parse(slices.Clone(b[60:]), 4, Want{9, 70}); err == nil {
		t.Error("a record was read at another place")
	}
}

func TestCheck(t *testing.T) {
	if err := Check(sample()); err != nil {
		t.Error(err)
	}
	for name, change := range map[string]func(*kvcache.Range){
		"no tokens":   func(r *kvcache.Range) { r.IDs = nil },
		"many tokens": func(r *kvcache.Range) { r.IDs = make([]int32, MaxTokens+1) },
		"no data":     func(r *kvcache.Range) { r.Data = nil },
		"codec":       func(r *kvcache.Range) { r.Codec = kvcache.CodecInt8 },
	} {
		r := sample()
		change(&r)
		if err := Check(r); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

// FuzzParse feeds records, changed and invented: what is read is what was written.
func FuzzParse(f *testing.F) {
	b := record(8, 9, sample())
	f.Add(b, int64(8))
	f.Add(b[:100], int64(8))
	f.Add([]byte(Magic), int64(0))
	f.Fuzz(func(t *testing.T, b []byte, at int64) {
		r, end, err := Parse(b, at, Want{Mark: 9, First: 70})
		if err != nil {
			return
		}
		again := AppendHeader(nil, at, 9, r)
		if got := append(again, r.Data...); !bytes.Equal(got, b[at:end]) {
			t.Errorf("%x reads as %+v", b[at:end], r)
		}
	})
}
