"""An encoder by itself encodes images for an engine, whose output is that of an engine that encodes its own.

Every message is packed and unpacked as between two machines.
"""

import dataclasses
from functools import partial

import pytest
import torch
from engine.test_host import GREEDY, SETTINGS, ask, video
from engine.test_preprocessing import encoded, noise, turned

from saccade.engine import Engine, EngineConfig, SamplingParams
from saccade.engine.core.messages import AddRequest, EndRequest
from saccade.engine.encoder_host import EncoderHost
from saccade.engine.frontend.preprocessing.preprocessor import Preprocessor
from saccade.engine.host import EngineHost, MediaMissingError
from saccade.engine.request import Request
from saccade.engine.transport.wire import (
    SentTask,
    decode_image,
    decode_outputs,
    decode_request,
    decode_task,
    encode_image,
    encode_outputs,
    encode_request,
    encode_task,
    media_of,
)
from saccade.errors import ImageError
from saccade.model.initialize import initialize_random, named_size
from saccade.model.weights import load_model, load_vision
from saccade.processor import MediaLimits, Processor
from saccade.processor.parts import feature_spans

TIMEOUT_S = 120
FAMILIES = [
    "tiny", pytest.param("qwen2_vl/tiny", marks=pytest.mark.slow), "qwen3_vl/tiny",
    pytest.param("llava_next/tiny", marks=pytest.mark.slow),
    pytest.param("llava_onevision/tiny", marks=pytest.mark.slow),
]  # fmt: skip
CONVERSATIONS = [
    ask("what?", encoded(noise(90, 60))),
    ask("these", encoded(noise(64, 64, 1)), encoded(noise(40, 80, 2)), turned(noise(96, 32, 3), 6)),
    ask("again", encoded(noise(90, 60)), encoded(noise(90, 60))),
]


class PooledCore:
    """The core of an engine that is a host elsewhere, which gets the images that an encoder has encoded."""

    def __init__(self, host, encoder, on_outputs, on_stop):
        self._host, self._encoder, self._on_outputs = host, encoder, on_outputs
        self.info, self.statistics = host.info, host.statistics

    def send(self, message):
        match message:
            case AddRequest():
                sent = decode_request(encode_request(message.request, message.prompt))
                media = media_of(message.prompt)
                images = [None] * len(media)
                for number in self._host.missing_media(sent):
                    task = SentTask(task=sent.tasks[number], salt=sent.request.salt, num_patches=0)
                    image = self._encoder.encode(decode_task(encode_task(task)).task, media[number]).result(TIMEOUT_S)
                    images[number] = decode_image(encode_image(image))
                self._host.submit(sent, images, self._receive)
            case EndRequest():
                self._host.cancel(message.request_id)

    def _receive(self, output):
        self._on_outputs(decode_outputs(encode_outputs([output])))

    def close(self):
        pass


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder") / "checkpoint"
    initialize_random(folder, named_size(request.param), dtype=torch.float32)
    return folder


@pytest.fixture(scope="module")
def engines(folder):
    """An engine whose images an encoder encodes, the host under it, and an engine that encodes its own."""
    config = EngineConfig(**SETTINGS | {"num_workers": 0, "max_length": 1200, "num_pages": 900})
    settings = {"device": "cpu", "config": config, "limits": MediaLimits()}
    with (
        EngineHost.load(folder, **settings | {"config": dataclasses.replace(config, core_process=True)}) as host,
        Engine.load(folder, **settings) as local,
        Preprocessor(folder, num_workers=0, processed_image_cache_bytes=2**24, measures_only=True) as measuring,
    ):
        encoder = EncoderHost.load(folder, **settings)
        pooled = Engine(partial(PooledCore, host, encoder), Processor.load(folder), measuring)
        yield pooled, host, local, encoder
        pooled._front_end.close()
        encoder.close()


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one.token_ids, one.failure) == (other.token_ids, other.failure)
        for token, expected_token in zip(one.logprobs, other.logprobs, strict=True):
            assert token.logprob == pytest.approx(expected_token.logprob, abs=1e-5)


def test_the_output_is_that_of_an_engine_that_encodes_its_own_images(engines):
    pooled, host, local, _ = engines
    sampling = [
        dataclasses.replace(GREEDY, logprobs=1),
        SamplingParams(max_tokens=8, temperature=1.0, seed=3, n=2, logprobs=1),
        dataclasses.replace(GREEDY, logprobs=1),
    ]
    same(pooled.generate(CONVERSATIONS, sampling), local.generate(CONVERSATIONS, sampling))
    assert host.statistics.num_images_encoded == 0
    assert local.statistics.num_images_encoded > 0


def test_a_video_has_the_output_of_an_engine_that_encodes_it(engines):
    pooled, host, local, _ = engines
    conversation, sampling = (
        ask("move", video(5, fps=2.0), encoded(noise(64, 64, 1))),
        dataclasses.replace(GREEDY, logprobs=1),
    )
    [expected] = local.generate(conversation, sampling)
    if expected.failure is not None:
        pytest.skip("this family has no videos")
    same(pooled.generate(conversation, sampling), [expected])
    assert host.statistics.num_images_encoded == 0


def test_features_that_were_evicted_from_the_encoder_cache_are_loaded_again(engines):
    pooled, host, local, _ = engines
    host._preprocessor.flush()
    expected = local.generate(CONVERSATIONS[1], dataclasses.replace(GREEDY, logprobs=1))
    for _ in range(2):
        same(pooled.generate(CONVERSATIONS[1], dataclasses.replace(GREEDY, logprobs=1)), expected)
    assert host.statistics.num_images_encoded == 0


def test_the_encoder_loads_no_language_model_and_has_the_features_of_the_whole_model(folder):
    whole, vision = load_model(folder, device="cpu"), load_vision(folder, device="cpu")
    grid, num_patches = whole.vision.square_grid(64)
    pixels, grids = torch.randn(num_patches, whole.config.vision.patch_dim), torch.tensor([grid])
    with torch.inference_mode():
        assert torch.equal(vision.encode_images(pixels, grids), whole.encode_images(pixels, grids))
    language = sum(parameter.numel() for parameter in whole.language.parameters())
    left = sum(parameter.numel() for parameter in vision.language.parameters())
    assert left < language / 10


def task_of(folder, image):
    with Preprocessor(folder, num_workers=0, processed_image_cache_bytes=0, measures_only=True) as preprocessor:
        prompt = preprocessor.submit(ask("one", image)).result(TIMEOUT_S)
    [task] = prompt.sources.tasks
    sent = decode_request(encode_request(request_of(prompt), prompt))
    return sent, task


def request_of(prompt):
    spans = tuple(image.span for image in prompt.images)
    return Request(id="one", token_ids=prompt.token_ids, images=spans, sampling=GREEDY)


def test_data_that_is_not_what_the_task_describes_is_refused(engines, folder):
    *_, encoder = engines
    sent, task = task_of(folder, encoded(noise(64, 64, 9)))
    other = bytearray(task.media())
    other[-20] ^= 1
    with pytest.raises(ImageError, match="another digest"):
        encoder.encode(sent.tasks[0], bytes(other)).result(TIMEOUT_S)
    with pytest.raises(ImageError, match="bytes were received"):
        encoder.encode(sent.tasks[0], b"short").result(TIMEOUT_S)
    assert encoder.encode(sent.tasks[0], task.media()).result(TIMEOUT_S).num_pixels == 64 * 64


def test_an_image_that_cannot_be_encoded_fails_alone(engines, folder, monkeypatch):
    *_, encoder = engines
    asked = [task_of(folder, encoded(noise(64, 64 + 28 * number, number))) for number in range(3)]
    encode = encoder._encoder.encode

    def fail_on_one(images):
        if any(image.grid == bad for image in images):
            raise RuntimeError("planted")
        return encode(images)

    bad = next(span.grid for span in feature_spans(encoder._preprocessor.patchify(asked[1][1]).result().visual.parts))
    monkeypatch.setattr(encoder._encoder, "encode", fail_on_one)
    futures = [encoder.encode(sent.tasks[0], task.media()) for sent, task in asked]
    failures = [future.exception(TIMEOUT_S) for future in futures]
    assert isinstance(failures[1], ImageError)
    assert not encoder.has_failed


def test_features_that_do_not_fit_the_request_are_asked_for_as_media(engines, folder):
    _, host, _, encoder = engines
    sent, task = task_of(folder, encoded(noise(64, 64, 10)))
    image = encoder.encode(sent.tasks[0], task.media()).result(TIMEOUT_S)
    narrow = dataclasses.replace(image, features=image.features[:, :-4])
    short = dataclasses.replace(image, features=image.features[:-1])
    for wrong in (narrow, short):
        with pytest.raises(MediaMissingError) as raised:
            host.submit(sent, [wrong], lambda output: None)
        assert raised.value.numbers == [0]


def test_a_closed_encoder_fails_what_is_queued(folder):
    encoder = EncoderHost.load(folder, device="cpu", config=EngineConfig(num_workers=0))
    sent, task = task_of(folder, encoded(noise(64, 64, 11)))
    futures = [encoder.encode(sent.tasks[0], task.media()) for _ in range(20)]
    encoder.close()
    endings = [future.exception(TIMEOUT_S) for future in futures]
    assert all(ending is None or isinstance(ending, Exception) for ending in endings)
    assert encoder.has_failed
