"""What a fleet does, as plain data: from its state folder alone, for `saccade fleet status` and the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from saccade.fleet.driver import Driver, finite
from saccade.fleet.lease import LEASE_S, Holder, holder_of
from saccade.fleet.state import Desired, FleetState, Snapshot
from saccade.fleet.versions import ModelVersions

_ALIVE_S = 2 * LEASE_S
"""Seconds after its last renewal for which a controller is called alive. Clocks of machines may differ a little."""
_NUM_DECISIONS = 20


def is_alive(holder: Holder | None, now: float) -> bool:
    """Whether a controller holds the lease, as far as its heartbeat says."""
    if holder is None or holder.is_released:
        return False
    return holder.renewed_at is None or now - holder.renewed_at < _ALIVE_S


def fleet_status(state: FleetState, now: float) -> dict[str, Any] | None:
    """Everything that `status` prints; None: the folder has no fleet."""
    desired = state.desired()
    if desired is None:
        return None
    holder, snapshot = holder_of(state.objects), state.snapshot()
    return {
        "fleet": desired.config.name,
        "state": state.objects.url,
        "desired": {
            "generation": desired.generation, "command": desired.command, "by": desired.by, "time_s": desired.time_s,
        },
        "controller": _controller(holder, now),
        "is_up": is_alive(holder, now) and not (desired.is_down and _has_ended(snapshot)),
        **_content(desired, snapshot),
    }  # fmt: skip


def _controller(holder: Holder | None, now: float) -> dict[str, Any] | None:
    if holder is None:
        return None
    age_s = None if holder.renewed_at is None else max(0.0, now - holder.renewed_at)
    owner = None if holder.owner is None else str(holder.owner)
    return {"epoch": holder.epoch, "owner": owner, "renewed_s_ago": age_s, "is_alive": is_alive(holder, now)}


def _has_ended(snapshot: Snapshot | None) -> bool:
    return snapshot is None or bool(snapshot.content["has_ended"])


def _content(desired: Desired, snapshot: Snapshot | None) -> dict[str, Any]:
    """What the controller has written."""
    if snapshot is None:
        return {"generation": None, "models": [], "fronts": {"urls": [], "ready": 0, "starting": 0}, "decisions": []}
    driver, content = Driver.from_plain(snapshot.content["driver"]), snapshot.content
    replicas = content["replicas"]
    return {
        "generation": None if driver.desired is None else driver.desired.generation,
        "models": [_model(one, replicas.get(name, {})) for name, one in driver.models.items()],
        "fronts": content["front"] | {"urls": [] if content["has_ended"] else content["urls"]},
        "decisions": list(driver.recent)[-_NUM_DECISIONS:],
    }


def _model(versions: ModelVersions, replicas: Mapping[str, Any]) -> dict[str, Any]:
    """One model, with its versions, rollouts and experiments."""
    shares, bounds = versions.view().shares, versions.bounds()
    return {
        "name": versions.model, "progress": versions.progress, "reason": versions.reason, "refusal": versions.refusal,
        "versions": [
            {
                "name": one.config.name, "state": one.state, "share": shares.get(one.config.name, 0.0),
                "checkpoint": one.config.checkpoint, "bounds": bounds.get(one.config.name),
                "replicas": replicas.get(one.config.name, {"ready": 0, "starting": 0, "failure": None}),
                "requests": versions.runs[one.config.name].num_requests,
                "errors": versions.runs[one.config.name].num_errors,
            }
            for one in versions.view().versions
        ],
        "rollouts": [
            {
                "version": name, "state": str(one.rollout.state), "share": one.share, "target": one.target,
                "next_share": one.rollout.next_share, "evidence": finite(list(one.evidence)),
            }
            for name, one in versions.introductions.items()
        ],
        "experiments": experiment_reports(versions),
        "rollback_to": [{"version": one.name, "traffic": one.traffic} for one in versions.rollback_target],
    }  # fmt: skip


def experiment_reports(versions: ModelVersions) -> list[dict[str, Any]]:
    """Results of a model's experiments so far."""
    reports: list[dict[str, Any]] = finite([one.report() for one in versions.experiments.runs.values()])
    return reports


def describe(decision: Mapping[str, Any]) -> str:
    """A decision in one line."""
    name = " ".join(part for part in (decision.get("model"), decision.get("version")) if part)
    share = decision.get("share")
    what = decision["what"] if not share else f"{decision['what']} {100 * share:.3g} %"
    return f"{name}: {what} ({decision['reason']})" if name else f"{what}: {decision['reason']}"
