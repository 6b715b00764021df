"""Allocation of image features on the device. Plain Python, no torch.

The encoder cache has a fixed number of *slots* of `ENCODER_SLOT_TOKENS` tokens each. An image takes as many slots as
its tokens need; they need not be adjacent. An image is *ready* when the runner has reported the end of its encoding. A
request uses an image from when it acquires the image to the step that computes its last token. Then the image stays
cached for other requests until its slots are needed; the least recently used image is evicted first.
"""

from __future__ import annotations

import hashlib
from collections import Counter

ENCODER_SLOT_TOKENS = 64
"""Tokens of image features per slot."""


def salted(salt: bytes, key: bytes) -> bytes:
    """The key of an image for requests with this salt. Requests with another salt cannot find the image."""
    return hashlib.sha256(len(salt).to_bytes(8, "little") + salt + key).digest()


class _Entry:
    __slots__ = ("is_ready", "num_users", "slots")

    def __init__(self, slots: tuple[int, ...]) -> None:
        self.slots = slots
        self.num_users = 1
        self.is_ready = False


class EncoderCache:
    """Slots and users of images, by salted key.

    The encoding of a cached image is complete, in flight, or in the plan that is being made. An image in flight is not
    evicted, even without users: the encoder writes to its slots.
    """

    def __init__(self, num_tokens: int, keeps_unused: bool = True) -> None:
        self.num_slots = num_tokens // ENCODER_SLOT_TOKENS
        self.keeps_unused = keeps_unused
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._entries: dict[bytes, _Entry] = {}
        self._unused: dict[bytes, None] = {}  # entries without users, least recently used first
        self._num_unused_slots = 0
        self.num_queries = self.num_hits = 0
        """Calls of `acquire`, and how many of them found the image."""

    def contains(self, key: bytes) -> bool:
        """Whether the image is cached, so that it need not be encoded again."""
        return key in self._entries

    def fits(self, num_tokens: int) -> bool:
        """Whether an image of this size fits into an otherwise empty cache."""
        return _num_slots(num_tokens) <= self.num_slots

    def can_acquire(self, key: bytes, num_tokens: int) -> bool:
        """Whether the image is cached, or enough slots are free or can be freed for it."""
        return key in self._entries or _num_slots(num_tokens) <= len(self._free) + self._num_unused_slots

    def acquire(self, key: bytes, num_tokens: int) -> bool:
        """Add a user. True: the image is new and has to be encoded into its slots."""
        entry = self._entries.get(key)
        self.num_queries += 1
        if entry is None:
            self._entries[key] = _Entry(self._allocate(_num_slots(num_tokens)))
            return True
        self.num_hits += 1
        assert len(entry.slots) == _num_slots(num_tokens), f"image {key.hex()} has two sizes"
        if key in self._unused:
            del self._unused[key]
            self._num_unused_slots -= len(entry.slots)
        entry.num_users += 1
        return False

    def release(self, key: bytes) -> None:
        """Remove a user."""
        entry = self._entries[key]
        assert entry.num_users > 0, f"image {key.hex()} is released but has no user"
        entry.num_users -= 1
        if entry.num_users == 0 and entry.is_ready:
            self._keep_unused(key, entry)

    def _keep_unused(self, key: bytes, entry: _Entry) -> None:
        self._unused[key] = None
        self._num_unused_slots += len(entry.slots)
        if not self.keeps_unused:
            self.evict(key)

    def is_ready(self, key: bytes) -> bool:
        """Whether the features of a cached image are complete."""
        return self._entries[key].is_ready

    def set_ready(self, key: bytes) -> None:
        """Mark the encoding of an image as complete."""
        entry = self._entries[key]
        assert not entry.is_ready, f"image {key.hex()} was encoded twice"
        entry.is_ready = True
        if entry.num_users == 0:
            self._keep_unused(key, entry)

    def slots(self, key: bytes) -> tuple[int, ...]:
        """Slots of a cached image, in token order."""
        return self._entries[key].slots

    def evict(self, key: bytes) -> None:
        """Remove an image without users, if it is cached. The caller ensures that no encoding writes to its slots."""
        entry = self._entries.get(key)
        if entry is None:
            return
        assert entry.num_users == 0, f"image {key.hex()} is evicted but has a user"
        if key in self._unused:
            del self._unused[key]
            self._num_unused_slots -= len(entry.slots)
        del self._entries[key]
        self._free.extend(reversed(entry.slots))

    def flush(self) -> None:
        """Evict all entries without users."""
        for key in list(self._unused):
            self.evict(key)

    def check(self, users: Counter[bytes]) -> None:
        """Check the invariants against `users`, the number of uses that requests have of each image."""
        for key in users.keys() | self._entries.keys():
            num_users = self._entries[key].num_users if key in self._entries else 0
            assert num_users == users[key], f"image {key.hex()} counts {num_users} users, requests have {users[key]}"
        unused = {key for key, entry in self._entries.items() if entry.num_users == 0 and entry.is_ready}
        assert unused == self._unused.keys(), "entries without users and the list of them disagree"
        assert self.keeps_unused or not unused, "an image without users was kept"
        assert self._num_unused_slots == sum(len(self._entries[key].slots) for key in unused), (
            "unused slots are miscounted"
        )
        slots = self._free + [slot for entry in self._entries.values() for slot in entry.slots]
        assert sorted(slots) == list(range(self.num_slots)), "a slot is lost or was allocated twice"

    def _allocate(self, num_slots: int) -> tuple[int, ...]:
        while len(self._free) < num_slots:
            assert self._unused, f"{num_slots} slots requested, {len(self._free)} are free"
            self.evict(next(iter(self._unused)))
        return tuple([self._free.pop() for _ in range(num_slots)])


def _num_slots(num_tokens: int) -> int:
    return -(-num_tokens // ENCODER_SLOT_TOKENS)
