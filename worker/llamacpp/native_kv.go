//go:build !nollamacpp && (linux || darwin) && (amd64 || arm64)

package llamacpp

import (
	"fmt"
	"slices"

	"github.com/hybridgroup/yzma/pkg/llama"

	"github.com/kvmesh/kvmesh/worker"
)

var _ keeper = (*native)(nil)

// CopyRange implements keeper. llama.cpp writes whole sequences only, so the range is
// first tagged as a sequence of its own, which copies nothing.
func (n *native) CopyRange(dst []byte, slot, from, to int) (out []byte, err error) {
	if err := llama.MemorySeqCp(n.mem, llama.SeqId(slot), n.scratch, llama.Pos(from), llama.Pos(to)); err != nil {
		return dst, err
	}
	defer func() {
		if e := n.clearScratch(); err == nil {
			err = e
		}
	}()
	size := int(llama.StateSeqGetSize(n.ctx, n.scratch))
	if size == 0 {
		return dst, fmt.Errorf("tokens %d to %d of slot %d have no state", from, to, slot)
	}
	at := len(dst)
	dst = slices.Grow(dst, size)[:at+size]
	if got := int(llama.StateSeqGetData(n.ctx, dst[at:], n.scratch)); got != size {
		return dst[:at], n.lib.because(fmt.Errorf("state of tokens %d to %d: %d bytes of %d", from, to, got, size))
	}
	return dst, nil
}

// LoadRange implements keeper. The state is read into a sequence of its own; what it
// holds is checked there, and only then tagged as slot's.
func (n *native) LoadRange(slot, from, to int, r worker.KVRange) (err error) {
	defer func() {
		if e := n.clearScratch(); err == nil {
			err = e
		}
	}()
	n.lib.lines.forget()
	if len(r.Data) == 0 || llama.StateSeqSetData(n.ctx, r.Data, n.scratch) == 0 {
		return n.lib.because(fmt.Errorf("llama.cpp refuses the state of %d bytes", len(r.Data)))
	}
	first, err := llama.MemorySeqPosMin(n.mem, n.scratch)
	if err != nil {
		return err
	}
	last, err := llama.MemorySeqPosMax(n.mem, n.scratch)
	if err != nil {
		return err
	}
	if int(first) != r.From || int(last) != r.To-1 {
		return fmt.Errorf("the state is of tokens %d to %d", first, last+1)
	}
	return llama.MemorySeqCp(n.mem, n.scratch, llama.SeqId(slot), llama.Pos(from), llama.Pos(to))
}

// ShareRange implements keeper.
func (n *native) ShareRange(from, to, upTo int) error {
	return llama.MemorySeqCp(n.mem, llama.SeqId(from), llama.SeqId(to), 0, llama.Pos(upTo))
}

// clearScratch forgets the sequence that ranges pass through.
func (n *native) clearScratch() error {
	_, err := llama.MemorySeqRm(n.mem, n.scratch, -1, -1)
	return err
}
