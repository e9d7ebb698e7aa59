package main

import (
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/spf13/pflag"

	"github.com/kvmesh/kvmesh/kvcache/arena"
	"github.com/kvmesh/kvmesh/kvcache/sealed/sealedtest"
)

// tierFlags parses flags with an environment.
func tierFlags(t *testing.T, environ map[string]string, args ...string) (o tierOptions, e *env, err error) {
	t.Helper()
	f := pflag.NewFlagSet("kvnode", pflag.ContinueOnError)
	o.add(f)
	if err := f.Parse(args); err != nil {
		t.Fatal(err)
	}
	e = &env{getenv: func(name string) string { return environ[name] }, log: slog.New(slog.DiscardHandler)}
	return o, e, o.complete(e)
}

// TestTierFlags: what flags and environment make of the tiers.
func TestTierFlags(t *testing.T) {
	o, _, err := tierFlags(t, map[string]string{
		"KV_REDIS_URL": "rediss://u:hunter2@h:1", "AWS_ACCESS_KEY_ID": "AK", "AWS_SECRET_ACCESS_KEY": "SK", "AWS_REGION": "r1", "AWS_ENDPOINT_URL": "http://env:1",
	}, "--redis", "redis://flag:1", "--s3", "s3://bucket/a/b", "--s3-region", "r2", "--s3-limit", "5", "--nvme", "/d")
	if err != nil {
		t.Fatal(err)
	}
	if o.redis.Redis.URL != "rediss://u:hunter2@h:1" || o.s3.Bucket != "bucket" || o.s3.Prefix != "a/b" || o.s3.Limit != 5 || o.nvme.Dir != "/d" {
		t.Errorf("%+v", o)
	}
	if s := o.s3.S3; s.AccessKey != "AK" || s.SecretKey != "SK" || s.Region != "r2" || s.Endpoint != "http://env:1" {
		t.Errorf("S3 by %s in %s at %s", s.AccessKey, s.Region, s.Endpoint)
	}
	if o, _, err := tierFlags(t, map[string]string{"KV_REDIS_URL": "redis://h:1"}); err != nil || o.redis.Redis.URL != "" {
		t.Errorf("a tier that nobody asked for: %q, %v", o.redis.Redis.URL, err)
	}
	for _, bad := range [][]string{{"--s3", "bucket"}, {"--s3", "s3://B_"}, {"--s3", "s3://bucket", "--s3-endpoint", "h:1"}} {
		if _, _, err := tierFlags(t, nil, bad...); err == nil {
			t.Errorf("%v is taken", bad)
		}
	}
}

// TestWarnOpen: what other users of the host reach has a password, or a warning.
func TestWarnOpen(t *testing.T) {
	tcp, unix := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}, &net.UnixAddr{Name: "s", Net: "unix"}
	if !warnOpen(tcp, "") || warnOpen(tcp, "secret") || warnOpen(unix, "") {
		t.Error("a warning where there is no need, or none where there is")
	}
}

// TestOpenTiers: those that are named are opened, and shown as metrics; servers may be away,
// and a directory that has an owner is an error that says what to do.
func TestOpenTiers(t *testing.T) {
	near, err := arena.Open(arena.Config{Dir: filepath.Join(t.TempDir(), "near"), Limit: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer near.Close()
	o, e, err := tierFlags(t, nil)
	if err != nil {
		t.Fatal(err)
	}
	if below, done, err := o.open(e, near, nil, prometheus.NewRegistry()); below != nil || err != nil {
		t.Errorf("tiers out of nothing: %v", err)
	} else {
		done()
	}
	dir, keys := filepath.Join(t.TempDir(), "nvme"), filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(keys, []byte(sealedtest.Text), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, _, err := tierFlags(t, nil, "--nvme", dir, "--tier-keys", keys); err == nil || !strings.Contains(err.Error(), "0600") {
		t.Errorf("a file of keys that others can read: %v", err)
	}
	if err := os.Chmod(keys, 0o600); err != nil {
		t.Fatal(err)
	}
	o, e, err = tierFlags(t, nil, "--tier-keys", keys, "--nvme", dir, "--redis", "redis://127.0.0.1:1", "--redis-single", "--s3", "s3://bucket", "--s3-endpoint", "http://127.0.0.1:1")
	if err != nil {
		t.Fatal(err)
	}
	registry := prometheus.NewRegistry()
	below, done, err := o.open(e, near, nil, registry)
	if err != nil || below == nil {
		t.Fatal(err)
	}
	for metric, want := range map[string]int{"kvmesh_kv_stack_behind_tokens": 3, "kvmesh_kv_tier_puts_total": 3, "kvmesh_kv_stack_cuts_total": 12, "kvmesh_kv_sealed_no_key_total": 3} {
		if n, err := testutil.GatherAndCount(registry, metric); err != nil || n != want {
			t.Errorf("%d of %s: %v", n, metric, err)
		}
	}
	if _, again, err := o.open(e, near, nil, prometheus.NewRegistry()); err == nil || !strings.Contains(err.Error(), "--nvme") {
		t.Errorf("a directory that has an owner: %v", err)
	} else {
		again()
	}
	done()
}
