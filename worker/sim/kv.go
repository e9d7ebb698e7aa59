package sim

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"github.com/kvmesh/kvmesh/worker"
)

// kvState is the simulated KV of a sequence: for every token a hash of all tokens up
// to it, repeated to the configured size. Like real KV it depends on nothing else, so
// that what was kept of the wrong tokens, or spoiled, is recognized.
type kvState struct {
	e      *Engine
	tokens []int32
	hashes []uint64

	restored int  // tokens whose KV came from elsewhere
	lossy    bool // some of it may have been quantized
}

// restore looks up stored KV for a generation; nil when nobody keeps it.
func (e *Engine) restore(ctx context.Context, ids []int32, p worker.Params) *kvState {
	if p.KV == nil {
		return nil
	}
	k := &kvState{e: e}
	for _, id := range ids {
		k.add(id)
	}
	// A simulated model without speeds is in no hurry.
	prefill := e.cfg.TTFT + time.Duration(len(ids))*e.cfg.PrefillPerToken
	chain := p.KV.Restore(ctx, ids, max(prefill, leastPrefill))
	k.restored = k.load(chain)
	k.lossy = chain.Lossy && k.restored > 0
	return k
}

// leastPrefill is the estimate of a prefill that takes no time.
const leastPrefill = 10 * time.Second

// keep decodes the newest token and lets the session copy what it wants.
func (s *sequence) keep(last bool) {
	if s.kv == nil {
		return
	}
	if s.more && !last {
		s.kv.add(s.newest)
		s.more = false
	}
	tokens := s.kv.tokens
	if s.more {
		tokens = append(slices.Clone(tokens), s.newest)
	}
	take := s.kv.copy
	if s.in.CorruptKV {
		take = s.kv.spoiled
	}
	s.p.KV.Step(tokens, len(s.kv.tokens), last, take)
}

// spoiled is copy with one bit flipped: as whole as any KV, and of no tokens at all.
func (k *kvState) spoiled(dst []byte, from, to int) ([]byte, error) {
	at := len(dst)
	dst, err := k.copy(dst, from, to)
	if err == nil {
		dst[at] ^= 1
	}
	return dst, err
}

// add takes the next token.
func (k *kvState) add(id int32) {
	h := k.e.key
	if n := len(k.hashes); n > 0 {
		h = k.hashes[n-1]
	}
	k.tokens, k.hashes = append(k.tokens, id), append(k.hashes, mix(h^uint64(id)))
}

// copy implements worker.KVCopy.
func (k *kvState) copy(dst []byte, from, to int) ([]byte, error) {
	if from < 0 || from >= to || to > len(k.hashes) {
		return dst, fmt.Errorf("sim: KV of tokens %d to %d of %d", from, to, len(k.hashes))
	}
	for _, h := range k.hashes[from:to] {
		for range k.e.cfg.KVBytes / 8 {
			dst = binary.LittleEndian.AppendUint64(dst, h)
		}
	}
	return dst, nil
}

// load checks stored KV and returns how many tokens it is good for.
func (k *kvState) load(c worker.KVChain) int {
	begin, n := time.Now(), 0
	var bad error
	for _, r := range c.Ranges {
		good := r.To
		if r.Good > 0 {
			good = r.Good
		}
		good = min(good, len(k.tokens)-1) // the newest token is decoded here
		if r.From > n || good <= n {
			break
		}
		want, err := k.copy(nil, r.From, good)
		if size := k.e.cfg.KVBytes * (r.To - r.From); err == nil && (len(r.Data) != size || !bytes.HasPrefix(r.Data, want)) {
			err = fmt.Errorf("sim: the KV of tokens %d to %d is not theirs", r.From, good)
		}
		if err != nil {
			bad = err
			break
		}
		n = good
	}
	if c.Done != nil {
		c.Done(n, time.Since(begin), bad)
	}
	return n
}
