"""Allocation of KV-cache pages, and the prefix cache. Plain Python, no torch.

A page holds keys and values of `page_size` tokens. Requests own pages; requests with a common prefix share them. A
full page can be *registered* under a key of everything that its content depends on: all tokens up to its last, the
images among them, and the salt. A registered page is never written again. Without owners it stays cached until the
page is needed.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain


def root_key(salt: bytes) -> bytes:
    """The parent key of the first page of a request with this salt."""
    return hashlib.sha256(b"prefix:" + salt).digest()


def page_key(parent: bytes, token_ids: Sequence[int], images: Iterable[tuple[bytes, int]]) -> bytes:
    """The key of a page with these tokens that follows the page with key `parent`.

    `images` has an entry for every image with a token in the page: its key, and the page's first token index minus the
    image's. Placeholder tokens of all images are equal; key and offset identify what was computed from them.
    """
    digest = hashlib.sha256(parent)
    digest.update(array("q", (len(token_ids), *token_ids)).tobytes())
    for key, offset in images:
        digest.update(array("q", (len(key), offset)).tobytes() + key)
    return digest.digest()


class PagePool:
    """Owners and keys of a fixed number of pages. Every operation takes constant time per page."""

    def __init__(self, num_pages: int, page_size: int, keeps_prefixes: bool = True) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.keeps_prefixes = keeps_prefixes
        self._num_owners = [0] * num_pages
        self._unused = list(range(num_pages - 1, -1, -1))  # allocated from the end
        self._cached: dict[int, None] = {}  # pages without owners that have a key, least recently freed first
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Pages that can be allocated, counting cached ones without owners."""
        return len(self._unused) + len(self._cached)

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-num_tokens // self.page_size)

    def num_owners(self, page: int) -> int:
        """Number of requests that own the page."""
        return self._num_owners[page]

    def can_allocate(self, num_pages: int) -> bool:
        """Whether `allocate` can return this many pages."""
        return num_pages <= self.num_free

    def allocate(self, num_pages: int) -> list[int]:
        """Allocate pages with one owner each. Cached pages are evicted if needed, least recently freed first."""
        assert self.can_allocate(num_pages), f"{num_pages} pages requested, {self.num_free} are free"
        pages = []
        for _ in range(num_pages):
            page = self._unused.pop() if self._unused else self._evict()
            self._num_owners[page] = 1
            pages.append(page)
        return pages

    def share(self, page: int) -> None:
        """Add an owner to a registered page."""
        assert page in self._key_of, f"page {page} is not registered, so it cannot be shared"
        self._cached.pop(page, None)
        self._num_owners[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Remove one owner from each page.

        Pass the tail of a request first: pages freed last are evicted last, and the head of a prompt is shared most.
        """
        for page in pages:
            assert self._num_owners[page] > 0, f"page {page} is freed but has no owner"
            self._num_owners[page] -= 1
            if self._num_owners[page] == 0:
                if page in self._key_of:
                    self._cached[page] = None
                else:
                    self._unused.append(page)

    def find(self, key: bytes) -> int | None:
        """The page registered under this key; None if there is none."""
        return self._page_of.get(key)

    def register(self, page: int, key: bytes) -> None:
        """Put a full page into the prefix cache. No effect if another page is registered under the key."""
        assert self._num_owners[page] > 0, f"page {page} is registered but has no owner"
        assert page not in self._key_of, f"page {page} is registered twice"
        if self.keeps_prefixes and key not in self._page_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def flush(self) -> None:
        """Unregister all pages. Owners keep theirs, but no other request finds them."""
        self._unused += self._cached
        self._cached.clear()
        self._page_of.clear()
        self._key_of.clear()

    def check(self, owned: Iterable[Sequence[int]]) -> None:
        """Check the invariants against `owned`, the pages of every request. The AssertionError names the page."""
        num_owners = [0] * self.num_pages
        for page in chain.from_iterable(owned):
            num_owners[page] += 1
        for page in range(self.num_pages) if num_owners != self._num_owners else ():
            assert num_owners[page] == self._num_owners[page], (
                f"page {page} has {num_owners[page]} owners, the pool counts {self._num_owners[page]}"
            )
        listed = [*self._unused, *self._cached, *[page for page, num in enumerate(num_owners) if num]]
        counts = Counter(listed) if sorted(listed) != list(range(self.num_pages)) else {}
        for page in range(self.num_pages) if counts else ():
            assert counts[page] == 1, f"page {page} is in {counts[page]} of: unused, cached, owned"
        assert self._cached.keys() <= self._key_of.keys(), (
            f"pages {self._cached.keys() - self._key_of.keys()} are cached without a key"
        )
        assert self._key_of.keys().isdisjoint(self._unused), (
            f"pages {self._key_of.keys() & set(self._unused)} are unused but have a key"
        )
        found = dict(zip(self._key_of.values(), self._key_of, strict=True))
        assert found == self._page_of, (
            f"pages {set(self._key_of) ^ set(self._page_of.values())} are found under another key or none"
        )

    def _evict(self) -> int:
        page = next(iter(self._cached))
        del self._cached[page]
        del self._page_of[self._key_of.pop(page)]
        return page
