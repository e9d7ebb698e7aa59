package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/codec"
	"github.com/kvmesh/kvmesh/worker"
)

// Store is what a Keeper needs: blocks and tails.
type Store interface {
	kvcache.Store
	kvcache.Tails
}

// Config describes a Keeper. Zero fields take the defaults named beside them.
type Config struct {
	Store Store // required; the caller closes it after the Keeper
	// Block is the number of tokens of a full block; default 64. Workers that share a
	// store find each other's blocks only with the same.
	Block int
	// Interval is the number of tokens between two appends to a tail; default 16, 1 =
	// after every token.
	Interval int
	// MaxRestore bounds what a look-up may take, however long the prefill is; default
	// 2 s.
	MaxRestore time.Duration
	// Patience is how long a call of the store may take before the store counts as
	// hanging, and is not asked; default 2 s.
	Patience time.Duration
	// QueueBytes bounds the copies that wait to be stored; default 64 MiB.
	QueueBytes int64
	// Parts cuts the KV of some tokens, as the engine copied it, into parts that can be
	// read and verified alone; nil, also as its result = it is one part.
	Parts func(data []byte, tokens int) []kvcache.Part
	// Codec is how full blocks are stored; what is not raw is smaller and not quite what
	// the engine wrote, so chains of it are marked as lossy. Blocks of one codec are
	// never found by a keeper with another. The tail of a stream stays raw. Default raw.
	Codec kvcache.Codec
	// Shape says what matrix is in a part, for the codec; nil only without one.
	Shape    codec.ShapeOf
	Registry prometheus.Registerer // for the metrics kvmesh_kv_*; default: none
	Log      *slog.Logger          // default: silent
}

// withDefaults returns c with every zero field set.
func (c Config) withDefaults() Config {
	if c.Block == 0 {
		c.Block = 64
	}
	if c.Interval == 0 {
		c.Interval = 16
	}
	if c.MaxRestore == 0 {
		c.MaxRestore = 2 * time.Second
	}
	if c.Patience == 0 {
		c.Patience = 2 * time.Second
	}
	if c.QueueBytes == 0 {
		c.QueueBytes = 64 << 20
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// mostBlock is the largest block: a tail's range takes as many tokens.
const mostBlock = 512

// Validate reports the first field that cannot work.
func (c Config) Validate() error {
	switch {
	case c.Store == nil:
		return errors.New("checkpoint: no store")
	case c.Codec != kvcache.CodecRaw && (c.Shape == nil || c.Parts == nil):
		return fmt.Errorf("checkpoint: codec %v for an engine whose state nobody can read", c.Codec)
	case c.Block < 0 || c.Block > mostBlock:
		return fmt.Errorf("checkpoint: block of %d tokens: 1 to %d", c.Block, mostBlock)
	case c.Interval < 0 || c.MaxRestore < 0 || c.Patience < 0 || c.QueueBytes < 0:
		return errors.New("checkpoint: a limit is negative")
	}
	return nil
}

// Keeper keeps the KV of many generations. It implements worker.KVKeeper and is safe
// for concurrent use.
type Keeper struct {
	cfg     Config
	metrics *metrics
	watch   *watch
	jobs    chan job
	queued  atomic.Int64 // bytes
	buffers buffers
	rate    atomic.Int64 // of restoring, bytes per second
	parts   atomic.Int64 // that the last block had, for which room is left in the next
	// announced says that the store was told of the model.
	announced atomic.Bool
	packed    []byte // the writer's, for the block that is being encoded

	life   sync.RWMutex // held for reading while a job is queued
	closed bool
	done   chan struct{}
}

var (
	_ worker.KVKeeper = (*Keeper)(nil)
	_ worker.Degrader = (*Keeper)(nil)
)

// queueJobs bounds the number of waiting copies, most of them small.
const queueJobs = 1024

// firstRate is the estimate of restored bytes per second before one was measured.
const firstRate = 500 << 20

// New starts a keeper; Close ends it.
func New(cfg Config) (*Keeper, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	k := &Keeper{cfg: cfg, watch: newWatch(cfg.Patience), jobs: make(chan job, queueJobs), done: make(chan struct{})}
	k.metrics = newMetrics(cfg.Registry, k, cfg.Store)
	k.rate.Store(firstRate)
	k.parts.Store(1)
	go k.write()
	return k, nil
}

// Session implements worker.KVKeeper.
func (k *Keeper) Session(m worker.Model, s worker.KVStream) worker.KVSession {
	text := k.text(m)
	space := kvcache.NewSpace(text, []byte(s.Salt))
	within := k.cfg.MaxRestore
	if s.Within > 0 {
		within = s.Within
	}
	one := &session{
		k: k, within: within, space: space, parent: space.Root, label: kvcache.Label{Model: m.Name, Weights: m.Weights, Text: text}, resumed: s.Resume,
		tail: tail{spec: kvcache.TailSpec{Space: space, Stream: s.ID, Choice: s.Choice, Attempt: s.Attempt}},
	}
	// A store that has epochs is to know of new weights from the first request on, not from
	// the first full block on.
	if m.Weights != "" && k.announced.CompareAndSwap(false, true) {
		k.announced.Store(k.queue(job{s: one, kind: nameJob}))
	}
	return one
}

// text is what the fingerprint of a model's blocks is made of. Without a codec it is the
// model's own.
func (k *Keeper) text(m worker.Model) string {
	if k.cfg.Codec == kvcache.CodecRaw {
		return m.Fingerprint
	}
	return m.Fingerprint + " codec:" + k.cfg.Codec.String()
}

// closeTime bounds how long Close waits for a store that hangs.
const closeTime = 5 * time.Second

// Close stores what is queued and ends the keeper. Sessions that go on keep nothing
// from then on. A store that hangs is not waited for for ever: then the error says so. It
// may be called twice.
func (k *Keeper) Close() error {
	k.life.Lock()
	if !k.closed {
		k.closed = true
		close(k.jobs)
	}
	k.life.Unlock()
	for {
		select {
		case <-k.done:
			return nil
		case <-time.After(closeTime):
			if !k.watch.writes(time.Now()) {
				return errors.New("checkpoint: the store hangs; what was queued for it is lost")
			}
		}
	}
}

// queue hands a job over without ever waiting; false when it cannot be taken.
func (k *Keeper) queue(j job) bool {
	k.life.RLock()
	defer k.life.RUnlock()
	if k.closed {
		return false
	}
	select {
	case k.jobs <- j:
		k.queued.Add(int64(len(j.data)))
		return true
	default:
		return false
	}
}

// room reports whether a copy of about size bytes may be made.
func (k *Keeper) room(size int64) bool {
	return k.queued.Load()+size <= k.cfg.QueueBytes && len(k.jobs) < cap(k.jobs)-1 && k.watch.writes(time.Now())
}

// cut divides the KV of some tokens into parts.
func (k *Keeper) cut(data []byte, tokens int) []kvcache.Part {
	if k.cfg.Parts != nil {
		if parts := k.cfg.Parts(data, tokens); len(parts) > 0 && len(parts) <= kvcache.MaxParts {
			return parts
		}
	}
	return []kvcache.Part{{Size: int64(len(data))}}
}

// Degraded implements worker.Degrader.
func (k *Keeper) Degraded() string { return k.watch.degraded(time.Now()) }

// storeTime bounds one call of the store; a dead one must not stop the writer.
const storeTime = 10 * time.Second

// write stores jobs in the order in which they came.
func (k *Keeper) write() {
	defer close(k.done)
	for j := range k.jobs {
		ctx, cancel := context.WithTimeout(context.Background(), storeTime)
		_, end := k.watch.begin(time.Now(), true)
		err := j.s.store(ctx, j)
		end(time.Now())
		if j.kind != endJob && j.kind != nameJob {
			k.note(j.kind, err)
		}
		cancel()
		k.queued.Add(-int64(len(j.data)))
		k.buffers.put(j.data)
	}
}

// note remembers what came of a write, and logs when the store stops and begins again to
// take any. What was refused because of the stream says nothing about the store.
func (k *Keeper) note(kind jobKind, err error) {
	if errors.Is(err, kvcache.ErrStale) || errors.Is(err, kvcache.ErrGap) {
		return
	}
	none, again := k.watch.wrote(time.Now(), kind, err)
	switch {
	case none:
		k.cfg.Log.Warn("the KV store takes no checkpoints; streams go on without them", "kind", kind.String(), "err", err)
	case again > 0:
		k.cfg.Log.Info("the KV store takes checkpoints again", "kind", kind.String(), "after", again)
	}
}

// buffers keeps memory for copies between uses, one list for blocks and one for
// ranges of tails, so that a small copy does not take a large buffer. Safe for
// concurrent use.
type buffers struct {
	mu           sync.Mutex
	large, small [][]byte
}

// Copies of more than smallCopy bytes are large; as many buffers of each size are
// kept as mostSpare.
const (
	smallCopy = 256 << 10
	mostSpare = 32
)

func (b *buffers) get(size int) []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	list := &b.small
	if size > smallCopy {
		list = &b.large
	}
	if n := len(*list); n > 0 {
		buf := (*list)[n-1]
		*list = (*list)[:n-1]
		return buf[:0]
	}
	return make([]byte, 0, size)
}

func (b *buffers) put(buf []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	list := &b.small
	if cap(buf) > smallCopy {
		list = &b.large
	}
	if cap(buf) > 0 && len(*list) < mostSpare {
		*list = append(*list, buf)
	}
}
