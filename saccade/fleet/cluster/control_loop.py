"""The controller's loop: what should be, what is, what to do next; stored before it is done.

    renew the lease -> desired state -> observe the cluster -> Driver.step -> snapshot -> view for the fronts -> actions

A controller that dies between any two of these leaves a snapshot from which another one continues: decisions are in the
snapshot before they have an effect, and an action that was not carried out is asked for again.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from saccade.errors import ConfigError
from saccade.fleet.actions import (
    Action,
    AppHealth,
    AskProbe,
    DeleteEngines,
    DeleteFronts,
    DeployEngines,
    DeployFronts,
    Observed,
)
from saccade.fleet.cluster.front_registry import FrontRegistry
from saccade.fleet.cluster.view import DecisionView, FleetView, FrontReport, ModelView, newest_decisions
from saccade.fleet.config import FleetConfig
from saccade.fleet.driver import Driver, Step
from saccade.fleet.lease import RENEW_S, Candidate, Lease, LeaseLostError, Owner
from saccade.fleet.state import FleetState
from saccade.fleet.status import describe, experiment_reports

logger = logging.getLogger(__name__)

_SNAPSHOT_S = 3.0
"""Seconds between two snapshots while nothing was decided."""


class Cluster(Protocol):
    """What carries out actions: `RayCluster`."""

    def observe(self, fleet: str) -> tuple[dict[tuple[str, str], AppHealth], AppHealth | None]:
        """Applications of engines by model and version, and that of the fronts."""

    def deploy_engines(self, fleet: FleetConfig, action: DeployEngines) -> None:
        """Create an application of engines, or change its bounds. ConfigError: it cannot be deployed."""

    def deploy_fronts(self, action: DeployFronts) -> None:
        """Create the fronts, or change them."""

    def delete_engines(self, fleet: str, action: DeleteEngines) -> None:
        """Delete an application of engines."""

    def delete_fronts(self, fleet: str) -> None:
        """Delete the fronts."""

    def ask(self, fleet: str, action: AskProbe, on_answer: Callable[[str | None], None]) -> None:
        """Ask a probe; calls back from a thread with the answer, or with None if there is none."""


class NotReadyError(Exception):
    """This controller does not hold the lease; a front keeps the view that it has."""


class ControlLoop:
    """One controller. A thread calls `tick`; fronts call `sync` from other threads."""

    def __init__(
        self, state: FleetState, cluster: Cluster, owner: Owner, *, wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._state, self._cluster, self._wall, self._clock = state, cluster, wall, clock
        self._cluster_name = owner.cluster
        self._candidate = Candidate(state.objects, owner, clock=clock)
        self._lease: Lease | None = None
        self._driver, self._fronts = Driver(), FrontRegistry()
        self._lock = threading.Lock()
        """Guards the fronts, the view and the answers of probes."""
        self._models: tuple[ModelView, ...] | None = None
        """What fronts are given; None: nothing was stored yet."""
        self._decisions: tuple[DecisionView, ...] = ()
        self._reports: dict[str, list[dict[str, Any]]] = {}
        self._answers: list[tuple[AskProbe, str | None]] = []
        self._in_flight: set[tuple[str, str, str]] = set()
        self._failures: dict[tuple[str, str], str] = {}
        """Versions that could not be deployed."""
        self._may_take_over = True
        """Whether this controller has just started: an earlier one of the same cluster has ended."""
        self._polled_s = self._stored_s = float("-inf")
        self._stored = ""
        self.has_ended = False
        """Whether the fleet is down, and the lease is given back."""

    # ------------------------------------------------------------------ fronts

    def sync(self, message: bytes) -> bytes:
        """Answer the report of a front."""
        report = FrontReport.from_bytes(message)
        with self._lock:
            lease, desired = self._lease, self._driver.desired
            if lease is None or not lease.is_held or self._models is None or desired is None:
                raise NotReadyError("this controller does not hold the lease")
            consumption = self._fronts.take(report, self._wall())
            view = FleetView(
                epoch=lease.epoch, generation=desired.generation, models=self._models,
                num_fronts=max(1, self._fronts.num_alive), consumption=consumption, poison=self._fronts.poison,
                decisions=self._decisions, reports=self._reports,
            )  # fmt: skip
        return view.to_bytes()

    # ------------------------------------------------------------------ one round

    def tick(self) -> None:
        """Look, decide, store and act once. Raises UserError if the state folder cannot be used."""
        if self._lease is None and not self._acquire():
            return
        assert self._lease is not None
        try:
            if self._clock() - self._polled_s >= RENEW_S:
                self._lease.renew()
                self._read_desired()
                self._polled_s = self._clock()
            observed, registry = self._observe()
            step = self._driver.step(observed)
            self._store(step, observed, registry)
            with self._lock:
                self._models, self._decisions = step.models, newest_decisions(self._driver.recent)
                self._reports = {name: experiment_reports(one) for name, one in self._driver.models.items()}
            for action in step.actions:
                self._carry_out(action)
            if step.has_ended:
                self._lease.release()
                self.has_ended = True
        except LeaseLostError as error:
            logger.warning("the lease is lost (%s): this controller does nothing until it has it again", error)
            with self._lock:
                self._lease = self._models = None

    def _acquire(self) -> bool:
        """Take the lease, and continue from the snapshot."""
        lease = self._candidate.try_acquire(takes_over=self._may_take_over)
        self._may_take_over = False
        if lease is None:
            return False
        snapshot = self._state.snapshot()
        driver, fronts = Driver(), FrontRegistry()
        if snapshot is not None:
            driver = Driver.from_plain(snapshot.content["driver"])
            registry = snapshot.content["registry"]
            self._state.log(lease.epoch, list(driver.recent))
            if snapshot.content["cluster"] != self._cluster_name:
                driver.lose_cluster(self._wall())
                registry = registry | {"fronts": {}}
            fronts = FrontRegistry.from_plain(registry, self._wall())
        with self._lock:
            self._driver, self._fronts, self._models = driver, fronts, None
            self._lease = lease
        self._stored, self._polled_s = "", self._clock() - RENEW_S
        logger.info("controller of epoch %d continues from decision %d", lease.epoch, driver.num_decisions)
        return True

    def _read_desired(self) -> None:
        """Follow a new generation."""
        newest, known = self._state.newest_generation(), self._driver.desired
        if newest is None or (known is not None and newest <= known.generation):
            return
        desired = self._state.desired()
        if desired is not None:
            self._failures.clear()
            self._driver.set_desired(desired, self._wall())

    def _observe(self) -> tuple[Observed, dict[str, Any]]:
        """Look at the cluster, and count what fronts have reported; returns the state of their registry too."""
        desired, now = self._driver.desired, self._wall()
        engines, front = ({}, None) if desired is None else self._cluster.observe(desired.config.name)
        for key, reason in self._failures.items():
            engines.setdefault(key, AppHealth(failure=reason))
        with self._lock:
            self._fronts.forget(now)
            outcomes, answers, self._answers = self._fronts.take_outcomes(), self._answers, []
            registry = {"registry": self._fronts.to_plain(), "urls": self._fronts.urls}
        for model, ended in outcomes.items():
            self._driver.count(model, ended)
        for asked, answer in answers:
            self._in_flight.discard(_key(asked))
            if answer is not None:
                self._driver.answer_probe(asked.model, asked.version, asked.probe.name, answer)
        in_flight = frozenset(self._in_flight)
        return Observed(time_s=now, engines=engines, front=front, probes_in_flight=in_flight), registry

    def _store(self, step: Step, observed: Observed, registry: dict[str, Any]) -> None:
        """Write the snapshot if something was decided, or now and then if something else has changed."""
        assert self._lease is not None
        is_urgent = bool(step.decisions) or step.models != self._models or step.has_ended
        if not is_urgent and self._clock() - self._stored_s < _SNAPSHOT_S:
            return
        content = registry | {
            "driver": self._driver.to_plain(), "has_ended": step.has_ended, "cluster": self._cluster_name,
            "replicas": _replicas(observed.engines), "front": _counts(observed.front),
        }  # fmt: skip
        text = json.dumps(content | {"driver": content["driver"] | {"now": None}})
        self._stored_s = self._clock()
        if text == self._stored:
            return
        self._check_held()
        self._state.write_snapshot(self._lease.epoch, content, observed.time_s)
        self._state.log(self._lease.epoch, step.decisions)
        self._stored = text
        for decision in step.decisions:
            logger.info("%s", describe(decision))

    def _check_held(self) -> None:
        if self._lease is None or not self._lease.is_held:
            raise LeaseLostError("it was not renewed in time")

    # ------------------------------------------------------------------ actions

    def _carry_out(self, action: Action) -> None:
        """Carry out one action, if the lease is still held. One that fails is asked for again."""
        self._check_held()
        assert self._driver.desired is not None
        config = self._driver.desired.config
        try:
            match action:
                case DeployEngines():
                    self._cluster.deploy_engines(config, action)
                    self._driver.note_deployed(action)
                case DeployFronts():
                    self._cluster.deploy_fronts(action)
                    self._driver.note_deployed(action)
                case DeleteEngines():
                    self._failures.pop((action.model, action.version), None)
                    self._cluster.delete_engines(config.name, action)
                case DeleteFronts():
                    self._cluster.delete_fronts(config.name)
                case AskProbe():
                    self._in_flight.add(_key(action))
                    self._cluster.ask(config.name, action, lambda answer: self._note_answer(action, answer))
        except ConfigError as error:
            logger.warning("%s", error)
            if isinstance(action, DeployEngines):
                self._failures[action.model.name, action.version.name] = str(error)

    def _note_answer(self, asked: AskProbe, answer: str | None) -> None:
        with self._lock:
            self._answers.append((asked, answer))


def _key(asked: AskProbe) -> tuple[str, str, str]:
    return asked.model, asked.version, asked.probe.name


def _replicas(engines: Mapping[tuple[str, str], AppHealth]) -> dict[str, dict[str, Any]]:
    """Replicas by model and version, as plain data."""
    found: dict[str, dict[str, Any]] = {}
    for (model, version), health in engines.items():
        found.setdefault(model, {})[version] = _counts(health) | {"encoders": health.encoders}
    return found


def _counts(health: AppHealth | None) -> dict[str, Any]:
    health = health or AppHealth()
    return {"ready": health.num_ready, "starting": health.num_starting, "failure": health.failure}
