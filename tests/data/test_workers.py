"""A packed sequence in shared memory is read in place, and its buffer is free once its last tensor is gone."""

import dataclasses
import os

import pytest
from data.making import make_picture
from data.test_collate import assert_same_inputs

from saccade.data.bad_samples import BadSample
from saccade.data.collate import CollateResult, PackedSequence
from saccade.data.workers import SequenceBuffer
from saccade.processor import Processor

PATCHES = 4 * 6
"""Patches of one image of 60 x 40 pixels."""


def collated(processor, into, *, num_images=1):
    """A sequence whose patches are in `into`."""
    image = make_picture(60, 40)
    messages = [{"role": "user", "content": [{"type": "image", "image": image}] * num_images}]
    inputs = processor.preprocess(messages, into=into)
    sequence = PackedSequence(inputs=inputs, sample_ids=["a/b/ü"], source_of_conversation=[0], source_names=["a"])
    return CollateResult(sequence, [BadSample("a/b/c", "why")])


@pytest.fixture(scope="module")
def processor(checkpoint):
    return Processor.load(checkpoint)


@pytest.fixture
def buffers():
    """The same buffer, as the worker and the trainer see it."""
    writer = SequenceBuffer()
    return writer, SequenceBuffer(os.dup(writer.fd))


def written(buffer, processor, num_images, num_spare=0):
    """A sequence written to the buffer, a copy of its inputs, and its description."""
    results = []

    def collate(into):
        results.append(collated(processor, into, num_images=num_images))
        return results[0]

    description = buffer.write(collate, num_images * PATCHES + num_spare, processor.images.patch_dim)
    inputs = results[0].sequence.inputs
    return results[0], dataclasses.replace(inputs, patches=inputs.patches.clone()), description


@pytest.mark.parametrize(("num_images", "num_spare"), [(1, 0), (3, 0), (2, 5)])
def test_a_sequence_is_read_as_it_was_written(processor, buffers, num_images, num_spare):
    result, expected, description = written(buffers[0], processor, num_images, num_spare)
    found = buffers[1].read(description, on_free=lambda: None)
    assert_same_inputs(found.sequence.inputs, expected)
    assert dataclasses.replace(found.sequence, inputs=expected) == dataclasses.replace(result.sequence, inputs=expected)
    assert found.bad == result.bad


def test_a_buffer_grows_for_a_larger_sequence_and_keeps_its_size_for_a_smaller_one(processor, buffers):
    sizes = []
    for num_images in (1, 4, 2):
        _, expected, description = written(buffers[0], processor, num_images)
        sizes.append(buffers[0].num_bytes())
        assert_same_inputs(buffers[1].read(description, on_free=lambda: None).sequence.inputs, expected)
    assert sizes[0] < sizes[1] == sizes[2]


def test_a_buffer_is_free_when_the_last_tensor_is_gone(processor, buffers):
    freed = []
    _, _, description = written(buffers[0], processor, 1)
    found = buffers[1].read(description, on_free=lambda: freed.append(True))
    last = found.sequence.inputs.token_ids[2:].view(-1)
    del found
    assert not freed
    del last
    assert freed
