package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvmesh/kvmesh/extproc/picker"
	"github.com/kvmesh/kvmesh/extproc/prompts"
	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/internal/policy"
	"github.com/kvmesh/kvmesh/kvcache/kvevents"
)

// prefixes is what the gateway knows of prompts and of who holds their beginnings.
type prefixes struct {
	followers *kvevents.Followers
	prompts   *prompts.Prompts
}

// newPrefixes makes them as the policy says, nil where it names no publisher. egress dials
// Envoy's egress listener.
func newPrefixes(set *policy.Set, reg prometheus.Registerer, log *slog.Logger, egress func(context.Context) (net.Conn, error)) (*prefixes, error) {
	if len(set.Mesh.KV.Events) == 0 {
		return nil, nil
	}
	var sources []kvevents.Source
	for _, e := range set.Mesh.KV.Events {
		sources = append(sources, kvevents.Source{Address: e.Address, Replay: e.Replay, Topic: e.Topic, Workers: e.Workers})
	}
	f, err := kvevents.NewFollowers(sources, log)
	if err != nil {
		return nil, err
	}
	if err := reg.Register(f); err != nil {
		return nil, err
	}
	known, err := prompts.New(prompts.Config{Ask: tokenizer(egress), Registerer: reg, Log: log})
	if err != nil {
		return nil, err
	}
	return &prefixes{f, known}, nil
}

// held is picker.Config's Held.
func (p *prefixes) held(x picker.Prompt) map[string]int {
	return p.followers.Held(kvevents.Prompt{IDs: x.IDs, Salt: x.Salt})
}

// run follows the publishers and asks for tokens until ctx ends.
func (p *prefixes) run(ctx context.Context) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.prompts.Run(ctx)
	}()
	p.followers.Run(ctx)
	<-done
}

// mostTokens is the bytes of a worker's answer that are read: for 1 MiB of text.
const mostTokens = 16 << 20

// tokenizer asks workers for the tokens of prompts, by the way that the relay's requests take.
func tokenizer(egress func(context.Context) (net.Conn, error)) func(context.Context, prompts.Worker, []byte) ([]int32, error) {
	protocols := &http.Protocols{}
	protocols.SetUnencryptedHTTP2(true)
	way := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return egress(ctx) },
		Protocols:   protocols,
	}
	return func(ctx context.Context, to prompts.Worker, body []byte) ([]int32, error) {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://egress"+openai.TokenizePath, bytes.NewReader(body))
		if err != nil {
			return nil, err
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set(names.Destination, to.Address)
		req.Header.Set(names.Pool, to.Pool)
		req.Header.Set(names.ExpectWorker, to.ID)
		resp, err := way.RoundTrip(req)
		if err != nil {
			return nil, err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return nil, fmt.Errorf("%s: status %d", openai.TokenizePath, resp.StatusCode)
		}
		var out openai.Tokenized
		if err := json.NewDecoder(io.LimitReader(resp.Body, mostTokens)).Decode(&out); err != nil {
			return nil, fmt.Errorf("%s: %w", openai.TokenizePath, err)
		}
		return out.Tokens, nil
	}
}
