"""Page allocation and the prefix cache."""

import pytest

from saccade.engine.core.pages import PagePool, page_key, root_key

KEYS = [bytes([number]) * 32 for number in range(8)]


def test_a_page_key_depends_on_everything_before_it():
    root = root_key(b"")
    image = (b"i" * 32, 3)
    keys = {
        page_key(root, [1, 2], []),
        page_key(root, [1, 3], []),
        page_key(root, [1, 2, 0], []),
        page_key(root, [12], []),
        page_key(root_key(b"tenant"), [1, 2], []),
        page_key(page_key(root, [1, 2], []), [1, 2], []),
        page_key(root, [1, 2], [image]),
        page_key(root, [1, 2], [(image[0], 4)]),
        page_key(root, [1, 2], [(image[0], -3)]),
        page_key(root, [1, 2], [(b"j" * 32, 3)]),
        page_key(root, [1, 2], [image, image]),
    }
    assert len(keys) == 11
    assert page_key(root, (1, 2), iter([image])) == page_key(root, [1, 2], [image])
    assert all(len(key) == 32 for key in keys)


def test_pages_are_allocated_once_and_freed():
    pool = PagePool(4, 16)
    first, second = pool.allocate(3), pool.allocate(1)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert not pool.can_allocate(1)
    pool.check([first, second])
    pool.free(first)
    assert pool.num_free == 3
    pool.check([second])


def test_a_registered_page_is_cached_found_and_shared():
    pool = PagePool(4, 16)
    [page] = pool.allocate(1)
    pool.register(page, KEYS[0])
    pool.free([page])
    assert pool.num_free == 4
    assert pool.find(KEYS[0]) == page
    pool.share(page)
    pool.share(page)
    assert pool.num_owners(page) == 2
    assert pool.num_free == 3
    pool.check([[page], [page]])


def test_unused_pages_are_allocated_first_then_the_least_recently_freed():
    pool = PagePool(4, 16)
    pages = pool.allocate(3)
    for page, key in zip(pages, KEYS, strict=False):
        pool.register(page, key)
    pool.free(reversed(pages))
    pool.allocate(1)
    assert [pool.find(key) for key in KEYS[:3]] == pages
    assert pool.allocate(1) == [pages[2]]
    assert [pool.find(key) for key in KEYS[:3]] == [pages[0], pages[1], None]
    pool.share(pages[1])
    pool.free([pages[1]])
    assert pool.allocate(1) == [pages[0]]


def test_the_first_page_registered_under_a_key_remains_the_cached_one():
    pool = PagePool(4, 16)
    first, second = pool.allocate(2)
    pool.register(first, KEYS[0])
    pool.register(second, KEYS[0])
    assert pool.find(KEYS[0]) == first
    pool.check([[first, second]])


def test_without_prefix_cache_nothing_is_found():
    pool = PagePool(4, 16, keeps_prefixes=False)
    [page] = pool.allocate(1)
    pool.register(page, KEYS[0])
    assert pool.find(KEYS[0]) is None


@pytest.mark.parametrize("owned", [[[]], [[0, 0]], [[0], [0]], [[0, 1]]])
def test_the_check_names_a_page_whose_owners_are_miscounted(owned):
    pool = PagePool(2, 16)
    assert pool.allocate(1) == [0]
    with pytest.raises(AssertionError, match=r"page [01] has"):
        pool.check(owned)


def test_the_check_names_a_page_that_is_free_and_owned():
    pool = PagePool(2, 16)
    pool._unused.append(pool.allocate(1)[0])
    with pytest.raises(AssertionError, match="page 0 is in 2 of"):
        pool.check([[0]])


def test_freeing_twice_is_detected():
    pool = PagePool(2, 16)
    pages = pool.allocate(1)
    pool.free(pages)
    with pytest.raises(AssertionError, match="page 0"):
        pool.free(pages)


def test_a_flushed_pool_finds_no_prefix_and_owned_pages_stay_owned():
    pool = PagePool(4, 16)
    owned, cached = pool.allocate(2)
    pool.register(owned, KEYS[0])
    pool.register(cached, KEYS[1])
    pool.free([cached])
    pool.flush()
    assert (pool.find(KEYS[0]), pool.find(KEYS[1]), pool.num_free) == (None, None, 3)
    pool.check([[owned]])
    pool.free([owned])
    pool.check([])
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]
