package main

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/kvmesh/kvmesh/internal/policy"
)

// workerVariable is an environment variable that stands for a flag of `kvmesh
// worker`. The names are those that model servers' deployments use already.
type workerVariable struct {
	name, flag string
	// check reports why a value that parses makes no sense; nil takes any.
	check func(value string) error
	// engines use it; nil means the worker itself does, whatever the engine.
	engines []string
}

// workerVariables lists them all. docs/worker.md has the same table for people, and
// a test holds one against the other.
func workerVariables() []workerVariable {
	positive := numberIn(1, policy.MostSeqs)
	return []workerVariable{
		{name: "WORKER_ID", flag: "id", check: policy.WorkerID},
		{name: "MODEL_NAME", flag: "model"},
		{name: "REDIS_URL", flag: "redis"},
		{name: "PORT", flag: "listen", check: numberIn(0, 65535)},
		{name: "AVAILABILITY_ZONE", flag: "zone", check: policy.Zone},
		{name: "TENSOR_PARALLEL_SIZE", flag: "tensor-parallel-size", check: positive, engines: []string{}},
		{name: "GPU_MEMORY_UTILIZATION", flag: "gpu-memory-utilization", check: share, engines: []string{}},
		{name: "MAX_NUM_SEQS", flag: "max-num-seqs", check: positive, engines: []string{policy.EngineLlamaCpp, policy.EngineSim, policy.EngineOpenAI}},
		{name: "MAX_NUM_BATCHED_TOKENS", flag: "max-num-batched-tokens", check: positive, engines: []string{policy.EngineLlamaCpp}},
		{name: "CHECKPOINT_INTERVAL", flag: "checkpoint-interval", check: positive, engines: []string{policy.EngineLlamaCpp}},
	}
}

// unusedFlags are flags that exist because deployments pass them on to every
// engine. What they hold is only checked and, where it goes nowhere, said.
type unusedFlags struct {
	tensorParallel int
	gpuMemory      float64
}

// add adds the flags.
func (u *unusedFlags) add(f *pflag.FlagSet) {
	f.IntVar(&u.tensorParallel, "tensor-parallel-size", 1, "GPUs per worker (TENSOR_PARALLEL_SIZE); no engine of ours splits a model")
	f.Float64Var(&u.gpuMemory, "gpu-memory-utilization", 0.9, "share of GPU memory to use (GPU_MEMORY_UTILIZATION); no engine of ours reserves GPU memory")
}

// applyWorkerEnv sets the flags that the command line leaves open from the
// environment, and checks the values of both.
func applyWorkerEnv(getenv func(string) string, flags *pflag.FlagSet) error {
	for _, v := range workerVariables() {
		f := flags.Lookup(v.flag)
		if f.Changed {
			// --listen has a form of its own, which listening checks.
			if v.flag != "listen" && v.check != nil {
				if err := v.check(f.Value.String()); err != nil {
					return usagef("--%s %.80q: %w", v.flag, f.Value.String(), err)
				}
			}
			continue
		}
		value := strings.TrimSpace(getenv(v.name))
		if value == "" {
			continue
		}
		if v.check != nil {
			if err := v.check(value); err != nil {
				return usagef("%s %.80q: %w", v.name, value, err)
			}
		}
		if v.flag == "listen" {
			value = net.JoinHostPort(loopback, value)
		}
		if err := flags.Set(v.flag, value); err != nil {
			return usagef("%s: %w", v.name, err)
		}
	}
	return nil
}

// loopback is where a worker listens unless --listen says otherwise.
const loopback = "127.0.0.1"

// logUnused says which settings the engine has no use for, so that nobody waits
// for their effect.
func logUnused(log *slog.Logger, flags *pflag.FlagSet, engine string) {
	for _, v := range workerVariables() {
		if v.engines != nil && flags.Changed(v.flag) && !slices.Contains(v.engines, engine) {
			log.Info("this engine does not use the setting", "engine", engine, "flag", "--"+v.flag, "variable", v.name)
		}
	}
}

// numberIn checks whole numbers.
func numberIn(low, high int) func(string) error {
	return func(value string) error {
		n, err := strconv.Atoi(value)
		if err != nil || n < low || n > high {
			return fmt.Errorf("want a whole number from %d to %d", low, high)
		}
		return nil
	}
}

// share checks a number above 0 and up to 1.
func share(value string) error {
	x, err := strconv.ParseFloat(value, 64)
	if err != nil || !(x > 0 && x <= 1) {
		return errors.New("want a number above 0, at most 1")
	}
	return nil
}
