"""Spans of a request join over the processes of a fleet: front, engine replica, encoder replica."""

import threading

import pytest
import torch
from fleet.cluster.local_fleet import LocalFleet
from fleet.cluster.test_encoder_pool import COSTS, Decoding, images
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from saccade.engine import RequestOptions, SamplingParams
from saccade.fleet.cluster import encoder_pool
from saccade.fleet.cluster.replica_tracing import ReplicaTracer
from saccade.model.initialize import initialize_random, named_size
from saccade.serve.record import RequestRecord
from saccade.serve.tracing import RequestTracer

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TIMEOUT_S = 60


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traced") / "checkpoint"
    initialize_random(folder, named_size("tiny"), dtype=torch.float32)
    return folder


class Exporters:
    """A collector for each process."""

    def __init__(self):
        self.exporters = {}

    def provider(self, process):
        self.exporters[process], provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporters[process]))
        return provider

    def tracer(self, process):
        return ReplicaTracer(self.provider(process), {"saccade.replica": process})

    def spans(self, process, trace_id=None):
        spans = self.exporters[process].get_finished_spans()
        return [one for one in spans if trace_id is None or one.context.trace_id == trace_id]

    def by_name(self, process, trace_id):
        spans = self.spans(process, trace_id)
        assert len({one.name for one in spans}) == len(spans)
        return {one.name: one for one in spans}


@pytest.fixture
def collected():
    return Exporters()


def ask(fleet, record, tracer, conversation, *, max_tokens=8, at=None, do=None):
    """Submit a request as a server does, and end its record; `do` runs once so many tokens are there."""
    ended, num_tokens = threading.Event(), 0

    def on_delta(delta):
        nonlocal num_tokens, do
        num_tokens += len(delta.token_ids)
        if at is not None and num_tokens >= at and do is not None:
            do()
            do = None
        if delta.completion is not None:
            ended.set()

    options = RequestOptions(traceparent=tracer.begin(record))
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    fleet.engine.submit(fleet.engine.preprocess(conversation), sampling, on_delta, options=options)
    assert ended.wait(TIMEOUT_S)
    record.ended_at, record.status, record.first_token_s = record.arrived_at + 1, 200, 0.5
    tracer.observe(record)


def record_of(**fields):
    return RequestRecord(id="req-1", route="/v1/chat/completions", model="tiny", **fields)


def test_spans_of_front_engine_and_encoder_are_one_trace(checkpoint, collected, monkeypatch):
    monkeypatch.setattr(encoder_pool, "_LEAST_PATIENCE_S", 60.0)
    tracers = {"one": collected.tracer("one"), "encoder": collected.tracer("encoder")}
    front = RequestTracer(None, collected.provider("front"))
    with LocalFleet(checkpoint, ("one",), num_encoders=1, costs=COSTS, tracers=tracers) as fleet, Decoding(fleet):
        ask(fleet, record_of(traceparent=PARENT), front, images(0))
        trace_id = int(PARENT.split("-")[1], 16)
        fleet.wait_until(lambda: len(collected.spans("one", trace_id)) == 4)
    request = collected.by_name("front", trace_id)["chat tiny"]
    assert f"{request.parent.span_id:016x}" == PARENT.split("-")[2]
    engine = collected.by_name("one", trace_id)
    assert engine.keys() == {"engine", "features", "prefill", "decode"}
    assert engine["engine"].parent.span_id == request.context.span_id
    assert engine["engine"].attributes["saccade.replica"] == "one"
    assert engine["engine"].attributes["gen_ai.usage.output_tokens"] == 8
    for name in ("features", "prefill", "decode"):
        stage = engine[name]
        assert stage.parent.span_id == engine["engine"].context.span_id
        assert engine["engine"].start_time <= stage.start_time <= stage.end_time <= engine["engine"].end_time
    encodes = collected.spans("encoder", trace_id)
    assert [one.name for one in encodes] == ["encode"] * 3
    assert {one.parent.span_id for one in encodes} == {engine["engine"].context.span_id}


def test_a_stream_that_continues_on_another_engine_has_the_spans_of_both(checkpoint, collected):
    tracers = {name: collected.tracer(name) for name in ("one", "two")}
    front = RequestTracer(None, collected.provider("front"))
    with LocalFleet(checkpoint, tracers=tracers) as fleet:
        killed = []

        def kill():
            killed.append(fleet.replica_of_open_requests())
            fleet.kill(killed[0])

        ask(fleet, record_of(), front, [{"role": "user", "content": "hello"}], max_tokens=200, at=20, do=kill)
        [other] = {"one", "two"} - set(killed)
        fleet.wait_until(lambda: "engine" in {one.name for one in collected.spans(other)})
        [request] = [one for one in collected.spans("front") if one.name == "chat tiny"]
        [second] = [one for one in collected.spans(other) if one.name == "engine"]
    assert second.parent.span_id == request.context.span_id
    assert second.attributes["saccade.known_tokens"] >= 20
    assert second.attributes["saccade.known_tokens"] + second.attributes["gen_ai.usage.output_tokens"] == 200


def test_a_client_without_a_trace_gets_one(checkpoint, collected):
    front = RequestTracer(None, collected.provider("front"))
    with LocalFleet(checkpoint, ("one",), tracers={"one": collected.tracer("one")}) as fleet:
        ask(fleet, record_of(), front, [{"role": "user", "content": "hello"}])
        fleet.wait_until(lambda: "engine" in {one.name for one in collected.spans("one")})
    [request] = [one for one in collected.spans("front") if one.name == "chat tiny"]
    [engine] = [one for one in collected.spans("one") if one.name == "engine"]
    assert request.parent is None
    assert engine.context.trace_id == request.context.trace_id


def test_a_failure_is_on_the_span_of_its_replica(collected):
    span = collected.tracer("one").begin("engine", PARENT)
    span.end({}, "timeout")
    [engine] = collected.spans("one")
    assert (engine.status.is_ok, engine.status.description) == (False, "timeout")
