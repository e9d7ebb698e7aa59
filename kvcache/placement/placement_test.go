package placement_test

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/placement"
)

// keys are so many different keys.
func keys(n int) []kvcache.Key {
	list := make([]kvcache.Key, n)
	for i := range list {
		binary.LittleEndian.PutUint64(list[i][:], uint64(i))
	}
	return list
}

// members are n of them in so many zones.
func members(n, zones int) []placement.Member {
	list := make([]placement.Member, n)
	for i := range list {
		list[i] = placement.Member{ID: fmt.Sprintf("node-%d", i), Zone: fmt.Sprintf("zone-%d", i%zones), Addr: "10.0.0.1:1"}
	}
	return list
}

// first is the id of the member that is best for a key.
func first(list []placement.Member, key kvcache.Key) string { return placement.Rank(list, key)[0].ID }

// TestBalance: each member gets its share by weight, within a tenth.
func TestBalance(t *testing.T) {
	list := members(10, 1)
	list[1].Room = 4 << 30
	list[2].Busy = 1
	all := 4 + 8 + 0.1
	want := func(m placement.Member) float64 {
		switch {
		case m.Room > 0:
			return 4 / all
		case m.Busy > 0:
			return 0.1 / all
		}
		return 1 / all
	}
	const n = 60_000
	got := map[string]int{}
	for _, key := range keys(n) {
		got[first(list, key)]++
	}
	for _, m := range list {
		share := float64(got[m.ID]) / n
		if w := want(m); share < 0.85*w || share > 1.15*w {
			t.Errorf("%s has %.4f of all keys, want %.4f", m.ID, share, w)
		}
	}
}

// TestMovement: whoever joins takes keys and nobody else does; whoever leaves, or gets less
// weight, loses its own.
func TestMovement(t *testing.T) {
	list := members(9, 3)
	joined := append(slices.Clone(list), placement.Member{ID: "new", Zone: "zone-1", Addr: "10.0.0.1:1"})
	busy := slices.Clone(list)
	busy[4].Busy = 0.5
	moved := 0
	for _, key := range keys(5000) {
		before := first(list, key)
		if after := first(joined, key); after != before {
			moved++
			if after != "new" {
				t.Fatalf("a key has moved from %s to %s when another one joined", before, after)
			}
		}
		if after := first(busy, key); after != before && before != "node-4" {
			t.Fatalf("a key has moved from %s to %s when node-4 got less", before, after)
		}
	}
	if moved < 5000/10*8/10 || moved > 5000/10*12/10 {
		t.Errorf("%d of 5000 keys moved to one of ten members", moved)
	}
	for _, key := range keys(2000) {
		// Of two copies, at most one moves, and the other stays where it was.
		source := list[0]
		was, is := placement.Replicas(list, source, key)[:2], placement.Replicas(joined, source, key)[:2]
		kept := 0
		for _, m := range is {
			if slices.Contains(was, m) {
				kept++
			}
		}
		if kept == 0 || kept == 1 && !slices.ContainsFunc(is, func(m placement.Member) bool { return m.ID == "new" }) {
			t.Fatalf("copies moved from %v to %v", was, is)
		}
	}
}

// TestZones: as long as there is a zone without a copy, the next one goes there, and
// nothing goes to its source.
func TestZones(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, key := range keys(500) {
		list := members(2+r.IntN(9), 1+r.IntN(4))
		source := list[r.IntN(len(list))]
		zones := map[string]bool{}
		for _, m := range list {
			zones[m.Zone] = true
		}
		got := placement.Replicas(list, source, key)
		if len(got) != len(list)-1 {
			t.Fatalf("%d replicas of %d members", len(got), len(list))
		}
		seen := map[string]bool{source.Zone: true}
		for i, m := range got {
			if m.ID == source.ID {
				t.Fatal("a copy goes to its source")
			}
			if seen[m.Zone] && len(seen) < len(zones) {
				t.Fatalf("copy %d goes to %s although %d zones of %d have one: %v", i, m.Zone, len(seen), len(zones), got)
			}
			seen[m.Zone] = true
		}
	}
}

// TestReaders: wherever a copy was made from, a reader asks one that has it; and it asks few.
func TestReaders(t *testing.T) {
	for _, shape := range [][2]int{{2, 1}, {2, 2}, {3, 2}, {12, 1}, {12, 3}, {12, 12}} {
		list := members(shape[0], shape[1])
		for copies := 1; copies <= 2; copies++ {
			most := 0
			for _, key := range keys(300) {
				readers := placement.Readers(list, key, copies)
				most = max(most, len(readers))
				for _, source := range list {
					for _, m := range placement.Replicas(list, source, key)[:min(copies, len(list)-1)] {
						if !slices.Contains(readers, m) {
							t.Fatalf("a reader does not ask %s, which has what %s made", m.ID, source.ID)
						}
					}
				}
			}
			if most > 2*copies+2 {
				t.Errorf("%v: %d members are asked for %d copies", shape, most, copies)
			}
		}
	}
}

// TestDeterministic: the order in which members are known changes nothing, and where a
// key is placed is a matter of compatibility: hosts of two versions must agree.
func TestDeterministic(t *testing.T) {
	list := members(5, 2)
	turned := slices.Clone(list)
	slices.Reverse(turned)
	var got []string
	for _, key := range keys(8) {
		if d := cmp.Diff(placement.Replicas(list, list[0], key), placement.Replicas(turned, list[0], key)); d != "" {
			t.Fatal(d)
		}
		got = append(got, first(list, key))
	}
	space := kvcache.NewSpace("m", nil)
	got = append(got, first(list, placement.StreamKey(space, "a")), first(list, placement.StreamKey(space, "b")))
	const want = "node-2 node-2 node-1 node-2 node-2 node-1 node-2 node-1 node-0 node-0"
	if s := strings.Join(got, " "); s != want {
		t.Errorf("placed on %q, want %q", s, want)
	}
	if placement.StreamKey(space, "a") == placement.StreamKey(kvcache.NewSpace("m", []byte("t")), "a") {
		t.Error("streams of two tenants have one key")
	}
	if got := placement.Replicas(list[:1], list[0], kvcache.Key{}); len(got) != 0 {
		t.Errorf("a member that is alone has replicas %v", got)
	}
	if got := placement.Readers(nil, kvcache.Key{}, 1); len(got) != 0 {
		t.Errorf("nobody is asked as %v", got)
	}
}

func TestParse(t *testing.T) {
	for text, want := range map[string]placement.Member{
		"b=z2@10.0.0.2:9096":  {ID: "b", Zone: "z2", Addr: "10.0.0.2:9096"},
		"kv-1.x=[fd00::1]:80": {ID: "kv-1.x", Addr: "[fd00::1]:80"},
	} {
		if got, err := placement.Parse(text); err != nil || got != want {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "b", "b=", "=z@h:1", "b=@h:1", "b=z@h", "b=z@h:0", "b=z@:", "b=z@:1", "b c=h:1", "b=z z@h:1", strings.Repeat("b", 129) + "=h:1"} {
		if got, err := placement.Parse(text); err == nil {
			t.Errorf("%q was read as %+v", text, got)
		}
	}
}

// FuzzParse: what is read is written the same way and read again.
func FuzzParse(f *testing.F) {
	f.Add("b=z2@10.0.0.2:9096")
	f.Add("b=[::1]:1")
	f.Fuzz(func(t *testing.T, text string) {
		m, err := placement.Parse(text)
		if err != nil {
			return
		}
		again := m.ID + "=" + m.Addr
		if m.Zone != "" {
			again = m.ID + "=" + m.Zone + "@" + m.Addr
		}
		if again != text || m.Validate() != nil {
			t.Errorf("%q was read as %+v", text, m)
		}
	})
}
