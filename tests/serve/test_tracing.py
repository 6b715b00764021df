"""Spans of requests, in memory and over OTLP."""

import asyncio
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from saccade.engine import EngineConfig
from saccade.errors import ConfigError
from saccade.serve import ServeConfig, create_app
from saccade.serve.front import Front
from saccade.serve.models import OneModel
from saccade.serve.record import RequestRecord
from saccade.serve.server import traced
from saccade.serve.service import Service
from saccade.serve.supervisor import Supervisor
from saccade.serve.tracing import RequestTracer, otlp_provider

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def record_of(**fields):
    now = time.perf_counter()
    common = {
        "id": "req-1", "route": "/v1/chat/completions", "arrived_at": now - 1, "ended_at": now, "status": 200,
        "ending": "stop",
        "num_completions": 1, "max_tokens": 64, "num_images": 1, "num_prompt_tokens": 30, "num_cached_tokens": 16,
        "num_output_tokens": 9, "preprocess_s": 0.1, "first_token_s": 0.4, "decode_s": 0.5,
    }  # fmt: skip
    return RequestRecord(**common | fields)


def spans_of(record):
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    RequestTracer("tiny", provider).observe(record)
    return {span.name: span for span in exporter.get_finished_spans()}


def seconds(span):
    return (span.end_time - span.start_time) / 1e9


def test_a_request_is_a_span_with_its_stages_inside():
    spans = spans_of(record_of())
    request = spans.pop("chat tiny")
    assert seconds(request) == pytest.approx(1, abs=1e-3)
    assert abs(request.end_time / 1e9 - time.time()) < 60
    assert {name: pytest.approx(seconds(span), abs=1e-3) for name, span in spans.items()} == {
        "preprocess": 0.1,
        "prefill": 0.3,
        "decode": 0.5,
    }
    for span in spans.values():
        assert span.parent.span_id == request.context.span_id
        assert request.start_time <= span.start_time <= span.end_time <= request.end_time


def test_attributes_have_the_names_of_the_conventions_for_generative_models():
    attributes = spans_of(record_of())["chat tiny"].attributes
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 64,
        "gen_ai.usage.input_tokens": 30,
        "gen_ai.usage.output_tokens": 9,
        "gen_ai.response.id": "req-1",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.latency.time_to_first_token": 0.4,
    }
    assert {name: attributes[name] for name in expected} == expected


def test_a_request_of_a_fleet_names_its_version_and_the_replicas_that_had_it():
    request = spans_of(record_of(version="may", replicas=("a", "b"), num_continuations=1))["chat tiny"]
    assert request.attributes["saccade.model.version"] == "may"
    assert request.attributes["saccade.replicas"] == ("a", "b")
    assert request.attributes["saccade.continuations"] == 1
    alone = spans_of(record_of())["chat tiny"]
    assert not {"saccade.replicas", "saccade.continuations"} & alone.attributes.keys()


def test_a_request_continues_the_trace_of_its_client_and_a_malformed_one_starts_its_own():
    request = spans_of(record_of(traceparent=PARENT))["chat tiny"]
    assert f"{request.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{request.parent.span_id:016x}" == PARENT.split("-")[2]
    assert spans_of(record_of(traceparent="00-nonsense"))["chat tiny"].parent is None


def test_a_refused_request_is_an_error_without_stages():
    spans = spans_of(record_of(status=429, error_code="overloaded", ending="", preprocess_s=None, first_token_s=None))
    [request] = spans.values()
    assert request.attributes["error.type"] == "overloaded"
    assert not request.status.is_ok


@contextmanager
def collector():
    """Yield the URL of an OTLP collector on loopback, and the spans that it receives."""
    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        spans = []
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
        server.shutdown()
    for message in received:
        for resource in ExportTraceServiceRequest.FromString(message).resource_spans:
            spans += [span for scope in resource.scope_spans for span in scope.spans]


def test_spans_reach_a_collector_over_http():
    with collector() as (url, spans):
        tracer = RequestTracer("tiny", otlp_provider(url))
        tracer.observe(record_of())
        tracer.close()
    assert {span.name for span in spans} == {"chat tiny", "preprocess", "prefill", "decode"}


def test_a_server_with_an_endpoint_exports_every_request_and_one_without_exports_none():
    async def ask(service):
        app = create_app(service.front, OneModel(service))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
            return await client.post("/v1/chat/completions", json=body, headers={"traceparent": PARENT})

    with collector() as (url, spans):
        for endpoint in (url, None):
            supervisor = Supervisor(lambda: None, max_restarts=0, backoff_s=1)  # refused, since the server is loading
            config = ServeConfig(otlp_endpoint=endpoint)
            front = Front(config=config)
            service = Service(front=front, engine_config=EngineConfig(), model_name="tiny", owner=supervisor)
            with traced(front, "tiny"):
                assert asyncio.run(ask(service)).status_code == 503
    [span] = spans
    assert span.trace_id.hex() == PARENT.split("-")[1]
    assert {one.key: one.value.string_value for one in span.attributes}["error.type"] == "loading"


def test_an_endpoint_that_is_no_url_is_refused():
    with pytest.raises(ConfigError, match="use a URL such as"):
        otlp_provider("collector:4318")
