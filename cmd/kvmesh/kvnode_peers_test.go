package main

import (
	"context"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"

	"github.com/kvmesh/kvmesh/internal/policy"
	"github.com/kvmesh/kvmesh/kvcache/arena"
)

// peerFlags parses flags with an environment.
func peerFlags(t *testing.T, environ map[string]string, args ...string) (peerOptions, *env, error) {
	t.Helper()
	var o peerOptions
	f := pflag.NewFlagSet("kvnode", pflag.ContinueOnError)
	o.add(f)
	if err := f.Parse(args); err != nil {
		t.Fatal(err)
	}
	e := &env{getenv: func(name string) string { return environ[name] }, log: slog.New(slog.DiscardHandler)}
	err := o.complete(e, f)
	return o, e, err
}

// TestPeerFlags: what flags and environment make of the other hosts.
func TestPeerFlags(t *testing.T) {
	o, _, err := peerFlags(t, map[string]string{"CHECKPOINT_INTERVAL": "4"}, "--peer-listen", "0.0.0.0:9096", "--id", "a",
		"--peers", "a=z1@10.0.0.1:9096,b=z2@10.0.0.2:9096", "--replicate-bandwidth", "64Mi/s")
	if err != nil {
		t.Fatal(err)
	}
	if o.self.Addr != "10.0.0.1:9096" || o.self.Zone != "z1" || len(o.list) != 2 || o.bytes != 64<<20 || o.interval != 4 || o.replicas != 2 {
		t.Errorf("%+v", o)
	}
	o, _, err = peerFlags(t, map[string]string{"REDIS_URL": "redis://other:1"}, "--peer-listen", "127.0.0.1:1", "--registry-redis", "redis://h:1")
	if err != nil || o.registry != "redis://other:1" || o.self.ID == "" || o.interval != 16 || o.bytes != 0 {
		t.Errorf("%+v, %v", o, err)
	}
	if o, _, err := peerFlags(t, map[string]string{"REDIS_URL": "redis://h:1", "CHECKPOINT_INTERVAL": "x"}); err != nil || o.listen != "" {
		t.Errorf("copies that nobody asked for: %v", err)
	}
	listen := []string{"--peer-listen", "127.0.0.1:1", "--id", "a"}
	for _, bad := range [][]string{
		{"--peers", "b=h:1"},
		listen,
		append(listen[:4:4], "--peers", "b=h:1", "--registry-redis", "redis://h:1"),
		append(listen[:4:4], "--peers", "b"),
		append(listen[:4:4], "--peers", "b=h:1", "--replicas", "1"),
		append(listen[:4:4], "--peers", "b=h:1", "--replicate-interval", "0"),
		append(listen[:4:4], "--peers", "b=h:1", "--replicate-bandwidth", "fast"),
		append(listen[:4:4], "--peers", "b=h:1", "--zone", "a zone"),
		append(listen[:4:4], "--registry-redis", "h:1"),
		{"--peer-listen", "0.0.0.0:1", "--id", "a", "--registry-redis", "redis://h:1"},
	} {
		if _, _, err := peerFlags(t, nil, bad...); err == nil {
			t.Errorf("%v is taken", bad)
		}
	}
}

// TestPeersNeedTLS: nobody listens to a network without TLS, and certificates belong together.
func TestPeersNeedTLS(t *testing.T) {
	near, err := arena.Open(arena.Config{Dir: filepath.Join(t.TempDir(), "near"), Limit: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer near.Close()
	for _, args := range [][]string{
		{"--peer-listen", "0.0.0.0:0", "--peer-address", "h:1"},
		{"--peer-listen", "127.0.0.1:0", "--peer-address", "h:1", "--peer-tls-cert", "c.pem"},
	} {
		o, e, err := peerFlags(t, nil, append(args, "--id", "a", "--peers", "b=h:1")...)
		if err != nil {
			t.Fatal(err)
		}
		if p, err := o.open(context.Background(), e, near, prometheus.NewRegistry()); err == nil || !strings.Contains(err.Error(), "TLS") && !strings.Contains(err.Error(), "belong together") {
			t.Errorf("%v: %v, %v", args, p, err)
		}
	}
}

// TestPeerArgs: a policy's peers as flags, which are taken.
func TestPeerArgs(t *testing.T) {
	if got := peerArgs(policy.KVPeers{}, ""); got != nil {
		t.Errorf("%v", got)
	}
	got := peerArgs(policy.KVPeers{Listen: "127.0.0.1:1", ID: "a", Zone: "z", Nodes: []string{"b=h:1", "c=h:2"}, Replicas: 3, Bandwidth: 5}, "redis://h:1")
	want := []string{"--peer-listen", "127.0.0.1:1", "--replicas", "3", "--id", "a", "--zone", "z", "--peers", "b=h:1,c=h:2", "--replicate-bandwidth", "5"}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if _, _, err := peerFlags(t, nil, got...); err != nil {
		t.Error(err)
	}
	if _, _, err := peerFlags(t, nil, peerArgs(policy.KVPeers{Listen: "127.0.0.1:1", Replicas: 2}, "redis://h:1")...); err != nil {
		t.Error(err)
	}
}

// TestTurnover: a memory of which half is given up in a minute is half busy.
func TestTurnover(t *testing.T) {
	b := turnover{limit: 1000}
	now := time.Unix(1e9, 0)
	for _, c := range []struct {
		after   time.Duration
		evicted uint64
		want    float64
	}{
		{0, 100, 0}, {time.Second, 1000, 0}, {59 * time.Second, 600, 0.5}, {time.Second, 9000, 0.5}, {59 * time.Second, 9000, 1}, {time.Hour, 9000, 0},
	} {
		now = now.Add(c.after)
		if got := b.share(now, c.evicted); got != c.want {
			t.Errorf("%d bytes after %v: %v, want %v", c.evicted, c.after, got, c.want)
		}
	}
}
