package enginetest

import (
	"context"
	"slices"
	"time"

	"github.com/kvmesh/kvmesh/worker"
)

// shelf is a KVSession in memory. It takes blocks of a few tokens as they complete.
type shelf struct {
	every  int
	taken  []worker.KVRange
	stored []worker.KVRange
	lossy  bool

	restored, told, lasts int
	refused, failed       error
}

// Restore implements worker.KVSession.
func (s *shelf) Restore(context.Context, []int32, time.Duration) worker.KVChain {
	return worker.KVChain{Ranges: s.stored, Lossy: s.lossy, Done: func(tokens int, _ time.Duration, err error) {
		s.restored, s.refused = tokens, err
		s.told++
	}}
}

// Step implements worker.KVSession.
func (s *shelf) Step(_ []int32, held int, last bool, take worker.KVCopy) {
	if last {
		s.lasts++
	}
	for {
		from := len(s.taken) * s.every
		if s.every == 0 || from+s.every > held || s.failed != nil {
			return
		}
		data, err := take(nil, from, from+s.every)
		if err != nil {
			s.failed = err
			return
		}
		s.taken = append(s.taken, worker.KVRange{From: from, To: from + s.every, Data: data})
	}
}

// resume are the parameters that go on after n tokens of p.
func resume(p worker.Params, n int, kv worker.KVSession) worker.Params {
	p.MaxTokens -= n
	p.Delivered, p.KV = n, kv
	return p
}

// resumes: a generation that goes on from its own delivered tokens, at every offset
// and without any KV, gives the other tokens. The engine may be one whose sums depend
// on the shape of batches: then the tokens are compared with those of a fresh run.
func (s *suite) resumes() {
	if _, ok := s.e.(worker.Resumer); !ok {
		s.Skip("the engine cannot resume")
	}
	prompt := s.prompt("Once upon a time in a small town")
	p := greedy(7)
	want := ids(s.generate(prompt, p))
	for at := 1; at < len(want); at++ {
		given := slices.Concat(prompt, want[:at])
		got := ids(s.generate(given, resume(p, at, nil)))
		fresh := ids(s.generate(given, greedy(len(want)-at)))
		if !slices.Equal(got, fresh) && !slices.Equal(got, want[at:]) {
			s.Errorf("cut at %d: %v, want %v", at, got, want[at:])
		}
	}
	s.idle("resuming")
}

// restores: with the KV of a run, a sampled generation goes on as it would have.
func (s *suite) restores() {
	if _, ok := s.e.(worker.Resumer); !ok {
		s.Skip("the engine cannot resume")
	}
	prompt := s.prompt("Once upon a time in a small town there was a baker who")
	p := sampled(9, 5, 0)
	p.Presence = 0.3
	book := &shelf{every: 4}
	whole := p
	whole.KV = book
	want := ids(s.generate(prompt, whole))
	if len(book.taken) == 0 && book.failed == nil {
		s.Skip("the engine keeps no KV")
	}
	if book.failed != nil || book.lasts != 1 || book.told != 1 {
		s.Fatalf("copying: %v; %d last steps, told %d times", book.failed, book.lasts, book.told)
	}
	for at := 1; at < len(want); at++ {
		given := slices.Concat(prompt, want[:at])
		n := min((len(given)-1)/4+1, len(book.taken))
		next := &shelf{stored: book.taken[:n]}
		got := s.generate(given, resume(p, at, next))
		if !slices.Equal(ids(got), want[at:]) {
			s.Errorf("cut at %d with %d tokens of KV: %v, want %v", at, next.restored, ids(got), want[at:])
		}
		if got[0].Lossy {
			s.Errorf("cut at %d: says that the KV was quantized", at)
		}
		if next.told != 1 || next.refused != nil || next.restored == 0 || got[0].Restored != next.restored {
			s.Errorf("cut at %d: restored %d (first token says %d), %v, told %d times", at, next.restored, got[0].Restored, next.refused, next.told)
		}
	}
	// What may have been quantized is said to be, and never exact.
	given := slices.Concat(prompt, want[:1])
	next := &shelf{stored: book.taken[:(len(given)-1)/4+1], lossy: true}
	if got := s.generate(given, resume(p, 1, next)); !got[0].Lossy || got[0].Exact || got[0].Restored == 0 {
		s.Errorf("of quantized KV: restored %d, lossy %v, exact %v", got[0].Restored, got[0].Lossy, got[0].Exact)
	}
	s.idle("restoring")
}

// corruptKV: KV that cannot be right is refused, said, and made good by prefill.
func (s *suite) corruptKV() {
	if _, ok := s.e.(worker.Resumer); !ok {
		s.Skip("the engine cannot resume")
	}
	prompt := s.prompt("Once upon a time in a small town there was a baker who")
	p := greedy(8)
	book := &shelf{every: 4}
	whole := p
	whole.KV = book
	want := ids(s.generate(prompt, whole))
	if len(book.taken) < 2 {
		s.Skip("the engine keeps no KV")
	}
	for name, bad := range map[string]worker.KVRange{
		"short":       {From: 0, To: 4, Data: book.taken[0].Data[:len(book.taken[0].Data)/2]},
		"empty":       {From: 0, To: 4},
		"other place": {From: 0, To: 4, Data: book.taken[1].Data},
	} {
		next := &shelf{stored: []worker.KVRange{bad}}
		with := p
		with.KV = next
		if got := ids(s.generate(prompt, with)); !slices.Equal(got, want) {
			s.Errorf("%s: %v, want %v", name, got, want)
		}
		if next.refused == nil || next.restored != 0 || next.told != 1 {
			s.Errorf("%s: restored %d, %v, told %d times; want a refusal", name, next.restored, next.refused, next.told)
		}
	}
	s.idle("refusing KV")
}
