package openaiengine

import (
	"bytes"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/worker"
)

// TestReadsEveryServersMetrics reads a page in the form of each server.
func TestReadsEveryServersMetrics(t *testing.T) {
	want := map[string]struct {
		kind Kind
		load worker.Load
	}{
		"vllm.txt":       {VLLM, worker.Load{Running: 5, Waiting: 4, KVUsage: 0.75, PromptTokens: 12000, GenTokens: 3456}},
		"vllm-old.txt":   {VLLM, worker.Load{Running: 1, KVUsage: 0.5}},
		"sglang.txt":     {SGLang, worker.Load{Running: 162, Waiting: 2826, KVUsage: 0.28, PromptTokens: 8128, GenTokens: 7557}},
		"tgi.txt":        {TGI, worker.Load{Running: 4, Waiting: 7, PromptTokens: 900, GenTokens: 8123}},
		"trtllm.txt":     {TRTLLM, worker.Load{Running: 6, Waiting: 1, KVUsage: 0.62}},
		"triton.txt":     {Triton, worker.Load{Running: 4, Waiting: 3, MaxRunning: 512, KVUsage: 0.6}},
		"triton-old.txt": {Triton, worker.Load{Running: 4, Waiting: 5, MaxRunning: 512}},
	}
	pages, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(pages) != len(want) {
		t.Fatalf("%d pages, %v; want %d", len(pages), err, len(want))
	}
	for _, page := range pages {
		raw, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		kind, load, err := read(bytes.NewReader(raw))
		if w := want[filepath.Base(page)]; err != nil || kind != w.kind || load != w.load {
			t.Errorf("%s: %s %+v, %v; want %s %+v", page, kind, load, err, w.kind, w.load)
		}
	}
}

func TestReadsOddMetrics(t *testing.T) {
	for page, want := range map[string]worker.Load{
		"vllm:num_requests_running NaN\n":                                            {},
		"vllm:num_requests_running -3\n":                                             {},
		"vllm:num_requests_running +Inf\nvllm:kv_cache_usage_perc 7\n":               {KVUsage: 1},
		"vllm:num_requests_running 1e300\n":                                          {Running: 1 << 52},
		"vllm:num_requests_running{engine=\"0\"} 2\nvllm:num_requests_waiting 2.9\n": {Running: 2, Waiting: 2},
	} {
		if kind, load, err := read(strings.NewReader(page)); err != nil || kind != VLLM || load != want {
			t.Errorf("%q: %s %+v, %v; want %+v", page, kind, load, err, want)
		}
	}
	if kind, _, err := read(strings.NewReader("process_cpu_seconds_total 1\n")); kind != Unknown || err != nil {
		t.Errorf("another program: %q, %v", kind, err)
	}
	if _, _, err := read(strings.NewReader(`[{"iter": 1}]`)); err == nil {
		t.Error("JSON passed for metrics")
	}
}

// FuzzRead: no page panics, and no load is out of bounds.
func FuzzRead(f *testing.F) {
	pages, _ := filepath.Glob("testdata/*.txt")
	for _, p := range pages {
		raw, err := os.ReadFile(p)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, page []byte) {
		_, l, _ := read(bytes.NewReader(page))
		if l.Running < 0 || l.Waiting < 0 || l.MaxRunning < 0 || l.KVUsage < 0 || l.KVUsage > 1 || math.IsNaN(l.KVUsage) {
			t.Errorf("load is %+v", l)
		}
	})
}
