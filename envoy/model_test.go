package envoy_test

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/internal/names"
)

const twoPools = quickPolicy + `
---
apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: other}
spec: {engine: sim, model: other-1, local: [{id: w1}]}
---
apiVersion: kvmesh.io/v1alpha1
kind: ModelRoute
metadata: {name: other}
spec: {models: [other-1, alias], tiers: [{pool: other}]}
`

// Without the gateway Envoy itself finds the pool of a model, by any of its names.
func TestModelRoutesWithoutGateway(t *testing.T) {
	m := newMesh(t, setup{policy: strings.Replace(twoPools, "{id: w0}, {id: w1}", "{id: w0}", 1), pools: map[string][]int{"main": {0}, "other": {1}}})
	m.gateway.server.Stop()
	for _, w := range m.workers {
		w.on(func(rw http.ResponseWriter, r *http.Request) {
			if h := r.Header.Get(names.Model); h != "" {
				t.Errorf("%s: %q reached a worker", names.Model, h)
			}
			body, err := io.ReadAll(r.Body)
			if err != nil {
				t.Errorf("body: %v", err)
			}
			_, _ = rw.Write(body)
		})
	}
	for _, path := range []string{"/v1/completions", "/v1/chat/completions", "/v1/completions?x=y"} {
		for body, want := range map[string]string{
			`{"model":"other-1"}`: "w1",
			`{"prompt":"\"model\":\"sim\"","a":{"model":"sim"}, "model" : "alias" }`: "w1",
			`{"model":"sim"}`:                           "w0",
			`{"model":"quick"}`:                         "w0",
			`{"model":"nobody's"}`:                      "w0",
			`{"model":"alias\r\nx-kvmesh-pool: other"}`: "w0",
			`{"model":{"a":"alias"}}`:                   "w0",
			`{"model":["alias"]}`:                       "w0",
			`{"model":null}`:                            "w0",
			`{}`:                                        "w0",
			`{"model":`:                                 "w0",
			`no JSON`:                                   "w0",
			``:                                          "w0",
			`{"model":"` + strings.Repeat("x", 9000) + `"}`:                   "w0",
			`{"model":"alias","prompt":"` + strings.Repeat("x", 4<<20) + `"}`: "w1",
		} {
			got := m.send("POST", path, strings.NewReader(body), "content-type", "application/json")
			if got.status != 200 || got.header.Get(names.Worker) != want || got.body != body {
				t.Errorf("%s %.60q: status %d from %q, %d of %d bytes, want it from %s", path, body, got.status, got.header.Get(names.Worker), len(got.body), len(body), want)
			}
		}
	}
	// Other paths stream, whatever is in them.
	if got := m.send("POST", "/v1/rerank", strings.NewReader(`{"model":"alias"}`), "content-type", "application/json"); got.header.Get(names.Worker) != "w0" {
		t.Errorf("another path: %d from %q", got.status, got.header.Get(names.Worker))
	}
}
