"""Which version of a model a user gets: shares of users, newest version first.

    split = Split(entries=(SplitEntry(rollout="assistant/june@2", version="june", share=0.1),), default="may")
    split.version_of(user)                # the same on every front

An entry takes its share of the users that the entries before it leave. A larger share of the first entry therefore
moves users to its version and moves no user between the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from saccade.fleet.comparison import position


@dataclass(frozen=True, kw_only=True)
class SplitEntry:
    """A version that has a share of users."""

    rollout: str
    """Name of the rollout that introduced the version; users are hashed with it."""
    version: str
    """Name of the version."""
    share: float
    """Share of the users that no earlier entry takes, above 0 and below 1."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """Versions of a model that have users."""

    entries: tuple[SplitEntry, ...] = ()
    """Versions with a part of the users, newest first."""
    default: str | None = None
    """Version of the remaining users. None: no version is ready."""

    def version_of(self, user: str) -> str | None:
        """Version for a user; requests without a user pass their own id."""
        for entry in self.entries:
            if position(user, entry.rollout) < entry.share:
                return entry.version
        return self.default

    @property
    def shares(self) -> dict[str, float]:
        """Share of all users that each version has; they sum to 1. Empty: no version is ready."""
        found, remaining = {}, 1.0
        for entry in self.entries:
            found[entry.version] = remaining * entry.share
            remaining *= 1 - entry.share
        return found if self.default is None else found | {self.default: remaining}


def split_by_shares(versions: Iterable[tuple[str, str, float]]) -> Split:
    """Make a split of (rollout, version, share of all users), newest first. Versions without users are left out."""
    present = [one for one in versions if one[2] > 0]
    entries, remaining = [], sum(share for _, _, share in present)
    for rollout, version, share in present[:-1]:
        entries.append(SplitEntry(rollout=rollout, version=version, share=share / remaining))
        remaining -= share
    return Split(entries=tuple(entries), default=present[-1][1] if present else None)
