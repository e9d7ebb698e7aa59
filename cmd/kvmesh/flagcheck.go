package main

import (
	"cmp"
	"errors"
	"math"
	"net"
	"strconv"
	"time"

	"github.com/spf13/pflag"

	"github.com/kvmesh/kvmesh/internal/policy"
)

// span is the range of a flag's value that makes sense: a number, or for a flag that is a
// time its nanoseconds.
type span struct {
	flag      string
	low, high int64
}

// checkSpans reports the first flag whose value is outside of its range.
func checkSpans(flags *pflag.FlagSet, spans ...span) error {
	for _, s := range spans {
		f := flags.Lookup(s.flag)
		if d, err := time.ParseDuration(f.Value.String()); err == nil && f.Value.Type() == "duration" {
			if int64(d) < s.low || int64(d) > s.high {
				return usagef("--%s %v: want a time of at least %v", s.flag, d, time.Duration(s.low))
			}
			continue
		}
		if n, err := strconv.ParseInt(f.Value.String(), 10, 64); err != nil || n < s.low || n > s.high {
			return usagef("--%s %v: want a whole number from %d to %d", s.flag, f.Value, s.low, s.high)
		}
	}
	return nil
}

// The ends of ranges that have no better one.
const (
	mostNumber = 1 << 30
	mostBytes  = 1 << 40
	anyTime    = math.MaxInt64
	shortest   = int64(time.Millisecond) // of a time in which something is to happen
)

// checkWorkerFlags reports the first flag of `kvmesh worker` whose value makes no sense.
// What a variable sets too is checked with it (workerVariables).
func checkWorkerFlags(flags *pflag.FlagSet) error {
	if err := checkWords(flags, word{"listen", hostPort}); err != nil {
		return err
	}
	return checkSpans(flags,
		span{"max-body", 1, policy.LargestBody}, span{"drain", 0, anyTime}, span{"self-check", 0, anyTime},
		span{"context-length", policy.LeastContext, policy.MostNumber}, span{"max-queue", 0, policy.MostNumber}, span{"kv-tokens", 0, mostNumber},
		span{"kv-pause-limit", 0, mostBytes}, span{"threads", 1, policy.MostThreads}, span{"sim-ttft", 0, anyTime}, span{"sim-itl", 0, anyTime},
		span{"kv-limit", policy.LeastKV, mostBytes}, span{"kv-block", 1, 512},
	)
}

// checkLlama reports what llamacpp cannot do of what the flags ask for.
func (o *workerOptions) checkLlama() error {
	switch seqs, batch := cmp.Or(o.seqs, 4), cmp.Or(o.batchTokens, 512); {
	case o.engine != policy.EngineLlamaCpp:
	case seqs > 256:
		return usagef("--max-num-seqs or MAX_NUM_SEQS %d: llamacpp takes 1 to 256", seqs)
	case batch < seqs:
		return usagef("--max-num-batched-tokens or MAX_NUM_BATCHED_TOKENS %d: want at least one token for each of %d sequences", batch, seqs)
	case o.kvTokens != 0 && o.kvTokens < o.context:
		return usagef("--kv-tokens %d: want at least --context-length, which is %d, or one sequence could not end", o.kvTokens, o.context)
	}
	return nil
}

// word is a flag whose text has a form.
type word struct {
	flag  string
	check func(string) error
}

// checkWords reports the first flag whose text is not of its form.
func checkWords(flags *pflag.FlagSet, words ...word) error {
	for _, w := range words {
		text := flags.Lookup(w.flag).Value.String()
		if err := w.check(text); err != nil {
			return usagef("--%s %.80q: %w", w.flag, text, err)
		}
	}
	return nil
}

// hostPort says why text is no address to listen on.
func hostPort(text string) error {
	_, port, err := net.SplitHostPort(text)
	if _, perr := strconv.ParseUint(port, 10, 16); err != nil || perr != nil {
		return errors.New("want ip:port, for example 127.0.0.1:8080")
	}
	return nil
}

// checkGatewayFlags reports the first flag of `kvmesh gateway` whose value makes no sense.
func checkGatewayFlags(flags *pflag.FlagSet) error {
	if err := checkSpans(flags, span{"drain", 0, anyTime}, span{"handover", 1, anyTime}); err != nil {
		return err
	}
	return checkWords(flags, word{"zone", policy.Zone}, word{"node", policy.WorkerID}, word{"metrics", hostPort})
}
