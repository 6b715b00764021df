"""Requests and outputs between machines: everything that is sent arrives, and nothing else is read."""

import dataclasses
import random

import numpy as np
import pytest

from saccade.engine.media import ImageTask, Source, TaskDescription
from saccade.engine.prompt import PromptImage, PromptSources, TokenPrompt
from saccade.engine.request import Failure, ImageSpan, Request, RequestOutput, TokenLogprobs
from saccade.engine.sampling_params import SamplingParams
from saccade.engine.structured import StructuredOutput
from saccade.engine.transport import wire
from saccade.engine.transport.wire import (
    SentRequest,
    decode_outputs,
    decode_request,
    encode_outputs,
    encode_request,
    media_of,
)
from saccade.errors import ConfigError, ImageError, RequestError, UserError

PIXELS = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
TASKS = (
    ImageTask("image", [Source("image_file", b"the file of an image")], num_images=3),
    ImageTask("image", [Source("image_url", b"data:image/png;base64,AAAA")], num_images=3),
    ImageTask("image", [Source("pixels", PIXELS)], num_images=3),
    ImageTask("video", [Source("image_file", b"one"), Source("pixels", PIXELS), Source("image_file", b"")], fps=2.5),
    ImageTask("video", [Source("video_file", b"a container")], fps=4.0),
)
SPANS = (
    ImageSpan(key=bytes(range(32)), start=1, num_tokens=2, num_patches=8),
    ImageSpan(key=bytes(32), start=4, num_tokens=1, num_patches=4),
)
PROMPT = TokenPrompt(
    token_ids=[7, 9, 9, 8, 9],
    positions=np.zeros((3, 5), np.int64),
    images=tuple(PromptImage(span=span, grid=(1, 2, 2), patches=np.empty((0, 12), np.uint8)) for span in SPANS),
    sources=PromptSources(token_ids=[7, 9, 8, 9], tasks=TASKS),
)
REQUEST = Request(
    id="request-7",
    token_ids=PROMPT.token_ids,
    images=SPANS,
    sampling=SamplingParams(
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias={3: 1.5, 11: -100.0},
        max_tokens=99,
        stop=("end", "Schluß"),
        stop_token_ids=(4, 5),
        seed=2**63 - 1,
        logprobs=2,
        prompt_logprobs=1,
        structured=StructuredOutput(choice=("yes", "no")),
    ),
    stop_ids=frozenset({2, 4, 5}),
    seed=2**63 - 1,
    priority=-3,
    adapter="cats",
    salt=b"\x00tenant\xff",
    queue_timeout_s=1.5,
    timeout_s=60.0,
    stream_interval=32,
    output_ids=(5, 6, 2**31 - 1),
    traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
)


def test_a_request_arrives_with_every_field():
    changed = [field.name for field in dataclasses.fields(Request) if getattr(REQUEST, field.name) == field.default]
    assert not changed, "every field has another value than its default"
    sent = decode_request(encode_request(REQUEST, PROMPT))
    assert sent.request == REQUEST
    assert (sent.token_ids, len(sent.tasks)) == ([7, 9, 8, 9], len(TASKS))


@pytest.mark.parametrize(
    "structured",
    [
        StructuredOutput(json_schema={"type": "object", "properties": {"b": {"type": "string"}, "a": {}}}),
        StructuredOutput(json_object=True),
        StructuredOutput(regex="[a-c]+"),
        StructuredOutput(grammar='start: "a"'),
    ],
    ids=lambda structured: structured.kind,
)
def test_a_grammar_arrives(structured):
    request = Request(id="r", token_ids=PROMPT.token_ids, sampling=SamplingParams(structured=structured))
    assert decode_request(encode_request(request, PROMPT)).request == request


def test_media_and_descriptions_make_the_same_tasks():
    sent, media = decode_request(encode_request(REQUEST, PROMPT)), media_of(PROMPT)
    assert media[0] is TASKS[0].sources[0].data, "a file is not copied"
    for task, description, data in zip(TASKS, sent.tasks, media, strict=True):
        made = description.with_media(data)
        assert made.describe() == task.describe()
        assert made.digest == task.digest == description.digest
        assert [bytes(source.data) for source in made.sources] == [bytes(source.data) for source in task.sources]


def test_a_request_without_images_has_no_media():
    prompt = dataclasses.replace(PROMPT, images=(), sources=PromptSources(token_ids=[1, 2]))
    request = Request(id="r", token_ids=[1, 2])
    assert decode_request(encode_request(request, prompt)) == SentRequest(request=request, token_ids=[1, 2])
    assert media_of(prompt) == []


def test_media_do_not_ride_in_the_message():
    message = encode_request(REQUEST, PROMPT)
    assert not any(data and data in message for data in media_of(PROMPT))


@pytest.mark.parametrize("change", [b"", b"x"], ids=["short", "long"])
def test_media_of_another_size_are_refused(change):
    description = TaskDescription.of(TASKS[0])
    with pytest.raises(ImageError, match="but 20 announced"):
        description.with_media(TASKS[0].media()[1:] + change * 2)


@pytest.mark.parametrize(
    "sources", [(), (("file", 3),), (("image_file", -1),), (("pixels", 4, 4),), (("image_file", 1, 1),)], ids=str
)
def test_a_description_of_no_image_is_refused(sources):
    with pytest.raises(RequestError, match="no image or video"):
        TaskDescription(kind="image", fps=1.0, num_images=1, sources=sources, digest=b"")


def test_outputs_arrive_with_every_field():
    logprobs = (TokenLogprobs(5, -0.25, [(5, -0.25), (6, -1.5)]), TokenLogprobs(6, -2.0, []))
    outputs = [
        RequestOutput("a", (5, 6), logprobs, logprobs[:1], "stop", None, 7, 2),
        RequestOutput("b", finish_reason="failed", failure=Failure("running", "it died", "engine_stopped")),
        RequestOutput("c", (1,)),
    ]
    assert decode_outputs(encode_outputs(outputs)) == outputs
    assert decode_outputs(encode_outputs([])) == []


@pytest.mark.parametrize("decode", [decode_request, decode_outputs])
def test_a_message_of_another_version_is_refused(monkeypatch, decode):
    message = {decode_request: lambda: encode_request(REQUEST, PROMPT), decode_outputs: lambda: encode_outputs([])}
    with monkeypatch.context() as patch:
        patch.setattr(wire, "WIRE_VERSION", 200)
        sent = message[decode]()
    with pytest.raises(ConfigError, match="version 200, but this process knows version 2"):
        decode(sent)
    with pytest.raises(ConfigError, match="same version"):
        decode(b"")


def test_damaged_messages_are_refused():
    rng = random.Random(0)
    request, outputs = encode_request(REQUEST, PROMPT), encode_outputs([RequestOutput("a", (5, 6))] * 3)
    num_refused = 0
    for _ in range(3000):
        message = bytearray(rng.choice([request, outputs]))
        decode = rng.choice([decode_request, decode_outputs])
        if rng.random() < 0.3:
            del message[rng.randrange(len(message)) :]
        for _ in range(rng.randint(0, 4)):
            if len(message) > 1:
                message[rng.randrange(1, len(message))] = rng.randrange(256)
        try:
            decode(bytes(message))
        except UserError:
            num_refused += 1
    assert num_refused > 1000
