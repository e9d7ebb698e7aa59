package registry

import (
	"bytes"
	"math"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// Load is what a server's own metrics tell.
type Load struct {
	Running, Waiting uint32
	KVUsage          float64 // 0..1
}

// Utilization puts a Load on the scale of our own workers' reports, where 1 is
// full: the share of KV memory in use, and past that how many wait for one that
// runs.
func (l Load) Utilization() float64 {
	return l.KVUsage + float64(l.Waiting)/float64(max(l.Running, 1))
}

// dialect is how one engine names its metrics. kv lists the names of KV use that
// its versions had.
type dialect struct {
	running, waiting string
	kv               []string
}

// dialects lists the engines whose metrics we read: vLLM, SGLang, TensorRT-LLM,
// llama.cpp's server, TGI.
func dialects() []dialect {
	return []dialect{
		{"vllm:num_requests_running", "vllm:num_requests_waiting", []string{"vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"}},
		{"sglang:num_running_reqs", "sglang:num_queue_reqs", []string{"sglang:token_usage"}},
		{"trtllm_num_requests_running", "trtllm_num_requests_waiting", []string{"trtllm_kv_cache_utilization"}},
		{"llamacpp:requests_processing", "llamacpp:requests_deferred", []string{"llamacpp:kv_cache_usage_ratio"}},
		{"tgi_batch_current_size", "tgi_queue_size", nil},
	}
}

// ParseLoad reads a Prometheus text page. ok is false when it holds no metrics of
// an engine we know, or is no such page.
func ParseLoad(page []byte) (load Load, ok bool) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(page))
	if err != nil {
		return Load{}, false
	}
	for _, d := range dialects() {
		running := values(families[d.running])
		if len(running) == 0 {
			continue
		}
		// One engine may report per rank: requests add up, the fullest memory counts.
		load.Running, load.Waiting = count(running), count(values(families[d.waiting]))
		for _, name := range d.kv {
			for _, v := range values(families[name]) {
				load.KVUsage = min(max(load.KVUsage, v), 1)
			}
		}
		return load, true
	}
	return Load{}, false
}

// values returns the finite values of a family.
func values(f *dto.MetricFamily) []float64 {
	var out []float64
	for _, m := range f.GetMetric() {
		// At most one of them is set.
		v := m.GetGauge().GetValue() + m.GetUntyped().GetValue() + m.GetCounter().GetValue()
		if !math.IsNaN(v) && !math.IsInf(v, 0) {
			out = append(out, v)
		}
	}
	return out
}

// count makes a number of requests of what a server wrote, which may be anything.
func count(vs []float64) uint32 {
	total := 0.0
	for _, v := range vs {
		total += max(v, 0)
	}
	return uint32(min(total, 1<<20))
}
