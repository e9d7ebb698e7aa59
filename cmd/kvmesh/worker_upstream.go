package main

import (
	"context"

	"github.com/spf13/pflag"

	"github.com/kvmesh/kvmesh/worker"
	"github.com/kvmesh/kvmesh/worker/openaiengine"
)

// upstreamOptions are the flags of the engine openai: where the server is that the
// worker stands in front of.
type upstreamOptions struct {
	url, metrics, model string
}

// add defines the flags.
func (u *upstreamOptions) add(f *pflag.FlagSet) {
	f.StringVar(&u.url, "upstream", "", "openai: base URL of the server (vLLM, SGLang, TGI, TensorRT-LLM, llama-server)")
	f.StringVar(&u.metrics, "upstream-metrics", "", "openai: URL of its metrics (default /metrics of the server)")
	f.StringVar(&u.model, "upstream-model", "", "openai: its own name of the model (default the first that it lists)")
}

// opener checks the flags and returns what opens the engine. The server's API key,
// if it wants one, is in KVMESH_UPSTREAM_API_KEY.
func (u upstreamOptions) opener(o workerOptions, getenv func(string) string) (func(context.Context, func(float64)) (worker.Engine, error), error) {
	if u.url == "" {
		return nil, usagef("--engine openai: --upstream URL is missing")
	}
	cfg := openaiengine.Config{
		Upstream: u.url, Metrics: u.metrics, Model: u.model, Name: o.Model, MaxRunning: o.seqs,
		APIKey: getenv("KVMESH_UPSTREAM_API_KEY"), Log: o.Log,
	}
	if err := cfg.Validate(); err != nil {
		return nil, usagef("--upstream: %v", err)
	}
	return func(ctx context.Context, _ func(float64)) (worker.Engine, error) {
		return openaiengine.Open(ctx, cfg)
	}, nil
}
