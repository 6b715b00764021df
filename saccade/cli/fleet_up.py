"""`saccade fleet up`: the processes of a fleet, on a Ray of this machine or on a cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import typer

from saccade.cli.fleet_report import Reporter
from saccade.errors import ConfigError, UserError
from saccade.fleet.lease import LEASE_S, RENEW_S, Candidate, Lease, LeaseLostError, Owner, holder_of
from saccade.fleet.operations import Follower, Outcome, request_down, request_up
from saccade.fleet.state import FleetState
from saccade.fleet.status import is_alive

if TYPE_CHECKING:
    from saccade.fleet.config import FleetConfig

_LOOK_S = 0.5
"""Seconds between two looks at a fleet that runs."""
_LOAD_S = 60.0
"""Seconds in which a front loads what it needs of a version."""
_GRACE_S = 60.0
"""Seconds after the time for running requests until a fleet that does not end is stopped."""


class _TerminatedError(BaseException):
    """The command was asked to end by SIGTERM."""


def up_local(config: FleetConfig, report: Reporter) -> None:
    """Start a Ray on this machine and the fleet on it; stay until the fleet ends, or until a signal ends it."""
    state, cluster = FleetState(config.state), f"local Ray of process {os.getpid()} on {socket.gethostname()}"
    lease = _acquire(state, config.name, cluster, report)
    from saccade.fleet.cluster.ray_session import check_resources, local_ray, log_folder

    with _kept(lease), local_ray(), _sigterm_raises():
        check_resources(config)
        change = request_up(state, config, time.time(), is_new_cluster=True)
        report.say(f"starting fleet {config.name}; logs are in {log_folder()}", logs=log_folder())
        try:
            _deploy(config, cluster)
            outcome = _wait_until_ready(state, change.generation, config, report, after_epoch=lease.epoch)
            if outcome.without_users:
                _end(state, config, report)
                raise typer.Exit(1)
            _watch(state, change.generation, report)
        except (KeyboardInterrupt, _TerminatedError) as interruption:
            _end(state, config, report)
            if isinstance(interruption, KeyboardInterrupt):
                raise typer.Exit(130) from interruption


def up_on_cluster(config: FleetConfig, report: Reporter) -> None:
    """Deploy the fleet on a cluster that runs, or change it there, and wait until it is ready."""
    from saccade.fleet.cluster.ray_session import check_resources, cluster_name, connected_ray, has_controller

    assert config.address is not None
    state = FleetState(config.state)
    with connected_ray(config.address):
        cluster = cluster_name()
        holder = holder_of(state.objects)
        owner = None if holder is None else holder.owner
        if is_alive(holder, time.time()) and (owner is None or owner.cluster != cluster):
            raise _refusal(config.name, owner)
        check_resources(config)
        is_new_cluster = owner is None or owner.cluster != cluster
        change = request_up(state, config, time.time(), is_new_cluster=is_new_cluster)
        is_current = owner is not None and owner.saccade == Owner.of_this_process(cluster).saccade
        after_epoch = 0
        if not (has_controller(config.name) and is_current):
            after_epoch = 0 if holder is None else holder.epoch
            _deploy(config, cluster)
        outcome = _wait_until_ready(state, change.generation, config, report, after_epoch=after_epoch)
        raise typer.Exit(1 if outcome.reasons else 0)


def _deploy(config: FleetConfig, cluster: str) -> None:
    from saccade.fleet.cluster.controller import deploy_controller

    deploy_controller(config.name, config.state, cluster)


def _wait_until_ready(
    state: FleetState, generation: int, config: FleetConfig, report: Reporter, *, after_epoch: int
) -> Outcome:
    """Follow the change; print where the fleet listens."""
    from saccade.fleet.cluster.ray_session import controller_failure

    def check() -> None:
        if reason := controller_failure(config.name):
            raise ConfigError(f"the controller does not start: {reason}")

    outcome = report.follow(state, generation, after_epoch=after_epoch, check=check)
    if outcome.urls and not outcome.without_users:
        for url in outcome.urls:
            _wait_until_it_answers(url)
        report.say(f"{' '.join(outcome.urls)}  fleet {config.name} is ready", urls=list(outcome.urls))
    return outcome


def _wait_until_it_answers(url: str) -> None:
    """Wait for a front that loads tokenizers yet. One that this machine cannot reach is not waited for."""
    deadline = time.monotonic() + _LOAD_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=_LOAD_S):  # noqa: S310
                return
        except urllib.error.HTTPError as error:
            error.close()
            time.sleep(_LOOK_S)
        except OSError:
            return


def _watch(state: FleetState, generation: int, report: Reporter) -> None:
    """Print what is decided, until the fleet ends."""
    follower = Follower(state, generation)
    with report.progress() as on_progress:
        while True:
            progress, outcome = follower.look()
            on_progress(progress)
            if outcome is not None and outcome.has_ended:
                return
            time.sleep(_LOOK_S)


def _end(state: FleetState, config: FleetConfig, report: Reporter) -> None:
    """Drain and end the fleet; a second signal ends it at once."""
    report.say("ending the fleet when the requests that run are finished; Ctrl-C stops them", ending=True)
    try:
        change = request_down(state, time.time())
        if change is not None:
            report.follow(state, change.generation, timeout_s=config.server.drain_timeout_s + _GRACE_S)
    except (KeyboardInterrupt, _TerminatedError):
        return


# ------------------------------------------------------------------ one `up` at a time


def _acquire(state: FleetState, fleet: str, cluster: str, report: Reporter) -> Lease:
    """Take the lease for the controller that follows; ConfigError: the fleet is up elsewhere."""
    candidate = Candidate(state.objects, Owner.of_this_process(cluster))
    first = holder_of(state.objects)
    began_s, has_said = time.monotonic(), False
    while (lease := candidate.try_acquire()) is None:
        holder = holder_of(state.objects)
        is_renewed = first is not None and holder is not None and holder.heartbeat != first.heartbeat
        waited_s = time.monotonic() - began_s
        if is_renewed or waited_s > 2 * LEASE_S:
            raise _refusal(fleet, None if holder is None else holder.owner)
        if waited_s > 2 * RENEW_S and not has_said:
            report.say(
                f"the fleet was up before: waiting {LEASE_S:.0f} s to see whether it is still", waiting_s=LEASE_S
            )
            has_said = True
        time.sleep(_LOOK_S)
    return lease


def _refusal(fleet: str, owner: Owner | None) -> ConfigError:
    return ConfigError(
        f"fleet {fleet} is up already, by {owner or 'an unknown process'}. "
        "Change it with saccade fleet update, or end it with saccade fleet down"
    )


@contextmanager
def _kept(lease: Lease) -> Iterator[None]:
    """Renew the lease until the controller has taken it over; give it back in the end if none has."""
    is_over = threading.Event()

    def renew() -> None:
        with contextlib.suppress(LeaseLostError, OSError, UserError):
            while not is_over.wait(RENEW_S):
                lease.renew()

    renewing = threading.Thread(target=renew, name="saccade-lease", daemon=True)
    renewing.start()
    try:
        yield
    finally:
        is_over.set()
        renewing.join()
        with contextlib.suppress(LeaseLostError):
            lease.release()


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    def terminate(number: int, frame: FrameType | None) -> None:
        raise _TerminatedError

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
