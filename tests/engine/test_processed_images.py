"""Prepared images in host memory: found by source, shared by key, bounded, the one used longest ago leaves first."""

import hashlib
import random

import numpy as np

from saccade.engine.processed_images import ProcessedImage, ProcessedImageCache

PATCH_DIM = 8000


def made(name, num_patches=1, fill=0):
    """An image whose key is its name."""
    patches = np.full((num_patches, PATCH_DIM), fill, dtype=np.uint8)
    patches.flags.writeable = False
    return ProcessedImage(name.encode(), (1, 1, num_patches), 1.0, patches)


def test_an_image_is_found_by_each_of_its_sources():
    images = ProcessedImageCache(10**6)
    first = made("a")
    assert images.find(b"png") is None
    assert images.keep(b"png", first) is first
    assert images.keep(b"bmp", made("a")) is first
    assert images.find(b"png") is images.find(b"bmp") is first
    assert len(images) == 1


def test_other_pixels_under_the_same_key_are_neither_given_nor_kept():
    images = ProcessedImageCache(10**6)
    images.keep(b"one", made("a", fill=1))
    other = made("a", fill=2)
    assert images.keep(b"two", other) is other
    assert images.find(b"two") is None
    assert images.find(b"one").patches[0, 0] == 1


def test_the_image_used_longest_ago_leaves_first():
    images = ProcessedImageCache(3 * 11_000)
    for name in "abc":
        images.keep(name.encode(), made(name))
    images.find(b"a")
    images.keep(b"d", made("d"))
    assert [images.find(name) is not None for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]


def test_an_image_larger_than_all_memory_throws_nothing_out():
    images = ProcessedImageCache(20_000)
    images.keep(b"a", made("a"))
    large = made("b", num_patches=3)
    assert images.keep(b"b", large) is large
    assert images.find(b"b") is None
    assert images.find(b"a") is not None
    assert ProcessedImageCache(0).keep(b"a", large) is large


def test_a_picture_sent_in_ever_new_files_takes_no_more_memory():
    images = ProcessedImageCache(10**6)
    for number in range(1000):
        images.keep(str(number).encode(), made("a"))
    assert len(images._keys) <= 8
    assert images.find(b"999") is not None
    assert images.find(b"0") is None


def test_counts_hold_over_a_long_random_run():
    images, chance = ProcessedImageCache(60_000), random.Random(0)
    for _ in range(3000):
        name = str(chance.randrange(20))
        source = hashlib.sha256(f"{name} {chance.randrange(12)}".encode()).digest()
        image = images.find(source) or images.keep(source, made(name, 1 + int(name) % 3, int(name)))
        assert image.patches[0, 0] == int(name)
        entries = images._entries.values()
        assert images.num_bytes == sum(entry.image.patches.nbytes + 2048 for entry in entries) <= 60_000
        assert images._keys == {source: entry.image.key for entry in entries for source in entry.sources}
