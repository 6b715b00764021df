"""Images and videos of LLaVA-OneVision: several in a conversation, the layouts of files, and the tokens in the loss."""

import json
from dataclasses import replace

import numpy as np
import pytest
from model import llava_onevision as oracle
from model.hugging_face import CONVERSATIONS, answer, ask, picture

from saccade.errors import CheckpointError
from saccade.processor import Processor
from saccade.processor.image import MediaLimits

LIMITS = MediaLimits()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return oracle.write(tmp_path_factory.mktemp("onevision") / "checkpoint", oracle.SHAPES[0])


@pytest.fixture(scope="module")
def processor(folder):
    return Processor.load(folder)


@pytest.fixture(scope="module")
def spelled(folder):
    return oracle.processor(folder).tokenizer.decode


def test_an_image_is_tiles_when_it_is_alone_and_a_square_among_others(processor):
    pixels = np.asarray(picture(90, 70))
    alone, among = (processor.patchify_image(pixels, num_images=count) for count in (1, 2))
    per_tile = processor.rules.images.tiling.patches_per_tile
    assert (alone.grid, among.grid) == ((10, 70, 90), (1, 70, 90))
    assert (len(alone.patches), len(among.patches)) == (10 * per_tile, per_tile)
    assert not np.array_equal(alone.patches[:per_tile], among.patches), (
        "the picture of the whole is stretched, the square padded"
    )
    assert [processor.rules.counted_images(count) for count in (1, 2, 3, 9)] == [1, 2, 2, 2]


@pytest.mark.parametrize("name", ["text-only", "644x364", "multi-image", "multi-turn"])
def test_measured_tokens_and_patches_are_those_of_the_preprocessed_conversation(name, processor):
    messages = CONVERSATIONS[name]
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    sizes = [part["image"].size for part in parts if part["type"] == "image"]
    inputs = processor.preprocess(messages)
    assert processor.measure(messages, sizes) == (inputs.num_tokens, len(inputs.patches))


def test_answers_are_learned_though_past_turns_have_a_space_that_the_generation_prompt_has_not(processor, spelled):
    messages = [ask("One?"), answer("First."), ask("Two?"), answer(" spaced\nlines ")]
    inputs = processor([messages])
    learned = inputs.token_ids[inputs.loss_mask].tolist()
    assert spelled(learned) == "First.<|im_end|> spaced\nlines <|im_end|>"
    whole = spelled(inputs.token_ids.tolist())
    assert "<|im_start|>assistant \nFirst.<|im_end|>" in whole
    prompt = processor.tokenize(messages[:3], add_generation_prompt=True)
    assert spelled(prompt).endswith("Two?<|im_end|><|im_start|>assistant\n")


def test_a_final_answer_is_continued_as_past_turns_are_written(processor, spelled):
    tokens = processor.tokenize([ask("One?"), answer("So far")], continue_final_message=True)
    assert spelled(tokens).endswith("<|im_start|>assistant \nSo far")


def test_images_and_videos_of_a_message_are_matched_with_the_placeholders_that_the_template_writes(processor, folder):
    """The template writes images before videos in any order of the parts."""
    video = {"type": "video", "video": [picture(50, 40, seed) for seed in range(3)]}
    image = {"type": "image", "image": picture(33, 80)}
    first, second = (
        processor([[{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]])
        for parts in ([video, image], [image, video])
    )
    assert first.image_grids.tolist() == second.image_grids.tolist() == [[7, 80, 33], [3, 0, 0]]
    assert np.array_equal(first.patches, second.patches)
    theirs = oracle.inputs(folder, [{"role": "user", "content": [video, image, {"type": "text", "text": "?"}]}])
    assert first.token_ids.tolist() == theirs["input_ids"][0].tolist()


def test_only_grids_that_an_image_or_video_can_have_are_accepted(processor):
    rules, one = processor.rules, range(1, 2)
    assert rules.is_possible("image", (10, 70, 90), 1.0, one, LIMITS, 1)
    assert rules.is_possible("image", (1, 70, 90), 1.0, one, LIMITS, 2)
    assert rules.is_possible("video", (5, 0, 0), 1.0, range(5, 6), LIMITS)
    wrong = [
        ("image", (1, 70, 90), 1), ("image", (10, 70, 90), 2), ("image", (9, 70, 90), 1), ("image", (10, 0, 0), 1),
        ("image", (4, 1, 20000), 1), ("video", (4, 0, 0), 1), ("video", (5, 70, 90), 1), ("video", (0, 0, 0), 1),
    ]  # fmt: skip
    for kind, grid, num_images in wrong:
        num_frames = range(5, 6) if kind == "video" else one
        assert not rules.is_possible(kind, grid, 1.0, num_frames, LIMITS, num_images), (kind, grid, num_images)


def change(folder, file, **fields):
    content = json.loads((folder / file).read_text())
    section = content["image_processor"] if file == "processor_config.json" and "size" in fields else content
    section.update(fields)
    (folder / file).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("config.json", {"vision_aspect_ratio": "anyres"}, "only anyres_max_N"),
        ("config.json", {"image_grid_pinpoints": [[30, 30]]}, "image_grid_pinpoints is .* in preprocessor_config.json"),
        ("processor_config.json", {"vision_aspect_ratio": "anyres_max_3"}, "vision_aspect_ratio is 'anyres_max_3'"),
        ("processor_config.json", {"num_image_tokens": 25}, "num_image_tokens is 25 .* 16 in config.json"),
        (
            "processor_config.json", {"size": {"height": 44, "width": 44}},
            "size is 44 in preprocessor_config.json, image_size 30",
        ),
        ("processor_config.json", {"size": {"height": 44, "width": 30}}, "only one square"),
        (
            "processor_config.json",
            {"size": {"height": 30, "width": 30}, "crop_size": {"height": 28, "width": 28}}, "only one square",
        ),
        ("processor_config.json", {"video_processor": {"image_mean": [0.1, 0.1, 0.1]}}, "different image_mean"),
        ("processor_config.json", {"video_processor": {"size": {"height": 60}}}, "frames of videos have the size"),
    ],
)  # fmt: skip
def test_files_that_disagree_are_refused(file, fields, message, tmp_path):
    folder = oracle.write(tmp_path / "checkpoint", oracle.SHAPES[0])
    change(folder, file, **fields)
    with pytest.raises(CheckpointError, match=message):
        Processor.load(folder)


def test_the_fingerprint_tells_tilings_apart(folder, tmp_path):
    other = oracle.write(tmp_path / "checkpoint", replace(oracle.SHAPES[0], tiles=2))
    assert Processor.fingerprint(folder) != Processor.fingerprint(other)
