package relay

import (
	"strings"
	"testing"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
)

// Each attempt is a span under the request's trace, and the worker is under its attempt.
func TestTrace(t *testing.T) {
	const trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
	spans := tracetest.NewInMemoryExporter()
	record := func(c *Config) {
		own(c)
		c.Tracing = sdktrace.NewTracerProvider(sdktrace.WithSyncer(spans))
	}
	var at *mesh
	inMesh(t, record, scripted(t, &at, after(t, 4, dies), well(t)), func(t *testing.T, m *mesh) {
		at = m
		got := m.ask(askUsage, "traceparent", "00-"+trace+"-"+parent+"-01", "tracestate", "vendor=1")
		m.checkWhole(got.body, 1, 10, true)
		list := spans.GetSpans()
		if len(list) != 2 {
			t.Fatalf("%d spans for two attempts", len(list))
		}
		for i, s := range list {
			if s.SpanContext.TraceID().String() != trace || s.Parent.SpanID().String() != parent || s.Name != "attempt" {
				t.Errorf("span %d: %s of %v under %v", i, s.Name, s.SpanContext.TraceID(), s.Parent.SpanID())
			}
			if tp, want := m.seen[i].header.Get("traceparent"), "00-"+trace+"-"+s.SpanContext.SpanID().String()+"-01"; tp != want || m.seen[i].header.Get("tracestate") != "vendor=1" {
				t.Errorf("worker %d got traceparent %s, want %s", i, tp, want)
			}
			for _, a := range s.Attributes {
				if strings.Contains(a.Value.String(), "stream-1") {
					t.Errorf("%s tells the stream's id", a.Key)
				}
			}
		}
		attrs := attribute.NewSet(list[1].Attributes...)
		for key, want := range map[attribute.Key]string{
			"kvmesh.worker": "w2", "kvmesh.cause": "lost", "kvmesh.attempt": "2", "kvmesh.result": "ok", "kvmesh.kv": "restored",
			"kvmesh.restored_tokens": "4", "kvmesh.computed_tokens": "1", "gen_ai.request.model": "m",
		} {
			if v, ok := attrs.Value(key); !ok || v.String() != want {
				t.Errorf("%s is %q, want %q", key, v.String(), want)
			}
		}
		if list[0].Status.Code != codes.Error || list[1].Status.Code == codes.Error {
			t.Errorf("states %v, %v", list[0].Status, list[1].Status)
		}
	})
	// Without a provider the trace goes on to the worker.
	inMesh(t, own, scripted(t, &at, well(t)), func(t *testing.T, m *mesh) {
		at = m
		m.ask(askUsage, "traceparent", "00-"+trace+"-"+parent+"-01")
		if tp := m.seen[0].header.Get("traceparent"); tp != "00-"+trace+"-"+parent+"-01" {
			t.Errorf("worker got traceparent %q", tp)
		}
	})
}
