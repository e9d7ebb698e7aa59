package remote

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvmesh/kvmesh/kvcache"
)

func TestNames(t *testing.T) {
	space := kvcache.NewSpace("m", nil)
	for _, n := range []int{1, 15, 16, 17, 300} {
		ids := make([]int32, n)
		for i := range ids {
			ids[i] = int32(i*7919) - 5
		}
		e := EntryOf(&kvcache.Header{Ref: space.Child(space.Root, ids), First: 3 * n, IDs: ids})
		got, ok := ParseName(e.Name())
		if diff := cmp.Diff(e, got); !ok || diff != "" {
			t.Errorf("%d tokens: %v %s", n, ok, diff)
		}
		if !strings.HasPrefix(e.Name(), Prefix(ids, 4)) {
			t.Error("a name does not begin with its tokens")
		}
		// As one part of a path, of which some file systems allow 255 bytes.
		if len(e.Name()) > 255 {
			t.Errorf("a name of %d bytes", len(e.Name()))
		}
	}
	key := space.Root.String()
	for _, bad := range []string{
		"", "---", "00000001-1-0-" + key[1:], "00000001-2-0-" + key, "0000001-1-0-" + key, "00000001-+1-0-" + key, "00000001-1--1-" + key,
		"00000001-01-0-" + key, "0000000A-1-0-" + key, "-0-0-" + key, "00000001-1-0-" + key + "-", "00000001-1-0-" + strings.ToUpper(key),
	} {
		if _, ok := ParseName(bad); ok {
			t.Errorf("%q is a name", bad)
		}
	}
}

// FuzzParseName: what is a name is written as it was read.
func FuzzParseName(f *testing.F) {
	f.Add("00000001-1-0-" + kvcache.Key{}.String())
	f.Add("-1-2-3")
	f.Fuzz(func(t *testing.T, name string) {
		if e, ok := ParseName(name); ok && e.Name() != name {
			t.Errorf("%q is read as %q", name, e.Name())
		}
	})
}

// fake is a source in memory that counts its calls.
type fake struct {
	headers      map[kvcache.Key]*kvcache.Header
	names        map[kvcache.Key][]Entry
	lists, reads int
	asked        int
	bad          map[kvcache.Key]bool
	fail         error
	failReads    bool
}

func newFake() *fake {
	return &fake{headers: map[kvcache.Key]*kvcache.Header{}, names: map[kvcache.Key][]Entry{}, bad: map[kvcache.Key]bool{}}
}

// add stores a block.
func (f *fake) add(space kvcache.Space, parent kvcache.Key, first int, ids []int32) kvcache.Key {
	h := &kvcache.Header{Ref: space.Child(parent, ids), First: first, IDs: ids, Total: int64(100 + len(ids))}
	f.headers[h.Key] = h
	f.names[parent] = append(f.names[parent], EntryOf(h))
	slices.SortFunc(f.names[parent], func(a, b Entry) int { return strings.Compare(a.Name(), b.Name()) })
	return h.Key
}

// chain stores blocks of some tokens from the root.
func (f *fake) chain(space kvcache.Space, ids []int32, size int) (keys []kvcache.Key) {
	parent := space.Root
	for at := 0; at+size <= len(ids); at += size {
		parent = f.add(space, parent, at, ids[at:at+size])
		keys = append(keys, parent)
	}
	return keys
}

// List implements Source.
func (f *fake) List(_ context.Context, _ kvcache.Space, asks []Ask) ([][]Entry, error) {
	f.lists++
	f.asked += len(asks)
	if f.fail != nil && !f.failReads {
		return nil, f.fail
	}
	out := make([][]Entry, len(asks))
	for i, a := range asks {
		for _, e := range f.names[a.Parent] {
			if strings.HasPrefix(e.Name(), a.Prefix) && len(out[i]) < Page {
				out[i] = append(out[i], e)
			}
		}
	}
	return out, nil
}

// Headers implements Source.
func (f *fake) Headers(_ context.Context, _ kvcache.Space, children []Child) ([]*kvcache.Header, error) {
	f.reads++
	if f.fail != nil && f.failReads {
		return nil, f.fail
	}
	out := make([]*kvcache.Header, len(children))
	for i, c := range children {
		if !f.bad[c.Key] {
			out[i] = f.headers[c.Key]
		}
	}
	return out, nil
}

// count makes n tokens.
func count(n int) []int32 {
	ids := make([]int32, n)
	for i := range ids {
		ids[i] = int32(i)
	}
	return ids
}

// A long chain costs few calls: that is what the guess is for.
func TestFewCalls(t *testing.T) {
	f, space := newFake(), kvcache.NewSpace("m", nil)
	ids := count(64 * 70)
	f.chain(space, ids, 64)
	find := Finder{Source: f, Ahead: 16}
	m, err := find.Longest(t.Context(), kvcache.Query{Space: space, IDs: ids})
	if err != nil || len(m.Blocks) != 70 {
		t.Fatalf("%d blocks, %v", len(m.Blocks), err)
	}
	if f.lists > 3 || f.reads != 1 || f.asked > 16+64+70 {
		t.Errorf("%d lists for %d parents and %d reads", f.lists, f.asked, f.reads)
	}
	// Another size of block is guessed wrong once.
	other := newFake()
	other.chain(space, ids, 32)
	find = Finder{Source: other, Ahead: 16}
	for i := range 2 {
		other.lists = 0
		if m, err := find.Longest(t.Context(), kvcache.Query{Space: space, IDs: ids}); err != nil || len(m.Blocks) != 140 {
			t.Fatalf("%d blocks, %v", len(m.Blocks), err)
		}
		if i == 1 && other.lists > 4 {
			t.Errorf("%d lists although the size is known", other.lists)
		}
	}
	// What is not there is asked for once.
	none := newFake()
	find = Finder{Source: none, Ahead: 4}
	if m, err := find.Longest(t.Context(), kvcache.Query{Space: space, IDs: ids}); err != nil || len(m.Blocks)+m.Common != 0 || none.lists != 1 || none.asked > 5 {
		t.Errorf("%+v, %v, %d lists for %d parents", m, err, none.lists, none.asked)
	}
}

// A block that is named and not good ends the chain, or another one takes its place.
func TestBadBlocks(t *testing.T) {
	f, space := newFake(), kvcache.NewSpace("m", nil)
	ids := count(40)
	keys := f.chain(space, ids, 8)
	find := Finder{Source: f, Ahead: 4}
	look := func() (int, int) {
		t.Helper()
		m, err := find.Longest(t.Context(), kvcache.Query{Space: space, IDs: ids})
		if err != nil {
			t.Fatal(err)
		}
		return m.Tokens(), m.Common
	}
	f.bad[keys[2]] = true
	if n, part := look(); n != 16 || part != 0 {
		t.Errorf("%d and %d tokens behind a bad block, want 16 and 0", n, part)
	}
	f.add(space, keys[1], 16, append(slices.Clone(ids[16:30]), -1))
	if n, part := look(); n != 16 || part != 14 {
		t.Errorf("%d and %d tokens, want 16 and 14", n, part)
	}
	f.add(space, keys[1], 16, ids[16:20])
	if n, part := look(); n != 20 || part != 0 {
		t.Errorf("%d and %d tokens, want 20 and 0", n, part)
	}
	// A name that is another block's, or that promises what its block has not.
	lie := EntryOf(f.headers[keys[0]])
	lie.Begin = slices.Clone(lie.Begin)
	lie.Begin[3]++
	lie.Key = keys[4]
	f.names[space.Root] = append(f.names[space.Root], lie)
	if n, _ := look(); n != 20 {
		t.Errorf("%d tokens beside a wrong name, want 20", n)
	}
}

// What is known when the source fails is an answer.
func TestSourceFails(t *testing.T) {
	f, space := newFake(), kvcache.NewSpace("m", nil)
	ids := count(64)
	f.chain(space, ids, 8)
	find := Finder{Source: f, Ahead: 4}
	f.fail = errors.New("away")
	for _, reads := range []bool{false, true} {
		f.failReads = reads
		if m, err := find.Longest(t.Context(), kvcache.Query{Space: space, IDs: ids}); !errors.Is(err, f.fail) || len(m.Blocks)+m.Common != 0 {
			t.Errorf("%+v, %v", m, err)
		}
	}
}

// TestAgainstSearch compares random trees with a search over all blocks; it includes
// names of which only the first tokens are told.
func TestAgainstSearch(t *testing.T) {
	space := kvcache.NewSpace("m", nil)
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 7))
		f := newFake()
		random := func(n int) []int32 {
			ids := make([]int32, n)
			for i := range ids {
				ids[i] = int32(min(1, r.IntN(20)))
			}
			return ids
		}
		parents := []*kvcache.Header{{Ref: kvcache.Ref{Key: space.Root}}}
		for range 80 {
			p := parents[r.IntN(len(parents))]
			parents = append(parents, f.headers[f.add(space, p.Key, p.First+len(p.IDs), random(1+r.IntN(24)))])
		}
		find := Finder{Source: f, Ahead: 1 + r.IntN(4)}
		for range 40 {
			ids := random(r.IntN(60))
			full, part := search(parents[1:], space.Root, ids)
			m, err := find.Longest(t.Context(), kvcache.Query{Space: space, IDs: ids})
			if err != nil || m.Tokens() != full || m.Common != part {
				t.Fatalf("seed %d: %d+%d tokens, want %d+%d, %v", seed, m.Tokens(), m.Common, full, part, err)
			}
		}
	}
}

// search is the plainest look-up.
func search(known []*kvcache.Header, parent kvcache.Key, ids []int32) (full, part int) {
	for _, h := range known {
		if h.Parent != parent {
			continue
		}
		a, b := 0, common(h.IDs, ids)
		if b == len(h.IDs) {
			a, b = search(known, h.Key, ids[b:])
			a += len(h.IDs)
		}
		if a > full || a == full && b > part {
			full, part = a, b
		}
	}
	return full, part
}

// TestPatience: a server that fails is left alone, then tried by one call at a time.
func TestPatience(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := NewOps(OpsConfig{Tier: "t", Timeout: time.Second, PutTimeout: 2 * time.Second, Away: time.Minute}, func() int64 { return 0 })
		try := func(err error) error {
			_, op, begun := o.Begin(t.Context(), OpGet)
			if begun != nil {
				return begun
			}
			return op.End(err)
		}
		away := func() bool { return errors.Is(try(errors.New("broken")), ErrAway) }
		// An answer, also one that nobody likes, is one.
		for range 10 {
			_, _ = try(kvcache.ErrNotFound), try(&kvcache.Refusal{})
		}
		for i, want := range []bool{false, false, false, true} {
			if away() != want {
				t.Errorf("failure %d of three that are enough", i+1)
			}
		}
		time.Sleep(time.Minute + time.Second)
		if away() || !away() {
			t.Error("one call shall try after a while, and fail for all")
		}
		time.Sleep(time.Minute + time.Second)
		if err := try(nil); err != nil {
			t.Errorf("the server is back: %v", err)
		}
		for range 2 {
			if away() {
				t.Error("what was before does not count")
			}
		}
		if st := o.Stats(); st.Failed != 6 || st.Late != 2 {
			t.Errorf("%d failed and %d late, want 6 and 2", st.Failed, st.Late)
		}
	})
}

// TestDeadlines: the earlier deadline counts, and a caller without time is no proof that
// the server is slow.
func TestDeadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := NewOps(OpsConfig{Tier: "t", Timeout: time.Second, PutTimeout: 3 * time.Second, Away: time.Hour}, func() int64 { return 0 })
		wait := func(name string, budget time.Duration) (time.Duration, error) {
			t.Helper()
			ctx, cancel := context.WithTimeout(t.Context(), budget)
			defer cancel()
			begin := time.Now()
			ctx, op, err := o.Begin(ctx, name)
			if err != nil {
				return 0, err
			}
			<-ctx.Done()
			return time.Since(begin), op.End(ctx.Err())
		}
		for range 5 {
			if took, err := wait(OpGet, 10*time.Millisecond); took != 10*time.Millisecond || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%v, %v", took, err)
			}
		}
		for name, want := range map[string]time.Duration{OpGet: time.Second, OpLookUp: time.Second, OpPut: 3 * time.Second} {
			if took, err := wait(name, time.Hour); took != want || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%s: %v, %v", name, took, err)
			}
		}
		if _, _, err := o.Begin(t.Context(), OpGet); !errors.Is(err, ErrAway) {
			t.Errorf("after three slow calls: %v", err)
		}
		time.Sleep(time.Hour)
		// What a socket says of a deadline is a deadline.
		_, op, err := o.Begin(t.Context(), OpGet)
		if err != nil {
			t.Fatal(err)
		}
		if err := op.End(&net.OpError{Op: "read", Err: os.ErrDeadlineExceeded}); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		if n := o.Stats().Late; n != 10 {
			t.Errorf("%d late, want 10", n)
		}
	})
}

func TestClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := NewOps(OpsConfig{Timeout: time.Second}, func() int64 { return 0 })
		_, op, err := o.Begin(t.Context(), OpGet)
		if err != nil {
			t.Fatal(err)
		}
		closed := make(chan bool)
		go func() {
			first, err := o.Close()
			closed <- first && err == nil
		}()
		synctest.Wait()
		if _, _, err := o.Begin(t.Context(), OpGet); !errors.Is(err, kvcache.ErrClosed) {
			t.Errorf("begin after close: %v", err)
		}
		select {
		case <-closed:
			t.Error("closed while a call runs")
		default:
		}
		_ = op.End(nil)
		if !<-closed {
			t.Error("the first to close is not the first, or a call runs")
		}
		if first, err := o.Close(); first || err != nil {
			t.Errorf("closed again: first %v, %v", first, err)
		}
	})
}

// TestCloseHangs: a call that never ends does not keep anybody from closing.
func TestCloseHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := NewOps(OpsConfig{Timeout: time.Minute}, func() int64 { return 0 })
		_, op, err := o.Begin(t.Context(), OpGet)
		if err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		if first, err := o.Close(); !first || err == nil || time.Since(begin) != closeWait {
			t.Errorf("first %v after %v: %v", first, time.Since(begin), err)
		}
		_ = op.End(nil)
		if first, err := o.Close(); first || err != nil {
			t.Errorf("closed when it had ended: first %v, %v", first, err)
		}
	})
}

func TestMetrics(t *testing.T) {
	reg := prometheus.NewRegistry()
	o := NewOps(OpsConfig{Tier: "t", Limit: 7, Timeout: time.Second, Registry: reg}, func() int64 { return 5 })
	o.Count.Puts.Add(3)
	o.Refused(fmt.Errorf("x: %w", &kvcache.Refusal{Reason: kvcache.ReasonTorn}))
	if o.Refused(errors.New("x")) {
		t.Error("that is no refusal")
	}
	_, op, err := o.Begin(t.Context(), OpGet)
	if err != nil {
		t.Fatal(err)
	}
	_ = op.End(nil)
	want := `# HELP kvmesh_kv_tier_puts_total Blocks written.
# TYPE kvmesh_kv_tier_puts_total counter
kvmesh_kv_tier_puts_total{tier="t"} 3
# HELP kvmesh_kv_tier_used_bytes Bytes that the tier holds, as far as this process knows.
# TYPE kvmesh_kv_tier_used_bytes gauge
kvmesh_kv_tier_used_bytes{tier="t"} 5
`
	if err := testutil.GatherAndCompare(reg, strings.NewReader(want), "kvmesh_kv_tier_puts_total", "kvmesh_kv_tier_used_bytes"); err != nil {
		t.Error(err)
	}
	if n, err := testutil.GatherAndCount(reg, "kvmesh_kv_tier_refused_total", "kvmesh_kv_tier_seconds"); err != nil || n != len(kvcache.Reasons())+1 {
		t.Errorf("%d series, %v", n, err)
	}
}

// TestAdmit: calls that bound themselves are counted and held back like the others.
func TestAdmit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := NewOps(OpsConfig{Tier: "t", Timeout: time.Second, PutTimeout: time.Second, Away: 5 * time.Second}, func() int64 { return 0 })
		do := func(err error) error {
			begin := time.Now()
			if err := o.Admit(begin); err != nil {
				return err
			}
			o.Done(err, begin)
			return nil
		}
		for range 5 {
			for _, err := range []error{kvcache.ErrStale, kvcache.ErrGap, kvcache.ErrFull} {
				if do(err) != nil {
					t.Errorf("%v counts against the server", err)
				}
			}
		}
		for _, err := range []error{os.ErrDeadlineExceeded, errors.New("no"), errors.New("no")} {
			if do(err) != nil {
				t.Error("a server that failed less than three times is left alone")
			}
		}
		if err := do(nil); !errors.Is(err, ErrAway) {
			t.Errorf("a server that failed three times: %v", err)
		}
		if st := o.Stats(); st.Late != 2 || st.Failed != 2 {
			t.Errorf("%d late and %d failed, want 2 and 2", st.Late, st.Failed)
		}
		time.Sleep(5 * time.Second)
		for range 2 {
			if do(nil) != nil {
				t.Error("a server that is back is left alone")
			}
		}
		if n := testing.AllocsPerRun(100, func() { _ = do(nil) }); n != 0 {
			t.Errorf("a call allocates %v times", n)
		}
		if _, err := o.Close(); err != nil {
			t.Error(err)
		}
		if err := do(nil); !errors.Is(err, kvcache.ErrClosed) {
			t.Errorf("after close: %v", err)
		}
	})
}
