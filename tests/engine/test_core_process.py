"""The core in a process of its own: the same tokens, and every request ends whatever happens to that process."""

import os
import re
import shutil
import signal
import threading
from pathlib import Path

import pytest
from model.hugging_face import SHAPES, make_checkpoint, picture

from saccade.engine import Engine, EngineConfig, SamplingParams
from saccade.errors import CheckpointError, RequestError
from saccade.model import load_model

TIMEOUT_S = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("process") / "checkpoint", SHAPES[0])


def engine_of(folder, **settings):
    settings = {"max_draft_tokens": 0} | settings  # a step gives one token: long outputs take long
    config = EngineConfig(core_process=True, num_workers=1, max_length=300, num_pages=200, **settings)
    return Engine.load(folder, device="cpu", config=config)


@pytest.fixture(scope="module")
def engine(folder):
    with engine_of(folder) as engine:
        yield engine
        pid = engine._core.pid
    assert not Path(f"/proc/{pid}").exists(), "the process ends with the engine"


def ask(words, *images):
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": words}]}]


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
    later = [{"role": "user", "content": [{"type": "text", "text": "the same image behind a text"}, image]}]
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    completions = engine.generate(CONVERSATIONS[1], sampling) + engine.generate(later, sampling)
    after = engine.statistics
    assert (after.num_running, after.num_waiting) == (0, 0)
    assert after.num_free_pages == engine._core.info.num_pages == 200
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


def test_every_open_request_fails_when_the_process_is_killed_and_a_new_core_serves_again(engine):
    completions, ended = [], threading.Semaphore(0)

    def on_delta(delta):
        if delta.completion is not None:
            completions.append(delta.completion)
            ended.release()

    prompts, pid = [engine.preprocess(CONVERSATIONS[1]) for _ in range(3)], engine._core.pid
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
