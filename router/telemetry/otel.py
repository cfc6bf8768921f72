"""Traces in OpenTelemetry, sent by OTLP over HTTP; needs the extra `traces`.

The SDK's own variables hold for what has no option here (OTEL_EXPORTER_OTLP_HEADERS, certificates).
"""

import time
from collections.abc import Callable, Mapping

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    format_span_id,
    format_trace_id,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from loraplex.router.telemetry.request import Notes

_TRACES_PATH = "/v1/traces"
_FLUSH_MS = 5000
_BILLION = 1_000_000_000


class OtelTrace:
    """A request's spans in OpenTelemetry. clock: the loop's; spans want Unix nanoseconds."""

    def __init__(self, tracer: Tracer, parent: Context, clock: Callable[[], float]) -> None:
        self._tracer = tracer
        self._epoch_ns = time.time_ns() - int(clock() * _BILLION)
        self._span: Span = tracer.start_span("request", parent, SpanKind.SERVER)
        self._context = set_span_in_context(self._span)
        self._is_recorded = self._span.is_recording()

    @property
    def trace_id(self) -> str | None:
        return (
            format_trace_id(self._span.get_span_context().trace_id) if self._is_recorded else None
        )

    @property
    def traceparent(self) -> str | None:
        context = self._span.get_span_context()
        ids = f"{format_trace_id(context.trace_id)}-{format_span_id(context.span_id)}"
        return f"00-{ids}-{int(context.trace_flags):02x}"

    def stage(self, name: str, began: float, ended: float, notes: Notes) -> None:
        if self._is_recorded:
            span = self._tracer.start_span(
                name, self._context, start_time=self._ns(began), attributes=dict(notes)
            )
            span.end(self._ns(ended))

    def end(self, name: str, notes: Notes, error: str | None) -> None:
        self._span.update_name(name)
        self._span.set_attributes(dict(notes))
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()

    def _ns(self, at: float) -> int:
        return self._epoch_ns + int(at * _BILLION)


class OtelTracing:
    """Traces requests with OpenTelemetry. Spans are sent from a thread of its own, in batches,
    bounded; what cannot be sent is lost.
    """

    def __init__(self, endpoint: str, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "loraplex-router"}),
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(endpoint.rstrip("/") + _TRACES_PATH)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("loraplex")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, headers: Mapping[str, str]) -> OtelTrace:
        """Begins a request's trace. headers: the request's; W3C's may name a parent."""
        return OtelTrace(self._tracer, self._propagator.extract(headers), self._clock)

    def close(self) -> None:
        """Sends what is left, for a few seconds at most. Blocks."""
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()
