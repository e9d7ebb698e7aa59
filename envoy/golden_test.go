package envoy_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/proto"

	"github.com/kvmesh/kvmesh/envoy"
	"github.com/kvmesh/kvmesh/internal/health"
	"github.com/kvmesh/kvmesh/internal/policy"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// document is a policy with every feature that shows in Envoy's configuration:
// own and foreign engines, tiers, time-outs that are set, off and default.
const document = `
apiVersion: kvmesh.io/v1alpha1
kind: Mesh
metadata: {name: ""}
spec:
  maxBody: 4Mi
  extProc: {messageTimeout: 700ms}
---
apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: small}
spec:
  engine: sim
  model: sim-small
  local: [{id: w1, zone: a}]
---
apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata: {name: foreign}
spec:
  engine: openai
  connect: 3s
  health: {check: "off"}
  static: [{url: "https://example.test/v1", zone: b}]
---
apiVersion: kvmesh.io/v1alpha1
kind: ModelRoute
metadata: {name: chat}
spec:
  models: [chat, "100%-chat"]
  tiers: [{pool: small}, {pool: foreign, model: big}]
  timeouts: {streamIdle: 120s, request: 30m}
  retries: 1
---
apiVersion: kvmesh.io/v1alpha1
kind: ModelRoute
metadata: {name: rest}
spec:
  models: ["*"]
  tiers: [{pool: foreign}]
  timeouts: {streamIdle: "off"}
  retries: 0
`

func parse(t *testing.T, doc string) *policy.Set {
	t.Helper()
	s, err := policy.Parse(policy.File{Name: "test.yaml", Data: []byte(doc)})
	if err != nil {
		t.Fatalf("parse policy: %v", err)
	}
	return s
}

func goldenConfig(t *testing.T) envoy.Config {
	return envoy.Config{
		Policy: parse(t, document),
		Edge:   "127.0.0.1:8080", Egress: "/run/kvmesh/egress.sock",
		Relay: "/run/kvmesh/relay.sock", ExtProc: "/run/kvmesh/extproc.sock",
		AccessLog: "/run/kvmesh/access.log", TrustedCA: "/etc/ssl/certs/ca-certificates.crt",
	}
}

func goldenBootstrap() envoy.BootstrapConfig {
	return envoy.BootstrapConfig{
		Node: "envoy-1", Zone: "a", Admin: "127.0.0.1:9901",
		XDS: "/run/kvmesh/xds.sock", Snapshot: "/run/kvmesh/snapshot.sock",
	}
}

func TestGolden(t *testing.T) {
	r, err := envoy.Build(goldenConfig(t))
	if err != nil {
		t.Fatalf("Build: %v", err)
	}
	b, err := envoy.Bootstrap(goldenBootstrap())
	if err != nil {
		t.Fatalf("Bootstrap: %v", err)
	}
	eds := envoy.Endpoints("pool/small", []envoy.Endpoint{
		{Worker: "w2", Address: "127.0.0.1:9002", Zone: "b", Status: health.Draining, Weight: 1},
		{Worker: "w1", Address: "127.0.0.1:9001", Zone: "a", Status: health.Healthy, Weight: 250},
		{Worker: "example.test", Address: "[2001:db8::1]:443", Zone: "b", Status: health.Healthy, Weight: 0, Hostname: "example.test", TLS: true},
	})
	golden(t, "bootstrap", b)
	golden(t, "endpoints", eds)
	golden(t, "listeners", asProtos(r.Listeners)...)
	golden(t, "routes", asProtos(r.Routes)...)
	golden(t, "clusters", asProtos(r.Clusters)...)
}

func asProtos[M proto.Message](ms []M) []proto.Message {
	out := make([]proto.Message, len(ms))
	for i, m := range ms {
		out[i] = m
	}
	return out
}

// golden compares the messages, as YAML, with testdata/name.yaml.
func golden(t *testing.T, name string, ms ...proto.Message) {
	t.Helper()
	var got bytes.Buffer
	enc := yaml.NewEncoder(&got)
	enc.SetIndent(2)
	for _, m := range ms {
		raw, err := envoy.JSON(m)
		if err != nil {
			t.Fatal(err)
		}
		var v any
		if err := json.Unmarshal(raw, &v); err != nil {
			t.Fatal(err)
		}
		if err := enc.Encode(v); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join("testdata", name+".yaml")
	if *update {
		if err := os.WriteFile(path, got.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("%v (run with -update to make it)", err)
	}
	if d := cmp.Diff(string(want), got.String()); d != "" {
		t.Errorf("%s differs from what Build made (-want +got); run with -update if that is right:\n%s", path, d)
	}
}
