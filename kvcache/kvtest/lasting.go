package kvtest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"testing"

	"github.com/kvmesh/kvmesh/kvcache"
)

// The shapes of what an owner writes until it is killed.
const (
	ownerChains = 4
	ownerBlocks = 8
	ownerSize   = 150_000
	// ownerLimit holds about a third of what an owner writes.
	ownerLimit = 2 << 20
)

// lasting skips tests that need content to outlive its process.
func (h Harness) lasting(t testing.TB) {
	t.Helper()
	if !h.Lasting && !h.Shared {
		t.Skip("the store ends with its process")
	}
}

// testLasting closes a store and opens it again, with nobody else at it.
func testLasting(t *testing.T, h Harness) {
	h.lasting(t)
	dir := newDir(t)
	sp := kvcache.NewSpace("model", []byte("salt"))
	ids := tokens(1, 64*4)
	frames := chain(sp, ids, 64, 1000)
	other := chain(kvcache.NewSpace("model 2", nil), ids, 64, 1000)
	tailSpec := spec(sp, "stream", 0, 3)
	withTails := false
	for round := range 3 {
		s := h.open(t, dir, plenty)
		if round > 0 {
			lastingHas(t, s, sp, ids)
			if _, ok := stats(s); ok && refusals(s) != 0 {
				t.Errorf("round %d: %d refusals", round, refusals(s))
			}
		}
		put(t, s, frames[:2+round]...)
		put(t, s, other...)
		if err := s.Drop(context.Background(), other[0].Fingerprint); err != nil {
			t.Fatal(err)
		}
		if ts, ok := s.(kvcache.Tails); ok {
			withTails = true
			lastingTail(t, ts, tailSpec, round)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	s := h.open(t, dir, plenty)
	if m := longest(t, s, sp, ids); len(m.Blocks) != 4 {
		t.Errorf("%d blocks in the end, want 4", len(m.Blocks))
	}
	if m := longest(t, s, other[0].Space, ids); len(m.Blocks) != 0 {
		t.Errorf("%d blocks of a dropped model", len(m.Blocks))
	}
	if !withTails {
		return
	}
	ts := s.(kvcache.Tails)
	if err := ts.DropTail(context.Background(), sp, "stream"); err != nil {
		t.Fatal(err)
	}
	s.Close()
	if got := readTail(t, tails(t, h.open(t, dir, plenty)), tailSpec); len(got) != 0 {
		t.Errorf("a stream that was dropped is back with %d tails", len(got))
	}
}

// lastingHas looks for what the rounds before have left.
func lastingHas(t *testing.T, s kvcache.Store, sp kvcache.Space, ids []int32) {
	t.Helper()
	m := longest(t, s, sp, ids)
	if len(m.Blocks) < 2 {
		t.Fatalf("%d blocks after reopening", len(m.Blocks))
	}
	checkMatch(t, s, kvcache.Query{Space: sp, IDs: ids}, m)
	if st, ok := stats(s); ok && (st.Used < 2000 || st.Used > st.Limit) {
		t.Errorf("%d bytes in use after reopening", st.Used)
	}
}

// lastingTail checks what is left of a stream and appends to it in a tail of its own.
func lastingTail(t *testing.T, ts kvcache.Tails, sp kvcache.TailSpec, round int) {
	t.Helper()
	if round > 0 {
		got := readTail(t, ts, sp)
		if len(got) != round {
			t.Fatalf("round %d: %d tails", round, len(got))
		}
		for i, tail := range got {
			if n := len(tail.IDs()); n != round-i+4 {
				t.Errorf("round %d: tail %d has %d tokens, want %d", round, i, n, round-i+4)
			}
			checkTail(t, tail, 1)
		}
		lower := sp
		lower.Attempt--
		if _, err := ts.OpenTail(context.Background(), lower); !errors.Is(err, kvcache.ErrStale) {
			t.Errorf("a lower attempt after reopening: %v", err)
		}
	}
	w := openTail(t, ts, sp)
	appendRanges(t, w, sp, run{sp.First, sp.First + round + 5, 1})
}

// writeOwner writes chains, and a tail of its own beside each. Where a store has no room
// for more of one, which it may say while another writer's remains count, the next is
// begun.
func writeOwner(s kvcache.Store, j job) error {
	for c := range ownerChains {
		err := writeChain(s, j.Seed, c)
		if errors.Is(err, kvcache.ErrFull) {
			for i := range ownerBlocks { // whoever waits for so many lines gets them
				fmt.Println("none", c, i)
			}
		} else if err != nil {
			return err
		}
	}
	return waitForEnd()
}

func writeChain(s kvcache.Store, seed uint64, c int) error {
	w, sp, err := ownerTail(s, seed, c)
	if err != nil {
		return err
	}
	for i, f := range ownerChain(seed, c) {
		if err := s.Put(context.Background(), f); err != nil {
			return err
		}
		fmt.Println("block", c, i)
		if w == nil {
			continue
		}
		if err := w.Append(rangeAt(sp.Stream, 1, sp.First+i, 1)); err != nil {
			return err
		}
		fmt.Println("tail", c, i)
	}
	return nil
}

// ownerChain is the c-th chain that an owner writes.
func ownerChain(seed uint64, c int) []*kvcache.Frame {
	return chain(space(), ownerIDs(seed, c), childTokens, ownerSize)
}

// ownerIDs are its tokens.
func ownerIDs(seed uint64, c int) []int32 {
	return tokens(1<<32+seed<<8+uint64(c), ownerBlocks*childTokens)
}

// ownerSpec describes the tail beside it.
func ownerSpec(seed uint64, c int) kvcache.TailSpec {
	return spec(space(), "owner "+strconv.FormatUint(seed, 10), c, 1)
}

// ownerTail opens it, if the store has tails.
func ownerTail(s kvcache.Store, seed uint64, c int) (kvcache.TailWriter, kvcache.TailSpec, error) {
	sp := ownerSpec(seed, c)
	ts, ok := s.(kvcache.Tails)
	if !ok {
		return nil, sp, nil
	}
	w, err := ts.OpenTail(context.Background(), sp)
	return w, sp, err
}

// acks is what one owner had acknowledged: how many of each chain.
type acks struct{ blocks, tails [ownerChains]int }

func (a *acks) note(t *testing.T, line string) {
	t.Helper()
	var what string
	var c, i int
	if _, err := fmt.Sscan(line, &what, &c, &i); err != nil {
		t.Fatalf("line %q: %v", line, err)
	}
	switch what {
	case "block":
		a.blocks[c] = i + 1
	case "tail":
		a.tails[c] = i + 1
	}
}

// testOwnerKilled kills the only process that has a store open while it writes, over
// and over: everything that it had acknowledged is there, whole, after all of it.
func testOwnerKilled(t *testing.T, h Harness) {
	h.lasting(t)
	dir := newDir(t)
	var all []acks
	n := h.kills()
	for round := range n {
		a := killOwner(t, dir, uint64(round), plenty)
		all = append(all, a)
		s := h.open(t, dir, plenty)
		checkAcks(t, s, uint64(round), a)
		// And one of those before, or all of them at the end.
		for old := range all {
			if old == round/2 || round == n-1 {
				checkAcks(t, s, uint64(old), all[old])
			}
		}
		if n := refusals(s) - cutRecords(s); n != 0 {
			t.Fatalf("round %d: %d blocks or records were refused", round, n)
		}
		s.Close()
	}
}

// cutRecords is how many records of tails a store has refused because they end early: a
// kill may cut the one that is being written, which nobody has acknowledged.
func cutRecords(s kvcache.Store) uint64 {
	st, _ := stats(s)
	return st.Refused[kvcache.ReasonTorn]
}

// kills is how often a writer is killed.
func (h Harness) kills() int {
	if h.Kills > 0 {
		return h.Kills
	}
	return rounds()
}

// killOwner starts an owner and kills it.
func killOwner(t *testing.T, dir string, seed uint64, limit int64) (a acks) {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 5))
	c := start(t, job{Mode: "owner", Dir: dir, Seed: seed, Limit: limit})
	c.killAt(t, r, r.IntN(ownerChains*ownerBlocks), func(line string) { a.note(t, line) })
	return a
}

// checkAcks looks for what an owner had acknowledged.
func checkAcks(t *testing.T, s kvcache.Store, seed uint64, a acks) {
	t.Helper()
	for c := range ownerChains {
		ids := ownerIDs(seed, c)
		m := longest(t, s, space(), ids)
		if len(m.Blocks) < a.blocks[c] {
			t.Fatalf("owner %d: %d blocks of chain %d, %d were acknowledged", seed, len(m.Blocks), c, a.blocks[c])
		}
		checkMatch(t, s, kvcache.Query{Space: space(), IDs: ids}, m)
		ts, ok := s.(kvcache.Tails)
		if !ok || a.tails[c] == 0 {
			continue
		}
		got := readTail(t, ts, ownerSpec(seed, c))
		if len(got) != 1 || len(got[0].Ranges) < a.tails[c] {
			t.Fatalf("owner %d: %d tails of chain %d, %d ranges were acknowledged", seed, len(got), c, a.tails[c])
		}
		checkTail(t, got[0], 1)
	}
}

// testOwnerKilledFull does the same to a store that is full, so that room is used
// again all the time: what is still there is whole.
func testOwnerKilledFull(t *testing.T, h Harness) {
	h.lasting(t)
	dir := newDir(t)
	left := 0
	for round := range h.kills() {
		killOwner(t, dir, uint64(round), ownerLimit)
		s := h.open(t, dir, ownerLimit)
		for old := max(0, round-1); old <= round; old++ {
			for c := range ownerChains {
				for _, f := range ownerChain(uint64(old), c) {
					if has(t, s, f.Ref) {
						left++
					}
				}
				if ts, ok := s.(kvcache.Tails); ok {
					for _, tail := range readTail(t, ts, ownerSpec(uint64(old), c)) {
						checkTail(t, tail, 1)
					}
					// Its stream has ended, so that its blocks may go.
					if err := ts.DropTail(context.Background(), space(), ownerSpec(uint64(old), c).Stream); err != nil {
						t.Fatal(err)
					}
				}
			}
		}
		// A store may make an open tail without asking for the room of its head, and a
		// writer may be killed between its block and the eviction that makes room for it.
		const over = ownerSize + 64<<10
		if st, ok := stats(s); ok && (refusals(s) != cutRecords(s) || st.Used > st.Limit+over) {
			t.Fatalf("round %d: %d refusals, %d of %d bytes in use", round, refusals(s), st.Used, st.Limit)
		}
		s.Close()
	}
	if left == 0 {
		t.Error("nothing was left of anything: the test proves nothing")
	}
}
