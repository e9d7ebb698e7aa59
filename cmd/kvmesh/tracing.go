package main

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// flushTime is how long the last spans may take to leave.
const flushTime = 300 * time.Millisecond

// tracing sends spans where OpenTelemetry's environment variables say; nil where they
// name no endpoint. done sends what is left.
func tracing(ctx context.Context, e *env, log *slog.Logger, service string) (p trace.TracerProvider, done func(), err error) {
	if e.getenv("OTEL_EXPORTER_OTLP_ENDPOINT") == "" && e.getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") == "" ||
		e.getenv("OTEL_SDK_DISABLED") == "true" || e.getenv("OTEL_TRACES_EXPORTER") == "none" {
		return nil, func() {}, nil
	}
	// The exporter reads endpoint, headers, time-out and certificates itself, and the
	// provider the sampler, the limits and the names of the resource.
	exporter, err := otlptracehttp.New(ctx)
	if err != nil {
		return nil, nil, withHint(fmt.Errorf("export of traces: %w", err), "OTEL_EXPORTER_OTLP_ENDPOINT takes a URL like http://127.0.0.1:4318")
	}
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { log.Warn("traces are lost", "err", err) }))
	name := e.getenv("OTEL_SERVICE_NAME")
	if name == "" {
		name = service
	}
	res, err := resource.New(ctx, resource.WithFromEnv(), resource.WithTelemetrySDK(), resource.WithAttributes(attribute.String("service.name", name)))
	if err != nil {
		log.Warn("resource of traces is not complete", "err", err)
	}
	provider := sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter), sdktrace.WithResource(res))
	return provider, func() {
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushTime)
		defer cancel()
		if err := provider.Shutdown(last); err != nil {
			log.Warn("the last traces are lost", "err", err)
		}
	}, nil
}
