"""OpenTelemetry spans of requests, with the `gen_ai.*` names. They need an endpoint and the extra `otel`.

    chat MODEL                                  from arrival to the last byte
      preprocess | prefill | decode             its stages

The span of a request begins when it is submitted, since engines of other processes make spans inside it. Those of its
stages are made when it has ended, from the times of its record. Spans carry names and numbers, never content.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from saccade.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

    from saccade.serve.record import RequestRecord

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
}


def otlp_provider(endpoint: str) -> TracerProvider:
    """Return a provider that sends batches of spans to an OTLP collector, such as `http://collector:4318/v1/traces`."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError("otlp_endpoint needs OpenTelemetry: pip install 'saccade[otel]'") from error
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"otlp_endpoint is {endpoint!r}; use a URL such as http://collector:4318/v1/traces")
    provider = TracerProvider(resource=Resource.create({"service.name": "saccade"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


def context_of(traceparent: str | None) -> Context:
    """The trace and the span that a W3C traceparent names. None, or a malformed one: a trace of its own."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({} if traceparent is None else {"traceparent": traceparent})


def traceparent_of(span: Span) -> str:
    """A span in W3C form."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


class RequestTracer:
    """Makes the spans of each request that has ended."""

    def __init__(self, model_name: str | None, provider: TracerProvider) -> None:
        """`model_name` is the model of requests that were refused before one was chosen."""
        self._model, self._provider = model_name, provider
        self._tracer = provider.get_tracer("saccade.serve")
        self._begun: dict[str, Span] = {}
        """Spans of requests that have not ended, by the request's id."""

    def begin(self, record: RequestRecord) -> str:
        """Begin the span of a request, which `observe` ends; returns it in W3C form."""
        if record.id not in self._begun:
            self._begun[record.id] = self._start(record, _WallClock())
        return traceparent_of(self._begun[record.id])

    def _start(self, record: RequestRecord, clock: _WallClock) -> Span:
        from opentelemetry.trace import SpanKind

        return self._tracer.start_span(
            " ".join(filter(None, (_OPERATIONS.get(record.route, record.route), record.model or self._model))),
            context=context_of(record.traceparent),
            kind=SpanKind.SERVER,
            start_time=clock.ns(record.arrived_at),
        )

    def observe(self, record: RequestRecord) -> None:
        """Export the spans of one request."""
        from opentelemetry import trace

        clock = _WallClock()
        span = self._begun.pop(record.id, None) or self._start(record, clock)
        span.set_attributes(self._attributes(record))
        if record.error_code is not None:
            span.set_status(trace.StatusCode.ERROR, record.error_code)
        inside = trace.set_span_in_context(span)
        for name, start_s, end_s in _stages(record):
            stage = self._tracer.start_span(name, context=inside, start_time=clock.ns(record.arrived_at + start_s))
            stage.end(clock.ns(record.arrived_at + end_s))
        span.end(clock.ns(record.ended_at))

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()

    def _attributes(self, record: RequestRecord) -> dict[str, Any]:
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": _OPERATIONS.get(record.route, "other"),
            "gen_ai.provider.name": "saccade",
            "gen_ai.response.id": record.id,
            "gen_ai.request.max_tokens": record.max_tokens,
            "gen_ai.request.choice.count": record.num_completions,
            "gen_ai.usage.input_tokens": record.num_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
            "gen_ai.usage.output_tokens": record.num_output_tokens,
            "gen_ai.latency.e2e": record.duration_s,
            "saccade.request.images": record.num_images,
            "http.route": record.route,
            "http.response.status_code": record.status,
        }
        if model := record.model or self._model:
            attributes |= {"gen_ai.request.model": model, "gen_ai.response.model": model}
        if record.version is not None:
            attributes["saccade.model.version"] = record.version
        if record.replicas:
            attributes |= {"saccade.replicas": record.replicas, "saccade.continuations": record.num_continuations}
        if record.ending:
            attributes["gen_ai.response.finish_reasons"] = (record.ending,)
        if record.first_token_s is not None:
            attributes["gen_ai.latency.time_to_first_token"] = record.first_token_s
        if record.error_code is not None:
            attributes["error.type"] = record.error_code
        return attributes


def _stages(record: RequestRecord) -> list[tuple[str, float, float]]:
    """Return the name, start and end of each stage of the request, in seconds since it arrived."""
    first, prepared = record.first_token_s, record.preprocess_s
    stages = []
    if prepared is not None:
        stages.append(("preprocess", 0.0, prepared))
    if first is not None:
        stages.append(("prefill", min(prepared or 0.0, first), first))
        stages.append(("decode", first, first + record.decode_s))
    return stages


class _WallClock:
    """Turns times of `time.perf_counter` into nanoseconds since 1970."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.perf_counter()

    def ns(self, moment: float) -> int:
        """Nanoseconds since 1970."""
        return int((moment + self._offset_s) * 1e9)
