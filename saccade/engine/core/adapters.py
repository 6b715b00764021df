"""Which adapter has which slot, and how many requests use it. Plain Python: names and integers, no torch.

    reserve -> activate (its matrices are on the device) -> acquire, release by requests -> remove -> the slot is free after the last release

A removed adapter takes no new requests at once; those that run keep it to their end. Its name can be used again at once, its slot later.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from saccade.errors import RequestError


@dataclass
class AdapterEntry:
    """An adapter in a slot."""

    name: str
    slot: int
    """From 0."""
    digest: bytes = b""
    """Of its matrices and settings; empty until it is loaded."""
    num_requests: int = 0
    """Open requests that use it."""
    is_removed: bool = False

    @property
    def is_loaded(self) -> bool:
        """Whether requests can use it."""
        return bool(self.digest) and not self.is_removed

    def salt(self, salt: bytes) -> bytes:
        """The salt of a request with this adapter: keys and values depend on it, so cached ones are never shared with others."""
        return hashlib.sha256(b"adapter:" + self.digest + salt).digest()


class AdapterTable:
    """The slots of all adapters."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._num_slots = num_slots
        self._entries: dict[str, AdapterEntry] = {}
        self._leaving: list[AdapterEntry] = []

    @property
    def names(self) -> list[str]:
        """Adapters that requests can name."""
        return [name for name, entry in self._entries.items() if entry.is_loaded]

    def reserve(self, name: str) -> AdapterEntry:
        """A slot for a new adapter."""
        if name in self._entries:
            raise RequestError(f"there is an adapter {name!r} already. Remove it first, or choose another name")
        if not self._num_slots:
            raise RequestError("this engine has no slots for adapters. Load it with max_adapters = 8, say")
        if not self._free:
            waits = f", {len(self._leaving)} of them until their last requests end" if self._leaving else ""
            raise RequestError(
                f"all {self._num_slots} slots for adapters are taken{waits}. Remove one, or raise max_adapters"
            )
        entry = self._entries[name] = AdapterEntry(name, self._free.pop())
        return entry

    def activate(self, entry: AdapterEntry, digest: bytes) -> None:
        """Its matrices are in the slot: requests may use it."""
        entry.digest = digest

    def find(self, name: str) -> AdapterEntry:
        """The adapter of this name. RequestError: there is none."""
        entry = self._entries.get(name)
        if entry is None or not entry.is_loaded:
            known = ", ".join(self.names) or "none"
            raise RequestError(f"adapter {name!r} is not loaded. Loaded: {known}")
        return entry

    def acquire(self, entry: AdapterEntry) -> None:
        """A request begins to use it."""
        entry.num_requests += 1

    def release(self, entry: AdapterEntry) -> None:
        """A request has ended."""
        entry.num_requests -= 1
        assert entry.num_requests >= 0, "every release follows an acquire"
        self._free_if_unused(entry)

    def remove(self, entry: AdapterEntry) -> None:
        """Take no new requests. The slot is free when no request uses it."""
        del self._entries[entry.name]
        entry.is_removed = True
        self._leaving.append(entry)
        self._free_if_unused(entry)

    def _free_if_unused(self, entry: AdapterEntry) -> None:
        if entry.is_removed and entry.num_requests == 0:
            self._leaving.remove(entry)
            self._free.append(entry.slot)

    def check(self) -> None:
        """Every slot is free or has one adapter."""
        slots = sorted([*self._free, *(entry.slot for entry in self._all())])
        assert slots == list(range(self._num_slots)), f"slots of adapters are lost or owned twice: {slots}"

    def _all(self) -> Iterator[AdapterEntry]:
        yield from self._entries.values()
        yield from self._leaving
