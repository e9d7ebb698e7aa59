package relay

import (
	"context"
	"net/http"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/kvmesh/kvmesh/internal/names"
)

// traced returns ctx under the trace that a request's headers name, in W3C's form.
func traced(ctx context.Context, h http.Header) context.Context {
	return propagation.TraceContext{}.Extract(ctx, propagation.HeaderCarrier(h))
}

// span begins the attempt's span, and has the worker's be under it. Prompts and stream
// ids, which are secrets of their clients, are not in it.
func (a *attempt) span(h http.Header) trace.Span {
	j := a.j
	ctx, s := j.r.tracer.Start(j.trace, "attempt", trace.WithSpanKind(trace.SpanKindClient), trace.WithAttributes(
		attribute.String("gen_ai.operation.name", operation(j.endpoint)),
		attribute.String("gen_ai.request.model", j.metered),
		attribute.String("kvmesh.pool", a.place.pool),
		attribute.String("kvmesh.worker", a.w.id),
		attribute.Int("kvmesh.attempt", a.n),
		attribute.String("kvmesh.cause", a.cause),
		attribute.String("kvmesh.request_id", j.in.Header.Get(names.RequestID)),
	))
	propagation.TraceContext{}.Inject(ctx, propagation.HeaderCarrier(h))
	return s
}

// endSpan says how the attempt ended, and how it went on with another's answer.
func (a *attempt) endSpan(s trace.Span, o *outcome) {
	s.SetAttributes(attribute.String("kvmesh.result", o.result))
	if k := a.took; k.kind != "" {
		s.SetAttributes(
			attribute.String("kvmesh.kv", k.kind), attribute.Int("kvmesh.restored_tokens", k.restored),
			attribute.Int("kvmesh.computed_tokens", k.computed), attribute.Float64("kvmesh.gap_s", k.gap.Seconds()),
		)
	}
	if o.blame == failed || o.blame == absent {
		s.SetStatus(codes.Error, o.result)
	}
	s.End()
}

// takeover is how an attempt went on with the answer of another.
type takeover struct {
	kind               string
	restored, computed int
	gap                time.Duration
}
