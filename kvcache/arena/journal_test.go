//go:build unix

package arena

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvmesh/kvmesh/kvcache"
)

// goldenID and goldenRecords are what testdata/journal-v1.hex holds.
func goldenID() (id arenaID) {
	copy(id[:], "arena of a test.")
	return id
}

func goldenRecords() []record {
	sp := kvcache.NewSpace("gemma/f16", []byte("tenant"))
	key := sp.Key(sp.Root, []int32{1, 2, -3})
	return []record{
		{kind: kindSpace, space: 1, in: sp},
		{kind: kindLabel, in: kvcache.Space{Fingerprint: sp.Fingerprint}, text: []byte(`{"model":"gemma"}`)},
		{kind: kindPut, space: 1, tokens: 3, at: 4096, size: 5000, first: 7, parent: sp.Root, key: key},
		{kind: kindFence, space: 1, attempt: 2, key: kvcache.Key{1}},
		{kind: kindTail, space: 1, choice: 3, tail: 9, attempt: 2, first: 10, parent: key, key: kvcache.Key{1}},
		{kind: kindRoom, tail: 9, at: 12288, size: 65536},
		{kind: kindEnd, tail: 9},
		{kind: kindStream, space: 1, key: kvcache.Key{1}},
		{kind: kindRemove, at: 4096},
		{kind: kindDrop, in: kvcache.Space{Fingerprint: sp.Fingerprint}},
	}
}

// golden reads a golden file. They were written by another program, from the
// description in the package comment.
func golden(t testing.TB, name string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	b, err := hex.DecodeString(strings.Join(strings.Fields(string(text)), ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestGoldenJournal(t *testing.T) {
	want := golden(t, "journal-v1.hex")
	b := journalHead(goldenID())
	for _, r := range goldenRecords() {
		b = appendRecord(b, goldenID(), r)
	}
	if !bytes.Equal(b, want) {
		t.Errorf("journal:\n%swant:\n%s", hex.Dump(b), hex.Dump(want))
	}
	if !ofArena(want, goldenID()) || ofArena(want, arenaID{}) {
		t.Error("the header is not that of its arena alone")
	}
	var got []record
	for b = want[journalHeader:]; len(b) > 0; {
		r, n, err := parseRecord(b, goldenID())
		if err != nil {
			t.Fatal(err)
		}
		got, b = append(got, r), b[n:]
	}
	if diff := cmp.Diff(goldenRecords(), got, cmp.AllowUnexported(record{})); diff != "" {
		t.Error(diff)
	}
}

func TestGoldenHeader(t *testing.T) {
	want := golden(t, "arena-v1.hex")
	if b := arenaHeader(goldenID(), 1<<30); !bytes.Equal(b, want) {
		t.Errorf("header:\n%swant:\n%s", hex.Dump(b), hex.Dump(want))
	}
	for i := range 8 * len(want) {
		want[i/8] ^= 1 << (i % 8)
		if _, err := parseHeader(want, 1<<30); err == nil {
			t.Errorf("bit %d of byte %d can flip", i%8, i/8)
		}
		want[i/8] ^= 1 << (i % 8)
	}
}

// TestRecordEveryBit: a record with a bit flipped, cut, or of another arena is none.
func TestRecordEveryBit(t *testing.T) {
	for _, r := range goldenRecords() {
		b := appendRecord(nil, goldenID(), r)
		for i := range 8 * len(b) {
			b[i/8] ^= 1 << (i % 8)
			if got, _, err := parseRecord(b, goldenID()); err == nil {
				t.Errorf("kind %d: bit %d of byte %d can flip: %+v", r.kind, i%8, i/8, got)
			}
			b[i/8] ^= 1 << (i % 8)
		}
		for n := range b {
			if _, _, err := parseRecord(b[:n], goldenID()); !errors.Is(err, errTorn) {
				t.Errorf("kind %d: %d of %d bytes: %v", r.kind, n, len(b), err)
			}
		}
		if _, _, err := parseRecord(b, arenaID{}); err == nil {
			t.Errorf("kind %d: a record of another arena was read", r.kind)
		}
	}
}

// filled makes a store with blocks, some of which were evicted, and a tail, closes it
// and returns its folder and everything that was put.
func filled(t testing.TB, seed int32) (dir string, frames []*kvcache.Frame, spec kvcache.TailSpec) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "store")
	s := newStore(t, Config{Dir: dir, Limit: leastLimit})
	space := kvcache.NewSpace("m", []byte{byte(seed)})
	parent := space.Root
	for id := range int32(12) {
		f := sealed(t, space, parent, seed+id, 6000)
		put(t, s, f)
		if frames = append(frames, f); id%3 == 1 {
			parent = f.Key
		}
	}
	spec = kvcache.TailSpec{Space: space, Stream: "s", Parent: parent}
	w, err := s.OpenTail(context.Background(), spec)
	if err != nil {
		t.Fatal(err)
	}
	for at := range 5 {
		if err := w.Append(kvcache.Range{First: at, IDs: []int32{int32(at)}, Data: []byte{byte(at)}}); err != nil {
			t.Fatal(err)
		}
	}
	s.Close()
	return dir, frames, spec
}

// serves counts what a store serves of what was put; wrong content fails the test.
func serves(t testing.TB, dir string, frames []*kvcache.Frame, spec kvcache.TailSpec) (blocks, ranges int, refused bool) {
	t.Helper()
	s, err := Open(Config{Dir: dir, Limit: leastLimit})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for _, f := range frames {
		l, err := s.Get(context.Background(), f.Ref)
		if err == nil {
			err = l.Verify()
		}
		if err == nil {
			if blocks++; !bytes.Equal(l.Bytes(), f.Bytes()) {
				t.Error("a block is another one")
			}
		}
		if l != nil {
			l.Release()
		}
	}
	tails, err := s.ReadTail(context.Background(), spec.Space, spec.Stream, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, tail := range tails {
		for i, r := range tail.Ranges {
			if ranges++; r.First != i || len(r.Data) != 1 || r.Data[0] != byte(i) {
				t.Errorf("range %d is another one: %+v", i, r)
			}
		}
	}
	n := uint64(0)
	for _, c := range s.Stats().Refused {
		n += c
	}
	// It is a store like any other.
	if err := s.Put(context.Background(), sealed(t, spec.Space, spec.Root, 99, 1000)); err != nil && !errors.Is(err, kvcache.ErrFull) {
		t.Error(err)
	}
	return blocks, ranges, n > 0
}

// TestJournalDamage cuts a journal at many lengths and flips bits all over it: what is
// served is right, and before the damage nothing is missing.
func TestJournalDamage(t *testing.T) {
	dir, frames, spec := filled(t, 0)
	name := filepath.Join(dir, journalName)
	whole, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	arenaFile := filepath.Join(dir, dataName)
	data, err := os.ReadFile(arenaFile)
	if err != nil {
		t.Fatal(err)
	}
	all, ranges, _ := serves(t, dir, frames, spec)
	if all < 5 || ranges != 5 {
		t.Fatalf("%d blocks and %d ranges: the test proves nothing", all, ranges)
	}
	try := func(b []byte) {
		t.Helper()
		// Both as they were: the store has written to them.
		if err := errors.Join(os.WriteFile(name, b, 0o600), os.WriteFile(arenaFile, data, 0o600)); err != nil {
			t.Fatal(err)
		}
		serves(t, dir, frames, spec)
	}
	for n := 0; n < len(whole); n += 13 {
		try(whole[:n])
		b := bytes.Clone(whole)
		b[n] ^= 1 << (n % 8)
		try(b)
	}
	try(append(bytes.Clone(whole), whole[journalHeader:]...)) // every record again
	try(nil)
}

// TestSwapped gives one store the arena or the journal of another: nothing of either is
// served from where it does not belong.
func TestSwapped(t *testing.T) {
	for _, file := range []string{dataName, journalName} {
		a, frames, spec := filled(t, 0)
		b, others, otherSpec := filled(t, 50)
		temp := filepath.Join(t.TempDir(), "x")
		for _, move := range [][2]string{{filepath.Join(a, file), temp}, {filepath.Join(b, file), filepath.Join(a, file)}, {temp, filepath.Join(b, file)}} {
			if err := os.Rename(move[0], move[1]); err != nil {
				t.Fatal(err)
			}
		}
		for _, dir := range []string{a, b} {
			for of, spec := range map[*[]*kvcache.Frame]kvcache.TailSpec{&frames: spec, &others: otherSpec} {
				if blocks, ranges, refused := serves(t, dir, *of, spec); blocks+ranges != 0 || refused {
					t.Errorf("%s swapped: %d blocks and %d ranges are served, something refused: %v", file, blocks, ranges, refused)
				}
			}
		}
	}
}

// TestJournalLost: an arena that outlives its journal, as one on a disk does the folder in
// shared memory, has another identity, and one that keeps it has not.
func TestJournalLost(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	cfg := Config{Dir: dir, Data: filepath.Join(t.TempDir(), "data"), Limit: 1 << 20}
	space := kvcache.NewSpace("m", nil)
	f := sealed(t, space, space.Root, 1, 1000)
	s := newStore(t, cfg)
	first := s.ID()
	put(t, s, f)
	for _, lose := range []bool{false, true, false} {
		before := s.ID()
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		if lose {
			if err := os.RemoveAll(dir); err != nil {
				t.Fatal(err)
			}
		}
		s = newStore(t, cfg)
		if there, same := has(t, s, f), s.ID() == first; (s.ID() == before) == lose || there != same {
			t.Errorf("lost: %v, but the block is there: %v, in the same arena: %v", lose, there, same)
		}
	}
	r := newReader(t, dir)
	put(t, s, f)
	l, err := borrow(t, s, r, f.Ref)
	if err != nil {
		t.Fatal(err)
	}
	l.Release()
}

// TestArenaDamage zeroes and shifts the arena itself: what is not as it was is refused.
func TestArenaDamage(t *testing.T) {
	for name, change := range map[string]func([]byte) []byte{
		"zeros": func(b []byte) []byte { return append(b[:grain:grain], make([]byte, len(b)-grain)...) },
		"shifted": func(b []byte) []byte {
			return append(append(b[:grain:grain], make([]byte, grain)...), b[grain:len(b)-grain]...)
		},
		"header": func(b []byte) []byte { b[20]++; return b },
	} {
		dir, frames, spec := filled(t, 0)
		file := filepath.Join(dir, dataName)
		b, err := os.ReadFile(file)
		if err == nil {
			err = os.WriteFile(file, change(b), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		if blocks, ranges, _ := serves(t, dir, frames, spec); blocks+ranges != 0 {
			t.Errorf("%s: %d blocks and %d ranges are served", name, blocks, ranges)
		}
	}
}

// TestCompact: a journal that has grown is written anew while everything goes on, and
// says the same.
func TestCompact(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	s := newStore(t, Config{Dir: dir})
	ctx := context.Background()
	space := kvcache.NewSpace("m", nil)
	if err := s.Label(ctx, space.Fingerprint, kvcache.Label{Model: "m"}); err != nil {
		t.Fatal(err)
	}
	spec := kvcache.TailSpec{Space: space, Stream: "s", Attempt: 4}
	w, err := s.OpenTail(ctx, spec)
	if err != nil {
		t.Fatal(err)
	}
	frames := map[int32]*kvcache.Frame{}
	for id := range int32(3000) {
		f := sealed(t, space, space.Root, id, 10_000)
		frames[id] = f
		put(t, s, f)
		if id%100 == 0 {
			if err := w.Append(kvcache.Range{First: int(id) / 100, IDs: []int32{id}, Data: []byte{byte(id)}}); err != nil {
				t.Fatal(err)
			}
		}
	}
	// With changes between the steps.
	if err := s.log.compact(); err != nil {
		t.Fatal(err)
	}
	s.rewriteLocked()
	before := s.log.end
	for from := 0; ; from += 10 {
		done, err := s.compactLocked(from, 10)
		if err != nil {
			t.Fatal(err)
		}
		id := int32(5000 + from)
		if frames[id] = sealed(t, space, space.Root, id, 10_000); done {
			put(t, s, frames[id])
			break
		}
		put(t, s, frames[id])
	}
	if s.log.end > before/5 {
		t.Errorf("the journal has %d bytes, %d before", s.log.end, before)
	}
	want := map[int32]bool{}
	for id, f := range frames {
		want[id] = has(t, s, f)
	}
	s.Close()
	again := newStore(t, Config{Dir: dir})
	for id, f := range frames {
		if got := has(t, again, f); got != want[id] {
			t.Fatalf("block %d is there: %v, before %v", id, got, want[id])
		}
	}
	tails, err := again.ReadTail(ctx, space, "s", 0)
	if err != nil || len(tails) != 1 || len(tails[0].Ranges) != 30 {
		t.Fatalf("%d tails, %v", len(tails), err)
	}
	if models, err := again.Models(ctx); err != nil || len(models) != 1 || models[0].Label.Model != "m" || models[0].Tails != 1 {
		t.Errorf("%+v, %v", models, err)
	}
	spec.Attempt = 3
	if _, err := again.OpenTail(ctx, spec); !errors.Is(err, kvcache.ErrStale) {
		t.Errorf("a lower attempt: %v", err)
	}
}

// TestCompactByItself: the store does so when it keeps house.
func TestCompactByItself(t *testing.T) {
	s := newStore(t, Config{Limit: leastLimit})
	space := kvcache.NewSpace("m", nil)
	for id := range int32(20_000) {
		put(t, s, sealed(t, space, space.Root, id, 10))
	}
	if s.log.end < 2<<20 {
		t.Fatalf("%d bytes of journal: the test proves nothing", s.log.end)
	}
	for range 2 {
		if err := s.Sweep(context.Background(), s.judged); err != nil {
			t.Fatal(err)
		}
	}
	if s.log.end > 100_000 {
		t.Errorf("the journal has %d bytes", s.log.end)
	}
}

// FuzzJournal feeds journals: nothing crashes, and no two things lie in one place or
// outside the arena.
func FuzzJournal(f *testing.F) {
	b := golden(f, "journal-v1.hex")
	f.Add(b, uint32(0))
	f.Add(b[:200], uint32(3))
	f.Fuzz(func(t *testing.T, b []byte, held uint32) {
		if len(b) < journalHeader {
			return
		}
		// The sums would keep all changes out.
		p, id := newReplay(), arenaID(b[16:32])
		for b = bytes.Clone(b[journalHeader:]); len(b) >= recordFixed; {
			n := min(max(int(b[4])|int(b[5])<<8, recordFixed), len(b))
			b[4], b[5] = byte(n), byte(n>>8)
			sum := recordSum(id, b[:n])
			b[0], b[1], b[2], b[3] = byte(sum), byte(sum>>8), byte(sum>>16), byte(sum>>24)
			if r, _, err := parseRecord(b, id); err == nil {
				p.apply(r)
			}
			b = b[n:]
		}
		const limit = 1 << 20
		last := uint32(1)
		for _, c := range p.claims(limit, []extent{{1 + held%100, 1 + held/100%100}}) {
			if c.at < last || c.n == 0 || int64(c.end())*grain > limit {
				t.Fatalf("%+v behind grain %d", c, last)
			}
			last = c.end()
		}
	})
}
