//go:build unix

package dirstore

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/tailrec"
)

// goldenTail is what testdata/tail-v1.hex holds.
func goldenTail() kvcache.Tail {
	space := kvcache.NewSpace("gemma/f16", []byte("tenant"))
	count := make([]byte, 121)
	for i := range count {
		count[i] = byte(i)
	}
	return kvcache.Tail{
		TailSpec: kvcache.TailSpec{
			Space: space, Stream: "stream 1", Choice: 2, Attempt: 3,
			Parent: space.Key(space.Root, []int32{1, 2, -3}), First: 67,
		},
		Ranges: []kvcache.Range{
			{First: 67, IDs: []int32{5}, Data: count[:100]},
			{First: 68, IDs: []int32{6, -7}, Data: count[100:]},
		},
	}
}

// readGolden reads the golden file. It was written by another program, from the
// description in the package comment.
func readGolden(t testing.TB) []byte {
	t.Helper()
	text, err := os.ReadFile("testdata/tail-v1.hex")
	if err != nil {
		t.Fatal(err)
	}
	b, err := hex.DecodeString(strings.Join(strings.Fields(string(text)), ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestGoldenTail(t *testing.T) {
	want, golden := readGolden(t), goldenTail()
	s := newStore(t, Config{})
	w, err := s.OpenTail(context.Background(), golden.TailSpec)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	for _, r := range golden.Ranges {
		if err := w.Append(r); err != nil {
			t.Fatal(err)
		}
	}
	name := streamDir(golden.Fingerprint, golden.Stream) + "/" + tailName(2, 3, 1)
	got, err := s.root.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("file:\n%swant:\n%s", hex.Dump(got), hex.Dump(want))
	}
	tail, end, err := parseTail(want, golden.TailSpec)
	if err != nil || end != io.EOF {
		t.Fatal(end, err)
	}
	if diff := cmp.Diff(golden, tail); diff != "" {
		t.Error(diff)
	}
}

// isPrefix says whether a tail is the beginning of another.
func isPrefix(part, whole kvcache.Tail) bool {
	return part.TailSpec == whole.TailSpec && len(part.Ranges) <= len(whole.Ranges) &&
		slices.EqualFunc(part.Ranges, whole.Ranges[:len(part.Ranges)], func(a, b kvcache.Range) bool {
			return a.First == b.First && a.Codec == b.Codec && slices.Equal(a.IDs, b.IDs) && bytes.Equal(a.Data, b.Data)
		})
}

// TestTailEveryBit flips each bit of a tail file: what is before the record that
// it is in stays, that record and what is behind it goes.
func TestTailEveryBit(t *testing.T) {
	b, golden := readGolden(t), goldenTail()
	second := bytes.LastIndex(b, []byte(tailrec.Magic))
	for i := range 8 * len(b) {
		b[i/8] ^= 1 << (i % 8)
		tail, end, err := parseTail(b, golden.TailSpec)
		b[i/8] ^= 1 << (i % 8)
		want := 0
		if i/8 >= second {
			want = 1
		}
		if i/8 < tailHeaderLen {
			if _, ok := errors.AsType[*kvcache.Refusal](err); !ok {
				t.Fatalf("bit %d of byte %d of the header can flip: %v", i%8, i/8, err)
			}
		} else if err != nil || end == io.EOF || len(tail.Ranges) != want || !isPrefix(tail, golden) {
			t.Fatalf("bit %d of byte %d: %d ranges, want %d, %v, %v", i%8, i/8, len(tail.Ranges), want, end, err)
		}
	}
}

// TestTailEveryLength cuts a tail file at each length, as a writer that dies
// could leave it.
func TestTailEveryLength(t *testing.T) {
	b, golden := readGolden(t), goldenTail()
	second := bytes.LastIndex(b, []byte(tailrec.Magic))
	for n := range b {
		tail, _, err := parseTail(b[:n], golden.TailSpec)
		switch {
		case n < tailHeaderLen:
			if _, ok := errors.AsType[*kvcache.Refusal](err); !ok {
				t.Fatalf("%d bytes: %v", n, err)
			}
		case err != nil || !isPrefix(tail, golden) || (len(tail.Ranges) == 1) != (n >= second):
			t.Fatalf("%d bytes: %d ranges, %v", n, len(tail.Ranges), err)
		}
	}
}

// TestTailForeign asks for a whole tail by what it is not.
func TestTailForeign(t *testing.T) {
	b, golden := readGolden(t), goldenTail()
	for name, c := range map[string]struct {
		change func(*kvcache.TailSpec)
		want   kvcache.Reason
	}{
		"model":   {func(s *kvcache.TailSpec) { s.Fingerprint[0]++ }, kvcache.ReasonForeign},
		"tenant":  {func(s *kvcache.TailSpec) { s.Root[0]++ }, kvcache.ReasonForeign},
		"stream":  {func(s *kvcache.TailSpec) { s.Stream += " " }, kvcache.ReasonKey},
		"choice":  {func(s *kvcache.TailSpec) { s.Choice++ }, kvcache.ReasonKey},
		"attempt": {func(s *kvcache.TailSpec) { s.Attempt-- }, kvcache.ReasonKey},
	} {
		want := golden.TailSpec
		c.change(&want)
		_, _, err := parseTail(b, want)
		if r, ok := errors.AsType[*kvcache.Refusal](err); !ok || r.Reason != c.want {
			t.Errorf("another %s: %v, want %v", name, err, c.want)
		}
	}
}

// TestTailRefusals: what a reader leaves out is counted, and files that cannot be
// read do not hide those that can.
func TestTailRefusals(t *testing.T) {
	s := newStore(t, Config{})
	golden := goldenTail()
	dir := filepath.Join(s.dir, streamDir(golden.Fingerprint, golden.Stream))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	b := readGolden(t)
	flip := func(at int) []byte { c := slices.Clone(b); c[at] ^= 1; return c }
	version := flip(4)
	for name, content := range map[string][]byte{
		"c2-a3-s1": b, "c2-a3-s2": b[:len(b)-1], "c2-a3-s3": flip(len(b) - 1), "c2-a3-s4": flip(100), "c2-a3-s5": {},
		"c2-a3-s6": version, "c2-a4-s1": b, // crossed: it says attempt 3
		"c2-a3-sx": b, "c2-a3": b, "notes": b, "c9-a3-s1": b,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	tails, err := s.ReadTail(context.Background(), golden.Space, golden.Stream, golden.Choice)
	if err != nil {
		t.Fatal(err)
	}
	var ranges []int
	for _, tail := range tails {
		if !isPrefix(tail, golden) {
			t.Errorf("read %+v", tail)
		}
		ranges = append(ranges, len(tail.Ranges))
	}
	if !slices.Equal(ranges, []int{1, 1, 2}) { // s3, s2, s1
		t.Errorf("ranges %v, want 1, 1 and 2", ranges)
	}
	got := map[kvcache.Reason]uint64{}
	for _, r := range kvcache.Reasons() {
		if n := s.Stats().Refused[r]; n > 0 {
			got[r] = n
		}
	}
	want := map[kvcache.Reason]uint64{kvcache.ReasonTorn: 2, kvcache.ReasonChecksum: 2, kvcache.ReasonVersion: 1, kvcache.ReasonKey: 1}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestTailNames(t *testing.T) {
	for _, n := range []tailFile{{0, 0, 1}, {1, 2, 3}, {255, 1 << 40, 65536}} {
		if got, ok := parseTailName(tailName(n.choice, n.attempt, n.seq)); !ok || got != n {
			t.Errorf("%+v reads as %+v", n, got)
		}
	}
	for _, name := range []string{"", fenceName, "c1-a1", "c1-a1-s1-s1", "a1-c1-s1", "c1-a1-s", "c1-a1-sg", "c-1-a1-s1"} {
		if got, ok := parseTailName(name); ok {
			t.Errorf("%q reads as %+v", name, got)
		}
	}
}

// FuzzTail feeds files, changed and invented: what is read is a beginning of what
// was written, or checksums would have to agree by chance.
func FuzzTail(f *testing.F) {
	b, golden := readGolden(f), goldenTail()
	f.Add(b, 0, byte(0))
	f.Add(b[:tailHeaderLen+100], 0, byte(0))
	f.Add([]byte(tailMagic), 0, byte(0))
	for i := range 16 {
		f.Add(b, i*len(b)/16, byte(1<<(i%8)))
	}
	f.Fuzz(func(t *testing.T, b []byte, at int, flip byte) {
		if len(b) > 0 {
			b = slices.Clone(b)
			b[uint(at)%uint(len(b))] ^= flip
		}
		if tail, _, err := parseTail(b, golden.TailSpec); err == nil && !isPrefix(tail, golden) && !isPrefix(golden, tail) {
			t.Errorf("read %+v", tail)
		}
	})
}
