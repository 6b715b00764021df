"""The processed-image cache: looked up by digest, bounded, least recently used evicted first."""

import hashlib
import random

import numpy as np

from saccade.engine.frontend.preprocessing.processed_images import ProcessedImage, ProcessedImageCache

PATCH_DIM = 8000


def processed(name, num_patches=1, fill=0):
    """An image whose key is its name."""
    patches = np.full((num_patches, PATCH_DIM), fill, dtype=np.uint8)
    patches.flags.writeable = False
    return ProcessedImage(name.encode(), (), patches)


def test_an_image_is_found_by_its_digest():
    cache = ProcessedImageCache(10**6)
    first = processed("a")
    assert cache.get(b"png") is None
    cache.put(b"png", first)
    assert cache.get(b"png") is first
    assert cache.get(b"bmp") is None
    assert len(cache) == 1


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
    cache.put(b"b", large)
    assert cache.get(b"b") is None
    assert cache.get(b"a") is not None
    nothing = ProcessedImageCache(0)
    nothing.put(b"a", large)
    assert len(nothing) == nothing.num_bytes == 0


def test_invariants_hold_over_a_long_random_run():
    cache, chance = ProcessedImageCache(60_000), random.Random(0)
    for _ in range(3000):
        name = str(chance.randrange(20))
        digest = hashlib.sha256(name.encode()).digest()
        image = cache.get(digest)
        if image is None:
            cache.put(digest, image := processed(name, 1 + int(name) % 3, int(name)))
        assert image.patches[0, 0] == int(name)
        assert cache.num_bytes == sum(one.patches.nbytes + 2048 for one in cache._images.values()) <= 60_000
