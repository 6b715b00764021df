"""A rank that dies or hangs fails the engine: every request ends once, no process stays, and it can be loaded again."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from engine.test_core_process import ask, last_delta
from model.hugging_face import SHAPES, make_checkpoint, picture

from saccade.engine import Engine, EngineConfig, SamplingParams

TIMEOUT_S = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("ranks") / "checkpoint", SHAPES[1])


def load(folder):
    config = EngineConfig(num_workers=0, max_length=300, num_pages=200, max_draft_tokens=0, rank_timeout_s=3.0)
    return Engine.load(folder, device="cpu", config=config, tensor_parallel_size=2)


def children(pid):
    """Process ids of the children of a process."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def shared_memory():
    return set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()  # noqa: PTH208


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)], ids=["dies", "hangs"]
)
def test_when_a_rank_fails_under_load_every_request_ends_once_and_the_engine_can_be_loaded_again(folder, number):
    before, text = shared_memory(), SamplingParams(max_tokens=200, ignore_eos=True)
    with load(folder) as engine:
        core = engine._front_end.core.pid
        [follower] = children(core)
        endings, lock = [], threading.Lock()
        prompts = [ask("hello"), ask("what is it", picture(56, 84, 1))]
        ended = [last_delta(engine, engine.preprocess(prompts[i % 2]), text) for i in range(6)]
        for future in ended:
            future.add_done_callback(lambda one: _note(endings, lock, one.result()))
        while not engine.statistics.num_output_tokens:
            time.sleep(0.01)
        os.kill(follower, number)
        begun = time.monotonic()
        completions = [future.result(TIMEOUT_S) for future in ended]
        assert [one.finish_reason for one in completions] == ["failed"] * 6
        assert {one.failure.kind for one in completions} == {"engine_stopped"}
        assert time.monotonic() - begun < 15
        assert len(endings) == 6
    deadline = time.monotonic() + 10
    while any(map(is_running, (core, follower))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, (core, follower))), "no process stays"
    assert shared_memory() <= before
    with load(folder) as engine:
        [completion] = engine.generate([ask("hello")], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(completion.token_ids) == 4


def _note(endings, lock, completion):
    with lock:
        endings.append(completion)


def test_followers_end_when_their_leader_is_killed(folder):
    with load(folder) as engine:
        core = engine._front_end.core.pid
        [follower] = children(core)
        os.kill(core, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while is_running(follower) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_running(follower)
