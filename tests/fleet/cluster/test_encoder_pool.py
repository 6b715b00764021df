"""Encoder replicas encode images for the engines of a fleet. Engines encode what these do not have in time."""

import asyncio
import threading

import pytest
import torch
from engine.test_host import GREEDY, ask
from engine.test_preprocessing import encoded, noise, turned
from fleet.cluster.local_fleet import LocalFleet

from saccade.engine import Engine, EngineConfig, SamplingParams
from saccade.fleet.cluster import encoder_pool
from saccade.fleet.costs import CostModel
from saccade.model.initialize import initialize_random, named_size

COSTS = CostModel(
    patch_s=1e-3, token_s=1e-5, request_s=1e-3, step_s=1e-3, step_request_s=0.0, target_step_s=0.0
)  # fmt: skip
"""While a request decodes, images get two thirds of an engine, so that an idle encoder is the faster one."""
LONG = SamplingParams(max_tokens=6000, temperature=0.0, ignore_eos=True)
FAMILIES = ["tiny", pytest.param("qwen3_vl/tiny", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pool") / "checkpoint"
    initialize_random(folder, named_size(request.param), dtype=torch.float32)
    return folder


@pytest.fixture(scope="module")
def expected(checkpoint):
    """What an engine that encodes its own images answers."""
    with Engine.load(checkpoint, device="cpu", config=EngineConfig(num_workers=0, num_pages=512)) as engine:
        yield lambda conversation: engine.generate(conversation, GREEDY)[0].token_ids


@pytest.fixture(autouse=True)
def patience(request, monkeypatch):
    """An engine waits long for the pool, so that a busy machine decides nothing; not if the pool never answers."""
    if "stuck" not in request.node.name:
        monkeypatch.setattr(encoder_pool, "_LEAST_PATIENCE_S", 60.0)


class Decoding:
    """A request that decodes on an engine while others come."""

    def __init__(self, fleet):
        self.fleet, self.has_begun, self.has_ended = fleet, threading.Event(), threading.Event()

    def _on_delta(self, delta):
        self.has_begun.set()
        if delta.completion is not None:
            self.has_ended.set()

    def __enter__(self):
        prompt = self.fleet.engine.preprocess([{"role": "user", "content": "a long answer"}])
        self.id = self.fleet.engine.submit(prompt, LONG, self._on_delta)
        assert self.has_begun.wait(60)

    def __exit__(self, *_):
        assert not self.has_ended.is_set(), "the long answer ended too early"
        self.fleet.engine.cancel(self.id)
        assert self.has_ended.wait(60)


def answer(fleet, conversation):
    [completion] = fleet.engine.generate(conversation, GREEDY)
    assert completion.failure is None, completion.failure
    return completion.token_ids


def images(first):
    pictures = [encoded(noise(90, 60, first)), encoded(noise(64, 64, first + 1)), turned(noise(96, 32, first + 2), 6)]
    return ask("these", *pictures)


def num_encoded(fleet):
    """Images that the engines have encoded themselves."""
    return sum(host.statistics.num_images_encoded for host in fleet.replicas.hosts.values())


def test_engines_that_decode_get_features_and_answer_as_if_they_had_encoded(checkpoint, expected):
    with LocalFleet(checkpoint, ("one",), num_encoders=2, costs=COSTS) as fleet:
        with Decoding(fleet):
            for number in range(4):
                conversation = images(10 * number)
                assert answer(fleet, conversation) == expected(conversation)
        assert num_encoded(fleet) == 0
        [pool] = fleet.replicas.pools
        assert pool.num_patches > 0
        assert pool.num_late_patches == 0
        assert {name for name, one in fleet.replicas.encoders.items() if one._kept} == {"encoder 0", "encoder 1"}
        fleet.wait_until(lambda: [one.pooled_patches for one in fleet.set.loads()] == [pool.num_patches])


def test_an_engine_that_is_idle_encodes_itself(checkpoint, expected):
    with LocalFleet(checkpoint, ("one",), num_encoders=1, costs=COSTS) as fleet:
        conversation = images(0)
        assert answer(fleet, conversation) == expected(conversation)
        assert num_encoded(fleet) == 3
        [pool] = fleet.replicas.pools
        assert (pool.num_patches, pool.num_late_patches) == (0, 0)


def test_an_image_that_two_engines_ask_for_is_encoded_once(checkpoint, expected):
    with LocalFleet(checkpoint, ("one", "two"), num_encoders=1, costs=COSTS) as fleet:
        [encoder] = fleet.replicas.encoders.values()
        conversation = images(0)
        asked = expected(conversation)
        passes = []
        encode = encoder._host._encoder.encode
        encoder._host._encoder.encode = lambda images: passes.append(len(images)) or encode(images)
        for name in ("one", "two"):
            fleet.run_replicas([name])
            fleet.wait_until(lambda: fleet.set.num_ready == 1)
            with Decoding(fleet):
                assert answer(fleet, conversation) == asked
        assert sum(passes) == 3
        assert num_encoded(fleet) == 0


@pytest.mark.parametrize("fault", ["gone", "stuck", "no replicas", "wrong features"])
def test_an_engine_encodes_itself_what_the_pool_does_not_have_in_time(checkpoint, expected, fault):
    with LocalFleet(checkpoint, ("one",), num_encoders=1, costs=COSTS) as fleet:
        [encoder] = fleet.replicas.encoders.values()
        conversation = images(0)
        with Decoding(fleet):
            [pool] = fleet.replicas.pools
            match fault:
                case "gone":
                    fleet.replicas.encoders.clear()
                case "stuck":
                    fleet.loop.call_soon_threadsafe(fleet.replicas.stuck.set)
                case "no replicas":
                    asyncio.run_coroutine_threadsafe(_set_replicas(pool, frozenset()), fleet.loop).result()
                case "wrong features":
                    host_encode = encoder._host._encoder.encode
                    encoder._host._encoder.encode = lambda images: host_encode(images)[:, :-8]
            assert answer(fleet, conversation) == expected(conversation)
        assert num_encoded(fleet) == 3
        assert (pool.num_patches == 0) == (fault != "wrong features")
        assert (pool.num_late_patches > 0) == (fault in ("gone", "stuck"))
        assert (pool._calls.num_woken > 0) == (fault == "no replicas")
        encoder.close()


async def _set_replicas(pool, names):
    pool.set_replicas(names)


def test_a_request_that_is_cancelled_while_the_pool_encodes_ends_once_and_is_never_computed(checkpoint):
    with LocalFleet(checkpoint, ("one",), num_encoders=1, costs=COSTS) as fleet:
        with Decoding(fleet):
            fleet.loop.call_soon_threadsafe(fleet.replicas.stuck.set)
            [pool] = fleet.replicas.pools
            endings, ended = [], threading.Event()

            def on_delta(delta):
                if delta.completion is not None:
                    endings.append(delta.completion.finish_reason)
                    ended.set()

            prompt = fleet.engine.preprocess(images(0))
            request_id = fleet.engine.submit(prompt, GREEDY, on_delta)
            fleet.wait_until(lambda: pool._in_progress)
            fleet.engine.cancel(request_id)
            assert ended.wait(60)
            fleet.wait_until(lambda: not fleet.replicas.services["one"]._preparing)
            assert endings == ["cancelled"]
        assert num_encoded(fleet) == 0


def test_the_cache_of_an_encoder_is_bounded_in_tokens(checkpoint):
    with LocalFleet(checkpoint, ("one",), num_encoders=1, costs=COSTS, encoder_cache_tokens=128) as fleet:
        [encoder] = fleet.replicas.encoders.values()
        with Decoding(fleet):
            for number in range(6):
                answer(fleet, ask("one", encoded(noise(90, 60 + number, number))))
        tokens = [count for _, count in encoder._kept.values()]
        assert 0 < sum(tokens) <= 128
        assert encoder._num_kept == sum(tokens)
        load = encoder.scaling_load()
        assert load["arrived_s"] > 0
        assert (load["waiting_s"], load["num_running"]) == (0, 0)


def test_an_engine_without_requests_has_no_load_so_that_its_pool_may_become_empty(checkpoint):
    with LocalFleet(checkpoint, ("one",)) as fleet:
        answer(fleet, images(0))
        load = fleet.replicas.services["one"].scaling_load()
        assert load["arrived_s"] > 0
        assert (load["waiting_s"], load["num_running"]) == (0, 0)
