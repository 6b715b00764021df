"""The public API: completions streamed or not, stopped, cancelled, failed."""

import asyncio
import contextlib
import gc
import os
import random
import signal
import threading
import time
import warnings
import weakref
from dataclasses import replace

import numpy as np
import pytest
from engine.tiny import PICTURES, conversation, core_of
from model.hugging_face import SHAPES, make_checkpoint, picture

from saccade.engine import Engine, EngineConfig, RequestOptions, SamplingParams
from saccade.engine.core.step_budget import StepBudget
from saccade.errors import ConfigError, RequestError
from saccade.model import generate, load_model
from saccade.processor import Processor

CONFIG = EngineConfig(
    num_pages=300, page_size=8, max_length=600, max_requests=8, max_step_tokens=128, num_workers=0,
    max_draft_tokens=0,  # one token per step: long outputs take many steps
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("engine") / "checkpoint", SHAPES[0])


@pytest.fixture(scope="module")
def engine(folder):
    with Engine.load(folder, device="cpu", config=CONFIG) as engine:
        yield engine


@pytest.fixture
def drafting_engine(folder, monkeypatch):
    """Drafts as often as it can: a draft token costs a quarter of a token by definition."""
    monkeypatch.setattr(StepBudget, "token_cost", lambda *_: 0.25)
    config = replace(CONFIG, max_draft_tokens=7)
    with Engine.load(folder, device="cpu", config=config) as engine:
        yield engine
    assert engine.statistics.num_accepted_draft_tokens > 0


@pytest.fixture(scope="module")
def conversations():
    rng = random.Random(0)
    return [conversation(rng, num_images=i % 3, num_words=5 + i) for i in range(9)]


def test_completions_equal_plain_generation(engine, folder, conversations):
    model, processor = load_model(folder, device="cpu").requires_grad_(False), Processor.load(folder)
    completions = engine.generate(conversations, SamplingParams(max_tokens=10))
    for messages, completion in zip(conversations, completions, strict=True):
        inputs = processor([messages], add_generation_prompt=True)
        [expected] = generate(model, inputs, max_new_tokens=10, eos_ids=processor.eos_ids)
        assert completion.token_ids == expected
        assert completion.text == processor.decode(expected)
        assert completion.num_prompt_tokens == inputs.num_tokens
        assert completion.finish_reason == ("stop" if expected[-1] in processor.eos_ids else "length")


def test_a_video_longer_than_wide_completes_as_plain_generation_does(engine, folder):
    """The video's time positions exceed its spatial ones; text and output continue after the largest of all axes."""
    frames = [picture(28, 28, seed) for seed in range(16)]
    messages = [
        {"role": "user", "content": [{"type": "video", "video": frames, "fps": 0.5}, {"type": "text", "text": "what"}]}
    ]
    model, processor = load_model(folder, device="cpu").requires_grad_(False), Processor.load(folder)
    inputs = processor([messages], add_generation_prompt=True)
    assert inputs.positions.max() == inputs.positions[:, -1].max() > len(inputs.token_ids)
    [expected] = generate(model, inputs, max_new_tokens=10)
    [completion] = engine.generate([messages], SamplingParams(max_tokens=10, ignore_eos=True))
    assert completion.token_ids == expected


def test_preprocessing_in_workers_equals_preprocessing_in_process(engine, folder, conversations):
    import dataclasses

    with Engine.load(folder, device="cpu", config=dataclasses.replace(CONFIG, num_workers=2)) as other:
        sampling = SamplingParams(max_tokens=6)
        ours, theirs = (each.generate(conversations, sampling) for each in (engine, other))
    assert [completion.token_ids for completion in ours] == [completion.token_ids for completion in theirs]


def test_streamed_equals_not_streamed(engine, conversations):
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=3, logprobs=1)
    whole = engine.generate(conversations, sampling)

    async def stream(messages):
        return [delta async for delta in engine.stream(messages, sampling)]

    async def stream_all():
        return await asyncio.gather(*(stream(messages) for messages in conversations))

    for deltas, completion in zip(asyncio.run(stream_all()), whole, strict=True):
        assert "".join(delta.text for delta in deltas) == completion.text
        assert [token for delta in deltas for token in delta.token_ids] == completion.token_ids
        last = deltas[-1].completion
        assert (last.text, last.token_ids, last.finish_reason) == (
            completion.text,
            completion.token_ids,
            completion.finish_reason,
        )
        for ours, theirs in zip(
            last.logprobs, completion.logprobs, strict=True
        ):  # other batch shapes round differently
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
        assert [delta.completion for delta in deltas[:-1]] == [None] * (len(deltas) - 1)


def test_a_stop_string_ends_the_completion_and_is_not_part_of_it(engine, conversations):
    [free] = engine.generate(conversations[:1], SamplingParams(max_tokens=40, ignore_eos=True))
    stop = free.text[5:8]
    [stopped] = engine.generate(conversations[:1], SamplingParams(max_tokens=40, ignore_eos=True, stop=(stop,)))
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.finish_reason == "stop"
    assert len(stopped.token_ids) < 40


def test_a_stop_token_ends_the_completion(engine, conversations):
    [free] = engine.generate(conversations[:1], SamplingParams(max_tokens=20, ignore_eos=True))
    end = free.token_ids[6]
    sampling = SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=(end,))
    [stopped] = engine.generate(conversations[:1], sampling)
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(end) + 1]
    assert stopped.finish_reason == "stop"


def test_a_bad_image_fails_its_own_request_alone(engine, conversations):
    bad = [{"role": "user", "content": [{"type": "image", "image": b"no picture"}, {"type": "text", "text": "what"}]}]
    completions = engine.generate([conversations[0], bad, conversations[1]], SamplingParams(max_tokens=4))
    assert [completion.finish_reason for completion in completions] == ["length", "failed", "length"]
    assert completions[1].failure.stage == "preprocessing"
    assert "image 1" in completions[1].failure.message


def test_a_request_that_can_never_run_fails_with_a_remedy(engine):
    long = [{"role": "user", "content": "word " * 400}]
    [completion] = engine.generate([long], SamplingParams(max_tokens=4))
    assert completion.finish_reason == "failed"
    assert "Shorten it" in completion.failure.message
    with pytest.raises(RequestError, match="stop_token_ids"):
        engine.generate([long], SamplingParams(stop_token_ids=(10**9,)))
    with pytest.raises(ConfigError, match="temperature is nan"):
        SamplingParams(temperature=float("nan"))
    [completion] = engine.generate_tokens([([5, 10**6], [])], SamplingParams(max_tokens=4))
    assert "its own tokenizer" in completion.failure.message


def test_tokens_with_images_complete_as_the_conversation_does(engine, folder):
    processor = Processor.load(folder)
    image = PICTURES[2]
    messages = [
        {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "what is this"}]}
    ]
    [expected] = engine.generate([messages], SamplingParams(max_tokens=8))
    ids = processor([messages], add_generation_prompt=True).token_ids.tolist()
    pad = processor.rules.image_id
    once = [token for i, token in enumerate(ids) if token != pad or ids[i - 1] != pad]
    [completion] = engine.generate_tokens([(once, [image])], SamplingParams(max_tokens=8))
    assert completion.token_ids == expected.token_ids


def test_leaving_a_stream_cancels_its_request(engine, conversations):
    async def leave():
        stream = engine.stream(conversations[0], SamplingParams(max_tokens=400, ignore_eos=True))
        async for delta in stream:
            if len(delta.token_ids):
                break
        await stream.aclose()

    before = engine.statistics.finished.get("cancelled", 0)
    asyncio.run(leave())
    engine.generate(conversations[:1], SamplingParams(max_tokens=2))
    assert engine.statistics.finished["cancelled"] == before + 1


def test_many_threads_may_generate_at_once(engine, conversations):
    expected = [completion.token_ids for completion in engine.generate(conversations, SamplingParams(max_tokens=6))]
    found = [None] * len(conversations)

    def ask(number):
        [completion] = engine.generate([conversations[number]], SamplingParams(max_tokens=6))
        found[number] = completion.token_ids

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(conversations))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_a_repeated_prompt_hits_the_prefix_cache(engine, conversations):
    first, second = (engine.generate(conversations[2:3], SamplingParams(max_tokens=4))[0] for _ in range(2))
    assert second.token_ids == first.token_ids
    assert second.num_cached_tokens > second.num_prompt_tokens - 8


def test_closing_ends_every_open_request(folder, conversations):
    engine = Engine.load(folder, device="cpu", config=CONFIG)
    endings = []
    prompt = engine.preprocess(conversations[0])
    sampling = SamplingParams(max_tokens=500, ignore_eos=True)
    engine.submit(prompt, sampling, lambda delta: endings.append(delta.completion) if delta.completion else None)
    engine.close()
    assert [ending.finish_reason for ending in endings] == ["failed"]
    with pytest.raises(RequestError, match="closed"):
        engine.generate(conversations[:1])
    engine.close()


def test_when_the_device_fails_every_open_request_ends_with_a_typed_failure(folder, conversations, caplog, monkeypatch):
    with Engine.load(folder, device="cpu", config=CONFIG) as engine:
        runner = core_of(engine)._runner

        def dies(chunks):
            monkeypatch.setattr("saccade.engine.device.failures.is_alive", lambda device: False)
            raise RuntimeError("illegal memory access")

        sampling = SamplingParams(max_tokens=4, ignore_eos=True)
        assert all(completion.failure is None for completion in engine.generate(conversations, sampling))
        runner._run_chunks = dies
        completions = engine.generate(conversations, sampling)
        assert {(c.finish_reason, c.failure.kind) for c in completions} == {("failed", "engine_stopped")}
        with pytest.raises(RequestError, match="stopped"):
            engine.generate(conversations[:1])


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, KeyboardInterrupt])
def test_a_callback_that_raises_ends_only_its_own_request(engine, conversations, error):
    def fails(delta):
        raise error("callback failed")

    engine.submit(engine.preprocess(conversations[0]), SamplingParams(max_tokens=50, ignore_eos=True), fails)
    [completion] = engine.generate(conversations[1:2], SamplingParams(max_tokens=4, ignore_eos=True))
    assert completion.finish_reason == "length"
    engine.submit(engine.preprocess(conversations[0]), SamplingParams(max_tokens=1), fails, streams=False)
    [completion] = engine.generate(conversations[1:2], SamplingParams(max_tokens=4, ignore_eos=True))
    assert completion.finish_reason == "length"


def test_a_stream_whose_loop_has_ended_is_cancelled(engine, conversations):
    async def begin():
        stream = engine.stream(conversations[0], SamplingParams(max_tokens=500, ignore_eos=True))
        await anext(stream)
        return stream

    before = engine.statistics.finished.get("cancelled", 0)
    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(begin())
    loop.close()
    for _ in range(200):
        engine.generate(conversations[:1], SamplingParams(max_tokens=1))
        if engine.statistics.finished.get("cancelled", 0) > before:
            break
    assert engine.statistics.finished["cancelled"] == before + 1
    with contextlib.suppress(StopIteration):
        stream.aclose().send(None)


def test_a_request_can_be_cancelled_while_it_is_preprocessed(engine):
    from concurrent.futures import Future

    prompt, endings = Future(), []
    request_id = engine.submit(prompt, SamplingParams(), lambda delta: endings.append(delta.completion.finish_reason))
    engine.cancel(request_id)
    deadline = time.monotonic() + 120
    while not endings and time.monotonic() < deadline:
        time.sleep(0.02)
    assert endings == ["cancelled"]


def test_log_probabilities_of_a_prompt_come_once_even_after_preemption(folder, conversations):
    import dataclasses

    small = dataclasses.replace(CONFIG, num_pages=75, max_step_tokens=24, target_step_ms=None)
    with Engine.load(folder, device="cpu", config=small) as engine:
        sampling = SamplingParams(max_tokens=100, ignore_eos=True, prompt_logprobs=0)  # long enough to overlap
        completions = engine.generate(conversations, sampling)
        assert engine.statistics.num_preemptions > 0
    for completion in completions:
        assert len(completion.prompt_logprobs) == completion.num_prompt_tokens
        assert completion.prompt_logprobs[0] is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": "1"}, {"temperature": 10**400}, {"temperature": True}, {"top_k": 1.5}, {"max_tokens": None},
        {"max_tokens": 30.5}, {"max_tokens": 2**64}, {"min_tokens": 300}, {"logprobs": 1.5}, {"stop": 5},
        {"stop": ("a", 5)}, {"stop": ("x" * 10**6,)}, {"n": 0}, {"n": 2}, {"stop_token_ids": 5},
        {"stop_token_ids": (5.5,)}, {"stop_token_ids": tuple(range(5000))}, {"logit_bias": {5.5: 1.0}},
        {"logit_bias": {-1: 1.0}}, {"logit_bias": {5: float("nan")}}, {"top_p": float("nan")}, {"seed": -1},
        {"ignore_eos": "yes"},
    ],
    ids=lambda wrong: ", ".join(wrong),
)  # fmt: skip
def test_invalid_sampling_parameters_are_refused_by_name(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))) as refusal:
        SamplingParams(**wrong)
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize(
    "wrong",
    [
        {"kv_format": "bogus"},
        {"num_workers": 1.5},
        {"max_draft_tokens": 1.5},
        {"page_size": 16.0},
        {"processed_image_cache_bytes": -1},
        {"preprocess_timeout_s": 0.0},
        {"gpu_memory_utilization": "0.9"},
        {"target_step_ms": "10"},
        {"max_images_per_request": -1},
    ],
    ids=str,
)
def test_invalid_settings_are_refused_by_name(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        EngineConfig(**wrong)


def test_priority_and_salt_are_checked(engine, conversations):
    sampling = SamplingParams(max_tokens=1)

    async def ask(**more):
        return [delta async for delta in engine.stream(conversations[0], sampling, options=RequestOptions(**more))]

    for more in ({"salt": "tenant"}, {"priority": float("nan")}, {"priority": 10**9}):
        with pytest.raises(RequestError, match=next(iter(more))):
            asyncio.run(ask(**more))


def test_a_maximum_length_above_the_context_length_is_refused(folder):
    with pytest.raises(ConfigError, match="context length"):
        Engine.load(folder, device="cpu", config=EngineConfig(max_length=10**8, num_workers=0))


# ------------------------------------------------------------------ what users of vLLM and transformers pass


def test_one_conversation_needs_no_list_and_sampling_may_be_a_dict(engine, conversations):
    [expected] = engine.generate(conversations[:1], SamplingParams(max_tokens=4))
    [completion] = engine.generate(conversations[0], {"max_tokens": 4})
    assert completion.token_ids == expected.token_ids
    each = engine.generate(conversations[:2], [{"max_tokens": 1}, SamplingParams(max_tokens=2)])
    assert [len(completion.token_ids) for completion in each] == [1, 2]
    with pytest.raises(ConfigError, match=r"max_token: no such sampling parameter\. Use n, .* max_tokens"):
        engine.generate(conversations[0], {"max_token": 4})
    assert engine.generate([]) == []
    assert len(engine.generate((each for each in conversations[:2]), {"max_tokens": 1})) == 2


@pytest.mark.parametrize("wrong", ["hello", None, 5, {"role": "user", "content": "hello"}], ids=repr)
def test_what_is_no_list_of_conversations_is_refused(engine, wrong):
    with pytest.raises(RequestError, match="list of messages"):
        engine.generate(wrong)


@pytest.mark.parametrize("wrong", [None, "abc", [1, 2, 3], [[1, 2, 3]], [([1],)]], ids=repr)
def test_what_is_no_list_of_token_prompts_is_refused(engine, wrong):
    with pytest.raises(RequestError, match="list of pairs"):
        engine.generate_tokens(wrong)


@pytest.mark.parametrize("wrong", [5, "greedy", [5]], ids=repr)
def test_sampling_that_is_no_parameters_is_refused(engine, conversations, wrong):
    with pytest.raises(ConfigError, match="sampling is"):
        engine.generate(conversations[0], wrong)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"stop": "abc"}, {"stop": ("abc",)}),
        ({"stop": ["a", "b"], "stop_token_ids": [1, 2]}, {"stop": ("a", "b"), "stop_token_ids": (1, 2)}),
        ({"stop": None, "stop_token_ids": None, "logit_bias": None}, {}),
        ({"top_k": -1}, {"top_k": None}),
        (
            {"temperature": np.float32(0.5), "max_tokens": np.int64(3), "top_k": np.int32(5), "seed": np.uint8(1)},
            {"temperature": 0.5, "max_tokens": 3, "top_k": 5, "seed": 1},
        ),
        (
            {"stop_token_ids": [np.int64(4)], "logit_bias": {np.int64(3): np.float32(1)}},
            {"stop_token_ids": (4,), "logit_bias": {3: 1.0}},
        ),
    ],
    ids=str,
)  # fmt: skip
def test_sampling_parameters_are_normalized(given, expected):
    params = SamplingParams(**given)
    assert params == SamplingParams(**expected)
    assert all(type(value) in (int, float, bool, tuple, dict, type(None)) for value in vars(params).values())


def test_priority_and_salt_of_generate_are_those_of_its_requests(engine, conversations):
    sampling = SamplingParams(max_tokens=1)
    engine.generate(conversations[5], sampling, options=RequestOptions(salt=b"a"))
    [cached] = engine.generate(conversations[5], sampling, options=RequestOptions(salt=b"a", priority=np.int64(-1)))
    [other] = engine.generate(conversations[5], sampling, options=RequestOptions(salt=b"b"))
    assert cached.num_cached_tokens > 0
    assert other.num_cached_tokens == 0
    with pytest.raises(RequestError, match="salt"):
        engine.generate(conversations[5], sampling, options=RequestOptions(salt="a"))


def test_n_gives_consecutive_completions_that_differ_by_seed(engine, conversations):
    sampling = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=8, ignore_eos=True)
    completions = engine.generate(conversations[:2], sampling)
    assert len(completions) == 6
    for number, completion in enumerate(completions):
        single = SamplingParams(temperature=1.0, seed=7 + number % 3, max_tokens=8, ignore_eos=True)
        [expected] = engine.generate(conversations[number // 3], single)
        assert completion.token_ids == expected.token_ids
    assert len({tuple(completion.token_ids) for completion in completions[:3]}) > 1
    with pytest.raises(ConfigError, match="n is 2 with temperature 0"):
        SamplingParams(n=2)
    with pytest.raises(RequestError, match="one completion"):
        asyncio.run(anext(engine.stream(conversations[0], sampling)))


def test_a_progress_bar_counts_completions(engine, conversations, capsys):
    engine.generate(conversations[:3], SamplingParams(max_tokens=1), progress=True)
    assert "3/3" in capsys.readouterr().out
    engine.generate(conversations[:3], SamplingParams(max_tokens=1))
    assert capsys.readouterr().out == ""


def test_an_empty_prompt_fails_with_one_line(engine):
    [completion] = engine.generate_tokens([([], [])], SamplingParams(max_tokens=1))
    assert completion.finish_reason == "failed"
    assert completion.failure.message == "The prompt is empty; give it at least one token"
    assert completion.failure.kind == "invalid_request"


@pytest.mark.parametrize("num_pages", [10**9, 10**12])
def test_a_kv_cache_that_cannot_fit_is_refused(folder, num_pages):
    with pytest.raises(ConfigError, match=rf"num_pages is {num_pages}.*GiB are available. Lower it"):
        Engine.load(folder, device="cpu", config=EngineConfig(num_pages=num_pages, num_workers=0))


# ------------------------------------------------------------------ memory and processes


def test_a_default_engine_on_a_cpu_has_a_small_cache_that_is_freed_when_it_closes(folder):
    engine = Engine.load(folder, device="cpu", dtype="auto", config=EngineConfig(num_workers=0))
    assert core_of(engine).scheduler.pages.num_pages <= 65536 // 16
    assert engine.processor.decode([5]) == Processor.load(folder).decode([5])
    engine.generate([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=2))
    runner = core_of(engine)._runner
    tensors = [runner.cache.entries, runner.model.head.weight, runner.images.features, runner.forward_pass.logits]
    alive = [weakref.ref(tensor) for tensor in tensors]
    del runner, tensors
    gc.collect()
    gc.disable()
    try:
        engine.close()
        assert [tensor() for tensor in alive] == [None] * 4
    finally:
        gc.enable()
    assert engine.statistics.num_output_tokens > 0
    engine.close()


def test_generate_after_a_fork_raises(engine, conversations):
    """In the child the engine's thread does not exist; closing it there must not end the parent's workers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork with threads
        pid = os.fork()
    if pid == 0:
        try:
            engine.generate(conversations[0])
        except RequestError as error:
            engine.close()
            os._exit(0 if "fork" in str(error) else 2)
        finally:
            os._exit(1)
    deadline, ended = time.monotonic() + 120, 0
    while not ended and time.monotonic() < deadline:
        time.sleep(0.02)
        ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        pytest.fail("generate hangs in a forked child")
    assert os.waitstatus_to_exitcode(status) == 0
    engine.generate(conversations[0], SamplingParams(max_tokens=1))


def test_a_request_that_takes_longer_than_its_time_limit_fails(engine, conversations):
    sampling = SamplingParams(max_tokens=400, ignore_eos=True)
    [completion] = engine.generate(conversations[0], sampling, options=RequestOptions(timeout_s=0.001))
    assert (completion.finish_reason, completion.failure.kind) == ("failed", "timeout")
    for limits in ({"timeout_s": 0}, {"queue_timeout_s": float("nan")}, {"timeout_s": "a"}):
        with pytest.raises(RequestError, match="use a positive number of seconds"):
            engine.generate(conversations[0], sampling, options=RequestOptions(**limits))


def test_time_spent_in_preprocessing_counts_and_a_request_that_waits_there_too_long_is_dropped(folder):
    config = EngineConfig(num_workers=1, num_pages=200, max_requests=2)
    with Engine.load(folder, device="cpu", config=config) as engine:
        conversation, sampling = [{"role": "user", "content": "hello"}], SamplingParams(max_tokens=1)
        assert engine.generate(conversation, sampling)
        [pid, *_] = engine._preprocessor._backend.text_pids
        os.kill(pid, signal.SIGSTOP)
        try:
            first = engine.generate(conversation, sampling, options=RequestOptions(queue_timeout_s=0.2))
            second = engine.generate(conversation, sampling, options=RequestOptions(timeout_s=0.2))
        finally:
            os.kill(pid, signal.SIGCONT)
        for [completion] in (first, second):
            assert (completion.failure.kind, completion.failure.stage) == ("timeout", "preprocessing")
        [completion] = engine.generate(conversation, sampling, options=RequestOptions(queue_timeout_s=60))
        assert completion.failure is None
        assert engine.preprocessing_statistics.num_unfinished == 0


def test_a_front_end_that_is_behind_delivers_several_steps_at_once(engine, conversations):
    """A slow callback of one request holds the front end's thread; the deltas of the others are merged meanwhile."""
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=0)
    [expected] = engine.generate(conversations[0], sampling)
    deltas, ended = [], threading.Event()

    def on_delta(delta):
        if not deltas:  # until the core is several steps ahead
            deadline = time.monotonic() + 120
            while engine.statistics.num_output_tokens < before + 10 and time.monotonic() < deadline:
                time.sleep(0.01)
        deltas.append(delta)
        if delta.completion is not None:
            ended.set()

    before = engine.statistics.num_output_tokens
    engine.submit(engine.preprocess(conversations[0]), sampling, on_delta)
    assert ended.wait(300)
    assert len(deltas) < 40
    assert [token for delta in deltas for token in delta.token_ids] == expected.token_ids
    assert [one.token_id for delta in deltas for one in delta.logprobs] == expected.token_ids
    assert "".join(delta.text for delta in deltas) == deltas[-1].completion.text == expected.text


async def collect(engine, messages, sampling):
    return [delta async for delta in engine.stream(messages, sampling)]


def assert_streamed_equals_whole(deltas, whole):
    """Text, tokens and log-probabilities of all deltas are those of the completion."""
    last = deltas[-1].completion
    assert (last.text, last.token_ids, last.finish_reason) == (whole.text, whole.token_ids, whole.finish_reason)
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
    logprobs = [one for delta in deltas for one in delta.logprobs]
    assert logprobs == last.logprobs
    assert [one.token_id for one in logprobs] == [one.token_id for one in whole.logprobs] == whole.token_ids
    assert [one.logprob for one in logprobs] == pytest.approx([one.logprob for one in whole.logprobs], abs=1e-4)


def token_of(engine, letter):
    [token_id] = engine.processor.tokenizer.encode_text(letter)
    return token_id


def test_a_stream_has_no_token_after_a_stop_string_within_an_output_of_several(drafting_engine):
    """Drafts give several tokens at once; a stop string is complete with any of them."""
    sampling = SamplingParams(
        max_tokens=60, ignore_eos=True, logprobs=2, logit_bias={token_of(drafting_engine, "a"): 100}
    )
    messages = [{"role": "user", "content": "repeat"}]
    for stop_length in range(9, 14):
        stopped = replace(sampling, stop="a" * stop_length)
        [whole] = drafting_engine.generate(messages, stopped)
        assert (whole.text, len(whole.token_ids), whole.finish_reason) == ("", stop_length, "stop")
        assert_streamed_equals_whole(asyncio.run(collect(drafting_engine, messages, stopped)), whole)


def test_a_stream_that_fails_has_the_text_and_log_probabilities_of_its_completion(folder, monkeypatch):
    """Text that may begin a stop string is held back, and comes with the last delta."""
    with Engine.load(folder, device="cpu", config=CONFIG) as engine:
        runner = core_of(engine)._runner
        forward_chunks = runner._run_chunks

        def dies_after_five_tokens(chunks):
            if chunks[0].end > len(prompt.result().token_ids) + 5:
                monkeypatch.setattr("saccade.engine.device.failures.is_alive", lambda device: False)
                raise RuntimeError("illegal memory access")
            return forward_chunks(chunks)

        runner._run_chunks = dies_after_five_tokens
        sampling = SamplingParams(
            max_tokens=20, ignore_eos=True, logprobs=1, logit_bias={token_of(engine, "a"): 100}, stop="a" * 19
        )
        deltas, has_ended = [], threading.Event()

        def on_delta(delta):
            deltas.append(delta)
            if delta.completion is not None:
                has_ended.set()

        prompt = engine.preprocess([{"role": "user", "content": "repeat"}])
        engine.submit(prompt, sampling, on_delta)
        assert has_ended.wait(300)
    completion = deltas[-1].completion
    assert completion.failure.kind == "engine_stopped"
    assert completion.text == "a" * len(completion.token_ids) != ""
    assert_streamed_equals_whole(deltas, completion)
