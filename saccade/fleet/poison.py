"""Requests that have ended engines, by digest. They are refused everywhere for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable

_LIFETIME_S = 600.0
"""Seconds for which a request is refused: an operator may have mended its cause meanwhile."""
_MAX_DIGESTS = 4096


class PoisonList:
    """Digests of a front's own requests, and of those of other fronts."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[bytes, float] = {}
        self._unreported: list[bytes] = []

    def add(self, digest: bytes) -> None:
        """Add a request of this front."""
        self._unreported.append(digest)
        self.add_known([digest])

    def add_known(self, digests: Iterable[bytes]) -> None:
        """Add requests that others report."""
        until = self._clock() + _LIFETIME_S
        for digest in digests:
            self._until.setdefault(digest, until)
        while len(self._until) > _MAX_DIGESTS:
            del self._until[next(iter(self._until))]

    @property
    def has_any(self) -> bool:
        """Whether a request may be refused. Without this, every prompt would be hashed."""
        return bool(self._until)

    def has(self, digest: bytes) -> bool:
        """Whether a request is refused."""
        until = self._until.get(digest)
        if until is not None and until < self._clock():
            del self._until[digest]
            return False
        return until is not None

    def take_unreported(self) -> tuple[bytes, ...]:
        """Digests that this front has added since the last call."""
        taken, self._unreported = tuple(self._unreported), []
        return taken
