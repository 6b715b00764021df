"""Patches in shared memory arrive whole, with few file descriptors however many images and requests there are."""

import gc
import os
import random
from pathlib import Path

import numpy as np
import pytest

from saccade.engine.frames import shared_images
from saccade.engine.frames.shared_images import MAX_SEGMENTS, SharedImages, map_patches
from saccade.engine.prompt import PromptImage
from saccade.engine.request import ImageSpan
from saccade.workers.shared_memory import MappedMemory, SharedMemory


def image(number, num_patches=3):
    patches = np.random.default_rng(number).integers(0, 256, (num_patches, 12), np.uint8)
    span = ImageSpan(key=number.to_bytes(4), start=0, num_tokens=1, num_patches=num_patches)
    return PromptImage(span=span, grid=(1, 1, num_patches), patches=patches)


def num_fds():
    """Descriptors of shared memory. Others may be closed meanwhile, by what earlier tests left to the collector."""
    gc.collect()
    return sum("memfd" in str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink())


def send(shared, images):
    """Share images and map them as a core does; returns the number of segments and the patches."""
    segments, places = shared.share(images)
    fds = [os.dup(segment.fd) for segment in segments]
    patches = map_patches(fds, places, [one.patches.shape for one in images])
    for fd in fds:
        os.close(fd)
    return len(segments), patches


def assert_equal(patches, images):
    for found, one in zip(patches, images, strict=True):
        np.testing.assert_array_equal(found, one.patches)
        assert not found.flags.writeable


def test_all_images_of_a_request_take_one_descriptor_and_none_once_mapped():
    before, shared = num_fds(), SharedImages()
    images = [image(number, 1 + number % 5) for number in range(1000)]
    images[700] = images[3]  # twice in one request
    num_segments, patches = send(shared, images)
    assert num_segments == 1
    assert num_fds() == before + 1
    del shared
    gc.collect()
    assert num_fds() == before
    assert_equal(patches, images)  # the mapping outlives the front end's memory


def test_images_sent_before_are_shared_and_those_of_too_many_requests_are_copied_together():
    shared, images = SharedImages(), [image(number) for number in range(60)]
    for one in images:
        assert send(shared, [one])[0] == 1
    few = images[: MAX_SEGMENTS - 1]
    before = num_fds()
    assert send(shared, few)[0] == len(few)
    assert num_fds() == before, "nothing new was written"
    for _ in range(2):
        num_segments, patches = send(shared, images)
        assert num_segments == 1
        assert_equal(patches, images)
    assert num_fds() == before + 1, "they were copied once"
    assert send(shared, [*images, image(60)])[0] == 2


def test_what_is_kept_is_bounded_and_correct_in_any_order(monkeypatch):
    monkeypatch.setattr(shared_images, "_MAX_KEPT_SEGMENTS", 5)
    monkeypatch.setattr(shared_images, "_MAX_KEPT_BYTES", 600)
    rng, before, shared = random.Random(1), num_fds(), SharedImages()
    for _ in range(300):
        images = [image(rng.randrange(20), rng.choice([3, 3, 3, 4])) for _ in range(rng.randint(0, 20))]
        _, patches = send(shared, images)
        assert_equal(patches, images)
        assert num_fds() <= before + 5
        assert shared._num_kept_bytes == sum(segment.num_bytes() for segment in shared._kept) <= 600
        assert {one.segment for one in shared._patches.values()} <= shared._kept.keys()


def test_a_descriptor_that_did_not_arrive_is_an_error():
    segments, places = SharedImages().share([image(1)])
    with pytest.raises(OSError, match="0 of 1 file descriptors arrived"):
        map_patches([], places, [(3, 12)])
    with pytest.raises(ValueError, match="reshape"):
        map_patches([segments[0].fd], places, [(4, 12)])


def test_memory_that_cannot_be_mapped_is_an_error():
    memory = SharedMemory()
    with pytest.raises(OSError, match="0 bytes of shared memory could not be mapped"):
        MappedMemory(memory.fd)
