//go:build unix

package nvmetier

import (
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// TestIndexOrder: after whatever came and went, an ask for a beginning finds what a search
// over all would.
func TestIndexOrder(t *testing.T) {
	x := newIndex(0)
	space := kvcache.NewSpace("m", nil)
	var all []placed
	for i := range int32(300) {
		ids := []int32{i % 3, i % 7, i}
		h := kvcache.Header{Ref: space.Child(space.Root, ids), IDs: ids, Total: 1}
		p := placed{space, blockOf(&h, 1)}
		x.insert(p, time.Time{})
		all = append(all, p)
		if i%5 == 0 {
			x.take(x.byKey[all[i/5].key], i%2 == 0)
			all[i/5].tokens = 0
		}
	}
	for _, begin := range [][]int32{nil, {0}, {1, 4}, {2, 6, 20}, {5}} {
		want := 0
		for _, p := range all {
			if p.tokens > 0 && compareBegin(p.begin[:min(p.n, len(begin))], begin) == 0 {
				want++
			}
		}
		if got := len(x.list(space, space.Root, begin)); got != want {
			t.Errorf("%v: %d children, want %d", begin, got, want)
		}
	}
	if got := x.list(kvcache.NewSpace("m", []byte("t")), space.Root, nil); len(got) != 0 {
		t.Errorf("another tenant sees %d", len(got))
	}
}

// TestJudge: who is dead goes first.
func TestJudge(t *testing.T) {
	x := newIndex(0)
	now := time.Now()
	var spaces []kvcache.Space
	for i, name := range []string{"old", "new", "other", "unnamed"} {
		space := kvcache.NewSpace(name, nil)
		h := kvcache.Header{Ref: space.Child(space.Root, []int32{1}), IDs: []int32{1}, Total: 1}
		x.insert(placed{space, blockOf(&h, 1)}, time.Time{})
		spaces = append(spaces, space)
		if name != "unnamed" {
			x.models[space.Fingerprint] = &model{Label: kvcache.Label{Model: "m"}, Order: uint64(i + 1), used: now}
		}
	}
	x.models[spaces[2].Fingerprint].Label.Model = "another"
	x.use(x.entries[1].key, now)
	// Nobody is dead who was used a moment ago: the oldest goes as S3-FIFO has it. Later the
	// older version is, whatever its uses were.
	for range 3 {
		x.use(x.entries[0].key, now)
	}
	later := now.Add(2 * deadAfter)
	p, ok := x.victim(kvcache.Key{}, later)
	if !ok || p.space != spaces[0] {
		t.Errorf("a block of %v goes first, want the old version's", p.space)
	}
	if p, _ := x.victim(kvcache.Key{}, later.Add(time.Minute)); p.space == spaces[1] {
		t.Error("the newest version counts as dead")
	}
}

// TestIndexListed: what was listed stays as it was when the block goes: a look-up reads it without
// the index's lock.
func TestIndexListed(t *testing.T) {
	x := newIndex(0)
	space := kvcache.NewSpace("m", nil)
	h := kvcache.Header{Ref: space.Child(space.Root, []int32{5, 6}), IDs: []int32{5, 6}, Total: 1}
	x.insert(placed{space, blockOf(&h, 1)}, time.Time{})
	list := x.list(space, space.Root, nil)
	x.drop(space.Fingerprint)
	if len(list) != 1 || len(list[0].Begin) != 2 || list[0].Begin[0] != 5 || list[0].Begin[1] != 6 {
		t.Errorf("what was listed is %+v", list)
	}
}
