"""`/metrics`: the names that dashboards know, and counters that add up."""

import time
from itertools import pairwise

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from serve.running import TIMEOUT_S, image_part
from serve.scraping import scrape, wait_for_growth, wait_until_idle

from saccade.engine.core.statistics import Statistics
from saccade.serve.engine_metrics import _Totals
from saccade.serve.metrics_history import MetricsHistory

GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info")
COUNTERS = (
    "prompt_tokens", "generation_tokens", "request_success", "num_preemptions", "prefix_cache_queries",
    "prefix_cache_hits",
    "mm_cache_queries", "mm_cache_hits", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
)  # fmt: skip
HISTOGRAMS = (
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
    "request_prompt_tokens",
    "request_generation_tokens", "request_time_per_output_token_seconds", "request_params_n",
    "request_params_max_tokens",
    "request_queue_time_seconds",
)  # fmt: skip


def test_the_page_has_the_names_and_types_that_dashboards_for_vllm_expect(server):
    metrics = scrape(server)
    for kind, names in (("gauge", GAUGES), ("counter", COUNTERS), ("histogram", HISTOGRAMS)):
        for name in names:
            assert metrics.types[f"vllm:{name}"] == kind
            assert metrics.documentation[f"vllm:{name}"].endswith((".", "1."))
            assert all(labels["model_name"] == "tiny" for labels, _ in metrics.samples_of(f"vllm:{name}"))


def test_counters_grow_by_what_the_responses_say(server):
    image = [image_part(seed=77), {"type": "text", "text": "what is it"}]
    before = wait_until_idle(server)
    plain = server.chat("a text of its own", ignore_eos=True).json()["usage"]
    chunks = server.chunks(image, ignore_eos=True, stream_options={"include_usage": True})
    again = server.chat(image, ignore_eos=True).json()["usage"]
    wait_for_growth(server, before, "vllm:e2e_request_latency_seconds_count", 3)
    grown = wait_until_idle(server) - before
    usages = [plain, chunks[-1]["usage"], again]
    assert grown["vllm:request_success_total", "finished_reason=length"] == 3
    assert grown["vllm:prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages)
    assert grown["vllm:generation_tokens_total"] == 24
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert grown["vllm:prefix_cache_hits_total"] == cached > 0
    assert grown["vllm:mm_cache_queries_total"] == 2
    assert grown["vllm:mm_cache_hits_total"] == 1
    assert grown["saccade:images_encoded_total"] == grown["saccade:encoder_cache_queries_total"] == 1
    for stage in ("decode", "preprocess", "encode"):
        assert grown[f"saccade:image_{stage}_seconds_count"] == 1
        assert 0 < grown[f"saccade:image_{stage}_seconds_sum"] < grown["vllm:e2e_request_latency_seconds_sum"]
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_params_n",
        "request_queue_time_seconds",
    ):
        assert grown[f"vllm:{name}_count"] == 3
    assert grown["vllm:request_generation_tokens_sum"] == 24
    assert 1 <= grown["vllm:inter_token_latency_seconds_count"] <= 7  # gaps of the streamed answer
    assert grown["http_requests_total", "handler=/v1/chat/completions", "status=200"] == 3


def test_an_idle_server_has_no_request_and_no_page_in_use(server):
    before = wait_until_idle(server)
    server.chat()
    wait_for_growth(server, before, "vllm:request_success_total", 1)
    metrics = wait_until_idle(server)
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert metrics[name] == 0
    assert sum(value for _, value in metrics.samples_of("saccade:requests_by_stage")) == 0
    assert {labels["bound"]: share for labels, share in metrics.samples_of("saccade:admission_usage")} == {
        "queue": 0, "kv_cache": 0, "encoder": 0, "media": 0
    }  # fmt: skip
    assert metrics["saccade:admission_refusals_total"] == 0
    assert metrics["saccade:server_state", "state=ready"] == 1
    for process in ("front", "core", "workers"):
        assert metrics["saccade:process_resident_memory_bytes", f"process={process}"] > 10**7


def test_refused_requests_are_counted_by_code_and_paths_of_clients_do_not_become_labels(server):
    before = wait_until_idle(server)
    server.chat(foo=1)
    server.http.get("/made-up-1")
    server.http.get("/made-up-2")
    server.http.request("PROPFIND", "/v1/models")
    wait_for_growth(server, before, ("http_requests_total", "method=other"), 1)
    after = wait_until_idle(server)
    grown = after - before
    assert grown["saccade:request_errors_total", "code=unknown_parameter"] == 1
    assert grown["http_requests_total", "handler=none", "status=404"] == 2
    assert grown["http_requests_total", "method=other"] == 1
    assert "made-up" not in after.text
    assert "PROPFIND" not in after.text


def test_totals_continue_when_a_restarted_core_counts_from_zero():
    totals = _Totals()
    totals.update(Statistics(num_steps=10, num_output_tokens=40))
    totals.update(Statistics(num_steps=12, num_output_tokens=50))
    assert totals.update(Statistics(num_steps=1, num_output_tokens=3))["num_output_tokens"] == 53
    assert totals.update(Statistics(num_steps=2, num_output_tokens=7))["num_output_tokens"] == 57


def test_the_history_has_what_each_interval_added_and_forgets_the_oldest_samples():
    registry = CollectorRegistry()
    done = Counter("vllm:request_success", "Requests.", ["finished_reason"], registry=registry)
    running = Gauge("vllm:num_requests_running", "Requests.", registry=registry)
    tokens = Counter("vllm:generation_tokens", "Tokens.", registry=registry)
    first = Histogram("vllm:time_to_first_token_seconds", "Seconds.", buckets=(0.1, 1), registry=registry)
    history = MetricsHistory(capacity=3)
    for number in range(5):
        done.labels("stop").inc()
        done.labels("length").inc()
        running.set(number)
        tokens.inc(10 * number)
        for seconds in [0.05] * number + [7]:
            first.observe(seconds)
        history.record(100.0 + number, registry.collect())
    recorded = history.since(0)
    assert recorded["at"] == [102, 103, 104]
    assert recorded["values"]["vllm:num_requests_running"] == [2, 3, 4]
    assert recorded["values"]["vllm:request_success_total"] == [6, 8, 10]
    assert recorded["values"]["vllm:kv_cache_usage_perc"] == [None] * 3
    assert recorded["increases"]["vllm:generation_tokens_total"] == [20, 30, 40]
    assert recorded["histograms"]["vllm:time_to_first_token_seconds"] == {
        "bounds": [0.1, 1],
        "observations": [[(0, 2), (2, 1)], [(0, 3), (2, 1)], [(0, 4), (2, 1)]],
    }
    assert history.since(103.0)["at"] == [104]


def test_the_history_of_a_restarted_counter_counts_from_zero():
    history = MetricsHistory()
    for counts in ((5, 3), (2, 1)):
        registry = CollectorRegistry()
        Counter("vllm:generation_tokens", "Tokens.", registry=registry).inc(counts[0])
        first = Histogram("vllm:time_to_first_token_seconds", "Seconds.", buckets=(1,), registry=registry)
        for _ in range(counts[1]):
            first.observe(0.5)
        history.record(counts[0], registry.collect())
    recorded = history.since(0)
    assert recorded["increases"]["vllm:generation_tokens_total"] == [5, 2]
    assert recorded["histograms"]["vllm:time_to_first_token_seconds"]["observations"] == [[(0, 3)], [(0, 1)]]


def test_the_history_loses_nothing_when_a_model_is_removed():
    history, registry = MetricsHistory(), CollectorRegistry()
    tokens = Counter("vllm:generation_tokens", "Tokens.", ["model_name"], registry=registry)
    first = Histogram("vllm:time_to_first_token_seconds", "Seconds.", ["model_name"], buckets=(1,), registry=registry)
    pages = Gauge("vllm:kv_cache_usage_perc", "Share.", ["model_name"], registry=registry)
    for number, models in enumerate((["old", "new"], ["new"], ["old", "new"])):
        for model in models:
            tokens.labels(model).inc(100 if model == "old" else 1)
            first.labels(model).observe(0.5)
            pages.labels(model).set(0.6 if model == "old" else 0.7)
        if "old" not in models:
            for metric in (tokens, first, pages):
                metric.remove("old")
        history.record(number, registry.collect())
    recorded = history.since(-1)
    assert recorded["increases"]["vllm:generation_tokens_total"] == [101, 1, 101]
    assert recorded["histograms"]["vllm:time_to_first_token_seconds"]["observations"] == [[(0, 2)], [(0, 1)], [(0, 2)]]
    assert recorded["values"]["vllm:kv_cache_usage_perc"] == [0.7] * 3


def test_the_server_records_its_metrics_before_anyone_asks(server):
    before = wait_until_idle(server)
    server.chunks("something to record", ignore_eos=True)
    wait_for_growth(server, before, "vllm:request_success_total", 1)
    totals = wait_until_idle(server)
    deadline, recorded = time.monotonic() + TIMEOUT_S, {"at": []}
    while (
        not recorded["at"]
        or recorded["values"]["vllm:request_success_total"][-1] != totals["vllm:request_success_total"]
    ):
        assert time.monotonic() < deadline, recorded
        time.sleep(0.1)
        recorded = server.http.get("/metrics/history").json()
    assert (
        sum(filter(None, recorded["increases"]["vllm:generation_tokens_total"]))
        == totals["vllm:generation_tokens_total"]
    )
    first_token = recorded["histograms"]["vllm:time_to_first_token_seconds"]
    counted = sum(count for sample in first_token["observations"] for _, count in sample)
    assert counted == totals["vllm:time_to_first_token_seconds_count"]
    assert all(later > earlier for earlier, later in pairwise(recorded["at"]))
    newest = recorded["at"][-1]
    assert newest not in server.http.get("/metrics/history", params={"after": newest}).json()["at"]
    assert server.http.get("/metrics/history", params={"after": "soon"}).status_code == 400
