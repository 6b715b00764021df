"""Rendezvous hashing: fronts rank the replicas of a key alike, and a replica that leaves moves only its own keys."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = tuple(np.uint64(bits) for bits in (30, 27, 31))


def digest(data: bytes) -> int:
    """64 bits of BLAKE2b. (A CRC is linear: keys that differ little would rank replicas alike.)"""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def ranks(key: bytes, digests: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A number for each replica, given the digests of their names; the highest is the key's home.

    The mixing is the finalizer of SplitMix64, over the exclusive or of the two digests.
    """
    mixed = digests ^ np.uint64(digest(key))
    mixed = (mixed ^ (mixed >> _SHIFTS[0])) * _FIRST
    mixed = (mixed ^ (mixed >> _SHIFTS[1])) * _SECOND
    return mixed ^ (mixed >> _SHIFTS[2])
