"""The processed-image cache: looked up by digest, shared by key, bounded, least recently used evicted first."""

import hashlib
import random

import numpy as np

from saccade.engine.processed_images import ProcessedImage, ProcessedImageCache

PATCH_DIM = 8000


def processed(name, num_patches=1, fill=0):
    """An image whose key is its name."""
    patches = np.full((num_patches, PATCH_DIM), fill, dtype=np.uint8)
    patches.flags.writeable = False
    return ProcessedImage(name.encode(), (1, 1, num_patches), 1.0, patches)


def test_an_image_is_found_by_each_of_its_digests():
    cache = ProcessedImageCache(10**6)
    first = processed("a")
    assert cache.get(b"png") is None
    assert cache.put(b"png", first) is first
    assert cache.put(b"bmp", processed("a")) is first
    assert cache.get(b"png") is cache.get(b"bmp") is first
    assert len(cache) == 1


def test_other_pixels_under_the_same_key_are_neither_returned_nor_cached():
    cache = ProcessedImageCache(10**6)
    cache.put(b"one", processed("a", fill=1))
    other = processed("a", fill=2)
    assert cache.put(b"two", other) is other
    assert cache.get(b"two") is None
    assert cache.get(b"one").patches[0, 0] == 1


def test_the_least_recently_used_image_is_evicted_first():
    cache = ProcessedImageCache(3 * 11_000)
    for name in "abc":
        cache.put(name.encode(), processed(name))
    cache.get(b"a")
    cache.put(b"d", processed("d"))
    assert [cache.get(name) is not None for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]


def test_an_image_larger_than_the_cache_evicts_nothing():
    cache = ProcessedImageCache(20_000)
    cache.put(b"a", processed("a"))
    large = processed("b", num_patches=3)
    assert cache.put(b"b", large) is large
    assert cache.get(b"b") is None
    assert cache.get(b"a") is not None
    assert ProcessedImageCache(0).put(b"a", large) is large


def test_an_image_sent_in_many_files_takes_no_more_memory():
    cache = ProcessedImageCache(10**6)
    for number in range(1000):
        cache.put(str(number).encode(), processed("a"))
    assert len(cache._keys) <= 8
    assert cache.get(b"999") is not None
    assert cache.get(b"0") is None


def test_invariants_hold_over_a_long_random_run():
    cache, chance = ProcessedImageCache(60_000), random.Random(0)
    for _ in range(3000):
        name = str(chance.randrange(20))
        digest = hashlib.sha256(f"{name} {chance.randrange(12)}".encode()).digest()
        image = cache.get(digest) or cache.put(digest, processed(name, 1 + int(name) % 3, int(name)))
        assert image.patches[0, 0] == int(name)
        entries = cache._entries.values()
        assert cache.num_bytes == sum(entry.image.patches.nbytes + 2048 for entry in entries) <= 60_000
        assert cache._keys == {digest: entry.image.key for entry in entries for digest in entry.digests}
