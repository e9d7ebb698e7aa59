package kvevents

import (
	"encoding/hex"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// golden are the batches of testdata, which msgspec has written with vLLM's own classes
// (scripts/kvevents-golden.py).
func golden(t testing.TB) map[string][]byte {
	t.Helper()
	text, err := os.ReadFile("testdata/batches.txt")
	if err != nil {
		t.Fatal(err)
	}
	all := map[string][]byte{}
	for line := range strings.Lines(string(text)) {
		name, data, _ := strings.Cut(strings.TrimSpace(line), " ")
		if all[name], err = hex.DecodeString(data); err != nil {
			t.Fatal(err)
		}
	}
	return all
}

// hash is the one that the golden batches have for n.
func hash(n byte) Hash {
	var b [32]byte
	for i := range b {
		b[i] = n + byte(i)
	}
	h, _ := HashOf(b[:])
	return h
}

// stored is the event that most golden batches begin with.
func stored() Event {
	return Event{Kind: BlockStored, Hashes: []Hash{hash(1), hash(2)}, IDs: []int32{1, 2, 300, 70000}, BlockSize: 2, Medium: MediumGPU}
}

func goldenBatches() map[string]Batch {
	low := HashNumber(hash(1).Number())
	removed, cleared := Event{Kind: BlockRemoved, Hashes: []Hash{hash(1)}, Medium: MediumGPU}, Event{Kind: AllBlocksCleared}
	salted := stored()
	salted.Extra = [][]byte{[]byte("\x91\xa4salt"), nil}
	return map[string]Batch{
		"map": {Time: 1700000000.25, Events: []Event{stored(), removed, cleared}},
		"map-child": {Time: 1.5, Rank: 3, Events: []Event{{
			Kind: BlockStored, Hashes: []Hash{hash(3)}, Parent: hash(2), IDs: []int32{7, 8}, BlockSize: 2, Medium: MediumCPU, LoRA: "sql",
			Extra: [][]byte{[]byte("\x92\xa3sql\xa4salt")}, Group: 1,
		}}},
		"map-extra": {Time: 1.5, Events: []Event{salted}},
		"map-numbers": {Time: 2, Events: []Event{
			{Kind: BlockStored, Hashes: []Hash{low, HashNumber(5)}, Parent: low, IDs: []int32{1, 2}, BlockSize: 1, Medium: MediumGPU},
			{Kind: BlockRemoved, Hashes: []Hash{low}, Medium: MediumGPU},
		}},
		"map-no-rank": {Time: 3},
		"array":       {Time: 4, Events: []Event{stored(), removed, cleared}},
		"array-old": {Time: 5, Events: []Event{
			{Kind: BlockStored, Hashes: []Hash{low, HashNumber(5)}, Parent: low, IDs: []int32{1, 2}, BlockSize: 1}, {Kind: BlockRemoved, Hashes: []Hash{low}},
		}},
	}
}

// equal compares hashes as values.
var equal = cmp.Comparer(func(a, b Hash) bool { return a == b })

func TestGolden(t *testing.T) {
	data, want := golden(t), goldenBatches()
	if len(data) != len(want) {
		t.Fatalf("%d batches, want %d", len(data), len(want))
	}
	for name, b := range data {
		got, err := Decode(b)
		if diff := cmp.Diff(want[name], got, equal); err != nil || diff != "" {
			t.Errorf("%s: %v, -want +got:\n%s", name, err, diff)
		}
	}
	// What msgspec writes of the same events is what is written here, byte by byte.
	batches := goldenBatches()
	for _, name := range []string{"map", "map-extra", "map-numbers"} {
		b := batches[name]
		if got := (Encoding{}).Append(nil, &b); string(got) != string(data[name]) {
			t.Errorf("%s is written as\n%x, want\n%x", name, got, data[name])
		}
	}
}

func TestEncodings(t *testing.T) {
	for name, want := range goldenBatches() {
		for _, c := range []Encoding{{}, {Arrays: true}} {
			got, err := Decode(c.Append(nil, &want))
			if diff := cmp.Diff(want, got, equal); err != nil || diff != "" {
				t.Errorf("%s, %+v: %v, -want +got:\n%s", name, c, err, diff)
			}
		}
	}
	b := Batch{Events: []Event{stored()}}
	got, err := Decode(Encoding{Numbers: true}.Append(nil, &b))
	if err != nil || got.Events[0].Hashes[1] != HashNumber(hash(2).Number()) {
		t.Errorf("as numbers: %v, %v", got, err)
	}
}

func TestDecodeOdd(t *testing.T) {
	// An event that nobody knows, and fields that nobody knows.
	b, err := Decode([]byte("\x94\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00\x93\x82\xa4type\xa3New\xa1x\x01\x92\xa3New\x01\x82\xa1y\xc0\xa4type\xb0AllBlocksCleared\x01\xa4more"))
	if want := (Batch{Time: 1, Events: []Event{{Kind: AllBlocksCleared}}, Rank: 1, Unknown: 2}); err != nil || !cmp.Equal(want, b, equal) {
		t.Errorf("%+v, %v", b, err)
	}
	for name, data := range map[string]string{
		"nothing": "", "no array": "\x80", "one field": "\x91\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00", "a text": "\x92\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00\x91\xa1x",
		"an empty array":  "\x92\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00\x91\x90",
		"no hash":         "\x92\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00\x91\x92\xacBlockRemoved\x91\xc4\x00",
		"long hash":       "\x92\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00\x91\x92\xacBlockRemoved\x91\xc4\x21" + strings.Repeat("h", 33),
		"negative":        "\x92\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00\x91\x92\xacBlockRemoved\x91\xff",
		"tokens":          "\x92\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00\x91\x95\xabBlockStored\x91\x01\xc0\x92\x01\x02\x01",
		"negative tokens": "\x92\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00\x91\x95\xabBlockStored\x91\x01\xc0\x91\xff\x01",
		"more":            "\x92\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00\x90\x00",
		"a promise":       "\x92\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00\xdd\xff\xff\xff\xff",
		"a deep one":      "\x92\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00\x91\x92\xa3New" + strings.Repeat("\x91", 1<<20),
	} {
		if b, err := Decode([]byte(data)); err == nil {
			t.Errorf("%s: %+v", name, b)
		}
	}
}

// FuzzDecode: what is read can be written and read again, and nothing that comes does harm.
func FuzzDecode(f *testing.F) {
	for _, b := range golden(f) {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		b, err := Decode(data)
		if err != nil {
			return
		}
		b.Unknown = 0
		if b.Time != b.Time {
			b.Time = 0
		}
		for _, c := range []Encoding{{}, {Arrays: true}} {
			again, err := Decode(c.Append(nil, &b))
			if diff := cmp.Diff(b, again, equal, cmp.Transformer("empty", func(s []Hash) int { return len(s) })); err != nil || diff != "" {
				t.Fatalf("%v, -want +got:\n%s", err, diff)
			}
		}
		x := NewIndex(16)
		x.Apply("w", b)
		if n := x.Stats("w").Blocks; n > 16 {
			t.Fatalf("%d blocks", n)
		}
	})
}
