"""Spans of engine and encoder replicas, inside those of the fronts whose requests they compute.

    chat MODEL                       a front, from arrival to the last byte
      engine                         an engine replica, from the request to its last token
        features | prefill | decode  its stages
        encode                       an encoder replica

The trace travels as a W3C traceparent in the messages. Spans carry names and numbers, never content.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from saccade.serve.tracing import context_of, otlp_provider, traceparent_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from saccade.fleet.cluster.engine_setup import EngineSetup


class ReplicaSpan:
    """A span that has begun. Any thread may use it."""

    def __init__(self, tracer: Any, name: str, traceparent: str | None, attributes: Mapping[str, Any]) -> None:
        self._tracer = tracer
        self._span = tracer.start_span(name, context=context_of(traceparent), attributes=dict(attributes))
        self.traceparent = traceparent_of(self._span)
        """The span in W3C form, for spans inside it."""
        self._stage_ns = time.time_ns()

    def end_stage(self, name: str) -> None:
        """Add the span of a stage, from the end of the stage before it until now."""
        now, context = time.time_ns(), context_of(self.traceparent)
        self._tracer.start_span(name, context=context, start_time=self._stage_ns).end(now)
        self._stage_ns = now

    def end(self, attributes: Mapping[str, Any], error: str | None = None) -> None:
        """End the span."""
        from opentelemetry.trace import StatusCode

        self._span.set_attributes(dict(attributes))
        if error is not None:
            self._span.set_status(StatusCode.ERROR, error)
        self._span.end()


class ReplicaTracer:
    """Makes the spans of one replica."""

    def __init__(self, provider: TracerProvider, attributes: Mapping[str, Any]) -> None:
        """`attributes` of every span, such as the name of the replica."""
        self._provider, self._attributes = provider, attributes
        self._tracer = provider.get_tracer("saccade.fleet")

    def begin(self, name: str, traceparent: str | None) -> ReplicaSpan:
        """Begin a span inside the one of a caller."""
        return ReplicaSpan(self._tracer, name, traceparent, self._attributes)

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()


def replica_tracer(setup: EngineSetup, replica: str) -> ReplicaTracer | None:
    """The tracer of a replica. None: no collector is configured."""
    if setup.otlp_endpoint is None:
        return None
    attributes = {
        "saccade.replica": replica, "gen_ai.request.model": setup.model, "saccade.model.version": setup.version.name,
    }  # fmt: skip
    return ReplicaTracer(otlp_provider(setup.otlp_endpoint), attributes)
