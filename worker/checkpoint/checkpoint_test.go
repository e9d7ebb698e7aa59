package checkpoint

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/dirstore"
	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/sim"
)

// rig is one worker process: an engine, a keeper and a store.
type rig struct {
	testing.TB
	e *sim.Engine
	k *Keeper
}

// newRig opens a store in dir as a process of its own would. wrap may put something
// between it and the keeper.
func newRig(t testing.TB, dir, model string, cfg Config, wrap func(Store) Store) *rig {
	t.Helper()
	store, err := dirstore.Open(dirstore.Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	cfg.Store = store
	if wrap != nil {
		cfg.Store = wrap(store)
	}
	cfg.Registry = prometheus.NewRegistry()
	k, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	e, err := sim.New(sim.Config{Name: model, AnswerLen: -1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		e.Close()
		k.Close()
		store.Close()
	})
	return &rig{t, e, k}
}

// prompt is about n tokens.
func (r *rig) prompt(n int) []int32 {
	r.Helper()
	req, bad := openai.Parse(openai.Completions, fmt.Appendf(nil, `{"model":"m","prompt":%q}`, strings.Repeat("river light garden morning ", n/4)))
	if bad != nil {
		r.Fatal(bad)
	}
	ids, err := r.e.Tokenize(req, 0)
	if err != nil {
		r.Fatal(err)
	}
	return ids
}

// params ask for n sampled tokens.
func params(n int) worker.Params {
	return worker.Params{MaxTokens: n, TopP: 1, TopLogprobs: -1, IgnoreEOS: true, Temperature: 1, Seed: 4}
}

// generate runs a generation, at most until it has most tokens.
func (r *rig) generate(ids []int32, p worker.Params, most int) (out []int32, first worker.Token) {
	r.Helper()
	for tok, err := range r.e.Generate(r.Context(), ids, p) {
		if err != nil {
			r.Fatal(err)
		}
		if len(out) == 0 {
			first = tok
			first.Bytes = nil
		}
		if out = append(out, tok.ID); len(out) == most {
			break
		}
	}
	return out, first
}

// flush waits until everything queued is stored.
func (r *rig) flush() {
	r.Helper()
	done := make(chan struct{})
	s := &session{k: r.k}
	s.tail.w = closeFunc(func() { close(done) })
	if !r.k.queue(job{s: s, kind: endJob}) {
		r.Fatal("the queue is full")
	}
	<-done
}

// closeFunc is a tail of which only the end matters.
type closeFunc func()

func (f closeFunc) Append(kvcache.Range) error    { return nil }
func (f closeFunc) Rotate(kvcache.Key, int) error { return nil }
func (f closeFunc) Close() error                  { f(); return nil }

func stream(attempt int) worker.KVStream {
	return worker.KVStream{ID: "s", Attempt: attempt, Salt: "tenant"}
}

// with puts a generation under a keeper.
func (r *rig) with(p worker.Params, s worker.KVStream) worker.Params {
	p.KV = r.k.Session(r.e.Model(), s)
	return p
}

func resumed(p worker.Params, n int) worker.Params {
	p.MaxTokens -= n
	p.Delivered = n
	return p
}

// TestEveryOffset stops a stream after every token and continues it in another
// process: all but a few tokens are restored, and the answer is the same.
func TestEveryOffset(t *testing.T) {
	const most = 80
	for _, every := range []int{1, 5, 16} {
		cfg := Config{Block: 16, Interval: every}
		dir := filepath.Join(t.TempDir(), "kv")
		one, two := newRig(t, dir, "m", cfg, nil), newRig(t, dir, "m", cfg, nil)
		ids := one.prompt(20)
		want, _ := one.generate(ids, params(most), most)
		for at := 1; at < most; at += 3 {
			s := stream(1)
			s.ID = fmt.Sprintf("%d-%d", every, at)
			s.Salt = s.ID
			if got, _ := one.generate(ids, one.with(params(most), s), at); !slices.Equal(got, want[:at]) {
				t.Fatalf("with a keeper: %v, want %v", got, want[:at])
			}
			one.flush()
			s.Attempt = 2
			got, first := two.generate(slices.Concat(ids, want[:at]), two.with(resumed(params(most), at), s), most)
			if !slices.Equal(got, want[at:]) {
				t.Fatalf("every %d, cut at %d: %v, want %v", every, at, got, want[at:])
			}
			// All but the newest is there, since leaving writes the end of the tail.
			if first.Restored != len(ids)+at-1 {
				t.Errorf("every %d, cut at %d: %d tokens restored of %d", every, at, first.Restored, len(ids)+at)
			}
		}
	}
}

// TestAhead: the first worker was far ahead of what was delivered; blocks of other
// tokens than the wanted are cut where they differ.
func TestAhead(t *testing.T) {
	cfg := Config{Block: 16, Interval: 4}
	dir := filepath.Join(t.TempDir(), "kv")
	one, two := newRig(t, dir, "m", cfg, nil), newRig(t, dir, "m", cfg, nil)
	ids := one.prompt(20)
	want, _ := one.generate(ids, params(120), 120)
	for _, at := range []int{1, 7, 30, 50, 119} {
		s := stream(1)
		s.ID = fmt.Sprint(at)
		one.generate(ids, one.with(params(120), s), 120)
		one.flush()
		s.Attempt = 2
		got, first := two.generate(slices.Concat(ids, want[:at]), two.with(resumed(params(120), at), s), 200)
		if !slices.Equal(got, want[at:]) {
			t.Errorf("cut at %d: %v, want %v", at, got, want[at:])
		}
		if first.Restored != len(ids)+at-1 {
			t.Errorf("cut at %d: %d tokens restored of %d", at, first.Restored, len(ids)+at)
		}
	}
}

// TestStrangers: what another model, tenant or block size wrote is not found, nor is
// the tail of another stream or choice.
func TestStrangers(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "kv")
	one := newRig(t, dir, "m", Config{Block: 16}, nil)
	ids := one.prompt(60)
	one.generate(ids, one.with(params(20), stream(1)), 20)
	one.flush()
	other := stream(2)
	other.Salt = "another tenant"
	elsewhere := stream(2)
	elsewhere.ID = "another stream"
	choice := stream(2)
	choice.Choice = 1
	blocks := (len(ids) + 19) / 16 * 16
	for name, c := range map[string]struct {
		model  string
		s      worker.KVStream
		block  int
		expect int
	}{
		"the same":       {"m", stream(2), 16, len(ids) + 18},
		"another model":  {"n", stream(2), 16, 0},
		"another tenant": {"m", other, 16, 0},
		"another stream": {"m", elsewhere, 16, blocks},
		"another choice": {"m", choice, 16, blocks},
	} {
		r := newRig(t, dir, c.model, Config{Block: c.block}, nil)
		want, _ := one.generate(ids, params(20), 20)
		if c.model != "m" {
			want, _ = r.generate(ids, params(20), 20)
		}
		got, first := r.generate(slices.Concat(ids, want[:19]), r.with(resumed(params(20), 19), c.s), 20)
		if !slices.Equal(got, want[19:]) {
			t.Errorf("%s: %v, want %v", name, got, want[19:])
		}
		if first.Restored != c.expect {
			t.Errorf("%s: %d tokens restored, want %d", name, first.Restored, c.expect)
		}
	}
}

// strange is a block that another model or another tenant has stored of the same tokens.
func strange(t *testing.T, model, salt string) []byte {
	dir := filepath.Join(t.TempDir(), "kv")
	r := newRig(t, dir, model, Config{Block: 16}, nil)
	r.generate(r.prompt(60), r.with(params(10), worker.KVStream{ID: "a", Salt: salt}), 10)
	r.flush()
	var block []byte
	err := filepath.WalkDir(filepath.Join(dir, "models"), func(path string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && d.Name() != "label" {
			block, err = os.ReadFile(path)
		}
		return err
	})
	if err != nil || len(block) == 0 {
		t.Fatalf("a strange block of %d bytes, %v", len(block), err)
	}
	return block
}

// TestSpoiledFiles: torn, flipped and strangers' files are refused for a reason that is
// counted, the answer is right, and good blocks take their place.
func TestSpoiledFiles(t *testing.T) {
	replace := func(model, salt string) func(string) error {
		block := strange(t, model, salt)
		return func(path string) error { return os.WriteFile(path, block, 0o600) }
	}
	for name, c := range map[string]struct {
		spoil  func(path string) error
		reason string
	}{
		"torn": {func(path string) error { return os.Truncate(path, 100) }, "torn"},
		"flipped": {func(path string) error {
			b, err := os.ReadFile(path)
			if err == nil {
				b[len(b)-1] ^= 1
				err = os.WriteFile(path, b, 0o600)
			}
			return err
		}, "checksum"},
		"another model's":  {replace("n", ""), "foreign"},
		"another tenant's": {replace("m", "another"), "key"}, // its keys are others, too
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "kv")
			one := newRig(t, dir, "m", Config{Block: 16}, nil)
			ids := one.prompt(60)
			want, _ := one.generate(ids, one.with(params(10), worker.KVStream{ID: "a"}), 10)
			one.flush()
			files := 0
			err := filepath.WalkDir(filepath.Join(dir, "models"), func(path string, d os.DirEntry, err error) error {
				if err != nil || !d.Type().IsRegular() || d.Name() == "label" {
					return err
				}
				files++
				return c.spoil(path)
			})
			if err != nil || files < 4 {
				t.Fatalf("%d files, %v", files, err)
			}
			two := newRig(t, dir, "m", Config{Block: 16}, nil)
			// Each generation puts good blocks in the place of the bad ones that it finds; a
			// block whose file is torn hides those behind it.
			healed := false
			for round := 0; !healed && round <= files; round++ {
				got, first := two.generate(ids, two.with(params(10), worker.KVStream{ID: fmt.Sprint(round)}), 10)
				two.flush()
				if !slices.Equal(got, want) {
					t.Errorf("round %d: %v, want %v", round, got, want)
				}
				if round == 0 && first.Restored > 0 {
					t.Errorf("%d tokens restored from bad blocks", first.Restored)
				}
				healed = first.Restored == len(ids)-1
			}
			if !healed {
				t.Errorf("after %d rounds the blocks are not good again", files+1)
			}
			if n := refusals(two, c.reason); n == 0 {
				t.Errorf("no refusal for reason %q is counted, but %v", c.reason, two.k.cfg.Store.(kvcache.Counted).Stats())
			}
		})
	}
}

// refusals counts those of the keeper and of its store.
func refusals(r *rig, reason string) float64 {
	n := testutil.ToFloat64(r.k.metrics.refused.WithLabelValues(reason))
	for i, known := range kvcache.Reasons() {
		if known.String() == reason {
			n += float64(r.k.cfg.Store.(kvcache.Counted).Stats().Refused[i])
		}
	}
	return n
}

// TestZombie: the writes of a worker whose stream has moved are refused and counted,
// and it keeps nothing more.
func TestZombie(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "kv")
	cfg := Config{Block: 16, Interval: 1}
	one, two := newRig(t, dir, "m", cfg, nil), newRig(t, dir, "m", cfg, nil)
	ids := one.prompt(20)
	want, _ := one.generate(ids, params(60), 60)
	n := 0
	for tok, err := range one.e.Generate(t.Context(), ids, one.with(params(60), stream(1))) {
		if err != nil {
			t.Fatal(err)
		}
		if tok.ID != want[n] {
			t.Fatalf("token %d is %d, want %d", n, tok.ID, want[n])
		}
		if n++; n == 9 { // it stands still here while the stream moves
			one.flush()
			got, first := two.generate(slices.Concat(ids, want[:9]), two.with(resumed(params(60), 9), stream(2)), 20)
			if !slices.Equal(got, want[9:29]) || first.Restored < len(ids) {
				t.Errorf("moved: %v with %d tokens restored, want %v", got, first.Restored, want[9:29])
			}
			two.flush()
		}
	}
	one.flush()
	if testutil.ToFloat64(one.k.metrics.stale) == 0 {
		t.Error("no late write was refused")
	}
	if n := testutil.ToFloat64(two.k.metrics.stale); n != 0 {
		t.Errorf("%v writes of the successor were refused", n)
	}
	got, first := two.generate(slices.Concat(ids, want[:29]), two.with(resumed(params(60), 29), stream(3)), 60)
	if !slices.Equal(got, want[29:]) || first.Restored != len(ids)+28 {
		t.Errorf("moved again: %v with %d tokens restored, want %v", got, first.Restored, want[29:])
	}
}

// TestSlowStore: a store that does not answer delays no token; what was skipped is
// counted, and made good when it answers again.
func TestSlowStore(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "kv")
	slow := &wrapped{gate: make(chan struct{})}
	cfg := Config{Block: 16, Interval: 4, QueueBytes: 8 << 10} // four blocks of 128 bytes a token
	one := newRig(t, dir, "m", cfg, func(s Store) Store { slow.Store = s; return slow })
	ids := one.prompt(20)
	n := 0
	for _, err := range one.e.Generate(t.Context(), ids, one.with(params(200), stream(1))) {
		if err != nil {
			t.Fatal(err)
		}
		if n++; n == 150 { // the whole first part came while the store stood still
			if testutil.ToFloat64(one.k.metrics.skipped.WithLabelValues("block")) == 0 {
				t.Error("nothing was skipped")
			}
			close(slow.gate)
			one.drain()
		}
		if n > 150 {
			one.drain()
		}
	}
	one.flush()
	if got, want := slow.puts.Load(), int64((len(ids)+199)/16); got != want {
		t.Errorf("%d blocks are stored, want %d", got, want)
	}
}

// drain waits until the queue is empty, without adding to it.
func (r *rig) drain() {
	for r.k.queued.Load() > 0 {
		select {
		case <-time.After(time.Millisecond):
		case <-r.Context().Done():
			r.Fatal("the queue does not drain")
		}
	}
}

// TestWithin: a request may say how long its look-up may take.
func TestWithin(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "kv")
	one := newRig(t, dir, "m", Config{Block: 16}, nil)
	ids := one.prompt(60)
	one.generate(ids, one.with(params(4), worker.KVStream{ID: "a"}), 4)
	one.flush()
	if _, first := one.generate(ids, one.with(params(4), worker.KVStream{ID: "b", Within: 1}), 4); first.Restored != 0 {
		t.Errorf("%d tokens restored within a nanosecond", first.Restored)
	}
	if n := testutil.ToFloat64(one.k.metrics.restores.WithLabelValues("late")) + testutil.ToFloat64(one.k.metrics.restores.WithLabelValues("slower")); n != 1 {
		t.Errorf("%v look-ups counted as too long, want 1", n)
	}
}

// TestSlowerThanPrefill: what would take longer to load than to compute stays where
// it is.
func TestSlowerThanPrefill(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "kv")
	one := newRig(t, dir, "m", Config{Block: 16}, nil)
	ids := one.prompt(60)
	one.generate(ids, one.with(params(4), worker.KVStream{ID: "a"}), 4)
	one.flush()
	one.k.rate.Store(1) // byte per second
	if _, first := one.generate(ids, one.with(params(4), worker.KVStream{ID: "b"}), 4); first.Restored != 0 {
		t.Errorf("%d tokens restored", first.Restored)
	}
	if testutil.ToFloat64(one.k.metrics.restores.WithLabelValues("slower")) != 1 {
		t.Error("not counted")
	}
}

func TestValidate(t *testing.T) {
	for _, c := range []Config{{}, {Store: &wrapped{}, Block: -1}, {Store: &wrapped{}, Block: 513}, {Store: &wrapped{}, Interval: -1}} {
		if c.Validate() == nil {
			t.Errorf("%+v passes", c)
		}
	}
}
