"""Caches distinguish the forms of an image whose patches depend on the number of images in its conversation."""

import pytest
import torch
from model import llava_onevision as family
from model.hugging_face import Oracle, ask, picture

from saccade.engine import Engine, EngineConfig, SamplingParams
from saccade.engine.frontend.preprocessing.preprocessor import Preprocessor
from saccade.model import load_model
from saccade.processor.inputs import normalize_patches

IMAGE, OTHER, THIRD = picture(90, 70), picture(40, 100, 1), picture(64, 64, 2)
ALONE, AMONG = [ask(IMAGE, "What is it?")], [ask(IMAGE, OTHER, "What is it?")]
AMONG_THREE, TWICE = [ask(IMAGE, OTHER, THIRD, "And?")], [ask(IMAGE, IMAGE, "Both?")]
LATER = [*ALONE, {"role": "assistant", "content": "A wave."}, ask(OTHER, "And this?")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return family.write(tmp_path_factory.mktemp("company") / "checkpoint", family.SHAPES[0])


def test_one_engine_answers_about_an_image_alone_and_among_others_as_transformers_does(folder):
    """Conversations repeat and alternate, so that every cache already has the other form of the image."""
    conversations = [ALONE, AMONG, ALONE, TWICE, AMONG_THREE, AMONG, LATER, ALONE]
    oracle = Oracle(folder)
    config = EngineConfig(page_size=4, num_pages=256, max_length=512, max_requests=2, num_workers=0)
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    with Engine.load(folder, device="cpu", config=config) as engine:
        one_by_one = [engine.generate([messages], sampling)[0].token_ids for messages in conversations]
        at_once = [completion.token_ids for completion in engine.generate(conversations, sampling)]
    for messages, tokens in zip(conversations, one_by_one, strict=True):
        assert len(tokens) == 12
        assert tokens == oracle.following(oracle.inputs(messages, add_generation_prompt=True), tokens)
    assert at_once == one_by_one


def open_preprocessor(folder, num_workers=0):
    return Preprocessor(folder, num_workers=num_workers, processed_image_cache_bytes=2**24)


def test_the_key_of_an_image_has_the_number_of_images_as_far_as_it_matters(folder):
    with open_preprocessor(folder) as preprocessor:
        prompts = [preprocessor.submit(messages).result() for messages in (ALONE, AMONG, AMONG_THREE, TWICE, LATER)]
        alone, *among = [prompt.images[0].span.key for prompt in prompts]
        assert len(set(among)) == 1, "two images or three, in any order, give the same form"
        assert alone not in among
        assert prompts[3].images[1].span.key == among[0]
        assert preprocessor.statistics.num_processed == 4, "the image in two forms, and the two others once"


def test_a_cache_keyed_by_the_image_alone_would_give_it_other_tokens_and_features(folder, monkeypatch):
    model = load_model(folder, device="cpu")
    with open_preprocessor(folder) as preprocessor:
        alone, among = (preprocessor.submit(messages).result().images[0] for messages in (ALONE, AMONG))
        assert (alone.grid, among.grid) == ((10, 70, 90), (1, 70, 90))
        assert (alone.span.num_tokens, among.span.num_tokens) == (16 + 7 * (8 + 1), 17), (
            "interpolated rows with newlines"
        )
        mean, std = (0.5, 0.4, 0.45), (0.5, 0.6, 0.55)
        with torch.no_grad():
            features = [
                model.encode_images(
                    normalize_patches(torch.from_numpy(image.patches.copy()), mean, std), torch.tensor([image.grid])
                )
                for image in (alone, among)
            ]
        assert not torch.allclose(features[0][:16], features[1][:16], atol=1e-2)
    with open_preprocessor(folder) as preprocessor:
        rules = type(preprocessor._backend.rules)
        monkeypatch.setattr(
            rules, "counted_images", lambda self, num_images: 1
        )  # as if the number of images did not matter
        prompts = [preprocessor.submit(messages).result() for messages in (ALONE, AMONG)]
        assert prompts[1].images[0].grid == alone.grid, "the cached tiles"
        theirs = Oracle(folder).inputs(AMONG, add_generation_prompt=True)["input_ids"][0].tolist()
        assert prompts[1].token_ids != theirs


def test_worker_processes_cut_an_image_by_the_number_of_images(folder):
    with open_preprocessor(folder, num_workers=1) as workers, open_preprocessor(folder) as threads:
        for messages in (ALONE, AMONG):
            ours, theirs = (one.submit(messages).result(60) for one in (workers, threads))
            assert ours.token_ids == theirs.token_ids
            for image, other in zip(ours.images, theirs.images, strict=True):
                assert (image.span, image.grid) == (other.span, other.grid)
                assert (image.patches == other.patches).all()
