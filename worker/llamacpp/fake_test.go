package llamacpp

import (
	"errors"
	"fmt"
	"hash/fnv"
	"sync"
	"testing"

	"github.com/kvmesh/kvmesh/worker"
)

// fakeVocab is the vocabulary of fakes: byte values, then BOS and the end token.
const (
	fakeBOS   = 256
	fakeEnd   = 257
	fakeVocab = 258
)

// fakeContext is a decoder that holds cells like llama.cpp and refuses what it
// would refuse. The logits after a token are a hash of the whole sequence, so a
// sequence whose KV was lost, mixed or doubled goes on differently.
type fakeContext struct {
	tb    testing.TB
	cells int

	mu       sync.Mutex
	slots    map[int][]int32
	closed   bool
	batches  [][]entry
	hashes   []uint64
	onDecode func(batch []entry, stop func() bool) error // called first; an error is returned
}

func newFakeContext(tb testing.TB, cells int) *fakeContext {
	return &fakeContext{tb: tb, cells: cells, slots: make(map[int][]int32)}
}

func (f *fakeContext) used() int {
	n := 0
	for _, s := range f.slots {
		n += len(s)
	}
	return n
}

func (f *fakeContext) Decode(batch []entry, stop func() bool) error {
	if f.onDecode != nil {
		if err := f.onDecode(batch, stop); err != nil {
			return err
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		f.tb.Error("Decode after Close")
	}
	if f.used()+len(batch) > f.cells {
		return errNoCells
	}
	copied := append([]entry(nil), batch...)
	f.batches = append(f.batches, copied)
	f.hashes = make([]uint64, len(batch))
	outputs := make(map[int]bool)
	for i, e := range batch {
		if e.pos != len(f.slots[e.slot]) {
			f.tb.Errorf("slot %d: position %d after %d tokens", e.slot, e.pos, len(f.slots[e.slot]))
		}
		f.slots[e.slot] = append(f.slots[e.slot], e.id)
		if e.logits {
			if outputs[e.slot] { // the real context has room for one each
				f.tb.Errorf("slot %d: logits of two tokens in one batch", e.slot)
			}
			outputs[e.slot] = true
			h := fnv.New64a()
			fmt.Fprint(h, f.slots[e.slot])
			f.hashes[i] = h.Sum64()
		}
	}
	return nil
}

func (f *fakeContext) Logits(i int) ([]float32, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	h := f.hashes[i]
	if h == 0 {
		return nil, errors.New("no logits were asked for")
	}
	out := make([]float32, fakeVocab)
	for t := range out {
		h = h*6364136223846793005 + 1442695040888963407
		out[t] = float32(h>>40) / (1 << 24) * 8
	}
	out[fakeEnd] = -20 // only a test's logit_bias ends an answer
	return out, nil
}

func (f *fakeContext) Keep(slot, n int) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.slots[slot]) > n {
		f.slots[slot] = f.slots[slot][:n]
	}
	return nil
}

func (f *fakeContext) Close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		f.tb.Error("closed twice")
	}
	if n := f.used(); n != 0 {
		f.tb.Errorf("closed with %d cells in use", n)
	}
	f.closed = true
}

// bytesTokenizer makes one token of each byte.
type bytesTokenizer struct{}

func (bytesTokenizer) Tokenize(text string, bos bool) ([]int32, error) {
	var ids []int32
	if bos {
		ids = append(ids, fakeBOS)
	}
	for _, b := range []byte(text) {
		ids = append(ids, int32(b))
	}
	return ids, nil
}

func fakeVocabulary() *vocabulary {
	v := &vocabulary{start: []uint32{0}, longest: 1, addBOS: true, bos: "<bos>", end: map[int32]bool{fakeEnd: true}}
	for b := range 256 {
		v.text = append(v.text, byte(b))
		v.start = append(v.start, uint32(b+1))
	}
	v.start = append(v.start, 256, 256)
	return v
}

// fakeConfig is small, so that limits are met soon.
func fakeConfig() Config {
	return Config{
		LibDir: "unused", ModelPath: "fake.gguf", ContextLen: 128, Cells: 256,
		MaxSeqs: 3, MaxQueue: 16, BatchTokens: 32, PrefillTokens: 8,
	}
}

// startFake runs an engine over f.
func startFake(tb testing.TB, cfg Config, f decoder) *Engine {
	tb.Helper()
	if err := cfg.Validate(); err != nil {
		tb.Fatal(err)
	}
	cfg = cfg.withDefaults()
	chat, err := newTemplate("", "<bos>", "")
	if err != nil {
		tb.Fatal(err)
	}
	kv, _ := f.(keeper)
	e, err := start(cfg, func(*Config) (parts, error) {
		return parts{
			dec: f, kv: kv, voc: fakeVocabulary(), text: bytesTokenizer{}, chat: chat,
			model: worker.Model{Name: cfg.Name, ContextLen: cfg.ContextLen, Vocab: fakeVocab, Fingerprint: "fake"},
		}, nil
	})
	if err != nil {
		tb.Fatal(err)
	}
	return e
}
