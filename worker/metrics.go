package worker

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// metrics counts what the server sees. The names and buckets are vLLM's, so that
// existing dashboards and autoscalers work. Safe for concurrent use.
type metrics struct {
	model   func() string
	load    func() Load
	ttft    *prometheus.HistogramVec
	e2e     *prometheus.HistogramVec
	success *prometheus.CounterVec

	coldStart    prometheus.Gauge
	checks       prometheus.Counter
	checksFailed prometheus.Counter

	finished atomic.Uint64 // requests that ended, well or not
	failed   atomic.Uint64 // requests that ended in a fault of the worker

	mu      sync.Mutex
	samples []sample // oldest first
}

const modelLabel = "model_name"

// newMetrics registers all metrics; model and load are asked at each scrape.
func newMetrics(reg *prometheus.Registry, model func() string, load func() Load) *metrics {
	m := &metrics{
		model: model, load: load,
		ttft: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "vllm:time_to_first_token_seconds", Help: "Time from the request to its first token.",
			Buckets: []float64{.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560},
		}, []string{modelLabel}),
		e2e: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "vllm:e2e_request_latency_seconds", Help: "Time from the request to the end of its answer.",
			Buckets: []float64{.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680},
		}, []string{modelLabel}),
		success: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "vllm:request_success_total", Help: "Choices generated, by how they ended.",
		}, []string{modelLabel, "finished_reason"}),
	}
	m.coldStart = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "kvmesh_worker_cold_start_seconds", Help: "Time from the start of the worker to its first generated token, 0 before it.",
	})
	m.checks = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "kvmesh_worker_self_checks_total", Help: "Tokens generated to see whether the engine works.",
	})
	m.checksFailed = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "kvmesh_worker_self_checks_failed_total", Help: "Self-checks without a token.",
	})
	reg.MustRegister(m.ttft, m.e2e, m.success, m.coldStart, m.checks, m.checksFailed, loadCollector{m},
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// loadCollector turns the engine's load into metrics at each scrape.
type loadCollector struct{ m *metrics }

// loadMetrics lists the metrics that are read off the engine's load.
func loadMetrics() [5]struct {
	name, help string
	kind       prometheus.ValueType
	value      func(Load) float64
} {
	return [...]struct {
		name, help string
		kind       prometheus.ValueType
		value      func(Load) float64
	}{
		{
			"vllm:num_requests_running", "Sequences being prefilled or decoded.", prometheus.GaugeValue,
			func(l Load) float64 { return float64(l.Running) },
		},
		{
			"vllm:num_requests_waiting", "Requests that wait for a sequence.", prometheus.GaugeValue,
			func(l Load) float64 { return float64(l.Waiting) },
		},
		{
			"vllm:kv_cache_usage_perc", "Share of the KV memory in use, 0 to 1.", prometheus.GaugeValue,
			func(l Load) float64 { return l.KVUsage },
		},
		{
			"vllm:prompt_tokens_total", "Prompt tokens prefilled.", prometheus.CounterValue,
			func(l Load) float64 { return float64(l.PromptTokens) },
		},
		{
			"vllm:generation_tokens_total", "Tokens generated.", prometheus.CounterValue,
			func(l Load) float64 { return float64(l.GenTokens) },
		},
	}
}

// Describe implements prometheus.Collector.
func (c loadCollector) Describe(out chan<- *prometheus.Desc) {
	for _, m := range loadMetrics() {
		out <- prometheus.NewDesc(m.name, m.help, []string{modelLabel}, nil)
	}
}

// Collect implements prometheus.Collector.
func (c loadCollector) Collect(out chan<- prometheus.Metric) {
	l, model := c.m.load(), c.m.model()
	for _, m := range loadMetrics() {
		desc := prometheus.NewDesc(m.name, m.help, []string{modelLabel}, nil)
		out <- prometheus.MustNewConstMetric(desc, m.kind, m.value(l), model)
	}
}

// sample is the state of the counters at one moment.
type sample struct {
	at                       time.Time
	finished, failed, tokens uint64
}

// rates are per second over the last seconds.
type rates struct{ requests, errors, tokens float64 }

const (
	rateWindow  = 5 * time.Second        // over which rates are taken
	sampleEvery = 250 * time.Millisecond // least distance of two samples
)

// rates computes the rates at now, from the samples that earlier calls left.
func (m *metrics) rates(now time.Time, l Load) rates {
	s := sample{now, m.finished.Load(), m.failed.Load(), l.GenTokens}
	m.mu.Lock()
	defer m.mu.Unlock()
	drop := 0
	for drop+1 < len(m.samples) && now.Sub(m.samples[drop+1].at) >= rateWindow {
		drop++
	}
	m.samples = append(m.samples[:0], m.samples[drop:]...)
	var r rates
	if len(m.samples) > 0 {
		first := m.samples[0]
		if secs := now.Sub(first.at).Seconds(); secs > 0 {
			r = rates{
				requests: float64(s.finished-first.finished) / secs,
				errors:   float64(s.failed-first.failed) / secs,
				tokens:   float64(s.tokens-first.tokens) / secs,
			}
		}
	}
	if n := len(m.samples); n == 0 || now.Sub(m.samples[n-1].at) >= sampleEvery {
		m.samples = append(m.samples, s)
	}
	return r
}
