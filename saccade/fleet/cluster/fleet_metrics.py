"""Prometheus metrics of a front about the fleet: replicas, versions and their traffic, requests that were continued."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from saccade.fleet.cluster.replica_set import ReplicaSet

if TYPE_CHECKING:
    from saccade.fleet.cluster.fleet_models import FleetModels

_LABELS = ("model_name", "version")


class FleetCollector(Collector):
    """Reads the state of a front at each scrape."""

    def __init__(self, models: FleetModels) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """Return all metrics of the fleet."""
        yield GaugeMetricFamily(
            "saccade:fleet_view_age_seconds", "Time since the controller's last answer to this front.",
            self._models.view_age_s,
        )  # fmt: skip
        yield GaugeMetricFamily(
            "saccade:fleet_fronts", "Fronts that are alive, as the controller says.", self._models.view.num_fronts
        )
        replicas = self._models.replicas()
        ready = {labels: float(one.num_ready) for labels, one in replicas.items()}
        shares = {
            (model.name, version): share
            for model in self._models.view.models
            for version, share in model.shares.items()
        }  # fmt: skip
        encoders = {
            (model.name, one.config.name): float(one.num_encoders)
            for model in self._models.view.models
            for one in model.versions
            if one.num_encoders is not None
        }
        yield _gauges("saccade:fleet_encoders_ready", "Encoder replicas that serve.", encoders)
        yield _gauges("saccade:fleet_replicas_ready", "Engine replicas that get requests.", ready)
        yield _gauges("saccade:fleet_version_share", "Share of a model's users that a version has.", shares)
        counts: list[tuple[str, str, Callable[[ReplicaSet], float]]] = [
            ("requests_continued", "Requests that continued on another replica.", lambda one: one.num_continued),
            ("requests_lost", "Requests that lost their replica and could not continue.", lambda one: one.num_lost),
            ("patches", "Patches of images in requests.", lambda one: one.num_patches),
            ("patches_resident", "Those of images that the replica had.", lambda one: one.num_resident_patches),
        ]
        for name, help_text, read in counts:
            counter = CounterMetricFamily(f"saccade:fleet_{name}", help_text, labels=_LABELS)
            for labels, one in replicas.items():
                counter.add_metric(labels, read(one))
            yield counter
        yield from _loads(replicas)


def _loads(replicas: Mapping[tuple[str, str], ReplicaSet]) -> Iterator[Metric]:
    """Load of each replica, as this front sees it."""
    running = GaugeMetricFamily(
        "saccade:fleet_replica_requests", "Requests on a replica.", labels=(*_LABELS, "replica")
    )
    queued = GaugeMetricFamily(
        "saccade:fleet_replica_queue_seconds", "Work that waits on a replica.", labels=(*_LABELS, "replica")
    )
    pooled = GaugeMetricFamily(
        "saccade:fleet_replica_pooled_patches", "Patches that encoder replicas have encoded for a replica.",
        labels=(*_LABELS, "replica"),
    )  # fmt: skip
    late = GaugeMetricFamily(
        "saccade:fleet_replica_late_patches", "Patches that it asked encoder replicas for, and encoded itself.",
        labels=(*_LABELS, "replica"),
    )  # fmt: skip
    for labels, one in replicas.items():
        for load in one.loads():
            running.add_metric((*labels, load.name), load.num_running)
            queued.add_metric((*labels, load.name), load.queued_s)
            pooled.add_metric((*labels, load.name), load.pooled_patches)
            late.add_metric((*labels, load.name), load.late_patches)
    yield from (running, queued, pooled, late)


def _gauges(name: str, help_text: str, values: Mapping[tuple[str, str], float]) -> Metric:
    gauge = GaugeMetricFamily(name, help_text, labels=_LABELS)
    for labels, value in values.items():
        gauge.add_metric(labels, value)
    return gauge
