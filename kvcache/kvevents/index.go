package kvevents

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"maps"
	"slices"
	"sync"

	"github.com/tinylib/msgp/msgp"
)

// Index knows which blocks each of several workers holds, by what their publishers tell. It
// names blocks by their tokens and not by the engine's hashes, so workers with other hashes, or
// other settings of them, can be compared. It is safe for concurrent use.
//
// It knows what it was told and no more: blocks whose tokens, or whose beginning, nobody told it
// are not in it, nor those of groups of layers but the first.
type Index struct {
	most int // blocks of one worker

	mu      sync.RWMutex
	workers map[string]*holder
}

// holder is one worker.
type holder struct {
	blocks map[Hash]held
	chains map[chain]uint32 // how many blocks there are of each
	sizes  map[int]int      // how many blocks there are of each size in tokens
	stats  IndexStats
}

// chain names the tokens of a block and of all before it.
type chain [16]byte

// held is a block that a worker has.
type held struct {
	chain chain
	size  int
	in    media
}

// media is a set of places. An engine that writes a block through to another medium tells of
// it twice, and removes it twice: the block is there as long as it is anywhere.
type media uint8

const (
	inGPU media = 1 << iota
	inCPU
	inStorage
	elsewhere
)

// mediumOf is the set of one place. Old versions of vLLM name none: theirs is the GPU's.
func mediumOf(name string) media {
	switch name {
	case "", MediumGPU:
		return inGPU
	case MediumCPU:
		return inCPU
	case MediumStorage:
		return inStorage
	}
	return elsewhere
}

// mostWorkers bounds the workers of an index, and mostSizes the sizes of blocks of one of them.
const (
	mostWorkers = 4096
	mostSizes   = 4
)

// NewIndex makes an index of at most so many blocks of each worker; 0 is 262144, which is about
// 40 MB, and 4 million tokens in blocks of 16.
func NewIndex(most int) *Index {
	return &Index{most: cmp.Or(most, 1<<18), workers: map[string]*holder{}}
}

// IndexStats are what an index knows of one worker, and what it could not take in.
type IndexStats struct {
	Blocks int
	// Full are blocks for which there was no room; Nameless those without tokens, and Orphans
	// those after a block that is not known.
	Full, Nameless, Orphans uint64
}

// Stats returns what is known of a worker.
func (x *Index) Stats(worker string) IndexStats {
	x.mu.RLock()
	defer x.mu.RUnlock()
	w := x.workers[worker]
	if w == nil {
		return IndexStats{}
	}
	st := w.stats
	st.Blocks = len(w.blocks)
	return st
}

// Forget forgets a worker, or what it was told of it so far.
func (x *Index) Forget(worker string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.workers, worker)
}

// atOnce is how many blocks are taken in before those who ask have their turn: some tenths of a
// millisecond.
const atOnce = 256

// Apply takes in what a worker's publisher tells.
func (x *Index) Apply(worker string, b Batch) {
	for _, e := range b.Events {
		for len(e.Hashes) > atOnce {
			x.apply(worker, e.cut(atOnce))
		}
		x.apply(worker, e)
	}
}

// cut takes the first n blocks off the event and returns them as one.
func (e *Event) cut(n int) Event {
	first := *e
	first.Hashes, e.Hashes = e.Hashes[:n], e.Hashes[n:]
	if e.Kind != BlockStored {
		return first
	}
	if len(e.IDs) > 0 {
		first.IDs, e.IDs = e.IDs[:n*e.BlockSize], e.IDs[n*e.BlockSize:]
	}
	if e.Extra != nil {
		first.Extra, e.Extra = e.Extra[:n], e.Extra[n:]
	}
	e.Parent = first.Hashes[n-1]
	return first
}

// apply takes in one event.
func (x *Index) apply(worker string, e Event) {
	x.mu.Lock()
	defer x.mu.Unlock()
	w := x.workers[worker]
	if w == nil {
		if len(x.workers) >= mostWorkers {
			return
		}
		w = &holder{blocks: map[Hash]held{}, chains: map[chain]uint32{}, sizes: map[int]int{}}
		x.workers[worker] = w
	}
	switch {
	case e.Kind == AllBlocksCleared:
		clear(w.blocks)
		clear(w.chains)
		clear(w.sizes)
	case e.Group != 0: // of other layers
	case e.Kind == BlockStored:
		w.store(&e, x.most)
	case e.Kind == BlockRemoved:
		w.remove(&e)
	}
}

// store takes in blocks that follow each other. The first follows the sequence's beginning or
// a block that is known: without the chain before it a block has no name here, and of what
// follows an unknown block nothing could be found either.
func (w *holder) store(e *Event, most int) {
	if e.BlockSize < 1 || len(e.IDs) != len(e.Hashes)*e.BlockSize {
		w.stats.Nameless += uint64(len(e.Hashes))
		return
	}
	var at chain
	if !e.Parent.IsZero() {
		parent, ok := w.blocks[e.Parent]
		if !ok {
			w.stats.Orphans += uint64(len(e.Hashes))
			return
		}
		at = parent.chain
	}
	in := mediumOf(e.Medium)
	for i, hash := range e.Hashes {
		at = at.next(e.IDs[i*e.BlockSize:(i+1)*e.BlockSize], e.extra(i))
		b, ok := w.blocks[hash]
		if ok && b.chain == at {
			b.in |= in
			w.blocks[hash] = b
			continue
		}
		if ok {
			w.take(hash, b) // a hash that means something else now
		}
		if len(w.blocks) >= most || w.sizes[e.BlockSize] == 0 && len(w.sizes) >= mostSizes {
			w.stats.Full += uint64(len(e.Hashes) - i)
			return
		}
		w.blocks[hash] = held{at, e.BlockSize, in}
		w.chains[at]++
		w.sizes[e.BlockSize]++
	}
}

// extra is what else the hash of block i covers.
func (e *Event) extra(i int) []byte {
	if e.Extra != nil {
		return e.Extra[i]
	}
	return extraKeys(e.LoRA, "")
}

// extraKeys are the extra keys of a block as vLLM writes them: nil where there are none.
func extraKeys(lora, salt string) []byte {
	var b []byte
	n := uint32(0)
	for _, s := range []string{lora, salt} {
		if s != "" {
			b = msgp.AppendString(b, s)
			n++
		}
	}
	if n == 0 {
		return nil
	}
	return append(msgp.AppendArrayHeader(nil, n), b...)
}

// remove takes out blocks that are in a medium no more.
func (w *holder) remove(e *Event) {
	in := mediumOf(e.Medium)
	for _, hash := range e.Hashes {
		b, ok := w.blocks[hash]
		if !ok {
			continue
		}
		if b.in &^= in; b.in != 0 {
			w.blocks[hash] = b
			continue
		}
		w.take(hash, b)
	}
}

// take takes a block out.
func (w *holder) take(hash Hash, b held) {
	delete(w.blocks, hash)
	if w.chains[b.chain]--; w.chains[b.chain] == 0 {
		delete(w.chains, b.chain)
	}
	if w.sizes[b.size]--; w.sizes[b.size] == 0 {
		delete(w.sizes, b.size)
	}
}

// next names the block of some tokens after this one. A cryptographic hash keeps one tenant
// from making prompts that look as if another one's blocks were theirs, which would send
// them to the wrong worker; what is computed never depends on it.
func (c chain) next(ids []int32, extra []byte) (n chain) {
	var room [1024]byte
	b := append(room[:0], c[:]...)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(ids)))
	for _, id := range ids {
		b = binary.LittleEndian.AppendUint32(b, uint32(id))
	}
	sum := sha256.Sum256(append(b, extra...))
	copy(n[:], sum[:])
	return n
}

// Prompt is what a request begins with.
type Prompt struct {
	IDs []int32
	// LoRA is the name of the adapter, and Salt the request's cache_salt, if any.
	LoRA, Salt string
}

// mostSteps bounds the blocks that one question follows: a millisecond or two.
const mostSteps = 8 << 10

// Held tells how many tokens of a prompt each worker holds from its beginning on. Workers that hold
// none are not in it. Its time depends on the longest that any of them holds, and ends with
// 8192 blocks.
func (x *Index) Held(p Prompt) map[string]int {
	x.mu.RLock()
	defer x.mu.RUnlock()
	found, sizes := map[string]int{}, map[int][]string{}
	for name, w := range x.workers {
		for size := range w.sizes {
			sizes[size] = append(sizes[size], name)
		}
	}
	steps := 0
	for size, names := range sizes {
		var at chain
		salt := p.Salt
		for n := size; n <= len(p.IDs) && len(names) > 0 && steps < mostSteps; n, steps = n+size, steps+1 {
			at = at.next(p.IDs[n-size:n], extraKeys(p.LoRA, salt))
			salt = ""
			names = slices.DeleteFunc(names, func(name string) bool { return x.workers[name].chains[at] == 0 })
			for _, name := range names {
				found[name] = max(found[name], n)
			}
		}
	}
	return found
}

// Workers lists the workers of whom anything was told, sorted.
func (x *Index) Workers() []string {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return slices.Sorted(maps.Keys(x.workers))
}
