package main

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/kvmesh/kvmesh/internal/policy"
	"github.com/kvmesh/kvmesh/worker"
)

// What --kv-codec takes, and of which engine.
func TestKVCodec(t *testing.T) {
	for _, tt := range []struct {
		codec, engine string
		bad           string // in the error, "" = it is taken
	}{
		{"raw", policy.EngineSim, ""},
		{"raw", policy.EngineLlamaCpp, ""},
		{"int8", policy.EngineLlamaCpp, ""},
		{"int4", policy.EngineLlamaCpp, ""},
		{"int8", policy.EngineSim, "only engine llamacpp"},
		{"int3", policy.EngineLlamaCpp, "want raw, int8 or int4"},
		{"", policy.EngineLlamaCpp, "want raw, int8 or int4"},
	} {
		var o kvOptions
		f := pflag.NewFlagSet("worker", pflag.ContinueOnError)
		o.add(f)
		if err := f.Parse([]string{"--kv-codec", tt.codec, "--kv-dir", filepath.Join(t.TempDir(), "kv")}); err != nil {
			t.Fatal(err)
		}
		cfg := worker.Config{EngineName: tt.engine}
		done, err := o.apply(&cfg, 1, func(string) string { return "" })
		if tt.bad == "" && (err != nil || cfg.KV == nil) || tt.bad != "" && (err == nil || !strings.Contains(err.Error(), tt.bad)) {
			t.Errorf("%q of %s: %v", tt.codec, tt.engine, err)
		}
		if done != nil {
			done()
		}
	}
}

// TestKVNode: a worker needs no node that is there already, and has one store only.
func TestKVNode(t *testing.T) {
	open := func(args ...string) error {
		t.Helper()
		var o kvOptions
		f := pflag.NewFlagSet("worker", pflag.ContinueOnError)
		o.add(f)
		if err := f.Parse(args); err != nil {
			t.Fatal(err)
		}
		cfg := worker.Config{EngineName: policy.EngineSim}
		done, err := o.apply(&cfg, 1, func(string) string { return "" })
		if err == nil {
			if (cfg.KV != nil) != (len(args) > 0) {
				t.Errorf("%v: keeps KV: %v", args, cfg.KV != nil)
			}
			done()
		}
		return err
	}
	dir := t.TempDir()
	if err := errors.Join(open(), open("--kv-node", filepath.Join(dir, "node"))); err != nil {
		t.Error(err)
	}
	if err := open("--kv-node", filepath.Join(dir, "node"), "--kv-dir", filepath.Join(dir, "kv")); err == nil || !strings.Contains(err.Error(), "give one of them") {
		t.Errorf("both: %v", err)
	}
}

// TestKVNodeSpec: the node of `kvmesh up` and its workers mean the same directory.
func TestKVNodeSpec(t *testing.T) {
	m := &localMesh{e: &env{}, set: &policy.Set{}, workers: []localWorker{{pool: &policy.WorkerPool{}}}}
	m.kv.dir, m.kv.limit = "/kv", 1<<20
	for _, node := range []bool{false, true} {
		m.set.Mesh.KV.Node = node
		args := strings.Join(m.workerSpec(m.workers[0]).Args, " ")
		if strings.Contains(args, "--kv-node /kv") != node || strings.Contains(args, "--kv-dir /kv --kv-limit 1048576") == node {
			t.Errorf("node %v: worker %s", node, args)
		}
	}
	if args := strings.Join(m.kvNodeSpec().Args, " "); !strings.HasPrefix(args, "kvnode --dir /kv --limit 1048576") {
		t.Errorf("node %s", args)
	}
	m.set.Mesh.KV.LMCache = policy.KVLMCache{Listen: "127.0.0.1:9", Chunk: 128}
	if args := strings.Join(m.lmcacheSpec().Args, " "); !strings.HasPrefix(args, "lmcache --kv-node /kv --listen 127.0.0.1:9,unix:/kv/lmcache.sock --chunk 128") {
		t.Errorf("for vLLM %s", args)
	}
	m.set.Mesh.KV.Tiers = policy.KVTiers{NVMe: policy.KVDisk{Dir: "/nvme", Limit: 2 << 20}, S3: policy.KVS3{URL: "s3://b", Limit: 3 << 20, Endpoint: "http://h"}, Keys: "/keys"}
	if args := strings.Join(m.kvNodeSpec().Args, " "); !strings.Contains(args, "--nvme /nvme --nvme-limit 2097152 --s3 s3://b --s3-limit 3145728 --s3-endpoint http://h --tier-keys /keys") || strings.Contains(args, "--redis") {
		t.Errorf("node with tiers %s", args)
	}
}
