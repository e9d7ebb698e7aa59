package openaiengine

import (
	"fmt"
	"io"
	"math"
	"strings"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/kvmesh/kvmesh/worker"
)

// Kind is a kind of server.
type Kind string

// The kinds of servers whose metrics are known.
const (
	Unknown Kind = ""
	VLLM    Kind = "vllm"
	SGLang  Kind = "sglang"
	TGI     Kind = "tgi"
	TRTLLM  Kind = "trtllm" // trtllm-serve
	Triton  Kind = "triton" // Triton with the TensorRT-LLM backend
	LlamaCP Kind = "llama-server"
)

// source is where one number of the load stands: samples of a metric, those with a
// label of a value where one is given.
type source struct{ name, label, value string }

// names are the metrics of one kind; several sources are tried in order, since
// names changed between versions.
type names struct {
	kind                     Kind
	prefix                   string // that tells the kind
	running, waiting, kv     []source
	prompt, generated, limit []source
}

func one(names ...string) []source {
	out := make([]source, len(names))
	for i, n := range names {
		out[i].name = n
	}
	return out
}

// kinds lists what is known. Triton's waiting requests are those active and not
// scheduled where it does not count them itself; see load.
func kinds() []names {
	const trtRequests, trtBlocks = "nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics"
	return []names{
		{
			kind: VLLM, prefix: "vllm:",
			running: one("vllm:num_requests_running"), waiting: one("vllm:num_requests_waiting"),
			kv:     one("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
			prompt: one("vllm:prompt_tokens_total", "vllm:prompt_tokens"), generated: one("vllm:generation_tokens_total", "vllm:generation_tokens"),
		},
		{
			kind: SGLang, prefix: "sglang:",
			running: one("sglang:num_running_reqs"), waiting: one("sglang:num_queue_reqs"), kv: one("sglang:token_usage"),
			prompt: one("sglang:prompt_tokens_total"), generated: one("sglang:generation_tokens_total"),
		},
		{
			kind: TGI, prefix: "tgi_",
			running: one("tgi_batch_current_size"), waiting: one("tgi_queue_size"),
			prompt: one("tgi_request_input_length"), generated: one("tgi_request_generated_tokens"), // sums of histograms
		},
		{
			kind: TRTLLM, prefix: "trtllm_",
			running: one("trtllm_num_requests_running"), waiting: one("trtllm_num_requests_waiting"), kv: one("trtllm_kv_cache_utilization"),
		},
		{
			kind: Triton, prefix: "nv_trt_llm_",
			running: []source{{trtRequests, "request_type", "scheduled"}},
			waiting: []source{{trtRequests, "request_type", "waiting"}},
			kv:      []source{{trtBlocks, "kv_cache_block_type", "fraction"}},
			limit:   []source{{trtRequests, "request_type", "max"}},
		},
		{
			kind: LlamaCP, prefix: "llamacpp:",
			running: one("llamacpp:requests_processing"), waiting: one("llamacpp:requests_deferred"), kv: one("llamacpp:kv_cache_usage_ratio"),
			prompt: one("llamacpp:prompt_tokens_total"), generated: one("llamacpp:tokens_predicted_total"),
		},
	}
}

// most bounds a page of metrics.
const most = 8 << 20

// read parses a page of metrics in Prometheus' text format and finds out which
// server wrote it. Unknown, without an error, is a page of no known server.
func read(r io.Reader) (Kind, worker.Load, error) {
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(io.LimitReader(r, most))
	if err != nil {
		return Unknown, worker.Load{}, fmt.Errorf("read metrics: %w", err)
	}
	for _, k := range kinds() {
		for name := range families {
			if strings.HasPrefix(name, k.prefix) {
				return k.kind, k.load(families), nil
			}
		}
	}
	return Unknown, worker.Load{}, nil
}

// load makes the load of the families of one server. Samples of several engines
// behind one server add up; the fullest KV cache counts.
func (n names) load(f map[string]*dto.MetricFamily) worker.Load {
	l := worker.Load{
		Running: count(sum(f, n.running)), Waiting: count(sum(f, n.waiting)), MaxRunning: count(sum(f, n.limit)),
		PromptTokens: uint64(count(sum(f, n.prompt))), GenTokens: uint64(count(sum(f, n.generated))),
	}
	values, _ := samples(f, n.kv)
	for _, v := range values {
		l.KVUsage = max(l.KVUsage, min(v, 1))
	}
	if _, counted := samples(f, n.waiting); !counted && n.kind == Triton {
		active := sum(f, []source{{n.running[0].name, "request_type", "active"}})
		l.Waiting = max(count(active)-l.Running, 0)
	}
	return l
}

// sum adds the samples of the first source that there is.
func sum(f map[string]*dto.MetricFamily, from []source) float64 {
	total := 0.0
	values, _ := samples(f, from)
	for _, v := range values {
		total += v
	}
	return total
}

// samples are the values of the first source that there is, those that are no
// finite number at least 0 left out.
func samples(f map[string]*dto.MetricFamily, from []source) (values []float64, found bool) {
	for _, s := range from {
		family := f[s.name]
		if family == nil {
			continue
		}
		for _, m := range family.GetMetric() {
			if !s.matches(m) {
				continue
			}
			found = true
			if v := value(m); v >= 0 && !math.IsInf(v, 0) {
				values = append(values, v)
			}
		}
		if found {
			return values, true
		}
	}
	return nil, false
}

// matches reports whether a sample has the source's label.
func (s source) matches(m *dto.Metric) bool {
	if s.label == "" {
		return true
	}
	for _, l := range m.GetLabel() {
		if l.GetName() == s.label {
			return l.GetValue() == s.value
		}
	}
	return false
}

// value is the number of a sample: the sum of a histogram.
func value(m *dto.Metric) float64 {
	switch {
	case m.Gauge != nil:
		return m.GetGauge().GetValue()
	case m.Counter != nil:
		return m.GetCounter().GetValue()
	case m.Histogram != nil:
		return m.GetHistogram().GetSampleSum()
	case m.Summary != nil:
		return m.GetSummary().GetSampleSum()
	}
	return m.GetUntyped().GetValue()
}

// count is a number of things; what no counter reaches is cut.
func count(v float64) int { return int(min(v, 1<<52)) }
