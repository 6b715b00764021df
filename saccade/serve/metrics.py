"""Prometheus metrics of a server, under the names that dashboards, autoscalers and routers for vLLM know.

    RequestRecord of an ended request -> ServerMetrics.observe -> histograms and counters \\
    engines, preprocessing workers, processes --------- read at each scrape ---------------> render -> /metrics

Names with the prefix `vllm:` mean what they mean in vLLM; what vLLM does not have has the prefix `saccade:`. The
registry is the server's own, so that several servers can live in one process. Every metric of a model has the label
`model_name`, and `version` where models have versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from saccade.serve.engine_metrics import ModelCollector, memory_of
from saccade.serve.request_metrics import RequestMetrics

if TYPE_CHECKING:
    from saccade.serve.admission import Admission
    from saccade.serve.engine_owner import EngineOwner
    from saccade.serve.record import RequestRecord

CONTENT_TYPE = CONTENT_TYPE_LATEST
"""Content type of the metrics page."""

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_CLIENT_LEFT = 499
"""Status that proxies log for a request whose client left before the response."""


class ServerMetrics:
    """All metrics of one server. Requests are observed in the event loop; any thread may render."""

    def __init__(self, *, has_versions: bool = False) -> None:
        """`has_versions`: models have the label `version`."""
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the page; nothing reads them
        self._label_names = ("model_name", "version") if has_versions else ("model_name",)
        self._registry = CollectorRegistry()
        self._requests = RequestMetrics(self._registry, self._label_names)
        self._models = _Models()
        self._http = Counter(
            "http_requests",
            "HTTP responses by route and status code.",
            ["method", "handler", "status"],
            registry=self._registry,
        )
        ProcessCollector(registry=self._registry)
        self._registry.register(self._models)

    def add(
        self, model_name: str, version: str | None, owner: EngineOwner, admission: Callable[[], Admission | None]
    ) -> None:
        """Export the metrics of a model, or of a version of it."""
        labels = self._labels(model_name, version)
        self._requests.add(labels)
        named = dict(zip(self._label_names, labels, strict=True))
        self._models.by_labels[labels] = ModelCollector(named, owner, admission)

    def remove(self, model_name: str, version: str | None) -> None:
        """Stop exporting the metrics of a model. What its last requests still report is dropped."""
        labels = self._labels(model_name, version)
        self._requests.remove(labels)
        self._models.by_labels.pop(labels, None)

    def _labels(self, model_name: str, version: str | None) -> tuple[str, ...]:
        return (model_name, version or "")[: len(self._label_names)]

    def observe(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        self._requests.observe(self._labels(record.model, record.version), record)

    def observe_http(self, method: str, route: str, status: int) -> None:
        """Count an HTTP response. `route` is an entry of the route table: a client cannot make up a label."""
        self._http.labels(method if method in _METHODS else "other", route, str(status or _CLIENT_LEFT)).inc()

    def register(self, collector: Collector) -> None:
        """Export other metrics too."""
        self._registry.register(collector)

    def collect(self) -> Iterable[Metric]:
        """Return all metrics as they are now."""
        return self._registry.collect()

    def render(self) -> bytes:
        """Write the metrics page."""
        return generate_latest(self._registry)


class _Models(Collector):
    """Exports what is read of all models at each scrape, and the memory of their processes."""

    def __init__(self) -> None:
        self.by_labels: dict[tuple[str, ...], ModelCollector] = {}

    def collect(self) -> Iterator[Metric]:
        """Return each metric once, with the samples of all models."""
        models = list(self.by_labels.values())
        found: dict[str, Metric] = {}
        for model in models:
            for metric in model.collect():
                found.setdefault(metric.name, metric)
                if found[metric.name] is not metric:
                    found[metric.name].samples.extend(metric.samples)
        yield from found.values()
        if engines := {id(model.engine): model.engine for model in models if model.engine is not None}:
            yield memory_of(engines.values())
