package main

import (
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
