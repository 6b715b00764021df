"""The core in a process of its own: the same tokens, and every request ends even if that process dies."""

import dataclasses
import errno
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from model.hugging_face import SHAPES, make_checkpoint, picture

from saccade.engine import Engine, EngineConfig, RequestOptions, SamplingParams
from saccade.engine.transport import process
from saccade.engine.transport.spawn import spare_core
from saccade.errors import CheckpointError, RequestError
from saccade.model import load_model
from saccade.model.initialize import initialize_random, named_size
from saccade.processor import MediaLimits

TIMEOUT_S = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("process") / "checkpoint", SHAPES[0])


def engine_of(folder, **settings):
    settings = {"max_draft_tokens": 0} | settings  # one token per step: long outputs take many steps
    config = EngineConfig(core_process=True, num_workers=1, max_length=300, num_pages=200, **settings)
    return Engine.load(folder, device="cpu", config=config)


@pytest.fixture(scope="module")
def engine(folder):
    with engine_of(folder) as engine:
        yield engine
        pid = engine._front_end.core.pid
    assert not Path(f"/proc/{pid}").exists(), "the process ends with the engine"


def ask(words, *images):
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": words}]}]


def last_delta(engine, prompt, sampling):
    """Submit a preprocessed prompt. The future has the completion of its last delta."""
    ended = Future()
    engine.submit(prompt, sampling, lambda delta: delta.completion and ended.set_result(delta.completion))
    return ended


def done(prompt):
    future = Future()
    future.set_result(prompt)
    return future


CONVERSATIONS = [
    ask("hello"),
    ask("what is it", picture(56, 84, 1)),
    ask("two", picture(56, 56, 2), picture(28, 84, 3)),
]


def test_completions_equal_those_of_a_core_in_a_thread(folder, engine):
    sampling = [
        SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=1),
        SamplingParams(max_tokens=12, temperature=1.0, seed=7, presence_penalty=0.5, logit_bias={5: 2.0}),
        SamplingParams(max_tokens=12, stop=("e",), min_tokens=1),
    ]
    with Engine.load(folder, device="cpu", config=EngineConfig(num_workers=1, max_length=300, num_pages=200)) as other:
        expected = other.generate(CONVERSATIONS, sampling)
    num_before = sum(engine.statistics.finished.values())
    found = engine.generate(CONVERSATIONS, sampling)
    fields = ("text", "token_ids", "finish_reason", "num_prompt_tokens", "failure")
    assert [[getattr(one, name) for name in fields] for one in found] == [
        [getattr(one, name) for name in fields] for one in expected
    ]
    for one, other in (
        (found[0].logprobs, expected[0].logprobs),
        (found[0].prompt_logprobs[1:], expected[0].prompt_logprobs[1:]),
    ):
        assert [entry.token_id for entry in one] == [entry.token_id for entry in other]
        # Rounding depends on which requests share a step, and so on timing.
        assert [entry.logprob for entry in one] == pytest.approx([entry.logprob for entry in other], abs=1e-5)
    assert sum(engine.statistics.finished.values()) == num_before + 3


def test_statistics_of_an_idle_core_count_no_request_and_every_page_as_free(engine):
    before = engine.statistics
    image = {"type": "image", "image": picture(56, 84, 1)}
    later = [{"role": "user", "content": [{"type": "text", "text": "the same image after a text"}, image]}]
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    completions = engine.generate(CONVERSATIONS[1], sampling) + engine.generate(later, sampling)
    after = engine.statistics
    assert (after.num_running, after.num_waiting) == (0, 0)
    assert after.num_free_pages == engine._front_end.core.info.num_pages == 200
    assert after.num_output_tokens - before.num_output_tokens == 8
    computed, cached = (
        getattr(after, name) - getattr(before, name) for name in ("num_prompt_tokens", "num_cached_tokens")
    )
    assert computed + cached == sum(one.num_prompt_tokens for one in completions)
    assert after.num_encoder_cache_hits == before.num_encoder_cache_hits + 1
    assert after.num_encoder_cache_queries - after.num_encoder_cache_hits == after.num_images_encoded


def test_structured_output_crosses_the_process(engine):
    sampling = {"structured": {"regex": "[a-c]{3}-[0-9]{2}"}, "temperature": 1.0, "seed": 1}
    [completion] = engine.generate(ask("a code"), sampling)
    assert completion.finish_reason == "stop"
    assert len(completion.text) == 6


def test_an_image_sent_twice_is_shared_and_a_cancelled_request_ends(engine):
    deltas, ended = [], threading.Event()

    def on_delta(delta):
        deltas.append(delta)
        if delta.completion is not None:
            ended.set()

    prompt = engine.preprocess(CONVERSATIONS[1])
    request_id = engine.submit(prompt, SamplingParams(max_tokens=250, ignore_eos=True), on_delta)
    [twin] = engine.generate(CONVERSATIONS[1], SamplingParams(max_tokens=2, ignore_eos=True))
    engine.cancel(request_id)
    assert ended.wait(TIMEOUT_S)
    assert deltas[-1].completion.finish_reason in ("cancelled", "length")
    assert twin.finish_reason == "length"


def test_flushed_caches_are_empty(engine):
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    engine.generate(CONVERSATIONS[2], sampling)
    [warm] = engine.generate(CONVERSATIONS[2], sampling)
    encoded = engine.statistics.num_images_encoded
    engine.flush_caches()
    [cold] = engine.generate(CONVERSATIONS[2], sampling)
    assert (warm.num_cached_tokens > 0, cold.num_cached_tokens) == (True, 0)
    assert engine.statistics.num_images_encoded == encoded + 2
    assert cold.token_ids == warm.token_ids
    assert engine.preprocessing_statistics.num_cached == 2


def test_a_live_core_writes_a_profile(engine, tmp_path):
    is_written = threading.Event()

    def keep_the_core_busy():
        while not is_written.is_set():
            engine.generate(CONVERSATIONS[1], SamplingParams(max_tokens=30))

    thread = threading.Thread(target=keep_the_core_busy)
    thread.start()
    try:
        assert engine.profile(tmp_path / "trace.json", seconds=0.2)
    finally:
        is_written.set()
        thread.join()
    assert "aten::" in (tmp_path / "trace.json").read_text()
    assert engine.generate(CONVERSATIONS[0], SamplingParams(max_tokens=2))[0].failure is None


def test_a_checkpoint_that_cannot_be_loaded_raises_what_it_raises_here(folder, tmp_path):
    broken = shutil.copytree(folder, tmp_path / "broken")
    weights = next(broken.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError) as here:
        load_model(broken)
    with pytest.raises(CheckpointError, match=re.escape(str(here.value))):
        engine_of(broken)


# ------------------------------------------------------------------ file descriptors


def num_fds(process):
    return len(list(Path(f"/proc/{process}/fd").iterdir()))


def test_a_video_of_as_many_frames_as_a_request_may_have_crosses_the_process(tmp_path):
    """Each frame pair is an image of its own: 384 images, more than the descriptors that the kernel passes at once."""
    initialize_random(tmp_path / "checkpoint", named_size("qwen3_vl/tiny"), dtype=torch.float32)
    config = EngineConfig(core_process=True, num_workers=1, max_length=8000, num_pages=1000)
    num_frames = MediaLimits().max_frames
    frames = np.random.default_rng(0).integers(0, 256, (num_frames, 32, 32, 3), np.uint8)
    messages = [{"role": "user", "content": [{"type": "video", "video": frames, "fps": 2.0}]}]
    with Engine.load(tmp_path / "checkpoint", device="cpu", config=config) as engine:
        prompt = engine.preprocess(messages)
        assert len(prompt.result(TIMEOUT_S).images) == num_frames // 2
        engine.generate([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=2))
        before = num_fds("self"), num_fds(engine.core_pid)
        completion = last_delta(engine, prompt, SamplingParams(max_tokens=2, ignore_eos=True)).result(60)
        after = num_fds("self"), num_fds(engine.core_pid)
        assert (completion.finish_reason, completion.failure) == ("length", None)
        assert engine.statistics.num_images_encoded == num_frames // 2
        assert after[0] <= before[0] + 2
        assert after[1] <= before[1] + 2


def test_open_requests_with_images_hold_no_file_descriptors_of_the_core(engine):
    _, hard = resource.prlimit(engine.core_pid, resource.RLIMIT_NOFILE)
    before = resource.prlimit(engine.core_pid, resource.RLIMIT_NOFILE, (num_fds(engine.core_pid) + 24, hard))
    try:
        conversations = [ask(str(seed), picture(28, 28, seed), picture(28, 28, 500 + seed)) for seed in range(64)]
        completions = engine.generate(
            conversations, SamplingParams(max_tokens=2, ignore_eos=True), options=RequestOptions(timeout_s=60.0)
        )
    finally:
        resource.prlimit(engine.core_pid, resource.RLIMIT_NOFILE, before)
    assert {(one.finish_reason, one.failure) for one in completions} == {("length", None)}


# ------------------------------------------------------------------ messages that do not arrive


@pytest.mark.parametrize("number", [errno.ETOOMANYREFS, errno.EINVAL, errno.ENOMEM], ids=errno.errorcode.get)
def test_a_request_that_the_kernel_does_not_pass_on_fails_alone(engine, monkeypatch, number):
    def refuse(*arguments):
        raise OSError(number, os.strerror(number))

    running = last_delta(engine, engine.preprocess(CONVERSATIONS[0]), SamplingParams(max_tokens=150, ignore_eos=True))
    prompt, sampling = engine.preprocess(CONVERSATIONS[1]), SamplingParams(max_tokens=2, ignore_eos=True)
    prompt.result(TIMEOUT_S)
    with monkeypatch.context() as patch:
        patch.setattr(socket, "send_fds", refuse)
        lost = last_delta(engine, prompt, sampling).result(30)
    assert (lost.finish_reason, lost.failure.kind) == ("failed", "overloaded")
    assert "engine core" in lost.failure.message
    assert last_delta(engine, prompt, sampling).result(TIMEOUT_S).finish_reason == "length"
    assert running.result(TIMEOUT_S).finish_reason == "length"
    assert not engine._front_end.num_open


def test_a_front_end_without_free_file_descriptors_fails_a_request_alone(engine):
    prompt, sampling = (
        engine.preprocess(ask("new", picture(28, 28, 900))),
        SamplingParams(max_tokens=2, ignore_eos=True),
    )
    prompt.result(TIMEOUT_S)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, before[1]))
    try:
        lost = last_delta(engine, prompt, sampling).result(30)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert (lost.finish_reason, lost.failure.kind) == ("failed", "overloaded")
    assert last_delta(engine, prompt, sampling).result(TIMEOUT_S).finish_reason == "length"


def test_a_core_without_free_file_descriptors_fails_a_request_alone(engine):
    _, hard = resource.prlimit(engine.core_pid, resource.RLIMIT_NOFILE)
    before = resource.prlimit(engine.core_pid, resource.RLIMIT_NOFILE, (3, hard))
    try:
        [lost] = engine.generate(ask("no", picture(28, 28, 901)), SamplingParams(max_tokens=2, ignore_eos=True))
    finally:
        resource.prlimit(engine.core_pid, resource.RLIMIT_NOFILE, before)
    assert (lost.finish_reason, lost.failure.kind) == ("failed", "overloaded")
    [found] = engine.generate(ask("no", picture(28, 28, 901)), SamplingParams(max_tokens=2, ignore_eos=True))
    assert found.finish_reason == "length"


def test_a_request_that_the_core_cannot_read_fails_alone(engine):
    prompt = engine.preprocess(CONVERSATIONS[1]).result(TIMEOUT_S)
    sampling = SamplingParams(max_tokens=150, ignore_eos=True)
    running = last_delta(engine, engine.preprocess(CONVERSATIONS[0]), sampling)
    pid = engine.core_pid
    broken = dataclasses.replace(prompt, positions=prompt.positions[:2, :5])
    lost = last_delta(engine, done(broken), sampling).result(30)
    assert (lost.finish_reason, lost.failure.kind) == ("failed", "internal_error")
    assert "other requests continue" in lost.failure.message
    assert running.result(TIMEOUT_S).finish_reason == "length"
    assert last_delta(engine, done(prompt), sampling).result(TIMEOUT_S).finish_reason == "length"
    assert (engine.core_pid, engine.has_failed) == (pid, False)


def test_outputs_that_cannot_be_read_end_every_request_and_a_new_core_serves_again(engine):
    def fail(outputs):
        raise ValueError("not an output")

    running = last_delta(engine, engine.preprocess(CONVERSATIONS[1]), SamplingParams(max_tokens=150, ignore_eos=True))
    engine._front_end.core._on_outputs = fail
    lost = running.result(30)
    assert (lost.finish_reason, lost.failure.kind) == ("failed", "engine_stopped")
    assert engine.wait_until_stopped(30)
    started_at = time.monotonic()
    engine._front_end.core.close()
    assert time.monotonic() - started_at < process._CLOSE_S / 2, "the core notices that nothing reads its outputs"
    engine.restart()
    assert engine.generate(CONVERSATIONS[1], SamplingParams(max_tokens=3, ignore_eos=True))[0].failure is None


def test_every_open_request_fails_when_the_process_is_killed_and_a_new_core_serves_again(engine):
    completions, ended = [], threading.Semaphore(0)

    def on_delta(delta):
        if delta.completion is not None:
            completions.append(delta.completion)
            ended.release()

    prompts, pid = [engine.preprocess(CONVERSATIONS[1]) for _ in range(3)], engine._front_end.core.pid
    for prompt in prompts:
        prompt.result(TIMEOUT_S)
    for prompt in prompts:
        engine.submit(prompt, SamplingParams(max_tokens=250, ignore_eos=True), on_delta)
    os.kill(pid, signal.SIGKILL)
    for _ in range(3):
        assert ended.acquire(timeout=TIMEOUT_S), "a request never ended"
    assert {(one.finish_reason, one.failure.kind) for one in completions} == {("failed", "engine_stopped")}
    with pytest.raises(RequestError, match="restart the engine"):
        engine.generate(CONVERSATIONS[0])
    assert engine.wait_until_stopped(TIMEOUT_S)
    engine.restart()
    assert engine.core_pid not in (None, pid)
    [completion] = engine.generate(CONVERSATIONS[1], SamplingParams(max_tokens=3, ignore_eos=True))
    assert completion.finish_reason == "length"
    assert completion.timings.preprocessed_s < completion.timings.first_token_s < TIMEOUT_S


def test_an_engine_closes_although_its_core_reads_no_messages(engine, monkeypatch):
    """The last test with this engine."""
    monkeypatch.setattr(process, "_CLOSE_S", 0.5)
    os.kill(engine.core_pid, signal.SIGSTOP)
    prompt = engine.preprocess(ask("word " * 40))
    prompt.result(TIMEOUT_S)
    requests = [
        last_delta(engine, prompt, SamplingParams(max_tokens=9)) for _ in range(400)
    ]  # more than a socket holds
    closer = threading.Thread(target=engine.close, daemon=True)
    closer.start()
    closer.join(30)
    assert not closer.is_alive()
    assert {request.result(30).failure.kind for request in requests} == {"engine_stopped"}


# ------------------------------------------------------------------ a process that is started ahead


def test_a_server_without_a_gpu_never_imports_torch(folder):
    """Only its core does. That is 1 s of CPU time and 260 MB of memory in the process that answers HTTP."""
    code = f"""if 1:
        import sys
        import saccade.serve.server
        from saccade.engine import Engine, EngineConfig, SamplingParams
        config = EngineConfig(core_process=True, num_workers=1, num_pages=200)
        with Engine.load({str(folder)!r}, device="cpu", config=config) as engine:
            engine.generate([[{{"role": "user", "content": "hello"}}]], SamplingParams(max_tokens=2))
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_core_that_was_started_ahead_is_taken_once_and_ends_if_it_is_not_taken():
    with spare_core("cpu", is_needed=True) as spare:
        ahead = spare._spawned
        taken = spare.take(is_cpu=True)
        another = spare.take(is_cpu=True)
        assert taken is ahead
        assert another.process.pid != ahead.process.pid
    assert taken.process.poll() is None
    for core in (taken, another):
        core.kill()
    with spare_core("cpu", is_needed=True) as spare:
        ahead = spare._spawned
    assert ahead.process.poll() is not None


def test_a_core_that_was_started_ahead_for_another_kind_of_device_is_replaced():
    with spare_core("cuda", is_needed=True) as spare:
        ahead = spare._spawned
        core = spare.take(is_cpu=True)
        assert ahead.process.poll() is not None
        assert core.is_cpu
        core.kill()
