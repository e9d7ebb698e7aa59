//go:build linux

package bench

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/redislink"
	"github.com/kvmesh/kvmesh/internal/rivaltest"
	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/redistier"
	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/checkpoint"
	"github.com/kvmesh/kvmesh/worker/llamacpp"
)

// tailless is a store of whole blocks only, for a keeper that reads.
type tailless struct{ *redistier.Store }

// OpenTail implements kvcache.Tails.
func (tailless) OpenTail(context.Context, kvcache.TailSpec) (kvcache.TailWriter, error) {
	return nil, errors.ErrUnsupported
}

// ReadTail implements kvcache.Tails.
func (tailless) ReadTail(context.Context, kvcache.Space, string, int) ([]kvcache.Tail, error) {
	return nil, nil
}

// DropTail implements kvcache.Tails.
func (tailless) DropTail(context.Context, kvcache.Space, string) error { return nil }

// plain is another server with the client that takes least and no look-up at all: what is
// stored there is known. The engine reads what it read last, so it is for one reader.
type plain struct {
	tailless
	rival hostRival
	match kvcache.Match
	room  []byte
}

// Put implements kvcache.Store.
func (p *plain) Put(ctx context.Context, f *kvcache.Frame) error { return p.rival.put(ctx, f) }

// Longest implements kvcache.Store.
func (p *plain) Longest(context.Context, kvcache.Query) (kvcache.Match, error) { return p.match, nil }

// Close implements kvcache.Store.
func (p *plain) Close() error { return nil }

// Get implements kvcache.Store.
func (p *plain) Get(ctx context.Context, ref kvcache.Ref) (lent *kvcache.Lent, err error) {
	at := 0
	for _, f := range p.match.Blocks {
		room := p.room[at : at+int(f.Size)+2]
		if at += len(room); f.Ref != ref {
			continue
		}
		run := []*kvcache.Frame{{Header: kvcache.Header{Ref: ref, Total: f.Size}}}
		var frame *kvcache.Frame
		err := p.rival.read(ctx, run, room, func(b []byte) { frame, err = kvcache.Decode(b, ref) })
		if err != nil {
			return nil, err
		}
		return kvcache.NewLent(frame, nil, nil), nil
	}
	return nil, kvcache.ErrNotFound
}

// parted is a session that measures a restore's two parts: until all is found, here, and
// verified, and until the engine's state calls have returned.
type parted struct {
	worker.KVSession
	find, load time.Duration
}

// Restore implements worker.KVSession.
func (p *parted) Restore(ctx context.Context, ids []int32, prefill time.Duration) worker.KVChain {
	begin := time.Now()
	c := p.KVSession.Restore(ctx, ids, prefill)
	p.find = time.Since(begin)
	if done := c.Done; done != nil {
		c.Done = func(tokens int, took time.Duration, err error) {
			p.load = took
			done(tokens, took, err)
		}
	}
	return c
}

// restorer is a store that the engine restores from.
type restorer struct {
	name  string
	store checkpoint.Store
	keep  *checkpoint.Keeper
	// Milliseconds of each turn: to the next token without a decode step, and of that until
	// all is here and verified, and in the engine's state calls.
	whole, find, load []float64
	// same says that it does all that the node does, and so is what it is compared with.
	same bool
}

// keepIn makes a restorer of a store.
func keepIn(b *testing.B, name string, store checkpoint.Store) *restorer {
	b.Helper()
	k, err := checkpoint.New(checkpoint.Config{Store: store, MaxRestore: time.Minute, QueueBytes: 512 << 20, Parts: llamacpp.StateParts})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		k.Close()
		store.Close()
	})
	_, raw := store.(*plain)
	return &restorer{name: name, store: store, keep: k, same: !raw}
}

// turn restores a context once.
func (r *restorer) turn(b *testing.B, e *llamacpp.Engine, ids []int32, counts bool) {
	b.Helper()
	s := &parted{KVSession: r.keep.Session(e.Model(), worker.KVStream{ID: "nobody's"})}
	p := greedy(4)
	p.KV = s
	var ttft, step time.Duration
	begin := time.Now()
	last, restored := begin, 0
	for tok, err := range e.Generate(b.Context(), ids, p) {
		if err != nil {
			b.Fatal(err)
		}
		switch d := time.Since(last); {
		case ttft == 0:
			ttft, restored = d, tok.Restored
		case step == 0 || d < step:
			step = d
		}
		last = time.Now()
	}
	if restored != len(ids)-1 {
		b.Fatalf("%s: %d tokens of %d were restored", r.name, restored, len(ids))
	}
	if counts {
		r.whole, r.find, r.load = append(r.whole, ms(ttft-step)), append(r.find, ms(s.find)), append(r.load, ms(s.load))
	}
}

// hostState compares, in turns, how long the real engine takes to the next token of a context
// of boundAt tokens whose KV is in another process of this host: a KV node, and Redis and
// Valkey behind this module's own store for them, over their Unix sockets. All of it
// is verified, each time. A decode step at this length is taken off. Beside them, and not
// held to anything, are the bare servers, without look-up, manifests and parts.
func hostState(b *testing.B) {
	e := openModel(b, boundAt+64, 1)
	ids := longPrompt(b, e, boundAt)
	n := startNode(b, 1<<30)
	c := n.client(b)
	if err := c.Fill(b.Context()); err != nil {
		b.Fatal(err)
	}
	all := []*restorer{keepIn(b, "node", c)}
	for name, path := range map[string]string{"Redis": rivaltest.Redis(), "Valkey": rivaltest.Valkey(*hostValkey)} {
		s := rivaltest.StartRedis(b, path, "unix")
		if s == nil {
			b.Logf("%s: not installed", name)
			continue
		}
		store, err := redistier.Open(redistier.Config{Redis: redislink.Config{URL: "unix://" + s.Addr, Timeout: time.Minute}, Single: true, Timeout: time.Minute, PutTimeout: time.Minute})
		if err != nil {
			b.Fatal(err)
		}
		all = append(all, keepIn(b, name, tailless{store}))
	}
	for _, r := range hostRivals(b) {
		all = append(all, keepIn(b, r.name+", whole frames, no look-up", &plain{rival: r}))
	}
	p := greedy(1)
	p.KV = all[0].keep.Session(e.Model(), worker.KVStream{ID: "bench", Attempt: 1})
	generate(b, e, ids, p)
	size := copyChain(b, all, kvcache.NewSpace(e.Model().Fingerprint, []byte("")), ids)
	for b.Loop() {
		for round := range *hostRounds + 1 {
			for _, r := range all {
				r.turn(b, e, ids, round > 0)
			}
		}
	}
	hostStateTable(b, all, size)
}

// copyChain waits for the KV of ids in the first store, copies it to the others, and returns
// its bytes.
func copyChain(b *testing.B, all []*restorer, space kvcache.Space, ids []int32) (size int64) {
	b.Helper()
	var m kvcache.Match
	for begin := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		var err error
		if m, err = all[0].store.Longest(b.Context(), kvcache.Query{Space: space, IDs: ids}); err != nil {
			b.Fatal(err)
		}
		if m.Tokens() == len(ids) {
			break
		}
		if time.Since(begin) > time.Minute {
			b.Fatalf("%d tokens of %d are stored", m.Tokens(), len(ids))
		}
	}
	for _, f := range m.Blocks {
		l, err := all[0].store.Get(b.Context(), f.Ref)
		if err != nil {
			b.Fatal(err)
		}
		for _, r := range all[1:] {
			if err := r.store.Put(b.Context(), l.Frame); err != nil {
				b.Fatalf("%s: %v", r.name, err)
			}
		}
		size += f.Size
		l.Release()
	}
	for _, r := range all {
		if p, ok := r.store.(*plain); ok {
			p.match, p.room = m, make([]byte, size+2*int64(len(m.Blocks)))
		}
	}
	return size
}

// hostStateTable prints what came out and holds it to the bound.
func hostStateTable(b *testing.B, all []*restorer, size int64) {
	t := newTable()
	node := all[0]
	best, bare := (*restorer)(nil), (*restorer)(nil)
	for _, r := range all {
		whole := middle(r.whole)
		t.row("%s\t%d tokens, %d MB\t%.1f ms to the next token\t%.1f ms found and verified\t%.1f ms in state calls\t", r.name, boundAt, size/1e6, whole, middle(r.find), middle(r.load))
		if to := &best; r != node {
			if !r.same {
				to = &bare
			}
			if *to == nil || whole < middle((*to).whole) {
				*to = r
			}
		}
	}
	t.print()
	for what, r := range map[string]*restorer{"state": best, "state-bare": bare} {
		if r == nil {
			continue
		}
		whole, find := middle(r.whole)/middle(node.whole), middle(r.find)/middle(node.find)
		b.ReportMetric(whole, what+"-×")
		b.ReportMetric(find, what+"-found-×")
		b.Logf("%s takes %.2f times the node's time to the next token, and %.2f times until all is found and verified, before the state calls, which are the same for all", r.name, whole, find)
	}
	if best == nil {
		b.Log("no other server is installed: nothing is compared")
		return
	}
	holdRatio(b, "to the next token the best other server takes of the node's time", middle(best.whole)/middle(node.whole), leastOfPeer)
}
