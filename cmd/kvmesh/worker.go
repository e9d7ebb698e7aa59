package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/internal/fetch"
	"github.com/kvmesh/kvmesh/internal/policy"
	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/llamacpp"
	"github.com/kvmesh/kvmesh/worker/sim"
)

// workerOptions are the flags of `kvmesh worker`.
type workerOptions struct {
	worker.Config
	engine          string
	context         int
	seqs            int
	batchTokens     int
	checkpointEvery int // tokens between two checkpoints
	queue           int
	kvTokens        int
	pauseBytes      int64
	threads         int
	llamaLib        string
	weights         string
	simWeights      string
	chatTemplate    string
	ttft            time.Duration
	itl             time.Duration
	upstream        upstreamOptions
	unused          unusedFlags
	kv              kvOptions
	parts           partOptions
	stored          modelOptions
}

func workerCommand(e *env) *cobra.Command {
	o := workerOptions{}
	c := &cobra.Command{
		Use:   "worker",
		Short: "Run one worker: an OpenAI-compatible server over an engine",
		Long: `Run one worker. It serves the OpenAI API, /health, /ready, /metrics and Envoy's ORCA
load reports on one port, and registers with a control plane when one is named.
SIGTERM drains it: no new requests, running ones finish within --drain.

WORKER_ID, MODEL_NAME, REDIS_URL, PORT, AVAILABILITY_ZONE, TENSOR_PARALLEL_SIZE,
GPU_MEMORY_UTILIZATION, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS and CHECKPOINT_INTERVAL
set what the flags leave open; docs/worker.md says which engine uses which.`,
		Example: `  kvmesh worker --id w1 --model gemma-3-270m --listen 127.0.0.1:8001
  kvmesh worker --id w2 --engine sim --model sim-1 --control-plane http://127.0.0.1:9000
  kvmesh worker --id w3 --engine openai --upstream http://127.0.0.1:8000 --model big`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := applyWorkerEnv(e.getenv, c.Flags()); err != nil {
				return err
			}
			o.checkpointEvery = checkpointEvery(c.Flags().Lookup("checkpoint-interval"), o.checkpointEvery, cmp.Or(o.kv.node, o.kv.dir))
			if err := o.stored.apply(e, c.Flags()); err != nil {
				return err
			}
			if err := errors.Join(checkWorkerFlags(c.Flags()), o.checkLlama()); err != nil {
				return err
			}
			logUnused(e.log, c.Flags(), o.engine)
			return runWorker(c.Context(), e, o)
		},
	}
	f := c.Flags()
	f.StringVar(&o.ID, "id", "", "id of the worker, unique in the mesh (default the host's name)")
	f.StringVar(&o.Listen, "listen", "127.0.0.1:8001", "address to listen on")
	f.StringVar(&o.Advertise, "advertise", "", "ip:port at which Envoy reaches the worker (default the listening address)")
	f.StringVar(&o.Pool, "pool", "main", "WorkerPool it belongs to")
	f.StringVar(&o.Zone, "zone", "", "availability zone")
	f.StringVar(&o.Model, "model", "", "name of the model")
	f.StringArrayVar(&o.Aliases, "alias", nil, "another name that requests may use, may be repeated")
	f.StringVar(&o.engine, "engine", policy.EngineLlamaCpp, "llamacpp, sim, or openai in front of another server")
	f.StringVar(&o.ControlPlane, "control-plane", "", "URL of the control plane's API")
	f.Int64Var(&o.MaxBody, "max-body", 32<<20, "largest request body in bytes")
	f.DurationVar(&o.DrainTimeout, "drain", 30*time.Second, "time that running requests have on SIGTERM, 0 = none")
	f.IntVar(&o.context, "context-length", 8192, "most tokens of prompt and answer")
	f.IntVar(&o.seqs, "max-num-seqs", 0, "most sequences at once (default 4 for llamacpp, 256 for sim)")
	f.IntVar(&o.batchTokens, "max-num-batched-tokens", 0, "most tokens of one step (default 512 for llamacpp)")
	f.IntVar(&o.checkpointEvery, "checkpoint-interval", 16, "tokens between two checkpoints of a stream; where --kv-dir or --kv-node is in shared memory and this is not given, 1")
	f.IntVar(&o.queue, "max-queue", 256, "most waiting requests, 0 = none waits")
	f.IntVar(&o.kvTokens, "kv-tokens", 0, "KV memory of all sequences in tokens, 0 = context-length")
	f.Int64Var(&o.pauseBytes, "kv-pause-limit", 512<<20, "llamacpp: most bytes of KV kept of sequences that gave way, 0 = none")
	f.BoolVar(&o.TrustPriority, "trust-priority", false, "believe everybody's x-kvmesh-priority and body field priority, not the relay's alone")
	f.IntVar(&o.threads, "threads", 1, "CPU threads of llamacpp")
	f.StringVar(&o.llamaLib, "llama-lib", "", "folder of llama.cpp's libraries (default KVMESH_LLAMA_LIB, else the fetched ones)")
	f.StringVar(&o.weights, "weights", "", "GGUF file (default KVMESH_MODEL, else the fetched model)")
	f.StringVar(&o.chatTemplate, "chat-template", "", "llamacpp: file with the Jinja chat template (default the model's own)")
	f.DurationVar(&o.ttft, "sim-ttft", 20*time.Millisecond, "sim: time to the first token")
	f.DurationVar(&o.itl, "sim-itl", 20*time.Millisecond, "sim: time between tokens")
	f.StringVar(&o.simWeights, "sim-weights", "", "sim: what the weights are called, as another version of the model has others")
	f.BoolVar(&o.SimHeader, "sim-faults", false, "sim: requests may ask for faults by the header x-kvmesh-sim too")
	o.upstream.add(f)
	o.unused.add(f)
	o.kv.add(f)
	o.parts.add(f)
	o.stored.add(f)
	_ = c.RegisterFlagCompletionFunc("engine", cobra.FixedCompletions([]string{policy.EngineLlamaCpp, policy.EngineSim, policy.EngineOpenAI}, cobra.ShellCompDirectiveNoFileComp))
	return c
}

func runWorker(ctx context.Context, e *env, o workerOptions) error {
	if o.ID == "" {
		host, err := os.Hostname()
		if err != nil {
			return withHint(fmt.Errorf("name of this host: %w", err), "give --id")
		}
		o.ID = host
	}
	var err error
	if o.ControlPlane, err = baseURL("--control-plane", o.ControlPlane); err != nil {
		return err
	}
	if o.DrainTimeout == 0 {
		o.DrainTimeout = 1 // for the worker 0 is its default, and for the user no time
	}
	if o.queue == 0 {
		o.queue = -1 // the same for the engines: none may wait
	}
	o.Log = e.log.With("worker", o.ID)
	o.EngineName = o.engine
	switch o.engine {
	case policy.EngineSim:
		o.Open = o.openSim
	case policy.EngineLlamaCpp:
		if err := o.findLlama(ctx, e); err != nil {
			return err
		}
		cache, err := e.cacheDir()
		if err != nil {
			return err
		}
		o.Open = func(ctx context.Context, progress func(float64)) (worker.Engine, error) {
			return o.openLlama(ctx, filepath.Join(cache, "hashes"), progress)
		}
	case policy.EngineOpenAI:
		open, err := o.upstream.opener(o, e.getenv)
		if err != nil {
			return err
		}
		o.Open = open
	default:
		return usagef("--engine %q: want %s, %s or %s", o.engine, policy.EngineLlamaCpp, policy.EngineSim, policy.EngineOpenAI)
	}
	done, err := o.kv.apply(&o.Config, o.checkpointEvery, e.getenv)
	if err != nil {
		return err
	}
	defer done()
	end, err := o.parts.apply(ctx, e, &o)
	if err != nil {
		return err
	}
	defer end()
	return worker.Run(ctx, o.Config)
}

func (o workerOptions) openSim(context.Context, func(float64)) (worker.Engine, error) {
	return sim.New(sim.Config{Name: o.Model, Weights: o.simWeights, ContextLen: o.context, MaxSeqs: cmp.Or(o.seqs, 256), MaxQueue: o.queue, TTFT: o.ttft, ITL: o.itl})
}

// findLlama fills in the library and the weights from the fetched assets.
func (o *workerOptions) findLlama(ctx context.Context, e *env) error {
	var names []string
	if o.llamaLib == "" {
		names = append(names, fetch.Llama)
	}
	if o.weights == "" {
		names = append(names, fetch.Model)
	}
	if len(names) == 0 {
		return nil
	}
	cfg, err := fetchConfig(e)
	if err != nil {
		return err
	}
	paths, err := e.ensure(ctx, cfg, names...)
	if err != nil {
		return err
	}
	if o.llamaLib == "" {
		o.llamaLib = paths.LlamaLib
	}
	if o.weights == "" {
		o.weights = paths.Model
	}
	return nil
}

func (o workerOptions) openLlama(ctx context.Context, hashes string, progress func(float64)) (worker.Engine, error) {
	if o.seqs == 0 {
		o.seqs = 4
	}
	var template []byte
	if o.chatTemplate != "" {
		var err error
		if template, err = os.ReadFile(o.chatTemplate); err != nil {
			return nil, fmt.Errorf("chat template: %w", err)
		}
	}
	return llamacpp.Open(ctx, llamacpp.Config{
		LibDir: o.llamaLib, ModelPath: o.weights, Name: o.Model, CacheDir: hashes,
		ContextLen: o.context, Cells: o.kvTokens, MaxSeqs: o.seqs, MaxQueue: o.queue, Threads: o.threads,
		PauseBytes: cmp.Or(o.pauseBytes, -1), BatchTokens: o.batchTokens, ChatTemplate: string(template), Progress: progress, Log: o.Log,
	})
}
