package main

import (
	"log/slog"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// workerFlagSet is what `kvmesh worker` understands.
func workerFlagSet(t *testing.T, args ...string) *pflag.FlagSet {
	t.Helper()
	f := workerCommand(&env{}).Flags()
	if err := f.Parse(args); err != nil {
		t.Fatal(err)
	}
	return f
}

func environment(pairs ...string) func(string) string {
	return func(name string) string {
		for i := 0; i+1 < len(pairs); i += 2 {
			if pairs[i] == name {
				return pairs[i+1]
			}
		}
		return ""
	}
}

func TestWorkerEnvironment(t *testing.T) {
	everything := environment(
		"WORKER_ID", "w7", "MODEL_NAME", "llama-3", "REDIS_URL", "rediss://:secret@cache:6380/1", "PORT", "8100",
		"AVAILABILITY_ZONE", "eu-1b", "TENSOR_PARALLEL_SIZE", "2", "GPU_MEMORY_UTILIZATION", "0.85",
		"MAX_NUM_SEQS", "128", "MAX_NUM_BATCHED_TOKENS", "4096", "CHECKPOINT_INTERVAL", "32")
	f := workerFlagSet(t)
	if err := applyWorkerEnv(everything, f); err != nil {
		t.Fatal(err)
	}
	for flag, want := range map[string]string{
		"id": "w7", "model": "llama-3", "redis": "rediss://:secret@cache:6380/1", "listen": "127.0.0.1:8100",
		"zone": "eu-1b", "tensor-parallel-size": "2", "gpu-memory-utilization": "0.85",
		"max-num-seqs": "128", "max-num-batched-tokens": "4096", "checkpoint-interval": "32",
	} {
		if got := f.Lookup(flag).Value.String(); got != want {
			t.Errorf("--%s is %q, want %q", flag, got, want)
		}
	}
	// Flags win, and what neither says keeps its default.
	f = workerFlagSet(t, "--id", "mine", "--listen", "0.0.0.0:1", "--checkpoint-interval", "8")
	if err := applyWorkerEnv(everything, f); err != nil {
		t.Fatal(err)
	}
	for flag, want := range map[string]string{"id": "mine", "listen": "0.0.0.0:1", "checkpoint-interval": "8", "zone": "eu-1b"} {
		if got := f.Lookup(flag).Value.String(); got != want {
			t.Errorf("with flags: --%s is %q, want %q", flag, got, want)
		}
	}
	f = workerFlagSet(t)
	if err := applyWorkerEnv(environment("PORT", " "), f); err != nil || f.Lookup("listen").Changed {
		t.Errorf("a blank variable: %v, --listen %s", err, f.Lookup("listen").Value)
	}
}

func TestBadWorkerEnvironment(t *testing.T) {
	for _, c := range []struct {
		name, value string
		want        string
	}{
		{"PORT", "http", "whole number from 0 to 65535"},
		{"PORT", "65536", "whole number from 0 to 65535"},
		{"TENSOR_PARALLEL_SIZE", "0", "whole number"},
		{"GPU_MEMORY_UTILIZATION", "90", "above 0, at most 1"},
		{"GPU_MEMORY_UTILIZATION", "NaN", "above 0, at most 1"},
		{"MAX_NUM_SEQS", "many", "whole number"},
		{"MAX_NUM_BATCHED_TOKENS", "-1", "whole number"},
		{"CHECKPOINT_INTERVAL", "1.5", "whole number"},
		{"WORKER_ID", "a b", "want 1 to 253 letters"},
		{"AVAILABILITY_ZONE", strings.Repeat("z", 64), "want at most 63 letters"},
	} {
		err := applyWorkerEnv(environment(c.name, c.value), workerFlagSet(t))
		if err == nil || !strings.HasPrefix(err.Error(), c.name+" ") || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s=%s: %v", c.name, c.value, err)
		}
	}
	err := applyWorkerEnv(environment(), workerFlagSet(t, "--checkpoint-interval", "0"))
	if err == nil || !strings.HasPrefix(err.Error(), "--checkpoint-interval ") {
		t.Errorf("flag out of range: %v", err)
	}
}

// What an engine has no use for is said, in a line that names flag and variable.
func TestUnusedSettingsAreLogged(t *testing.T) {
	said := func(engine string, args ...string) string {
		var out strings.Builder
		logUnused(slog.New(slog.NewTextHandler(&out, nil)), workerFlagSet(t, args...), engine)
		return out.String()
	}
	all := []string{"--tensor-parallel-size", "2", "--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--id", "w"}
	if got := said("llamacpp", all...); strings.Count(got, "\n") != 1 || !strings.Contains(got, "TENSOR_PARALLEL_SIZE") {
		t.Errorf("llamacpp: %s", got)
	}
	if got := said("sim", all...); strings.Count(got, "\n") != 2 || !strings.Contains(got, "MAX_NUM_BATCHED_TOKENS") {
		t.Errorf("sim: %s", got)
	}
	if got := said("sim"); got != "" {
		t.Errorf("nothing was set: %s", got)
	}
}

// The table of the documentation is the one of the code.
func TestWorkerVariablesAreDocumented(t *testing.T) {
	raw, err := os.ReadFile("../../docs/worker.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range workerVariables() {
		if !strings.Contains(string(raw), "| `"+v.name+"` | `--"+v.flag+"` |") {
			t.Errorf("docs/worker.md has no row for %s and --%s", v.name, v.flag)
		}
		if f := workerFlagSet(t).Lookup(v.flag); f == nil {
			t.Errorf("%s stands for --%s, which does not exist", v.name, v.flag)
		}
	}
}

// Without a choice of the user's, a checkpoint in memory follows every token.
func TestCheckpointEvery(t *testing.T) {
	const memory = "/dev/shm"
	if !inMemory(memory) {
		t.Skip("this system has no shared memory at " + memory)
	}
	for _, c := range []struct {
		name, dir string
		args      []string
		want      int
	}{
		{"memory", memory, nil, 1},
		{"memory, chosen", memory, []string{"--checkpoint-interval", "16"}, 16},
		{"elsewhere", "/nowhere", nil, 16},
		{"nothing kept", "", nil, 16},
	} {
		f := workerFlagSet(t, c.args...).Lookup("checkpoint-interval")
		n, err := strconv.Atoi(f.Value.String())
		if err != nil {
			t.Fatal(err)
		}
		if got := checkpointEvery(f, n, c.dir); got != c.want {
			t.Errorf("%s: every %d tokens, want %d", c.name, got, c.want)
		}
	}
}
