"""Requests over several engine replicas: the answers of one engine, also when replicas die while they answer."""

import io
import os
import signal
import threading
import time

import pytest
from fleet.cluster.local_fleet import LocalFleet
from model.hugging_face import SHAPES, make_checkpoint
from PIL import Image

from saccade.engine import Engine, RequestOptions, SamplingParams
from saccade.engine.config import EngineConfig
from saccade.engine.structured import StructuredOutput

LONG = 120
SCHEMA = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 12, "maxItems": 30}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("fleet") / "tiny", SHAPES[0])


@pytest.fixture(scope="module")
def single(checkpoint):
    config = EngineConfig(num_workers=0, num_pages=512)
    with Engine.load(checkpoint, device="cpu", dtype="float32", config=config) as engine:
        yield engine


def png(colour, size=(56, 84)):
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


def about(*images, text="What do you see?"):
    parts = [{"type": "image", "image": one} for one in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


REQUESTS = {
    "greedy": (about(), {}),
    "image": (about(png("red"), png("blue")), {}),
    "sampled": (about(), {"temperature": 0.9, "seed": 5, "top_p": 0.95}),
    "penalties": (about(), {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.3, "presence_penalty": 0.5}),
    "logprobs": (about(), {"logprobs": 2, "prompt_logprobs": 1}),
    "schema": (about(), {"structured": StructuredOutput(json_schema=SCHEMA), "ignore_eos": False}),
    "stop": (about(), {"stop": ("zzzz",)}),
}


def params(**fields):
    return SamplingParams(**{"max_tokens": LONG, "ignore_eos": True} | fields)


def stream(fleet, messages, sampling, *, after=None, do=lambda fleet: None):
    """Deltas of a request; `do` runs once, when `after` tokens have come."""
    deltas, ended = [], threading.Event()
    count, done = [0], [after is None]

    def on_delta(delta):
        deltas.append(delta)
        count[0] += len(delta.token_ids)
        if not done[0] and count[0] >= after and delta.completion is None:
            done[0] = True
            do(fleet)
        if delta.completion is not None:
            ended.set()

    fleet.engine.submit(fleet.engine.preprocess(messages), sampling, on_delta)
    assert ended.wait(60), "the request does not end"
    assert done[0], "the answer ended before the failure"
    return deltas


def kill_the_replica(fleet):
    fleet.kill(fleet.replica_of_open_requests())


def assert_equal(completion, expected):
    assert completion.failure is None
    assert completion.token_ids == expected.token_ids
    assert completion.text == expected.text
    assert completion.finish_reason == expected.finish_reason
    for ours, theirs in (
        (completion.logprobs, expected.logprobs),
        (completion.prompt_logprobs, expected.prompt_logprobs),
    ):
        assert (ours is None) == (theirs is None)
        for one, other in zip(ours or [], theirs or [], strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert one.logprob == pytest.approx(other.logprob, abs=1e-5)


@pytest.mark.parametrize("name", REQUESTS)
def test_answers_are_those_of_one_engine(name, checkpoint, single, shared_fleet):
    messages, fields = REQUESTS[name]
    [expected] = single.generate(messages, params(**fields))
    [completion] = shared_fleet.engine.generate(messages, params(**fields))
    assert_equal(completion, expected)


@pytest.fixture(scope="module")
def shared_fleet(checkpoint):
    with LocalFleet(checkpoint) as fleet:
        yield fleet


@pytest.mark.parametrize("name", REQUESTS)
def test_a_stream_continues_on_another_replica(name, checkpoint, single):
    messages, fields = REQUESTS[name]
    [expected] = single.generate(messages, params(**fields))
    with LocalFleet(checkpoint) as fleet:
        deltas = stream(fleet, messages, params(**fields), after=20, do=kill_the_replica)
        assert fleet.set.num_continued == 1
    assert_equal(deltas[-1].completion, expected)
    assert [token for delta in deltas for token in delta.token_ids] == expected.token_ids
    assert "".join(delta.text for delta in deltas) == expected.text


def test_several_completions_of_a_prompt_continue(checkpoint, single):
    sampling = params(temperature=1.0, seed=11, n=2)
    expected = single.generate(about(png("green")), sampling)
    with LocalFleet(checkpoint) as fleet:
        killer = threading.Thread(target=_kill_when_busy, args=(fleet,))
        killer.start()
        completions = fleet.engine.generate(about(png("green")), sampling)
        killer.join()
    for completion, one in zip(completions, expected, strict=True):
        assert_equal(completion, one)


def _kill_when_busy(fleet):
    fleet.wait_until(lambda: any(len(sent.continuation.output_ids) >= 5 for sent in list(fleet.set._sent.values())))
    names = {sent.link.name for sent in list(fleet.set._sent.values()) if sent.link is not None}
    fleet.kill(names.pop())


def test_a_replica_whose_core_is_killed_gives_its_requests_back(checkpoint, single):
    [expected] = single.generate(about(), params())
    with LocalFleet(checkpoint, core_process=True) as fleet:

        def kill_core(fleet):
            host = fleet.replicas.hosts[fleet.replica_of_open_requests()]
            os.kill(host.core_pid, signal.SIGKILL)

        deltas = stream(fleet, about(), params(), after=20, do=kill_core)
        assert_equal(deltas[-1].completion, expected)
        fleet.wait_until(lambda: sum(service.has_failed for service in fleet.replicas.services.values()) == 1)
        [again] = fleet.engine.generate(about(), params())
        assert_equal(again, expected)


def test_a_request_that_ends_two_replicas_is_refused_everywhere(checkpoint):
    with LocalFleet(checkpoint, ("one", "two", "three")) as fleet:
        killed = []

        def kill_each():
            hosts = fleet.replicas.hosts
            while len(killed) < 2:
                for name in [name for name in hosts if name not in killed and hosts[name].num_open]:
                    killed.append(name)
                    fleet.kill(name)
                time.sleep(0.001)

        killer = threading.Thread(target=kill_each)
        killer.start()
        [completion] = fleet.engine.generate(about(), params(max_tokens=400))
        killer.join()
        assert completion.failure is not None
        assert completion.failure.kind == "invalid_request"
        assert fleet.poison.take_unreported()
        [again] = fleet.engine.generate(about(), params(max_tokens=400))
        assert again.failure == completion.failure
        [other] = fleet.engine.generate(about(text="Another question"), params())
        assert other.failure is None


def test_without_a_replica_a_request_waits_for_its_queue_time_and_wakes_the_pool(checkpoint, single):
    with LocalFleet(checkpoint) as fleet:
        fleet.run_replicas(())
        fleet.wait_until(lambda: fleet.set.num_ready == 0)
        [completion] = fleet.engine.generate(about(), params(), options=RequestOptions(queue_timeout_s=0.3))
        assert completion.failure.kind == "unavailable"
        assert fleet.calls.num_woken
        waiting = threading.Thread(target=lambda: (time.sleep(0.2), fleet.run_replicas(["one", "two"])))
        waiting.start()
        [completion] = fleet.engine.generate(about(), params(), options=RequestOptions(queue_timeout_s=30.0))
        waiting.join()
        assert_equal(completion, single.generate(about(), params())[0])


def test_a_replica_that_stops_ends_its_requests_and_gets_no_more(checkpoint, single):
    [expected] = single.generate(about(), params())
    with LocalFleet(checkpoint) as fleet:
        stopping = []

        def stop(fleet):
            stopping.append(fleet.replica_of_open_requests())
            fleet.run_replicas({"one", "two"} - set(stopping))

        deltas = stream(fleet, about(), params(), after=10, do=stop)
        assert_equal(deltas[-1].completion, expected)
        assert fleet.set.num_continued == 0
        fleet.wait_until(lambda: set(fleet.set._links) == {"one", "two"} - set(stopping))
        before = fleet.replicas.hosts[stopping[0]].statistics.num_output_tokens
        fleet.engine.generate([about(text=str(number)) for number in range(6)], params(max_tokens=4))
        assert fleet.replicas.hosts[stopping[0]].statistics.num_output_tokens == before


def test_an_image_is_sent_once_to_a_replica_that_keeps_it(checkpoint):
    with LocalFleet(checkpoint, ("one",)) as fleet:
        for _ in range(3):
            [completion] = fleet.engine.generate(about(png("red")), params(max_tokens=2))
            assert completion.failure is None
        assert fleet.set.num_media_sent == 1


@pytest.mark.slow
def test_requests_of_a_front_that_died_are_cancelled_within_five_seconds(checkpoint):
    with LocalFleet(checkpoint, ("one",)) as living:
        with LocalFleet(checkpoint, ("one",), front="dead", joins=living) as dying:
            prompt = dying.engine.preprocess(about())
            dying.engine.submit(prompt, params(max_tokens=3500), lambda delta: None)
            host = living.replicas.hosts["one"]
            dying.wait_until(lambda: host.num_open == 1)
            for link in dying.set._links.values():  # the process ends: nothing is closed, nothing is called any more
                dying.loop.call_soon_threadsafe([task.cancel for task in link._tasks][1])
            begun = time.monotonic()
            living.wait_until(lambda: host.num_open == 0)
            assert time.monotonic() - begun < 5.0
        [completion] = living.engine.generate(about(), params(max_tokens=4))
        assert completion.failure is None


@pytest.mark.slow
def test_a_front_that_was_away_for_too_long_opens_its_channel_again(checkpoint):
    with LocalFleet(checkpoint, ("one",)) as fleet:
        service = fleet.replicas.services["one"]
        [channel] = service._fronts.values()
        channel.heard_at -= 100.0  # its process has stood still
        fleet.wait_until(lambda: service._fronts and list(service._fronts.values()) != [channel])
        fleet.wait_until(lambda: fleet.set.num_ready == 1)
        [completion] = fleet.engine.generate(about(), params(max_tokens=4))
        assert completion.failure is None
