"""A host serves requests that come as tokens and encoded media, with the tokens of an engine that has the conversation.

Every request is packed and unpacked as between two machines.
"""

import contextlib
import dataclasses
import os
import random
import signal
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch
from engine.making_adapters import write_adapters
from engine.test_preprocessing import encode_video, encoded, noise, stopped, turned

from saccade.engine import Engine, EngineConfig, RequestOptions, SamplingParams
from saccade.engine.core.messages import AddRequest, EndRequest
from saccade.engine.frontend.preprocessing.preprocessor import Preprocessor
from saccade.engine.host import EngineHost, MediaMissingError
from saccade.engine.request import Request, RequestOutput
from saccade.engine.transport.wire import decode_outputs, decode_request, encode_outputs, encode_request, media_of
from saccade.model.initialize import initialize_random, named_size
from saccade.processor import MediaLimits, Processor

TIMEOUT_S = 120
SETTINGS = {"page_size": 4, "num_pages": 300, "max_length": 400, "max_draft_tokens": 0, "num_workers": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("host") / "checkpoint"
    initialize_random(folder, named_size("qwen3_vl/tiny"), dtype=torch.float32)
    return folder


def host_of(folder, **settings):
    return EngineHost.load(folder, device="cpu", config=EngineConfig(**SETTINGS | settings), limits=MediaLimits())


@pytest.fixture(scope="module")
def host(folder):
    with host_of(folder) as host:
        yield host


@pytest.fixture
def fresh_host(folder):
    """A host that has seen no image, with its core in a process."""
    with host_of(folder, core_process=True) as host:
        yield host


@pytest.fixture(scope="module")
def measuring(folder):
    with Preprocessor(folder, num_workers=0, processed_image_cache_bytes=2**24, measures_only=True) as preprocessor:
        yield preprocessor


class RemoteCore:
    """The core of an engine that is a host elsewhere: what a front does, without a network."""

    def __init__(self, host, on_outputs, on_stop):
        self._host, self._on_outputs = host, on_outputs
        self.info, self.statistics = host.info, host.statistics
        self.num_media_sent = 0

    def send(self, message):
        match message:
            case AddRequest():
                sent = decode_request(encode_request(message.request, message.prompt))
                missing = set(self._host.missing_media(sent))
                self.num_media_sent += len(missing)
                media = [data if number in missing else None for number, data in enumerate(media_of(message.prompt))]
                self._host.submit(sent, media, self._receive)
            case EndRequest():
                self._host.cancel(message.request_id)

    def _receive(self, output):
        self._on_outputs(decode_outputs(encode_outputs([output])))

    def close(self):
        pass


@pytest.fixture(scope="module")
def remote(folder, host, measuring):
    """An engine that measures images, and whose core is a host."""
    engine = Engine(partial(RemoteCore, host), Processor.load(folder), measuring)
    yield engine
    engine._front_end.close()


@pytest.fixture(scope="module")
def local(folder):
    with Engine.load(folder, device="cpu", config=EngineConfig(**SETTINGS)) as engine:
        yield engine


def ask(words, *parts):
    made = [part if isinstance(part, dict) else {"type": "image", "image": part} for part in parts]
    return [{"role": "user", "content": [*made, {"type": "text", "text": words}]}]


def video(num_frames, **options):
    frames = [encoded(noise(64, 64, seed)) for seed in range(num_frames)]
    return {"type": "video", "video": frames, **options}


CONVERSATIONS = {
    "text": ask("what is a saccade?"),
    "image": ask("what?", encoded(noise(90, 60))),
    "images": ask("these", encoded(noise(64, 64, 1)), np.asarray(noise(40, 80, 2)), turned(noise(96, 32, 3), 6)),
    "repeated": ask("again", encoded(noise(90, 60)), encoded(noise(90, 60))),
    "video": ask("move", video(5, fps=2.0), encoded(noise(64, 64, 1))),
    "video file": ask("file", {"type": "video", "video": encode_video(8), "fps": 4.0}),
}
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        for name in ("text", "token_ids", "finish_reason", "num_prompt_tokens", "failure"):
            assert getattr(one, name) == getattr(other, name)
        for logprobs, others in ((one.logprobs, other.logprobs), (one.prompt_logprobs, other.prompt_logprobs)):
            assert (logprobs is None) == (others is None)
            for token, expected_token in zip((logprobs or [])[1:], (others or [])[1:], strict=True):
                assert token.token_id == expected_token.token_id
                assert token.logprob == pytest.approx(expected_token.logprob, abs=1e-5)


# ------------------------------------------------------------------ the same output


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_output_is_that_of_an_engine(remote, local, name):
    sampling = dataclasses.replace(GREEDY, logprobs=2, prompt_logprobs=1)
    same(remote.generate(CONVERSATIONS[name], sampling), local.generate(CONVERSATIONS[name], sampling))


def test_requests_at_once_with_any_sampling_have_the_output_of_an_engine(remote, local):
    conversations = list(CONVERSATIONS.values())
    sampling = [
        GREEDY,
        SamplingParams(max_tokens=8, temperature=1.0, seed=3, n=3, top_k=20),
        SamplingParams(max_tokens=20, stop=("e", "a"), min_tokens=2),
        SamplingParams(max_tokens=30, structured={"regex": "[a-c]{3}-[0-9]{2}"}, temperature=1.0, seed=1),
        SamplingParams(max_tokens=8, logit_bias={5: 3.0}, presence_penalty=0.5, repetition_penalty=1.2),
        SamplingParams(max_tokens=40, structured={"choice": ("yes", "no")}),
    ]
    same(remote.generate(conversations, sampling), local.generate(conversations, sampling))


def test_a_prompt_that_was_continued_has_the_output_of_an_engine(remote, local):
    options = {"num_beams": 2, "max_tokens": 4}
    same(remote.beam_search(CONVERSATIONS["image"], **options), local.beam_search(CONVERSATIONS["image"], **options))


def test_media_that_are_processed_already_are_not_sent_again(remote, host):
    core, messages = remote._front_end.core, ask("new", encoded(noise(64, 64, 50)), encoded(noise(64, 64, 51)))
    host._preprocessor.flush()
    counts = []
    for salt in (b"one", b"one", b"two"):
        before = core.num_media_sent
        [completion] = remote.generate(messages, GREEDY, options=RequestOptions(salt=salt))
        counts.append((core.num_media_sent - before, completion.failure))
    assert counts == [(2, None), (0, None), (2, None)]


def test_adapters_are_those_of_the_engine(folder, measuring, tmp_path):
    [name, *_] = adapters = write_adapters(folder, tmp_path)
    config = EngineConfig(**SETTINGS)
    with (
        Engine.load(folder, device="cpu", config=config, adapters=adapters) as local,
        EngineHost.load(folder, device="cpu", config=config, adapters=adapters) as host,
    ):
        assert host.adapters == local.adapters
        remote = Engine(partial(RemoteCore, host), Processor.load(folder), measuring)
        options = RequestOptions(adapter=name)
        expected = local.generate(CONVERSATIONS["image"], GREEDY, options=options)
        same(remote.generate(CONVERSATIONS["image"], GREEDY, options=options), expected)
        [unknown] = remote.generate(CONVERSATIONS["text"], GREEDY, options=RequestOptions(adapter="none"))
        assert "adapter 'none' is not loaded" in unknown.failure.message
        remote._front_end.close()


# ------------------------------------------------------------------ one request


class Outputs:
    """The outputs of a request; it must end once."""

    def __init__(self):
        self.token_ids, self.last = [], None
        self.has_begun, self.has_ended = threading.Event(), threading.Event()

    def __call__(self, output):
        assert self.last is None, "no output follows the last one"
        self.token_ids += output.token_ids
        self.has_begun.set()
        if output.finish_reason is not None:
            self.last = output
            self.has_ended.set()

    def end(self):
        assert self.has_ended.wait(TIMEOUT_S), "the request never ended"
        return self.last


def sent_and_media(measuring, messages, name="request", sampling=GREEDY, **fields):
    prompt = measuring.submit(messages, salt=fields.get("salt", b"")).result(TIMEOUT_S)
    spans = tuple(image.span for image in prompt.images)
    request = Request(id=name, token_ids=prompt.token_ids, images=spans, sampling=sampling, **fields)
    return decode_request(encode_request(request, prompt)), media_of(prompt)


def served(host, sent, media):
    outputs = Outputs()
    host.submit(sent, media, outputs)
    return outputs


@contextlib.contextmanager
def stopped_workers(host):
    """Image workers that make no progress."""
    host._preprocessor.wait_until_ready()
    with stopped(host._preprocessor.worker_pids):
        yield


def new_image(seed):
    return encoded(noise(64, 64, 1000 + seed))


def test_a_broken_image_fails_its_request_with_the_line_of_an_engine(host, measuring, local):
    broken = encoded(noise(90, 90, 7))[:-3000]
    [expected] = local.generate(ask("x", new_image(0), broken), GREEDY)
    failed = served(host, *sent_and_media(measuring, ask("x", new_image(0), broken))).end()
    assert failed.failure == expected.failure
    assert (failed.failure.kind, failed.failure.message[:8]) == ("invalid_request", "image 2:")


def test_other_media_than_announced_fail_the_request(host, measuring):
    sent, [media] = sent_and_media(measuring, ask("x", new_image(1)))
    longer = served(host, sent, [media + b"1"]).end()
    assert "bytes were received" in longer.failure.message
    array, [pixels] = sent_and_media(measuring, ask("x", np.asarray(noise(64, 64, 3))))
    replaced = served(host, array, [pixels[::-1]]).end()
    assert "not the one that was announced" in replaced.failure.message
    unlike = dataclasses.replace(sent, request=dataclasses.replace(sent.request, token_ids=[1, 2, 3]))
    assert "not the one that was announced" in served(host, unlike, [media]).end().failure.message
    assert served(host, sent, [media]).end().finish_reason == "length"


def test_a_request_cannot_use_the_key_of_another_image(host, measuring):
    """A sender that announces the key of an image and sends another one gets no output, and reaches no cache."""
    sent, [media] = sent_and_media(measuring, ask("x", np.asarray(noise(64, 64, 4))))
    assert served(host, sent, [bytes(len(media))]).end().finish_reason == "failed"
    host._preprocessor.flush()
    assert host.missing_media(sent) == [0]


def test_images_that_were_evicted_meanwhile_are_asked_for(host, measuring):
    sent, media = sent_and_media(measuring, ask("x", new_image(5), new_image(6)))
    served(host, sent, media).end()
    assert host.missing_media(sent) == []
    host._preprocessor.flush()
    outputs = Outputs()
    with pytest.raises(MediaMissingError) as missing:
        host.submit(sent, [None, media[1]], outputs)
    assert missing.value.numbers == [0]
    assert host.num_open == 0
    assert served(host, sent, media).end().finish_reason == "length"
    assert not outputs.has_ended.is_set()


def test_an_id_that_is_open_and_tokens_that_do_not_exist_are_refused(host, measuring):
    sent, _ = sent_and_media(measuring, ask("x"), sampling=SamplingParams(max_tokens=300, ignore_eos=True))
    first, second = served(host, sent, []), served(host, sent, [])
    assert "is open" in second.end().failure.message
    host.cancel(sent.request.id)
    assert first.end().finish_reason in ("cancelled", "length")
    biased, _ = sent_and_media(measuring, ask("x"), sampling=SamplingParams(logit_bias={10**6: 1.0}))
    assert "logit_bias" in served(host, biased, []).end().failure.message
    unknown = dataclasses.replace(sent, request=dataclasses.replace(sent.request, token_ids=[*sent.token_ids, 10**6]))
    assert "vocabulary" in served(host, unknown, []).end().failure.message
    assert "1 media for 0" in served(host, sent, [b"x"]).end().failure.message
    assert host.num_open == 0


def test_a_request_continues_after_output_tokens_of_another_engine(host, measuring):
    messages = ask("go on", new_image(7), video(3, fps=1.0))
    whole = served(host, *sent_and_media(measuring, messages))
    assert whole.end().finish_reason == "length"
    rest = served(host, *sent_and_media(measuring, messages, output_ids=tuple(whole.token_ids[:5])))
    assert rest.end().finish_reason == "length"
    assert whole.token_ids[5:] == rest.token_ids


# ------------------------------------------------------------------ cancel, deadlines, queues


def test_a_request_is_cancelled_in_every_stage(host, measuring):
    long = SamplingParams(max_tokens=300, ignore_eos=True)
    with stopped_workers(host):
        preprocessing = served(host, *sent_and_media(measuring, ask("x", new_image(10)), sampling=long))
        host.cancel("request")
        assert preprocessing.end() == RequestOutput("request", finish_reason="cancelled")
    running = served(host, *sent_and_media(measuring, ask("x", new_image(11)), sampling=long))
    assert running.has_begun.wait(TIMEOUT_S)
    host.cancel("request")
    assert running.end().finish_reason == "cancelled"
    at_once = served(host, *sent_and_media(measuring, ask("x"), sampling=long))
    host.cancel("request")
    assert at_once.end().finish_reason == "cancelled"
    host.cancel("request")
    assert host.num_open == 0


@pytest.mark.parametrize(("limit", "seed"), [("queue_timeout_s", 12), ("timeout_s", 13)])
def test_preprocessing_counts_against_the_limits(host, measuring, limit, seed):
    with stopped_workers(host):
        sent, media = sent_and_media(measuring, ask("x", new_image(seed)), **{limit: 0.2})
        late = served(host, sent, media).end()
    assert (late.failure.kind, late.failure.stage) == ("timeout", "preprocessing")


def test_every_request_of_many_senders_ends_once(host, measuring):
    sent = {
        f"{sender}-{number}": sent_and_media(
            measuring,
            ask("x", *[new_image(20 + (sender + n) % 5) for n in range(number % 3)]),
            f"{sender}-{number}",
            SamplingParams(max_tokens=5 + number, ignore_eos=True),
        )
        for sender in range(3)
        for number in range(12)
    }
    outputs, rng = {}, random.Random(0)

    def send(sender):
        for name, (request, media) in sent.items():
            if name.startswith(f"{sender}-"):
                outputs[name] = served(host, request, media)
                if rng.random() < 0.4:
                    host.cancel(name)

    threads = [threading.Thread(target=send, args=(sender,)) for sender in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reasons = [one.end().finish_reason for one in outputs.values()]
    assert len(reasons) == 36
    assert set(reasons) <= {"length", "cancelled"}
    assert host.num_open == 0


def test_a_callback_that_raises_cancels_its_request_alone(host, measuring):
    def fail(output):
        raise SystemExit("a broken callback")

    sent, media = sent_and_media(measuring, ask("x"), "broken", SamplingParams(max_tokens=300, ignore_eos=True))
    other = served(host, *sent_and_media(measuring, ask("y"), "other"))
    host.submit(sent, media, fail)
    assert other.end().finish_reason == "length"
    deadline = time.monotonic() + TIMEOUT_S
    while host.num_open and time.monotonic() < deadline:
        time.sleep(0.01)
    assert host.num_open == 0


# ------------------------------------------------------------------ the end of the core, and of the host


def test_every_open_request_ends_when_the_core_is_killed(fresh_host, measuring):
    host, long = fresh_host, SamplingParams(max_tokens=300, ignore_eos=True)
    running = [served(host, *sent_and_media(measuring, ask("x", new_image(n)), f"{n}", long)) for n in range(3)]
    for outputs in running:
        assert outputs.has_begun.wait(TIMEOUT_S)
    with stopped_workers(host):
        preprocessing = served(host, *sent_and_media(measuring, ask("x", new_image(9)), "9", long))
        os.kill(host.core_pid, signal.SIGKILL)
        ends = [outputs.end() for outputs in [*running, preprocessing]]
    assert {(one.finish_reason, one.failure.kind) for one in ends} == {("failed", "engine_stopped")}
    assert host.has_failed
    assert host.num_open == 0
    refused = served(host, *sent_and_media(measuring, ask("x"), "later")).end()
    assert (refused.finish_reason, refused.failure.kind) == ("failed", "engine_stopped")


def test_every_open_request_ends_when_the_host_is_closed(folder, measuring):
    host = host_of(folder, num_workers=0)
    sent, _ = sent_and_media(measuring, ask("x"), sampling=SamplingParams(max_tokens=390, ignore_eos=True))
    outputs = served(host, sent, [])
    host.close()
    assert outputs.end().finish_reason in ("failed", "length")
    with pytest.raises(RuntimeError, match="closed"):
        host.submit(sent, [], Outputs())
    host.close()
