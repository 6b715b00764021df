"""What the commands of a fleet do in its state folder. No Ray: the controller follows what is written there.

fleet = open_fleet("examples/fleet.toml")            # or the state folder itself
change = request_update(fleet, config, now)
outcome = follow(fleet.state, change.generation, on_decision=print)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from saccade.config import load_config
from saccade.data.storage import is_remote
from saccade.errors import ConfigError, DataError
from saccade.fleet.config import FleetConfig, ModelConfig, VersionConfig
from saccade.fleet.driver import Driver
from saccade.fleet.lease import LEASE_S, Holder, holder_of
from saccade.fleet.state import Desired, FleetState
from saccade.fleet.status import is_alive

_POLL_S, _POLL_STORE_S = 0.3, 2.0
"""Seconds between two looks at a local state folder, and at one in a store."""


# ------------------------------------------------------------------ finding a fleet


def open_state(where: str) -> FleetState:
    """The state folder of a fleet, named by its file or by itself."""
    if where.endswith(".toml") and not is_remote(where):
        return FleetState(state_url(load_config(FleetConfig, Path(where))))
    return FleetState(where)


def state_url(config: FleetConfig) -> str:
    """The state folder of a file, as an absolute path or a URL."""
    return config.state if is_remote(config.state) else str(Path(config.state).absolute())


def known_fleet(state: FleetState) -> Desired:
    """The desired state; ConfigError: there is no fleet in this folder."""
    desired = state.desired()
    if desired is None:
        raise ConfigError(
            f"{state.objects.url}: no fleet has its state there. Name its file or its state folder, or start it: "
            "saccade fleet up FLEET.toml"
        )
    return desired


def with_absolute_paths(config: FleetConfig) -> FleetConfig:
    """The fleet with absolute paths: its processes have other working folders. Names on the Hub stay."""

    def absolute(path: str) -> str:
        return str(Path(path).absolute()) if Path(path).exists() else path

    def version(one: VersionConfig) -> VersionConfig:
        adapters = {name: absolute(folder) for name, folder in one.adapters.items()}
        return replace(one, checkpoint=absolute(one.checkpoint), adapters=adapters)

    def model(one: ModelConfig) -> ModelConfig:
        probes = tuple(
            probe if probe.image is None else replace(probe, image=absolute(probe.image)) for probe in one.probes
        )
        return replace(one, versions=tuple(map(version, one.versions)), probes=probes)

    keys = config.server.api_keys
    server = config.server if keys is None else replace(config.server, api_keys=keys.absolute())
    return replace(config, state=state_url(config), models=tuple(map(model, config.models)), server=server)


# ------------------------------------------------------------------ changing it


def request_up(state: FleetState, config: FleetConfig, now: float, *, is_new_cluster: bool) -> Desired:
    """Write the fleet's file as the desired state, unless it is that already.

    `is_new_cluster`: nothing of the fleet runs there, whatever the state folder says.
    """
    newest = state.newest_generation()
    desired = None if newest is None else state.desired()
    if desired is not None and desired.config == config and not desired.is_down:
        return desired
    _check_name(state, desired, config)
    if not is_new_cluster:
        _check_versions(state, config)
    return state.change(config, after=newest, command="up", time_s=now)


def request_update(state: FleetState, config: FleetConfig, now: float) -> Desired:
    """Write a changed file as the desired state of a fleet that runs."""
    newest = state.newest_generation()
    try:
        desired = known_fleet(state)
    except DataError:
        desired = None  # a damaged generation is replaced
    _check_runs(state, now)
    _check_name(state, desired, config)
    _check_versions(state, config)
    return state.change(config, after=newest, command="update", time_s=now)


def request_rollback(state: FleetState, model: str, now: float) -> tuple[Desired, str]:
    """Write the versions that a model had before its last change as the desired state; returns a description too."""
    desired = known_fleet(state)
    _check_runs(state, now)
    served = next((one for one in desired.config.models if one.name == model), None)
    if served is None:
        names = ", ".join(one.name for one in desired.config.models)
        raise ConfigError(f"fleet {desired.config.name} has no model {model!r}. Its models: {names}")
    driver = _driver(state)
    versions = driver.models[model] if driver is not None and model in driver.models else None
    target = () if versions is None else versions.rollback_target
    if not target:
        raise ConfigError(f"no other version of {model} ran before: there is nothing to go back to")
    models = tuple(one.only_with(target) if one.name == model else one for one in desired.config.models)
    config = replace(desired.config, models=models)
    described = ", ".join(f"{one.name} {one.traffic:.3g} %" for one in target)
    change = state.change(config, after=desired.generation, command="rollback", time_s=now, at_once=(model,))
    return change, described


def request_down(state: FleetState, now: float) -> Desired | None:
    """Write that the fleet should end; None: it has ended."""
    desired = known_fleet(state)
    if desired.is_down and not is_alive(holder_of(state.objects), now):
        return None
    if desired.is_down:
        return desired
    return state.change(desired.config, after=desired.generation, command="down", time_s=now)


def _check_runs(state: FleetState, now: float) -> None:
    if not is_alive(holder_of(state.objects), now):
        raise ConfigError(
            f"{state.objects.url}: no controller of this fleet is running, so that nothing would follow the change. "
            "Start it: saccade fleet up FLEET.toml"
        )


def _check_name(state: FleetState, desired: Desired | None, config: FleetConfig) -> None:
    """Refuse the state folder of another fleet."""
    if desired is not None and desired.config.name != config.name:
        raise ConfigError(
            f"{state.objects.url} has the state of fleet {desired.config.name}, not of {config.name}. "
            "Give each fleet a state folder of its own"
        )


def _check_versions(state: FleetState, config: FleetConfig) -> None:
    """Refuse versions that run with other settings: a controller would not follow them."""
    driver = _driver(state) or Driver()
    for model in config.models:
        versions = driver.models.get(model.name)
        if versions is not None and (changed := versions.changed_version(model)):
            raise ConfigError(
                f"version {changed} of model {model.name} runs with other settings. Versions keep their settings: "
                "give the changed one another name"
            )


def _driver(state: FleetState) -> Driver | None:
    """The controller's state, as far as it was stored."""
    snapshot = state.snapshot()
    return None if snapshot is None else Driver.from_plain(snapshot.content["driver"])


# ------------------------------------------------------------------ following it


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a change ended."""

    reasons: tuple[str, ...] = ()
    """Why models were rolled back, or the change was refused. Empty: the fleet is as it should be."""
    without_users: tuple[str, ...] = ()
    """Models of which no version is ready."""
    urls: tuple[str, ...] = ()
    """Addresses of the fronts."""
    has_ended: bool = False
    """Whether the fleet is down."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What is known while a change is under way."""

    decisions: tuple[dict[str, Any], ...]
    """Decisions since the last look."""
    waiting_for: str
    """What the change waits for, in a few words."""


class Follower:
    """Looks at a fleet again and again."""

    def __init__(self, state: FleetState, generation: int, *, after_epoch: int = 0) -> None:
        """`after_epoch`: what controllers of this epoch and of earlier ones have written does not count."""
        self._state, self._generation, self._after_epoch = state, generation, after_epoch
        snapshot = state.snapshot()
        self._seen = 0 if snapshot is None else snapshot.content["driver"]["num_decisions"]

    def look(self) -> tuple[Progress, Outcome | None]:
        """What happened since the last look; the outcome once there is one."""
        snapshot = self._state.snapshot()
        if snapshot is None or snapshot.epoch <= self._after_epoch:
            return Progress(decisions=(), waiting_for="the controller"), None
        content = snapshot.content
        driver = content["driver"]
        new = tuple(one for one in driver["recent"] if one["number"] > self._seen)
        self._seen = max(self._seen, driver["num_decisions"])
        desired = driver["desired"]
        if desired is None or desired["generation"] < self._generation:
            return Progress(decisions=new, waiting_for="the controller"), None
        if content["has_ended"]:
            return Progress(decisions=new, waiting_for=""), Outcome(has_ended=True)
        return self._look_at(content, new, is_down=desired["command"] == "down")

    def _look_at(
        self, content: dict[str, Any], new: tuple[dict[str, Any], ...], *, is_down: bool
    ) -> tuple[Progress, Outcome | None]:
        models: dict[str, Any] = content["driver"]["models"]
        waiting = [_waiting_for(name, one, content["replicas"].get(name, {})) for name, one in models.items()]
        waiting = [one for one in waiting if one]
        if is_down:
            waiting = ["requests to end"]
        elif not (content["urls"] and content["front"]["ready"]):
            waiting.append("the fronts")
        if waiting:
            return Progress(decisions=new, waiting_for=", ".join(waiting)), None
        changed = {name: one for name, one in models.items() if one["generation"] == self._generation}
        reasons = [
            f"{name}: {reason}" for name, one in changed.items() for reason in (one["refusal"], one["reason"]) if reason
        ]
        without = tuple(name for name, one in models.items() if not any(run["share"] > 0 for run in one["runs"]))
        outcome = Outcome(reasons=tuple(reasons), without_users=without, urls=tuple(content["urls"]))
        return Progress(decisions=new, waiting_for=""), outcome


def _waiting_for(name: str, model: dict[str, Any], replicas: dict[str, Any]) -> str:
    """What a model waits for; empty: nothing."""
    starting = [one["config"]["name"] for one in model["runs"] if one["phase"] == "starting" and one["share"] > 0]
    if starting:
        return f"{name} {', '.join(starting)} to start again"
    if model["progress"] != "updating" or model["refusal"]:
        return ""
    introductions = {one["version"]: one["rollout"]["state"] for one in model["introductions"]}
    if not introductions:
        return name
    parts = []
    for version, phase in introductions.items():
        found = replicas.get(version, {"ready": 0, "starting": 0})
        num_ready, num_all = found["ready"], found["ready"] + found["starting"]
        parts.append(f"{name} {version} {phase}" + (f", {num_ready} of {num_all} replicas ready" if num_all else ""))
    return "; ".join(parts)


def follow(
    state: FleetState, generation: int, on_progress: Callable[[Progress], None], *,
    after_epoch: int = 0, check: Callable[[], None] = lambda: None, timeout_s: float | None = None,
) -> Outcome:  # fmt: skip
    """Follow a change to its end. `check` is called at every look, and may raise.

    ConfigError: the controller has disappeared, or the change takes longer than the timeout.
    """
    follower, began_s = Follower(state, generation, after_epoch=after_epoch), time.monotonic()
    watch = _HeartbeatWatch()
    while True:
        progress, outcome = follower.look()
        on_progress(progress)
        if outcome is not None:
            return outcome
        check()
        watch.check(state)
        if timeout_s is not None and time.monotonic() - began_s >= timeout_s:
            raise ConfigError(f"it takes longer than {timeout_s:.0f} s. Look at it with saccade fleet status")
        time.sleep(_POLL_STORE_S if is_remote(state.objects.url) else _POLL_S)


class _HeartbeatWatch:
    """Notices that no controller renews the lease, by this machine's clock alone."""

    _PATIENCE_S = 6 * LEASE_S

    def __init__(self) -> None:
        self._seen: tuple[int, bytes | None] | None = None
        self._since_s = time.monotonic()

    def check(self, state: FleetState) -> None:
        holder: Holder | None = holder_of(state.objects)
        seen = None if holder is None else (holder.epoch, holder.heartbeat)
        if seen != self._seen:
            self._seen, self._since_s = seen, time.monotonic()
        elif time.monotonic() - self._since_s >= self._PATIENCE_S:
            raise ConfigError(
                f"{state.objects.url}: no controller has been heard of for {self._PATIENCE_S:.0f} s. "
                "Look at the cluster, or start it again: saccade fleet up FLEET.toml"
            )
