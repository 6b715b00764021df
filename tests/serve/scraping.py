"""Read a metrics page with Prometheus' own parser."""

import time
from collections import defaultdict

from prometheus_client.parser import text_string_to_metric_families
from serve.running import TIMEOUT_S


class Metrics:
    """One scrape. `metrics[name, "label=value", ...]` is the sum over samples with these labels."""

    def __init__(self, text):
        self.text = text
        self.types, self.documentation, self._samples = {}, {}, defaultdict(list)
        for family in text_string_to_metric_families(text):
            self.types[family.name], self.documentation[family.name] = family.type, family.documentation
            for sample in family.samples:
                self._samples[sample.name].append((sample.labels, sample.value))

    @property
    def names(self):
        """Names of samples, as queries use them."""
        return set(self._samples)

    def samples_of(self, name):
        """Samples of a metric, whatever its type."""
        names = (name, f"{name}_total", f"{name}_bucket")
        return [sample for one in names for sample in self._samples.get(one, ())]

    def __getitem__(self, key):
        name, *wanted = (key,) if isinstance(key, str) else key
        assert name in self._samples, f"there is no {name}"
        pairs = [pair.split("=", 1) for pair in wanted]
        return sum(v for labels, v in self._samples[name] if all(labels[label] == value for label, value in pairs))

    def __sub__(self, before):
        return _Growth(self, before)


class _Growth:
    def __init__(self, after, before):
        self._after, self._before = after, before

    def __getitem__(self, key):
        name = key if isinstance(key, str) else key[0]
        return self._after[key] - (self._before[key] if name in self._before.names else 0)


def wait_for_growth(server, before, key, amount):
    """A request is counted when its last byte has been sent, which its reader may see first."""
    deadline = time.monotonic() + TIMEOUT_S
    while (grown := (scrape(server) - before)[key]) < amount:
        assert time.monotonic() < deadline, f"{key} grew by {grown}, not {amount}"
        time.sleep(0.02)
    assert grown == amount


def wait_until_idle(server):
    """Wait until all requests of earlier tests have ended and are counted; return the metrics."""
    deadline, before = time.monotonic() + TIMEOUT_S, None
    while True:
        metrics = scrape(server)
        still_open = [metrics["vllm:num_requests_running"], metrics["vllm:num_requests_waiting"]]
        still_open += [value for _, value in metrics.samples_of("saccade:requests_by_stage")]
        still_open += [value for _, value in metrics.samples_of("saccade:admission_usage")]
        counted = {name: metrics[name] for name in ("vllm:request_success_total", "http_requests_total")}
        counted["http_requests_total"] -= metrics["http_requests_total", "handler=/metrics"]
        if not any(still_open) and counted == before:
            return metrics
        assert time.monotonic() < deadline, f"requests are still open: {still_open}"
        before = counted
        time.sleep(0.05)


def scrape(server):
    response = server.http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    return Metrics(response.text)
