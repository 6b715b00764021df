"""Encoder-cache slots: users, sharing, encodings in flight and eviction."""

from collections import Counter

import pytest

from saccade.engine.core.encoder_cache import ENCODER_SLOT_TOKENS, EncoderCache, salted

A, B, C = b"a" * 32, b"b" * 32, b"c" * 32


def test_an_image_gets_slots_for_its_tokens():
    cache = EncoderCache(10 * ENCODER_SLOT_TOKENS)
    assert cache.acquire(A, 576)
    assert len(cache.slots(A)) == 9
    assert cache.acquire(B, 1)
    assert not set(cache.slots(A)) & set(cache.slots(B))
    assert not cache.can_acquire(C, 1)
    cache.check(Counter({A: 1, B: 1}))


def test_an_image_in_use_is_shared():
    cache = EncoderCache(ENCODER_SLOT_TOKENS)
    assert cache.acquire(A, 10)
    cache.set_ready(A)
    slots = cache.slots(A)
    assert cache.can_acquire(A, 10)
    assert not cache.acquire(A, 10)
    assert cache.slots(A) == slots
    cache.check(Counter({A: 2}))
    cache.release(A)
    assert not cache.can_acquire(B, 10)
    cache.release(A)
    assert cache.can_acquire(B, 10)


def test_unused_images_are_evicted_when_slots_are_needed_least_recently_used_first():
    cache = EncoderCache(3 * ENCODER_SLOT_TOKENS)
    for key in (A, B, C):
        cache.acquire(key, 64)
        cache.set_ready(key)
    for key in (B, A, C):
        cache.release(key)
    assert not cache.acquire(B, 64)
    cache.release(B)
    assert cache.acquire(b"d" * 32, 128)
    assert [cache.contains(key) for key in (A, B, C)] == [False, True, False]
    cache.check(Counter({b"d" * 32: 1}))


def test_without_caching_an_unused_image_is_evicted_at_once():
    cache = EncoderCache(ENCODER_SLOT_TOKENS, keeps_unused=False)
    cache.acquire(A, 64)
    cache.set_ready(A)
    cache.release(A)
    assert not cache.contains(A)
    assert cache.acquire(A, 64)


@pytest.mark.parametrize("keeps_unused", [True, False])
def test_an_image_in_flight_is_not_evicted_even_without_users(keeps_unused):
    """The encoder still writes to its slots."""
    cache = EncoderCache(ENCODER_SLOT_TOKENS, keeps_unused=keeps_unused)
    cache.acquire(A, 64)
    cache.release(A)
    assert not cache.is_ready(A)
    assert not cache.can_acquire(B, 64)
    assert cache.can_acquire(A, 64)
    cache.check(Counter())
    cache.set_ready(A)
    assert cache.contains(A) == keeps_unused
    assert cache.can_acquire(B, 64)
    cache.check(Counter())


def test_an_image_in_flight_can_be_used_again():
    cache = EncoderCache(ENCODER_SLOT_TOKENS)
    cache.acquire(A, 64)
    cache.release(A)
    assert not cache.acquire(A, 64)
    cache.set_ready(A)
    cache.check(Counter({A: 1}))
    assert not cache.can_acquire(B, 64)


def test_an_encoding_ends_once():
    cache = EncoderCache(ENCODER_SLOT_TOKENS)
    cache.acquire(A, 64)
    cache.set_ready(A)
    with pytest.raises(AssertionError, match="encoded twice"):
        cache.set_ready(A)


def test_only_an_image_without_users_can_be_evicted():
    cache = EncoderCache(ENCODER_SLOT_TOKENS)
    cache.acquire(A, 64)
    with pytest.raises(AssertionError, match="has a user"):
        cache.evict(A)
    cache.release(A)
    cache.evict(A)
    cache.evict(A)
    assert not cache.contains(A)
    cache.check(Counter())


def test_an_image_larger_than_the_cache_does_not_fit():
    cache = EncoderCache(2 * ENCODER_SLOT_TOKENS + 63)
    assert cache.fits(2 * ENCODER_SLOT_TOKENS)
    assert not cache.fits(2 * ENCODER_SLOT_TOKENS + 1)


def test_keys_of_different_salts_differ():
    assert len({salted(b"", A), salted(b"x", A), salted(b"y", A), salted(b"", B), salted(A[:1], A[1:])}) == 5


def test_the_check_detects_miscounted_users():
    cache = EncoderCache(ENCODER_SLOT_TOKENS)
    cache.acquire(A, 64)
    with pytest.raises(AssertionError, match="counts 1 users, requests have 2"):
        cache.check(Counter({A: 2}))
    with pytest.raises(AssertionError, match="counts 0 users, requests have 1"):
        cache.check(Counter({A: 1, B: 1}))
