"""Ray's side of scaling: a policy of Ray Serve that asks `saccade.fleet.scaling` for the number of replicas."""

from __future__ import annotations

import logging
from typing import Any

from saccade.config import decode
from saccade.fleet.scaling import Autoscaler, PoolLoad, ScalingPolicy

logger = logging.getLogger(__name__)

_DECIDE_EVERY_S = 1.0
_WOKEN_S = 1.0
"""Work that a front's call to an empty pool stands for."""


class PredictedQueueTime:
    """Keeps the predicted queue time of one version's engines. Ray calls it in each round of its controller."""

    def __init__(self, policy: dict[str, Any], min_replicas: int, max_replicas: int) -> None:
        self._autoscaler = Autoscaler(
            decode(ScalingPolicy, policy, "scaling"), min_replicas=min_replicas, max_replicas=max_replicas
        )
        self._decided_s = 0.0
        self._wanted: int | None = None
        """Replicas of the last decision."""
        self._starting_since: list[float] = []
        self._arrived: dict[Any, float] = {}

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Replicas that the pool should have."""
        now = float(context.current_time)
        if now - self._decided_s < _DECIDE_EVERY_S:
            return context.target_num_replicas, context.policy_state
        self._decided_s = now
        if self._wanted is not None and context.target_num_replicas > self._wanted:
            self._autoscaler.note_work(now)  # Ray itself starts the first replica of an empty pool, for a waiting call
        decision = self._autoscaler.decide(self._load(context, now))
        if decision.num_replicas != context.target_num_replicas:
            logger.info(
                "%s: %d replicas instead of %d (%s; %.2f work/s expected, queue %.2f s)", context.app_name,
                decision.num_replicas, context.target_num_replicas, decision.reason, decision.forecast,
                decision.predicted_queue_s,
            )  # fmt: skip
        self._wanted = decision.num_replicas
        return decision.num_replicas, context.policy_state

    def _load(self, context: Any, now: float) -> PoolLoad:
        latest = _latest(context.raw_metrics or {})
        num_ready = len(context.running_replicas)
        queued = context.total_queued_requests or 0.0
        return PoolLoad(
            time_s=now, num_ready=num_ready, starting_s=self._starting_s(context.target_num_replicas - num_ready, now),
            arrived_s=self._new_arrivals(latest.get("arrived_s", {})),
            waiting_s=_total(latest, "waiting_s") + (_WOKEN_S * queued if num_ready == 0 else 0.0),
            num_running=round(_total(latest, "num_running")), slots=max(1, round(_mean(latest, "slots"))),
            request_s=_mean(latest, "request_s"), pages_used=round(_total(latest, "pages_used")),
            pages_per_replica=round(_mean(latest, "pages")),
        )  # fmt: skip

    def _starting_s(self, num_starting: int, now: float) -> tuple[float, ...]:
        """Seconds until each replica that starts is expected to serve."""
        del self._starting_since[: max(0, len(self._starting_since) - max(0, num_starting))]
        self._starting_since += [now] * (max(0, num_starting) - len(self._starting_since))
        warm_up_s = self._autoscaler.policy.warm_up_s
        return tuple(max(0.0, warm_up_s - (now - since)) for since in self._starting_since)

    def _new_arrivals(self, totals: dict[Any, float]) -> float:
        """Work that has arrived since the decision before, from the totals of the replicas."""
        arrived = sum(max(0.0, total - self._arrived.get(replica, 0.0)) for replica, total in totals.items())
        self._arrived = dict(totals)
        return arrived


def _latest(metrics: dict[str, dict[Any, Any]]) -> dict[str, dict[Any, float]]:
    """Newest value of each metric, by replica."""
    return {
        name: {replica: float(series[-1].value) for replica, series in by_replica.items() if series}
        for name, by_replica in metrics.items()
    }


def _total(latest: dict[str, dict[Any, float]], name: str) -> float:
    return sum(latest.get(name, {}).values())


def _mean(latest: dict[str, dict[Any, float]], name: str) -> float:
    values = latest.get(name, {}).values()
    return sum(values) / len(values) if values else 0.0
