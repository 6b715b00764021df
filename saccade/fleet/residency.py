"""What each replica probably has in a cache, and which replicas have a key.

Knowledge comes from requests that were sent to a replica and from keys that it reports. It may be wrong; the replica
then computes what it was expected to have. Like the cache itself, it forgets the least recently used keys above a
capacity. A set of replicas is an integer with a bit for each, so that sets are compared and united at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


@lru_cache(maxsize=4096)
def replicas_in(members: int) -> NDArray[np.intp]:
    """The replicas of a set."""
    data = members.to_bytes((members.bit_length() + 7) // 8, "little")
    found = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").nonzero()[0]
    found.flags.writeable = False
    return found


class Residency:
    """Bounded lists of keys by replica, and their inverse. A replica is a small integer."""

    def __init__(self) -> None:
        self._keys: dict[int, OrderedDict[bytes, int]] = {}
        self._used: dict[int, int] = {}
        self._capacity: dict[int, int] = {}
        self._holders: dict[bytes, int] = {}

    def add_replica(self, replica: int, capacity: int) -> None:
        """Add an empty cache. The capacity has the unit of the sizes given to `touch`."""
        self._keys[replica], self._used[replica], self._capacity[replica] = OrderedDict(), 0, capacity

    def remove_replica(self, replica: int) -> None:
        """Forget a replica with all of its keys."""
        for key in self._keys.pop(replica):
            self._remove_holder(key, replica)
        del self._used[replica], self._capacity[replica]

    def holders(self, key: bytes) -> int:
        """The set of replicas that probably have the key."""
        return self._holders.get(key, 0)

    def holders_along(self, chain: Sequence[bytes]) -> list[tuple[int, int]]:
        """How long a beginning of the chain is held, and by which replicas, for each such length.

        Whoever has a key of a chain has those before it: a chain whose first and last keys have the same holders is
        not read.
        """
        runs: list[tuple[int, int]] = []
        last = self.holders(chain[-1]) if chain else 0
        for number, key in enumerate(chain):
            holders = self.holders(key)
            if holders == last or not holders:
                break
            if runs and runs[-1][1] == holders:
                runs.pop()
            runs.append((number + 1, holders))
        return [*runs, (len(chain), last)] if last else runs

    def has(self, replica: int, key: bytes) -> bool:
        """Whether a replica probably has the key."""
        return key in self._keys[replica]

    def touch_all(self, replica: int, keys: Sequence[bytes], size: int) -> None:
        """`touch` each key, in order."""
        known = self._keys[replica]
        for key in keys:
            try:
                known.move_to_end(key)
            except KeyError:
                self.touch(replica, key, size)

    def touch(self, replica: int, key: bytes, size: int) -> None:
        """Note that a replica uses the key now; least recently used keys make room for it."""
        keys = self._keys[replica]
        if key in keys:
            keys.move_to_end(key)
            return
        keys[key] = size
        self._used[replica] += size
        self._holders[key] = self._holders.get(key, 0) | 1 << replica
        while self._used[replica] > self._capacity[replica]:
            oldest, freed = keys.popitem(last=False)
            self._used[replica] -= freed
            self._remove_holder(oldest, replica)

    def _remove_holder(self, key: bytes, replica: int) -> None:
        if holders := self._holders[key] & ~(1 << replica):
            self._holders[key] = holders
        else:
            del self._holders[key]
