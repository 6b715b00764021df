"""Who owns which page of the key/value cache, and which page holds which prefix. Plain Python, no torch.

A page holds keys and values of `page_size` tokens. Requests own pages; several may own one whose tokens they have in common. A full
page can be *registered* under the key of everything that its content depends on: all tokens up to its last, the images among
them, and the salt. A registered page is never written to again, and when its last owner is gone it is kept until the room is needed.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain


def root_key(salt: bytes) -> bytes:
    """The key that the first page of a request with this salt goes on from."""
    return hashlib.sha256(b"prefix:" + salt).digest()


def page_key(parent: bytes, token_ids: Sequence[int], images: Iterable[tuple[bytes, int]]) -> bytes:
    """The key of a page with these tokens behind the page with key `parent`.

    `images` has every image with a token in the page: its key, and the page's first token less the image's first. Tokens of an
    image are alike whatever it shows; the key and where in the image the page stands tell what was computed from them.
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
        self._owners = [0] * num_pages
        self._unused = list(range(num_pages - 1, -1, -1))  # given out from the end
        self._kept: dict[int, None] = {}  # pages without owner that have a key; freed longest ago first
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Pages that can be had now, counting those kept for their prefix."""
        return len(self._unused) + len(self._kept)

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that this many tokens take."""
        return -(-num_tokens // self.page_size)

    def owners(self, page: int) -> int:
        """How many requests own it."""
        return self._owners[page]

    def is_writable(self, page: int) -> bool:
        """Whether its only owner may change it: nobody shares it or can find it."""
        return self._owners[page] == 1 and page not in self._key_of

    def can_allocate(self, num_pages: int) -> bool:
        """Whether `allocate` can give this many."""
        return num_pages <= self.num_free

    def allocate(self, num_pages: int) -> list[int]:
        """Pages with one owner each and nothing in them. What was freed longest ago is forgotten first."""
        assert self.can_allocate(num_pages), f"{num_pages} pages asked for, {self.num_free} are free"
        pages = []
        for _ in range(num_pages):
            page = self._unused.pop() if self._unused else self._forget_oldest()
            self._owners[page] = 1
            pages.append(page)
        return pages

    def share(self, page: int) -> None:
        """Give a page that was found one owner more."""
        assert page in self._key_of, f"page {page} is not registered, so it cannot be shared"
        self._kept.pop(page, None)
        self._owners[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Take one owner from each. Give the tail of a request first: what is freed last is kept longest, and heads are shared most."""
        for page in pages:
            assert self._owners[page] > 0, f"page {page} is freed but has no owner"
            self._owners[page] -= 1
            if self._owners[page] == 0:
                if page in self._key_of:
                    self._kept[page] = None
                else:
                    self._unused.append(page)

    def find(self, key: bytes) -> int | None:
        """The page registered under this key."""
        return self._page_of.get(key)

    def register(self, page: int, key: bytes) -> None:
        """Let a full page be found. If another page has the key already, that one stays the one that is found."""
        assert self._owners[page] > 0, f"page {page} is registered but has no owner"
        assert page not in self._key_of, f"page {page} is registered twice"
        if self.keeps_prefixes and key not in self._page_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def forget_all(self) -> None:
        """No prefix is found any more: the weights that computed them are gone."""
        self._page_of.clear()
        self._key_of.clear()
        self._unused.extend(self._kept)
        self._kept.clear()

    def check(self, owned: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError, naming the page, unless `owned` (the pages of every request) agrees with the books."""
        owners = [0] * self.num_pages
        for page in chain.from_iterable(owned):
            owners[page] += 1
        for page in range(self.num_pages) if owners != self._owners else ():
            assert owners[page] == self._owners[page], (
                f"page {page} has {owners[page]} owners, the books say {self._owners[page]}"
            )
        places = [*self._unused, *self._kept, *[page for page, num in enumerate(owners) if num]]
        wrong = Counter(places) if sorted(places) != list(range(self.num_pages)) else {}
        for page in range(self.num_pages) if wrong else ():
            assert wrong[page] == 1, f"page {page} is in {wrong[page]} of: unused, kept, owned"
        assert self._kept.keys() <= self._key_of.keys(), (
            f"pages {self._kept.keys() - self._key_of.keys()} are kept without key"
        )
        assert self._key_of.keys().isdisjoint(self._unused), (
            f"pages {self._key_of.keys() & set(self._unused)} are unused with key"
        )
        found = dict(zip(self._key_of.values(), self._key_of, strict=True))
        assert found == self._page_of, (
            f"pages {set(self._key_of) ^ set(self._page_of.values())} are found under another key or none"
        )

    def _forget_oldest(self) -> int:
        page = next(iter(self._kept))
        del self._kept[page]
        del self._page_of[self._key_of.pop(page)]
        return page
