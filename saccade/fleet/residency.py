"""What each replica probably has in a cache, and which replicas have a key.

Knowledge comes from requests that were sent to a replica and from keys that it reports. It may be wrong; the replica
then computes what it was expected to have. Like the cache itself, it forgets the least recently used keys above a
capacity.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

NONE = np.empty(0, np.intp)
"""No replicas."""


class Residency:
    """Bounded lists of keys by replica, and their inverse. A replica is a small integer."""

    def __init__(self) -> None:
        self._keys: dict[int, OrderedDict[bytes, int]] = {}
        self._used: dict[int, int] = {}
        self._capacity: dict[int, int] = {}
        self._holders: dict[bytes, list[int]] = {}
        self._arrays: dict[bytes, NDArray[np.intp]] = {}

    def add_replica(self, replica: int, capacity: int) -> None:
        """Add an empty cache. The capacity has the unit of the sizes given to `touch`."""
        self._keys[replica], self._used[replica], self._capacity[replica] = OrderedDict(), 0, capacity

    def remove_replica(self, replica: int) -> None:
        """Forget a replica with all of its keys."""
        for key in self._keys.pop(replica):
            self._remove_holder(key, replica)
        del self._used[replica], self._capacity[replica]

    def holders(self, key: bytes) -> NDArray[np.intp]:
        """Replicas that probably have the key."""
        found = self._arrays.get(key)
        if found is None:
            if key not in self._holders:
                return NONE
            found = self._arrays[key] = np.array(self._holders[key], np.intp)
        return found

    def counts_along(self, chain: Sequence[bytes]) -> list[int]:
        """Number of replicas that have each key of a chain, up to the first key that none has."""
        counts: list[int] = []
        for key in chain:
            holders = self._holders.get(key)
            if holders is None:
                break
            counts.append(len(holders))
        return counts

    def has(self, replica: int, key: bytes) -> bool:
        """Whether a replica probably has the key."""
        return key in self._keys[replica]

    def touch_all(self, replica: int, keys: Sequence[bytes], size: int) -> None:
        """`touch` each key, in order."""
        known = self._keys[replica]
        for key in keys:
            if key in known:
                known.move_to_end(key)
            else:
                self.touch(replica, key, size)

    def touch(self, replica: int, key: bytes, size: int) -> None:
        """Note that a replica uses the key now; least recently used keys make room for it."""
        keys = self._keys[replica]
        if key in keys:
            keys.move_to_end(key)
            return
        keys[key] = size
        self._used[replica] += size
        self._holders.setdefault(key, []).append(replica)
        self._arrays.pop(key, None)
        while self._used[replica] > self._capacity[replica]:
            oldest, freed = keys.popitem(last=False)
            self._used[replica] -= freed
            self._remove_holder(oldest, replica)

    def _remove_holder(self, key: bytes, replica: int) -> None:
        self._arrays.pop(key, None)
        holders = self._holders[key]
        holders.remove(replica)
        if not holders:
            del self._holders[key]
