"""Lengths measured without pixels equal those of the row; patches in given memory equal those in new memory."""

import json
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from saccade.errors import CheckpointError, ImageError, RequestError
from saccade.processor import Processor


def picture(width, height):
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def conversation(parts, answer="yes"):
    """Text for a string, an image for a (width, height)."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": picture(*part)}
        for part in parts
    ]
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


sides = st.integers(1, 300)
parts = st.lists(st.one_of(st.text(max_size=30), st.tuples(sides, sides)), min_size=1, max_size=5)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(parts=parts, answer=st.text(min_size=1, max_size=40))
def test_the_measure_of_a_conversation_is_its_length(processor, parts, answer):
    sizes = [part for part in parts if isinstance(part, tuple)]
    messages = conversation(parts, answer)
    try:
        row = processor.preprocess(messages)
    except ImageError:
        with pytest.raises(ImageError, match="aspect ratio"):
            processor.measure(messages, sizes)
        return
    assert processor.measure(messages, sizes) == (row.num_tokens, len(row.patches))


def test_measuring_looks_at_no_image(processor):
    messages = [{"role": "user", "content": [{"type": "image", "image": b"not an image"}]}]
    expected = processor.preprocess([{"role": "user", "content": [{"type": "image", "image": picture(90, 60)}]}])
    assert processor.measure(messages, [(90, 60)]) == (expected.num_tokens, len(expected.patches))


def test_sizes_and_images_must_pair_up(processor):
    with pytest.raises(RequestError, match="1 images or videos but 2 image sizes"):
        processor.measure(conversation([(60, 60)]), [(60, 60), (60, 60)])
    video = [{"role": "user", "content": [{"type": "video", "video": [picture(60, 60)]}]}]
    with pytest.raises(RequestError, match="only images can be measured"):
        processor.measure(video, [(60, 60)])


def test_patches_are_written_into_given_memory(processor):
    messages = conversation(["a", (60, 90), "b", (200, 100)])
    expected = processor.preprocess(messages)
    memory = np.full((len(expected.patches) + 3, processor.images.patch_dim), 7, dtype=np.uint8)
    row = processor.preprocess(messages, into=memory)
    assert torch.equal(row.patches, expected.patches)
    assert row.patches.data_ptr() == memory.ctypes.data
    assert (memory[len(expected.patches) :] == 7).all()


def test_patches_that_find_no_room_are_an_error(processor):
    memory = np.zeros((10, processor.images.patch_dim), dtype=np.uint8)
    with pytest.raises(ImageError, match="image 1: 56x56 pixels are 16 patches, but there is memory for 10"):
        processor.preprocess(conversation([(56, 56)]), into=memory)


def test_the_fingerprint_changes_with_what_decides_lengths_and_with_nothing_else(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    before = Processor.fingerprint(checkpoint)
    assert Processor.fingerprint(folder) == before
    (folder / "model.safetensors").write_bytes(b"other weights")
    assert Processor.fingerprint(folder) == before
    for name, change in {
        "tokenizer.json": lambda text: text.replace("<|im_end|>", "<|im_stop|>"),
        "chat_template.jinja": lambda text: text + " ",
        "preprocessor_config.json": lambda text: json.dumps(json.loads(text) | {"max_pixels": 28 * 28 * 7}),
    }.items():
        original = (folder / name).read_text()
        (folder / name).write_text(change(original))
        assert Processor.fingerprint(folder) != before, name
        (folder / name).write_text(original)
    assert Processor.fingerprint(folder) == before
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer.json"):
        Processor.fingerprint(folder)
