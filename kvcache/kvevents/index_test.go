package kvevents

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// add tells an index of blocks of two tokens.
func add(x *Index, worker string, parent Hash, e Event, ids ...int32) {
	e.Kind, e.Parent, e.IDs, e.BlockSize = BlockStored, parent, ids, 2
	x.Apply(worker, Batch{Events: []Event{e}})
}

func n(numbers ...uint64) (hashes []Hash) {
	for _, i := range numbers {
		hashes = append(hashes, HashNumber(i))
	}
	return hashes
}

func holds(t *testing.T, x *Index, p Prompt, want map[string]int) {
	t.Helper()
	if diff := cmp.Diff(want, x.Held(p)); diff != "" {
		t.Errorf("%+v is held, -want +got:\n%s", p, diff)
	}
}

func TestIndex(t *testing.T) {
	x := NewIndex(0)
	add(x, "a", Hash{}, Event{Hashes: n(1, 2)}, 1, 2, 3, 4)
	add(x, "a", HashNumber(2), Event{Hashes: n(3)}, 5, 6)
	add(x, "b", Hash{}, Event{Hashes: []Hash{hash(7)}}, 1, 2) // by hashes of another kind
	prompt := Prompt{IDs: []int32{1, 2, 3, 4, 5, 6, 7}}
	holds(t, x, prompt, map[string]int{"a": 6, "b": 2})
	holds(t, x, Prompt{IDs: []int32{1, 2, 9, 9}}, map[string]int{"a": 2, "b": 2})
	holds(t, x, Prompt{IDs: []int32{3, 4}}, map[string]int{})
	holds(t, x, Prompt{IDs: []int32{1}}, map[string]int{})

	// Without a block in between what follows it is of no use, until it is there again.
	x.Apply("a", Batch{Events: []Event{{Kind: BlockRemoved, Hashes: n(2, 99)}}})
	holds(t, x, prompt, map[string]int{"a": 2, "b": 2})
	add(x, "a", HashNumber(1), Event{Hashes: n(2)}, 3, 4)
	holds(t, x, prompt, map[string]int{"a": 6, "b": 2})

	x.Apply("a", Batch{Events: []Event{{Kind: AllBlocksCleared}}})
	holds(t, x, prompt, map[string]int{"b": 2})
	x.Forget("b")
	holds(t, x, prompt, map[string]int{})
	if got := x.Workers(); !cmp.Equal(got, []string{"a"}) {
		t.Errorf("workers %v", got)
	}
}

// TestIndexMedia: a block is there as long as it is in any medium.
func TestIndexMedia(t *testing.T) {
	x := NewIndex(0)
	prompt := Prompt{IDs: []int32{1, 2}}
	add(x, "a", Hash{}, Event{Hashes: n(1), Medium: MediumGPU}, 1, 2)
	add(x, "a", Hash{}, Event{Hashes: n(1), Medium: MediumCPU}, 1, 2)
	x.Apply("a", Batch{Events: []Event{{Kind: BlockRemoved, Hashes: n(1), Medium: MediumGPU}}})
	holds(t, x, prompt, map[string]int{"a": 2})
	x.Apply("a", Batch{Events: []Event{{Kind: BlockRemoved, Hashes: n(1), Medium: MediumCPU}}})
	holds(t, x, prompt, map[string]int{})
}

// TestIndexExtra: blocks of an adapter, a tenant or a picture are not those of the same tokens
// without.
func TestIndexExtra(t *testing.T) {
	x := NewIndex(0)
	add(x, "salted", Hash{}, Event{Hashes: n(1, 2), Extra: [][]byte{[]byte("\x91\xa1s"), nil}}, 1, 2, 3, 4)
	add(x, "tuned", Hash{}, Event{Hashes: n(1), LoRA: "sql"}, 1, 2)
	add(x, "both", Hash{}, Event{Hashes: n(1), LoRA: "sql", Extra: [][]byte{[]byte("\x92\xa3sql\xa1s")}}, 1, 2)
	ids := []int32{1, 2, 3, 4}
	holds(t, x, Prompt{IDs: ids}, map[string]int{})
	holds(t, x, Prompt{IDs: ids, Salt: "s"}, map[string]int{"salted": 4})
	holds(t, x, Prompt{IDs: ids, LoRA: "sql"}, map[string]int{"tuned": 2})
	holds(t, x, Prompt{IDs: ids, LoRA: "sql", Salt: "s"}, map[string]int{"both": 2})
}

// TestIndexOdd: what cannot be placed is counted, and one worker has so many blocks at most.
func TestIndexOdd(t *testing.T) {
	x := NewIndex(3)
	add(x, "a", HashNumber(77), Event{Hashes: n(1)}, 1, 2)
	x.Apply("a", Batch{Events: []Event{{Kind: BlockStored, Hashes: n(1), BlockSize: 2}, {Kind: BlockStored, Hashes: n(1), IDs: []int32{1}, BlockSize: 1, Group: 1}}})
	add(x, "a", Hash{}, Event{Hashes: n(1, 2, 3, 4, 5)}, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
	if diff := cmp.Diff(IndexStats{Blocks: 3, Full: 2, Nameless: 1, Orphans: 1}, x.Stats("a")); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	holds(t, x, Prompt{IDs: []int32{1, 2, 3, 4, 5, 6, 7, 8}}, map[string]int{"a": 6})
	// A hash that comes to mean something else takes its old place out.
	add(x, "a", Hash{}, Event{Hashes: n(1)}, 8, 8)
	holds(t, x, Prompt{IDs: []int32{1, 2}}, map[string]int{})
	holds(t, x, Prompt{IDs: []int32{8, 8}}, map[string]int{"a": 2})
}

// TestIndexLong: an event with more blocks than are taken in at once is one event all the same.
func TestIndexLong(t *testing.T) {
	const blocks = 2*atOnce + 7
	e := Event{Kind: BlockStored, IDs: make([]int32, 2*blocks), BlockSize: 2, Extra: make([][]byte, blocks)}
	for i := range blocks {
		e.Hashes = append(e.Hashes, HashNumber(uint64(i+1)))
		e.IDs[2*i] = int32(i)
	}
	e.Extra[0] = []byte("\x91\xa1s")
	x := NewIndex(0)
	x.Apply("a", Batch{Events: []Event{e, {Kind: BlockStored, Hashes: make([]Hash, 2*atOnce), BlockSize: 1}}})
	holds(t, x, Prompt{IDs: e.IDs, Salt: "s"}, map[string]int{"a": 2 * blocks})
	if st := x.Stats("a"); st.Blocks != blocks || st.Nameless != 2*atOnce {
		t.Errorf("%+v", st)
	}
	x.Apply("a", Batch{Events: []Event{{Kind: BlockRemoved, Hashes: e.Hashes[3:]}}})
	holds(t, x, Prompt{IDs: e.IDs, Salt: "s"}, map[string]int{"a": 6})
}
