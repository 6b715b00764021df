"""Where features of images lie on the device, and who uses them. Plain Python, no torch.

The pool is a fixed number of *places* of `IMAGE_PAGE` tokens each; an image takes as many as its tokens need, anywhere. A request
uses an image from the step that encodes it, or first reads it, to the step that computes its last token. Behind that the image is
kept for others until the room is needed.
"""

from __future__ import annotations

import hashlib
from collections import Counter

IMAGE_PAGE = 64
"""Tokens of a place."""


def salted(salt: bytes, key: bytes) -> bytes:
    """The key of an image among requests of one salt. Others neither find it nor learn that it is there."""
    return hashlib.sha256(len(salt).to_bytes(8, "little") + salt + key).digest()


class _Held:
    __slots__ = ("num_users", "places")

    def __init__(self, places: list[int]) -> None:
        self.places = places
        self.num_users = 1


class ImagePool:
    """Places and users of images, by salted key. `is held` means: encoded by a step that was planned, or by an earlier one."""

    def __init__(self, num_tokens: int, keeps_unused: bool = True) -> None:
        self.num_places = num_tokens // IMAGE_PAGE
        self.keeps_unused = keeps_unused
        self._free = list(range(self.num_places - 1, -1, -1))
        self._held: dict[bytes, _Held] = {}
        self._unused: dict[bytes, None] = {}  # held without user; longest ago first
        self._num_unused_places = 0

    def holds(self, key: bytes) -> bool:
        """Whether the image need not be encoded again."""
        return key in self._held

    def fits(self, num_tokens: int) -> bool:
        """Whether an image of this size fits the pool when nothing else is in use."""
        return _num_places(num_tokens) <= self.num_places

    def can_take(self, key: bytes, num_tokens: int) -> bool:
        """Whether the image is held or there is room for it beside those in use."""
        return key in self._held or _num_places(num_tokens) <= len(self._free) + self._num_unused_places

    def take(self, key: bytes, num_tokens: int) -> bool:
        """Give the image one user more. True: it is new, so it has to be encoded into its places."""
        held = self._held.get(key)
        if held is None:
            self._held[key] = _Held(self._make_room(_num_places(num_tokens)))
            return True
        assert len(held.places) == _num_places(num_tokens), f"image {key.hex()} comes in two sizes"
        if held.num_users == 0:
            del self._unused[key]
            self._num_unused_places -= len(held.places)
        held.num_users += 1
        return False

    def release(self, key: bytes) -> None:
        """Take one user from the image."""
        held = self._held[key]
        assert held.num_users > 0, f"image {key.hex()} is released but has no user"
        held.num_users -= 1
        if held.num_users == 0:
            self._unused[key] = None
            self._num_unused_places += len(held.places)
            if not self.keeps_unused:
                self.drop(key)

    def places(self, key: bytes) -> list[int]:
        """Its places, in order of its tokens."""
        return self._held[key].places

    def drop(self, key: bytes) -> None:
        """Throw an image without user out, if it is here: it was not encoded after all."""
        if key in self._held:
            assert key in self._unused, f"image {key.hex()} is thrown out but has a user"
            del self._unused[key]
            places = self._held.pop(key).places
            self._num_unused_places -= len(places)
            self._free.extend(reversed(places))

    def forget_unused(self) -> None:
        """Throw out every image without user: the weights that encoded them are gone."""
        for key in list(self._unused):
            self.drop(key)

    def check(self, users: Counter[bytes]) -> None:
        """Raise AssertionError unless `users` (how many uses requests have of each image) agrees with the books."""
        for key in users.keys() | self._held.keys():
            num_users = self._held[key].num_users if key in self._held else 0
            assert num_users == users[key], (
                f"image {key.hex()} has {num_users} users in the books, {users[key]} in truth"
            )
        unused = {key for key, held in self._held.items() if held.num_users == 0}
        assert unused == self._unused.keys(), "images without user and the list of them disagree"
        assert self.keeps_unused or not unused, "an image without user was kept"
        assert self._num_unused_places == sum(len(self._held[key].places) for key in unused), (
            "unused places are miscounted"
        )
        places = self._free + [place for held in self._held.values() for place in held.places]
        assert sorted(places) == list(range(self.num_places)), "a place is lost or was given out twice"

    def _make_room(self, num_places: int) -> list[int]:
        while len(self._free) < num_places:
            assert self._unused, f"{num_places} places asked for, {len(self._free)} are free"
            self.drop(next(iter(self._unused)))
        return [self._free.pop() for _ in range(num_places)]


def _num_places(num_tokens: int) -> int:
    return -(-num_tokens // IMAGE_PAGE)
