"""The door: conversations in, answers out; streamed or not, stopped, cancelled, failed."""

import asyncio
import contextlib
import random
import threading
import time

import pytest
from engine.tiny import PICTURES, conversation
from model.hugging_face import SHAPES, make_checkpoint, picture

from saccade.engine import Engine, EngineConfig, SamplingParams
from saccade.errors import ConfigError, RequestError
from saccade.model import generate, load_model
from saccade.processor import Processor

CONFIG = EngineConfig(num_pages=300, page_size=8, max_length=600, max_requests=8, max_step_tokens=128, num_workers=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("engine") / "checkpoint", SHAPES[0])


@pytest.fixture(scope="module")
def engine(folder):
    with Engine.load(folder, device="cpu", config=CONFIG) as engine:
        yield engine


@pytest.fixture(scope="module")
def conversations():
    rng = random.Random(0)
    return [conversation(rng, num_images=i % 3, num_words=5 + i) for i in range(9)]


def test_answers_are_those_of_plain_generation(engine, folder, conversations):
    model, processor = load_model(folder, device="cpu").requires_grad_(False), Processor.load(folder)
    answers = engine.generate(conversations, SamplingParams(max_tokens=10))
    for messages, answer in zip(conversations, answers, strict=True):
        inputs = processor([messages], add_generation_prompt=True)
        [expected] = generate(model, inputs, max_new_tokens=10, eos_ids=processor.eos_ids)
        assert answer.token_ids == expected
        assert answer.text == processor.decode(expected)
        assert answer.num_prompt_tokens == inputs.num_tokens
        assert answer.finish_reason == ("stop" if expected[-1] in processor.eos_ids else "length")


def test_a_video_longer_than_wide_is_answered_as_plain_generation_does(engine, folder):
    """Its last time position lies behind those of the text after it: the answer goes on behind the text."""
    frames = [picture(28, 28, seed) for seed in range(16)]
    messages = [
        {"role": "user", "content": [{"type": "video", "video": frames, "fps": 0.5}, {"type": "text", "text": "what"}]}
    ]
    model, processor = load_model(folder, device="cpu").requires_grad_(False), Processor.load(folder)
    inputs = processor([messages], add_generation_prompt=True)
    assert inputs.positions.max() > inputs.positions[:, -1].max()
    [expected] = generate(model, inputs, max_new_tokens=10)
    [answer] = engine.generate([messages], SamplingParams(max_tokens=10, ignore_eos=True))
    assert answer.token_ids == expected


def test_prepared_in_processes_equals_prepared_here(engine, folder, conversations):
    import dataclasses

    with Engine.load(folder, device="cpu", config=dataclasses.replace(CONFIG, num_workers=2)) as other:
        sampling = SamplingParams(max_tokens=6)
        ours, theirs = (each.generate(conversations, sampling) for each in (engine, other))
    assert [answer.token_ids for answer in ours] == [answer.token_ids for answer in theirs]


def test_streamed_equals_not_streamed(engine, conversations):
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=3, logprobs=1)
    whole = engine.generate(conversations, sampling)

    async def stream(messages):
        return [part async for part in engine.stream(messages, sampling)]

    async def stream_all():
        return await asyncio.gather(*(stream(messages) for messages in conversations))

    for parts, answer in zip(asyncio.run(stream_all()), whole, strict=True):
        assert "".join(part.text for part in parts) == answer.text
        assert [token for part in parts for token in part.token_ids] == answer.token_ids
        last = parts[-1].completion
        assert (last.text, last.token_ids, last.finish_reason) == (answer.text, answer.token_ids, answer.finish_reason)
        for ours, theirs in zip(last.logprobs, answer.logprobs, strict=True):  # batched otherwise, so rounded otherwise
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
        assert [part.completion for part in parts[:-1]] == [None] * (len(parts) - 1)


def test_a_stop_text_ends_the_answer_and_is_not_part_of_it(engine, conversations):
    [free] = engine.generate(conversations[:1], SamplingParams(max_tokens=40, ignore_eos=True))
    stop = free.text[5:8]
    [stopped] = engine.generate(conversations[:1], SamplingParams(max_tokens=40, ignore_eos=True, stop=(stop,)))
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.finish_reason == "stop"
    assert len(stopped.token_ids) < 40


def test_a_stop_token_ends_the_answer(engine, conversations):
    [free] = engine.generate(conversations[:1], SamplingParams(max_tokens=20, ignore_eos=True))
    end = free.token_ids[6]
    sampling = SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=(end,))
    [stopped] = engine.generate(conversations[:1], sampling)
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(end) + 1]
    assert stopped.finish_reason == "stop"


def test_a_bad_image_fails_its_own_request_alone(engine, conversations):
    bad = [{"role": "user", "content": [{"type": "image", "image": b"no picture"}, {"type": "text", "text": "what"}]}]
    answers = engine.generate([conversations[0], bad, conversations[1]], SamplingParams(max_tokens=4))
    assert [answer.finish_reason for answer in answers] == ["length", "failed", "length"]
    assert answers[1].failure.stage == "preparing"
    assert "image 1" in answers[1].failure.message


def test_what_can_never_run_fails_with_a_remedy(engine):
    long = [{"role": "user", "content": "word " * 400}]
    [answer] = engine.generate([long], SamplingParams(max_tokens=4))
    assert answer.finish_reason == "failed"
    assert "Shorten it" in answer.failure.message
    with pytest.raises(RequestError, match="stop_token_ids"):
        engine.generate([long], SamplingParams(stop_token_ids=(10**9,)))
    with pytest.raises(ConfigError, match="temperature is nan"):
        SamplingParams(temperature=float("nan"))
    [answer] = engine.generate_tokens([([5, 10**6], [])], SamplingParams(max_tokens=4))
    assert "its own tokenizer" in answer.failure.message


def test_tokens_with_images_are_answered_as_the_conversation_is(engine, folder):
    processor = Processor.load(folder)
    image = PICTURES[2]
    messages = [
        {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "what is this"}]}
    ]
    [expected] = engine.generate([messages], SamplingParams(max_tokens=8))
    ids = processor([messages], add_generation_prompt=True).token_ids.tolist()
    pad = processor.vision.image_id
    once = [token for i, token in enumerate(ids) if token != pad or ids[i - 1] != pad]
    [answer] = engine.generate_tokens([(once, [image])], SamplingParams(max_tokens=8))
    assert answer.token_ids == expected.token_ids


def test_leaving_a_stream_cancels_its_request(engine, conversations):
    async def leave():
        stream = engine.stream(conversations[0], SamplingParams(max_tokens=400, ignore_eos=True))
        async for part in stream:
            if len(part.token_ids):
                break
        await stream.aclose()

    before = engine.statistics.ended.get("cancelled", 0)
    asyncio.run(leave())
    engine.generate(conversations[:1], SamplingParams(max_tokens=2))
    assert engine.statistics.ended["cancelled"] == before + 1


def test_many_threads_may_ask_at_once(engine, conversations):
    expected = [answer.token_ids for answer in engine.generate(conversations, SamplingParams(max_tokens=6))]
    found = [None] * len(conversations)

    def ask(number):
        [answer] = engine.generate([conversations[number]], SamplingParams(max_tokens=6))
        found[number] = answer.token_ids

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(conversations))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_a_second_time_the_prefix_is_found(engine, conversations):
    first, second = (engine.generate(conversations[2:3], SamplingParams(max_tokens=4))[0] for _ in range(2))
    assert second.token_ids == first.token_ids
    assert second.num_cached_tokens > second.num_prompt_tokens - 8


def test_closing_ends_every_open_request(folder, conversations):
    engine = Engine.load(folder, device="cpu", config=CONFIG)
    endings = []
    prompt = engine._preprocessor.submit(conversations[0])
    sampling = SamplingParams(max_tokens=500, ignore_eos=True)
    engine.submit(prompt, sampling, lambda part: endings.append(part.completion) if part.completion else None)
    engine.close()
    assert [ending.finish_reason for ending in endings] == ["failed"]
    with pytest.raises(RequestError, match="closed"):
        engine.generate(conversations[:1])
    engine.close()


def test_a_listener_that_raises_ends_its_own_request_alone(engine, conversations):
    def fails(part):
        raise RuntimeError("nobody listens")

    engine.submit(engine._preprocessor.submit(conversations[0]), SamplingParams(max_tokens=50, ignore_eos=True), fails)
    [answer] = engine.generate(conversations[1:2], SamplingParams(max_tokens=4, ignore_eos=True))
    assert answer.finish_reason == "length"
    engine.submit(engine._preprocessor.submit(conversations[0]), SamplingParams(max_tokens=1), fails, streams=False)
    [answer] = engine.generate(conversations[1:2], SamplingParams(max_tokens=4, ignore_eos=True))
    assert answer.finish_reason == "length"


def test_a_stream_whose_loop_has_ended_is_cancelled(engine, conversations):
    async def begin():
        stream = engine.stream(conversations[0], SamplingParams(max_tokens=500, ignore_eos=True))
        await anext(stream)
        return stream

    before = engine.statistics.ended.get("cancelled", 0)
    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(begin())
    loop.close()
    for _ in range(200):
        engine.generate(conversations[:1], SamplingParams(max_tokens=1))
        if engine.statistics.ended.get("cancelled", 0) > before:
            break
    assert engine.statistics.ended["cancelled"] == before + 1
    with contextlib.suppress(StopIteration):
        stream.aclose().send(None)


def test_a_request_that_is_still_being_prepared_can_be_cancelled(engine):
    from concurrent.futures import Future

    prompt, endings = Future(), []
    request_id = engine.submit(prompt, SamplingParams(), lambda part: endings.append(part.completion.finish_reason))
    engine.cancel(request_id)
    for _ in range(100):
        if endings:
            break
        time.sleep(0.02)
    assert endings == ["cancelled"]


def test_log_probabilities_of_a_prompt_come_once_even_after_preemption(folder, conversations):
    import dataclasses

    small = dataclasses.replace(CONFIG, num_pages=75, max_step_tokens=24)
    with Engine.load(folder, device="cpu", config=small) as engine:
        sampling = SamplingParams(max_tokens=30, ignore_eos=True, prompt_logprobs=0)
        answers = engine.generate(conversations, sampling)
        assert engine.statistics.num_preemptions > 0
    for answer in answers:
        assert len(answer.prompt_logprobs) == answer.num_prompt_tokens
        assert answer.prompt_logprobs[0] is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": "1"}, {"temperature": 10**400}, {"temperature": True}, {"top_k": 1.5}, {"max_tokens": None}, {"max_tokens": 30.5},
        {"max_tokens": 2**64}, {"min_tokens": 300}, {"logprobs": 1.5}, {"stop": "abc"}, {"stop": None},
        {"stop": ("x" * 10**6,)}, {"stop_token_ids": 5}, {"stop_token_ids": (5.5,)}, {"stop_token_ids": tuple(range(5000))},
        {"logit_bias": {5.5: 1.0}}, {"logit_bias": {-1: 1.0}}, {"logit_bias": {5: float("nan")}}, {"top_p": float("nan")}, {"seed": -1},
    ],
    ids=lambda wrong: ", ".join(wrong),
)  # fmt: skip
def test_wishes_that_make_no_sense_are_refused_by_name(wrong):
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
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused_by_name(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        EngineConfig(**wrong)


def test_priority_and_salt_are_checked_at_the_door(engine, conversations):
    async def ask(**more):
        return [part async for part in engine.stream(conversations[0], SamplingParams(max_tokens=1), **more)]

    for more in ({"salt": "tenant"}, {"priority": float("nan")}, {"priority": 10**9}):
        with pytest.raises(RequestError, match=next(iter(more))):
            asyncio.run(ask(**more))


def test_a_length_the_model_was_not_made_for_is_refused(folder):
    with pytest.raises(ConfigError, match="made for"):
        Engine.load(folder, device="cpu", config=EngineConfig(max_length=10**8, num_workers=0))
