package kvtest

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/kvmesh/kvmesh/kvcache"
)

// spec makes the description of a tail at position 64.
func spec(space kvcache.Space, stream string, choice, attempt int) kvcache.TailSpec {
	return kvcache.TailSpec{Space: space, Stream: stream, Choice: choice, Attempt: attempt, Parent: space.Root, First: 64}
}

// rangeAt makes the range of n tokens at a position of a stream. What it holds
// follows from where it is and from the attempt, so that whoever reads it can
// tell.
func rangeAt(stream string, attempt, first, n int) kvcache.Range {
	key := kvcache.Root(stream, []byte{byte(attempt), byte(first), byte(first >> 8), byte(n)})
	return kvcache.Range{First: first, IDs: tokens(uint64(first), n), Data: content(key, 0, 100*n+n%7+1)}
}

// checkTail fails the test unless a tail is what appends of ranges of n tokens
// leave behind: whole ranges from the beginning on.
func checkTail(t testing.TB, tail kvcache.Tail, n int) {
	t.Helper()
	next := tail.First
	for _, r := range tail.Ranges {
		want := rangeAt(tail.Stream, tail.Attempt, next, n)
		if r.First != next || !slices.Equal(r.IDs, want.IDs) || !bytes.Equal(r.Data, want.Data) {
			t.Fatalf("range at %d of attempt %d is not as it was appended", next, tail.Attempt)
		}
		next += n
	}
}

// openTail opens a tail until the test ends.
func openTail(t testing.TB, ts kvcache.Tails, spec kvcache.TailSpec) kvcache.TailWriter {
	t.Helper()
	w, err := ts.OpenTail(context.Background(), spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	return w
}

// run is the ranges of n tokens each from one position to another.
type run struct{ from, to, n int }

// appendRanges appends a run to a tail.
func appendRanges(t testing.TB, w kvcache.TailWriter, spec kvcache.TailSpec, r run) {
	t.Helper()
	for at := r.from; at < r.to; at += r.n {
		if err := w.Append(rangeAt(spec.Stream, spec.Attempt, at, r.n)); err != nil {
			t.Fatalf("append at %d: %v", at, err)
		}
	}
}

// readTail reads the tails of a choice.
func readTail(t testing.TB, ts kvcache.Tails, spec kvcache.TailSpec) []kvcache.Tail {
	t.Helper()
	tails, err := ts.ReadTail(context.Background(), spec.Space, spec.Stream, spec.Choice)
	if err != nil {
		t.Fatal(err)
	}
	return tails
}

func testTail(t *testing.T, h Harness) {
	s := h.fresh(t)
	ts := tails(t, s)
	sp := spec(kvcache.NewSpace("model", nil), "stream", 0, 1)
	if got := readTail(t, ts, sp); len(got) != 0 {
		t.Errorf("%d tails before the first", len(got))
	}
	w := openTail(t, ts, sp)
	if got := readTail(t, ts, sp); len(got) != 1 || len(got[0].Ranges) != 0 || got[0].TailSpec != sp {
		t.Errorf("a new tail reads as %+v", got)
	}
	for at := 64; at < 80; at++ {
		appendRanges(t, w, sp, run{at, at + 1, 1})
		got := readTail(t, ts, sp) // while its writer is at work
		if len(got) != 1 || len(got[0].IDs()) != at-63 {
			t.Fatalf("after position %d: %+v", at, got)
		}
		checkTail(t, got[0], 1)
	}
	for _, r := range []kvcache.Range{
		rangeAt("stream", 1, 79, 1), rangeAt("stream", 1, 81, 1), rangeAt("stream", 1, 0, 1),
	} {
		if err := w.Append(r); !errors.Is(err, kvcache.ErrGap) {
			t.Errorf("append at %d behind 79: %v", r.First, err)
		}
	}
	for name, r := range map[string]kvcache.Range{
		"no tokens":   {First: 80, Data: []byte{1}},
		"many tokens": {First: 80, Data: []byte{1}, IDs: make([]int32, 513)},
		"no bytes":    {First: 80, IDs: []int32{1}},
		"codec":       {First: 80, IDs: []int32{1}, Data: []byte{1}, Codec: kvcache.CodecInt4},
	} {
		if err := w.Append(r); err == nil {
			t.Errorf("a range with %s was appended", name)
		}
	}
	appendRanges(t, w, sp, run{80, 81, 1}) // none of it did harm
	// The bytes are the reader's: they outlive everything.
	kept := readTail(t, ts, sp)[0]
	checkTail(t, kept, 1)
	rotated := sp
	rotated.Parent, rotated.First = sp.Space.Key(sp.Root, []int32{1}), 128
	if err := w.Rotate(rotated.Parent, rotated.First); err != nil {
		t.Fatal(err)
	}
	got := readTail(t, ts, sp)
	if len(got) != 1 || got[0].TailSpec != rotated || len(got[0].Ranges) != 0 {
		t.Errorf("after rotation: %+v", got)
	}
	appendRanges(t, w, rotated, run{128, 128 + 512, 512})
	got = readTail(t, ts, sp)
	checkTail(t, got[0], 512)
	for range 2 {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	}
	if err := w.Append(rangeAt("stream", 1, 640, 1)); !errors.Is(err, kvcache.ErrClosed) {
		t.Errorf("append after close: %v", err)
	}
	if got := readTail(t, ts, sp); len(got) != 1 || len(got[0].Ranges) != 1 {
		t.Errorf("after close: %+v", got)
	}
	checkTail(t, kept, 1)
	if st, ok := stats(s); ok && (st.Appends != 18 || st.AppendBytes == 0) {
		t.Errorf("counted %+v", st)
	}
}

func testTailAttempts(t *testing.T, h Harness) {
	s := h.fresh(t)
	ts := tails(t, s)
	space := kvcache.NewSpace("model", nil)
	first, second := spec(space, "stream", 0, 1), spec(space, "stream", 0, 2)
	w1 := openTail(t, ts, first)
	appendRanges(t, w1, first, run{64, 70, 1})
	w2 := openTail(t, ts, second)
	// The one that was overtaken.
	if err := w1.Append(rangeAt("stream", 1, 70, 1)); !errors.Is(err, kvcache.ErrStale) {
		t.Errorf("append by a lower attempt: %v", err)
	}
	if err := w1.Rotate(space.Root, 128); !errors.Is(err, kvcache.ErrStale) {
		t.Errorf("rotation by a lower attempt: %v", err)
	}
	if _, err := ts.OpenTail(context.Background(), first); !errors.Is(err, kvcache.ErrStale) {
		t.Errorf("opening a lower attempt: %v", err)
	}
	// The attempt is the stream's: it goes for other choices too.
	if _, err := ts.OpenTail(context.Background(), spec(space, "stream", 3, 1)); !errors.Is(err, kvcache.ErrStale) {
		t.Errorf("opening a lower attempt at another choice: %v", err)
	}
	if st, ok := stats(s); ok && st.Stale != 4 {
		t.Errorf("%d stale writes counted, want 4", st.Stale)
	}
	// What it had written is still good, until the successor has its own.
	got := readTail(t, ts, first)
	if len(got) != 2 || got[0].Attempt != 2 || len(got[0].Ranges) != 0 || got[1].Attempt != 1 || len(got[1].Ranges) != 6 {
		t.Fatalf("two attempts read as %+v", got)
	}
	checkTail(t, got[1], 1)
	appendRanges(t, w2, second, run{64, 66, 2})
	third := openTail(t, ts, second) // the same attempt again, from anew
	appendRanges(t, third, second, run{64, 72, 4})
	appendRanges(t, w2, second, run{66, 70, 2})
	got = readTail(t, ts, first)
	if len(got) != 3 || len(got[0].Ranges) != 2 || len(got[1].Ranges) != 3 || len(got[2].Ranges) != 6 {
		t.Fatalf("three tails read as %+v", got)
	}
	checkTail(t, got[0], 4)
	checkTail(t, got[1], 2)
	if err := third.Rotate(space.Root, 128); err != nil {
		t.Fatal(err)
	}
	if got = readTail(t, ts, first); len(got) != 1 || got[0].First != 128 {
		t.Errorf("after rotation: %+v", got)
	}
	// Choices do not disturb each other.
	other := spec(space, "stream", 1, 2)
	w := openTail(t, ts, other)
	appendRanges(t, w, other, run{64, 65, 1})
	if err := w.Rotate(space.Root, 65); err != nil {
		t.Fatal(err)
	}
	if got = readTail(t, ts, first); len(got) != 1 || got[0].First != 128 {
		t.Errorf("after the rotation of another choice: %+v", got)
	}
}

func testTailDrop(t *testing.T, h Harness) {
	s := h.fresh(t)
	ts := tails(t, s)
	space := kvcache.NewSpace("model", nil)
	one, two, other := spec(space, "stream", 0, 1), spec(space, "stream", 1, 1), spec(space, "stream 2", 0, 1)
	w := openTail(t, ts, one)
	for _, sp := range []kvcache.TailSpec{two, other} {
		appendRanges(t, openTail(t, ts, sp), sp, run{64, 66, 1})
	}
	for range 2 { // the second time there is nothing left
		if err := ts.DropTail(context.Background(), space, "stream"); err != nil {
			t.Fatal(err)
		}
	}
	if len(readTail(t, ts, one))+len(readTail(t, ts, two)) != 0 {
		t.Error("a dropped stream can be read")
	}
	if got := readTail(t, ts, other); len(got) != 1 || len(got[0].Ranges) != 2 {
		t.Errorf("another stream reads as %+v", got)
	}
	if err := w.Append(rangeAt("stream", 1, 64, 1)); !errors.Is(err, kvcache.ErrStale) {
		t.Errorf("append to a dropped tail: %v", err)
	}
	if err := w.Rotate(space.Root, 64); !errors.Is(err, kvcache.ErrStale) {
		t.Errorf("rotation of a dropped tail: %v", err)
	}
	// A model's end is that of its tails.
	w = openTail(t, ts, other)
	if err := s.Drop(context.Background(), space.Fingerprint); err != nil {
		t.Fatal(err)
	}
	if err := w.Append(rangeAt("stream 2", 1, 64, 1)); !errors.Is(err, kvcache.ErrStale) {
		t.Errorf("append to a tail of a dropped model: %v", err)
	}
	if got := readTail(t, ts, other); len(got) != 0 {
		t.Errorf("a tail of a dropped model reads as %+v", got)
	}
	// Everything may begin anew.
	w = openTail(t, ts, one)
	appendRanges(t, w, one, run{64, 65, 1})
	if got := readTail(t, ts, one); len(got) != 1 || len(got[0].Ranges) != 1 {
		t.Errorf("a stream that came back reads as %+v", got)
	}
}

func testTailSpaces(t *testing.T, h Harness) {
	s := h.fresh(t)
	ts := tails(t, s)
	sp := spec(kvcache.NewSpace("model", []byte("a")), "stream", 0, 1)
	appendRanges(t, openTail(t, ts, sp), sp, run{64, 66, 1})
	for _, space := range []kvcache.Space{kvcache.NewSpace("model", nil), kvcache.NewSpace("model", []byte("b")), kvcache.NewSpace("model 2", []byte("a"))} {
		wrong := sp
		wrong.Space = space
		if got := readTail(t, ts, wrong); len(got) != 0 {
			t.Error("a tail was read with another's salt or model")
		}
	}
	for _, stream := range []string{"", "strea", "stream/", "../stream", "x\x00"} {
		wrong := sp
		wrong.Stream = stream
		if got := readTail(t, ts, wrong); len(got) != 0 {
			t.Errorf("stream %q reads another's tail", stream)
		}
	}
	if got := readTail(t, ts, sp); len(got) != 1 || len(got[0].Ranges) != 2 {
		t.Errorf("the tail itself reads as %+v", got)
	}
	for _, bad := range []kvcache.TailSpec{
		spec(sp.Space, "", 0, 1), spec(sp.Space, "s", -1, 1), spec(sp.Space, "s", 0, -1), {Space: sp.Space, Stream: "s", First: -1},
	} {
		if w, err := ts.OpenTail(context.Background(), bad); err == nil {
			w.Close()
			t.Errorf("opened %+v", bad)
		}
	}
	// Any text is a stream's id.
	for _, stream := range []string{"../../x", "a/b", string(make([]byte, 5000))} {
		odd := spec(sp.Space, stream, 0, 0)
		appendRanges(t, openTail(t, ts, odd), odd, run{64, 65, 1})
		if got := readTail(t, ts, odd); len(got) != 1 || len(got[0].Ranges) != 1 {
			t.Errorf("stream %.10q reads as %+v", stream, got)
		}
	}
}

// testTailPins: while a tail lives, the blocks before it stay, and a full store
// says so rather than lose them.
func testTailPins(t *testing.T, h Harness) {
	s := h.open(t, newDir(t), h.Limit)
	ts := tails(t, s)
	space := kvcache.NewSpace("model", nil)
	size := int(h.Limit / 40)
	frames := chain(space, tokens(1, 16*4), 16, size)
	put(t, s, frames...)
	sp := spec(space, "stream", 0, 1)
	sp.Parent = frames[3].Key
	w := openTail(t, ts, sp)
	appendRanges(t, w, sp, run{64, 66, 1})
	for seed := range uint64(20) {
		put(t, s, chain(space, tokens(100+seed, 16*8), 16, size)...)
	}
	for i, f := range frames {
		if !has(t, s, f.Ref) {
			t.Errorf("block %d before a live tail was evicted", i)
		}
	}
	// Fill the store with the tail alone.
	big := kvcache.Range{First: 66, IDs: []int32{1}, Data: make([]byte, size)}
	full := false
	for range 100 {
		if err := w.Append(big); errors.Is(err, kvcache.ErrFull) {
			full = true
			break
		} else if err != nil {
			t.Fatal(err)
		}
		big.First++
	}
	if !full {
		t.Error("a tail grows without limit")
	}
	if st, ok := stats(s); ok && (st.Used > st.Limit || st.Full == 0) {
		t.Errorf("counted %+v", st)
	}
	got := readTail(t, ts, sp)
	if len(got) != 1 || len(got[0].IDs()) != big.First-64 {
		t.Errorf("the tail lost ranges when it found no room")
	}
	if err := ts.DropTail(context.Background(), space, "stream"); err != nil {
		t.Fatal(err)
	}
	put(t, s, chain(space, tokens(200, 16*8), 16, size)...)
}

func testTailAllocates(t *testing.T, h Harness) {
	s := h.fresh(t)
	sp := spec(kvcache.NewSpace("model", nil), "stream", 0, 1)
	w := openTail(t, tails(t, s), sp)
	r := kvcache.Range{First: 64, IDs: []int32{1}, Data: make([]byte, 18_432)}
	n := testing.AllocsPerRun(200, func() {
		if err := w.Append(r); err != nil {
			t.Fatal(err)
		}
		r.First++
	})
	if n > h.AppendAllocates {
		t.Errorf("an append allocates %v times", n)
	}
}
