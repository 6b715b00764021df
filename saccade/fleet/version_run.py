"""A version of a model that runs, starts or drains."""

from __future__ import annotations

from typing import Any, get_args

from saccade.config import decode, encode
from saccade.fleet.actions import AppHealth
from saccade.fleet.bounds import Bounds
from saccade.fleet.cluster.view import VersionState
from saccade.fleet.config import VersionConfig


class VersionRun:
    """A version that runs, starts or drains."""

    def __init__(self, config: VersionConfig, rollout: str) -> None:
        self.config, self.rollout = config, rollout
        self.phase: VersionState = "starting"
        self.share = 0.0
        """Share of users while no ramp runs."""
        self.deployed: Bounds | None = None
        """Bounds that the cluster has."""
        self.users_until_s: float | None = None
        """When it last had users; None: it had none."""
        self.delete_at_s: float | None = None
        """When its application is deleted; None: it does not drain, or has to be deployed again."""
        self.num_requests = self.num_errors = 0
        self.health: AppHealth | None = None
        """Its application as last seen; None: there is none. It is observed, not kept."""

    @property
    def name(self) -> str:
        """Name of the version."""
        return self.config.name

    @property
    def num_encoders(self) -> int | None:
        """Encoder replicas that serve. None: it has none."""
        return None if self.health is None or self.health.encoders is None else self.health.encoders[0]

    @property
    def is_on_cluster(self) -> bool:
        """Whether the cluster may have an application of the version."""
        return self.deployed is not None or self.health is not None

    def to_plain(self) -> dict[str, Any]:
        """All state as plain data."""
        return {
            "config": encode(self.config), "rollout": self.rollout, "phase": self.phase, "share": self.share,
            "deployed": self.deployed, "users_until_s": self.users_until_s, "delete_at_s": self.delete_at_s,
            "num_requests": self.num_requests, "num_errors": self.num_errors,
        }  # fmt: skip

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> VersionRun:
        """Continue from `to_plain()`."""
        made = cls(decode(VersionConfig, plain["config"], "snapshot"), plain["rollout"])
        assert plain["phase"] in get_args(VersionState)
        made.phase, made.share = plain["phase"], plain["share"]
        made.users_until_s, made.delete_at_s = plain["users_until_s"], plain["delete_at_s"]
        made.deployed = None if plain["deployed"] is None else tuple(plain["deployed"])
        made.num_requests, made.num_errors = plain["num_requests"], plain["num_errors"]
        return made
