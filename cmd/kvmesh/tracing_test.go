package main

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"
)

// Spans go where OpenTelemetry's variables say, and nowhere without them.
func TestTracing(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	vars := map[string]string{}
	e := &env{getenv: func(k string) string { return vars[k] }}
	if p, done, err := tracing(t.Context(), e, log, "test"); p != nil || err != nil {
		t.Errorf("without variables: %v, %v", p, err)
	} else {
		done()
	}
	got := make(chan string, 1)
	collector := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { got <- r.Method + " " + r.URL.Path }))
	defer collector.Close()
	vars["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector.URL
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.URL) // the exporter reads it itself
	p, done, err := tracing(t.Context(), e, log, "test")
	if err != nil || p == nil {
		t.Fatalf("with an endpoint: %v, %v", p, err)
	}
	_, span := p.Tracer("test").Start(t.Context(), "attempt")
	span.End()
	done()
	if r := <-got; r != "POST /v1/traces" {
		t.Errorf("the collector got %s", r)
	}
	vars["OTEL_TRACES_EXPORTER"] = "none"
	if p, _, err := tracing(t.Context(), e, log, "test"); p != nil || err != nil {
		t.Errorf("switched off: %v, %v", p, err)
	}
}
