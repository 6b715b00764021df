"""The models of a fleet at a front: which version of a model answers which user, as the controller's view says."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from saccade.fleet.cluster.fleet_metrics import FleetCollector
from saccade.fleet.cluster.replica_set import ReplicaSet
from saccade.fleet.cluster.served_version import FrontContext, ServedVersion
from saccade.fleet.cluster.view import FleetView, ModelView, VersionView
from saccade.serve.engine_owner import State, refusal_of
from saccade.serve.front import Front
from saccade.serve.models import Chosen, Models
from saccade.serve.service import Service

logger = logging.getLogger(__name__)

_CLOSE_EVERY_S = 0.5
"""Seconds between two looks whether a version that left the view has open requests."""


@dataclass
class _Entry:
    """One version of a model."""

    owner: ServedVersion
    service: Service


class FleetModels(Models):
    """A directory that follows the controller's views. Used in the event loop."""

    def __init__(self, front: Front, context: FrontContext) -> None:
        self._front, self._context = front, context
        self.view = FleetView(epoch=0, generation=0, models=())
        """The view that this front follows."""
        self._followed_at = time.monotonic()
        self._entries: dict[tuple[str, str], _Entry] = {}
        self.is_draining = False
        """Whether new requests are refused, because this front stops."""
        self._closing: set[asyncio.Task[None]] = set()
        front.metrics.register(FleetCollector(self))

    # ------------------------------------------------------------------ views

    def follow(self, view: FleetView) -> None:
        """Follow a view, unless it is of a controller that another one has replaced."""
        if view.epoch < self.view.epoch:
            return
        self.view, self._followed_at = view, time.monotonic()
        wanted = {(model.name, one.config.name): one for model in view.models for one in model.versions}
        for key, version in wanted.items():
            if key not in self._entries:
                self._entries[key] = self._open(key[0], version)
        for key in self._entries.keys() - wanted.keys():
            closing = asyncio.create_task(self._close(self._entries.pop(key)))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        self.share_capacity()

    def _open(self, model: str, version: VersionView) -> _Entry:
        owner = ServedVersion(self._context, model, version.config, self.share_capacity)
        service = Service(
            front=self._front, engine_config=version.config.engine, model_name=model, version=version.config.name,
            owner=owner,
        )  # fmt: skip
        owner.replicas.on_change = self.share_capacity
        return _Entry(owner, service)

    async def _close(self, entry: _Entry) -> None:
        """Close a version when its last request has ended."""
        while entry.owner.replicas.num_open:
            await asyncio.sleep(_CLOSE_EVERY_S)
        entry.owner.close()
        entry.service.close()

    def share_capacity(self) -> None:
        """Admit this front's part of what the ready replicas can serve."""
        for entry in self._entries.values():
            num_engines = max(1, entry.owner.replicas.num_ready)
            entry.service.set_capacity(num_engines=num_engines, num_fronts=max(1, self.view.num_fronts))

    @property
    def view_age_s(self) -> float:
        """Seconds since the last view, or since the start of this front before there was one."""
        return time.monotonic() - self._followed_at

    def replicas(self) -> dict[tuple[str, str], ReplicaSet]:
        """Replicas of each model and version. Any thread may ask."""
        return {key: entry.owner.replicas for key, entry in list(self._entries.items())}

    def close(self) -> None:
        """Close all versions."""
        for entry in self._entries.values():
            entry.owner.close()

    # ------------------------------------------------------------------ a directory

    @property
    def state(self) -> State:
        """What this front can do now."""
        return "draining" if self.is_draining else super().state

    def check_room(self) -> None:
        """Refuse a request before its body is read, if it could not be served now."""
        if self.is_draining:
            raise refusal_of("draining")
        super().check_room()

    @property
    def services(self) -> Sequence[Service]:
        """Versions that can have users."""
        entries = [self._entries.get((model.name, one)) for model in self.view.models for one in model.shares]
        return [entry.service for entry in entries if entry is not None]

    def choose(self, name: str | None, user: str) -> Chosen:
        """Return the version of a model, or of an adapter's model, that a user has."""
        for model in self.view.models:
            if name == model.name or (name is None and len(self.view.models) == 1):
                return self._choose(model, user, None)
            if name in model.adapters:
                return self._choose(model, user, name)
        raise self.unknown(name)

    def _choose(self, model: ModelView, user: str, adapter: str | None) -> Chosen:
        """Choose the user's version, or the first one that has users and can answer instead."""
        ready = [one.config for one in model.versions if one.state == "ready"]
        able = self._loaded(model, [one.name for one in ready if adapter is None or adapter in one.adapters])
        version, experiment, variant = model.assign(user, able)
        if version not in able:
            shares = model.split.shares
            version = min(able, key=lambda name: name not in shares, default=None)
        if version is None:
            raise refusal_of("loading")
        return Chosen(self._entries[model.name, version].service, adapter, experiment, variant)

    def _loaded(self, model: ModelView, versions: list[str]) -> list[str]:
        """The versions that this front can use by now; all of them if it can use none."""
        owners = {name: self._entries[model.name, name].owner for name in versions}
        loaded = [name for name, owner in owners.items() if owner.state == "ready"]
        for name in model.shares.keys() & owners.keys() - set(loaded):
            owners[name].wake()
        return loaded or versions

    def version(self, model: str, version: str) -> ServedVersion | None:
        """One version, whether or not it has users."""
        entry = self._entries.get((model, version))
        return None if entry is None else entry.owner
