"""Places of image features: who uses them, what is kept, what goes first."""

from collections import Counter

import pytest

from saccade.engine.image_pool import IMAGE_PAGE, ImagePool, salted

A, B, C = b"a" * 32, b"b" * 32, b"c" * 32


def test_an_image_takes_places_for_its_tokens_in_order():
    pool = ImagePool(10 * IMAGE_PAGE)
    assert pool.take(A, 576)
    assert len(pool.places(A)) == 9
    assert pool.take(B, 1)
    assert not set(pool.places(A)) & set(pool.places(B))
    assert not pool.can_take(C, 1)
    pool.check(Counter({A: 1, B: 1}))


def test_an_image_in_use_is_shared():
    pool = ImagePool(IMAGE_PAGE)
    assert pool.take(A, 10)
    places = pool.places(A)
    assert pool.can_take(A, 10)
    assert not pool.take(A, 10)
    assert pool.places(A) == places
    pool.check(Counter({A: 2}))
    pool.release(A)
    assert not pool.can_take(B, 10)
    pool.release(A)
    assert pool.can_take(B, 10)


def test_unused_images_are_kept_until_room_is_needed_longest_unused_first():
    pool = ImagePool(3 * IMAGE_PAGE)
    for key in (A, B, C):
        pool.take(key, 64)
    for key in (B, A, C):
        pool.release(key)
    assert not pool.take(B, 64)
    pool.release(B)
    assert pool.take(b"d" * 32, 128)
    assert [pool.holds(key) for key in (A, B, C)] == [False, True, False]
    pool.check(Counter({b"d" * 32: 1}))


def test_without_cache_an_unused_image_goes_at_once():
    pool = ImagePool(IMAGE_PAGE, keeps_unused=False)
    pool.take(A, 64)
    pool.release(A)
    assert not pool.holds(A)
    assert pool.take(A, 64)


def test_an_image_that_was_not_encoded_is_dropped():
    pool = ImagePool(IMAGE_PAGE)
    pool.take(A, 64)
    with pytest.raises(AssertionError, match="has a user"):
        pool.drop(A)
    pool.release(A)
    pool.drop(A)
    pool.drop(A)
    assert not pool.holds(A)
    pool.check(Counter())


def test_forgetting_leaves_images_in_use():
    pool = ImagePool(2 * IMAGE_PAGE)
    pool.take(A, 64)
    pool.take(B, 64)
    pool.release(B)
    pool.forget_unused()
    assert pool.holds(A)
    assert not pool.holds(B)


def test_what_is_larger_than_the_pool_does_not_fit():
    pool = ImagePool(2 * IMAGE_PAGE + 63)
    assert pool.fits(2 * IMAGE_PAGE)
    assert not pool.fits(2 * IMAGE_PAGE + 1)


def test_tenants_have_keys_of_their_own():
    assert len({salted(b"", A), salted(b"x", A), salted(b"y", A), salted(b"", B), salted(A[:1], A[1:])}) == 5


def test_the_check_notices_miscounted_users():
    pool = ImagePool(IMAGE_PAGE)
    pool.take(A, 64)
    with pytest.raises(AssertionError, match="1 users in the books, 2 in truth"):
        pool.check(Counter({A: 2}))
    with pytest.raises(AssertionError, match="0 users in the books, 1 in truth"):
        pool.check(Counter({A: 1, B: 1}))
