package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/openai"
	"github.com/kvmesh/kvmesh/test/testmesh"
)

// joined is a mesh to which workers with the real model come from outside, for their chat
// template is none that a policy could name.
const joined = `apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: sim}
spec: {engine: sim, model: sim-1, local: [{id: sim-1}]}
---
apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: gemma}
spec: {engine: llamacpp, model: gemma}
`

// TestModelOutlivesKinds kills the worker of streams that carry more than plain text, in
// the middle: of a call's arguments, of JSON that follows a schema, of characters, of one
// of two choices. The answer is that of an undisturbed run.
func TestModelOutlivesKinds(t *testing.T) {
	modelFiles(t)
	template := filepath.Join(t.TempDir(), "hermes.jinja")
	if err := os.WriteFile(template, []byte(toolTemplate), 0o600); err != nil {
		t.Fatal(err)
	}
	m := testmesh.StartPolicy(t, bin, joined)
	args := []string{"--chat-template", template, "--pool", "gemma", "--control-plane", m.API, "--relay-secret-file", filepath.Join(m.RunDir(t), "relay.secret"), "--kv-dir", m.KVDir()}
	alone := startProcess(t, "alone", "--chat-template", template)
	workers := map[string]*process{}
	start := func(id string) { workers[id] = startProcess(t, id, args...) }
	start("one")
	start("two")
	f := failover{t, m}
	for _, k := range kinds() {
		if k.full && !*fullFailover {
			continue
		}
		t.Run(k.name, func(t *testing.T) {
			var evs []event
			body := maps.Clone(k.body)
			undisturbed := func() *ledger {
				var a ledger
				evs = a.events(t, alone.post(body, map[string]any{"token_ids": true, "salt": k.name}, "undisturbed"))
				return &a
			}
			want := undisturbed()
			if k.adjust != nil {
				k.adjust(t, evs, body)
				want = undisturbed()
			}
			at := len(evs) / 2
			if k.where != nil {
				places := k.where(evs)
				if len(places) == 0 {
					t.Fatal("no place to cut at")
				}
				at = places[len(places)/2]
			}
			if at > len(evs)-6 { // the worker would be done before it is killed
				at = len(evs) / 2
			}
			maps.Copy(body, map[string]any{"model": "gemma", "stream": true, "stream_options": map[string]any{"include_usage": true}, "cache_salt": k.name})
			raw, err := json.Marshal(body)
			if err != nil {
				t.Fatal(err)
			}
			path := openai.Completions
			if body["messages"] != nil {
				path = openai.Chat
			}
			testmesh.Eventually(t, "both workers take requests", time.Minute, func() bool { return len(takers(t, m, "gemma")) == 2 })
			before := relayMetric(t, m, "kvmesh_relay_moves_total")
			killed := ""
			got := f.one(ask{path: strings.TrimPrefix(string(path), "/v1"), body: string(raw)}, at, func(h *heard) {
				killed = f.serving(h.stream())
				if w := workers[killed]; w != nil {
					w.signal(syscall.SIGKILL)
				}
			})
			if n := relayMetric(t, m, "kvmesh_relay_moves_total") - before; n != 1 {
				t.Errorf("%v moves after %s was killed at event %d of %d", n, killed, at, len(evs))
			}
			checkKind(t, k, got, want)
			start(killed)
		})
	}
}

// checkKind compares what the client has with the undisturbed answer.
func checkKind(t *testing.T, k kind, got *heard, want *ledger) {
	t.Helper()
	if !got.done || got.failure != "" || got.usage == nil || got.usage.CompletionTokens != want.Completion && !k.loose || got.usage.PromptTokens != want.Prompt {
		t.Fatalf("done %v, %s, usage %+v, want %d and %d", got.done, got.failure, got.usage, want.Prompt, want.Completion)
	}
	for i, c := range want.Choices {
		var calls strings.Builder
		for _, call := range c.Calls {
			calls.WriteString(call.Names + call.Arguments)
		}
		args := got.args[i]
		if len(c.Calls) > 0 { // the ids of calls differ from stream to stream
			args = args[strings.Index(args, c.Calls[0].Names):]
		}
		if !k.loose && (got.text[i] != c.Text || args != calls.String() || got.finish[i] != c.Finish) {
			t.Errorf("choice %d:\n%q %q %s, want\n%q %q %s", i, got.text[i], args, got.finish[i], c.Text, calls.String(), c.Finish)
		}
		if k.check != nil {
			whole := told{Text: got.text[i], Finish: got.finish[i]}
			for _, call := range c.Calls {
				whole.Calls = append(whole.Calls, toldCall{IDs: call.IDs, Names: call.Names, Arguments: strings.TrimPrefix(args, call.Names)})
			}
			k.check(t, whole)
		}
		if got.finish[i] == "" || got.text[i] == "" && args == "" {
			t.Errorf("choice %d: %q %q %s", i, got.text[i], args, got.finish[i])
		}
	}
	if fmt.Sprint(len(got.head)) != "1" {
		t.Errorf("events of %d answers", len(got.head))
	}
}

// takers are the workers of a pool that are well.
func takers(t testing.TB, m *testmesh.Mesh, pool string) (ids []string) {
	t.Helper()
	for _, w := range m.Workers(t) {
		if w.Pool == pool && w.Status == "HEALTHY" {
			ids = append(ids, w.ID)
		}
	}
	return ids
}
