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

	pace *pace

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
		model: model, load: load, pace: newPace(),
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
	itl := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "vllm:inter_token_latency_seconds", Help: "Time between two tokens of one answer.",
		Buckets: []float64{.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80},
	}, []string{modelLabel})
	m.pace.observe = func(seconds float64) { itl.WithLabelValues(model()).Observe(seconds) }
	reg.MustRegister(m.ttft, m.e2e, itl, m.success, m.coldStart, m.checks, m.checksFailed, loadCollector{m},
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// loadCollector turns the engine's load into metrics at each scrape.
type loadCollector struct{ m *metrics }

// loadMetrics lists the metrics that are read off the engine's load.
func loadMetrics() [8]struct {
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
		{
			"vllm:num_preemptions_total", "Times that a sequence gave its place to another.", prometheus.CounterValue,
			func(l Load) float64 { return float64(l.Preempted) },
		},
		{
			"kvmesh_worker_resumed_total", "Times that a sequence went on from its KV after it had given way.", prometheus.CounterValue,
			func(l Load) float64 { return float64(l.Resumed) },
		},
		{
			"kvmesh_worker_paused_bytes", "Memory of the KV of sequences that gave way.", prometheus.GaugeValue,
			func(l Load) float64 { return float64(l.PausedBytes) },
		},
	}
}

// Describe implements prometheus.Collector.
func (c loadCollector) Describe(out chan<- *prometheus.Desc) {
	for _, m := range loadMetrics() {
		out <- prometheus.NewDesc(m.name, m.help, []string{modelLabel}, nil)
	}
	for name := range c.m.paceNow(Load{}) {
		out <- paceDesc(name)
	}
}

// paceNow is how fast and how well the engine answers, by the name of the metric.
func (m *metrics) paceNow(l Load) map[string]float64 {
	r := m.rates(time.Now(), l)
	return map[string]float64{
		"kvmesh_worker_tokens_per_second":   r.tokens,
		"kvmesh_worker_inter_token_seconds": m.pace.interToken.value(),
		"kvmesh_worker_error_ratio":         r.failing(),
		"kvmesh_worker_latency_seconds":     m.pace.latency.value(),
	}
}

// paceDesc describes one of them.
func paceDesc(name string) *prometheus.Desc {
	help := map[string]string{
		"kvmesh_worker_tokens_per_second":   "Tokens generated per second over the last seconds.",
		"kvmesh_worker_inter_token_seconds": "Time between two tokens of one answer, moving average.",
		"kvmesh_worker_error_ratio":         "Share of the requests of the last seconds that failed, 0 to 1.",
		"kvmesh_worker_latency_seconds":     "Time of a whole answer, moving average.",
	}
	return prometheus.NewDesc(name, help[name], []string{modelLabel}, nil)
}

// Collect implements prometheus.Collector.
func (c loadCollector) Collect(out chan<- prometheus.Metric) {
	l, model := c.m.load(), c.m.model()
	for name, v := range c.m.paceNow(l) {
		out <- prometheus.MustNewConstMetric(paceDesc(name), prometheus.GaugeValue, v, model)
	}
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

// failing is the share of the requests that failed, 0..1.
func (r rates) failing() float64 {
	if r.requests <= 0 {
		return 0
	}
	return min(r.errors/r.requests, 1)
}

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
