"""`/fleet` and the metrics of a fleet over HTTP: a front with real engines, and a controller that the test plays."""

import threading
from dataclasses import replace

import pytest
from fleet.cluster.local_front import LocalFront
from model.hugging_face import SHAPES, make_checkpoint
from serve.monitoring import FLEET_ALERTS, assert_exported, expressions_of, undocumented
from serve.running import chat_body, image_part
from serve.scraping import Metrics

from saccade.fleet.cluster.view import DecisionView
from saccade.serve.keys import create_key, revoke_key

DECISION = DecisionView(
    number=7, time_s=1_700_000_000.0, what="ramping", reason="it keeps its objectives", model="tiny", version="may",
    share=0.25,
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("fleet") / "tiny", SHAPES[0])


@pytest.fixture(scope="module")
def front(checkpoint):
    with LocalFront(checkpoint) as front:
        yield front


def ask(front, **fields):
    response = front.http.post("/v1/chat/completions", json=chat_body([image_part()], **fields))
    assert response.status_code == 200, response.text


def test_a_front_describes_versions_replicas_and_decisions(front):
    front.add_version("june", generation=4, num_fronts=3, decisions=(DECISION,))
    front.wait_until(lambda: front.fleet()["generation"] == 4)
    found = front.fleet()
    assert (found["name"], found["front"], found["num_fronts"]) == ("photos", "front", 3)
    assert found["view_age_s"] < 60
    [model] = found["models"]
    may, june = model["versions"]
    assert (may["state"], may["share"], june["state"], june["share"]) == ("ready", 1.0, "starting", 0.0)
    assert {one["name"] for one in may["replicas"]} == {"one", "two"}
    assert june["replicas"] == []
    assert found["decisions"] == [
        {
            "number": 7, "time": 1_700_000_000.0, "what": "ramping", "reason": "it keeps its objectives",
            "model": "tiny", "version": "may", "share": 0.25,
        }
    ]  # fmt: skip
    assert str(front.replicas.version.checkpoint) not in front.http.get("/fleet").text, "paths are for operators"


def test_the_images_that_a_replica_had_are_counted(front):
    before = front.version()
    for _ in range(3):
        ask(front)
    after = front.version()
    patches = after["patches"] - before["patches"]
    assert patches > 0
    # Of three requests on two replicas, one or two find the image.
    assert after["patches_resident"] - before["patches_resident"] in (patches // 3, patches * 2 // 3)


def test_requests_in_progress_are_the_load_of_their_replica_and_those_that_continue_are_counted(checkpoint):
    with LocalFront(checkpoint) as front:
        records = []
        front.server._front.observers.append(records.append)
        asking = threading.Thread(target=ask, args=(front,), kwargs={"max_tokens": 300, "ignore_eos": True})
        asking.start()
        front.wait_until(lambda: sum(one["requests"] for one in front.version()["replicas"]) == 1)
        [busy] = [one["name"] for one in front.version()["replicas"] if one["requests"]]
        front.replicas.kill(busy)
        asking.join()
        found = front.version()
        front.wait_until(lambda: records)
    assert (found["requests_continued"], found["requests_lost"]) == (1, 0)
    [record] = records
    assert (record.replicas, record.num_continuations) == ((busy, {"one": "two", "two": "one"}[busy]), 1)
    fields = record.log_fields()
    assert (fields["replicas"], fields["continued"]) == (",".join(record.replicas), 1)


def test_without_the_controller_the_view_gets_older_and_stays(front):
    front.wait_until(lambda: front.fleet()["view_age_s"] < 2)
    view, front.view = front.view, None
    front.wait_until(lambda: front.fleet()["view_age_s"] > 2)
    assert Metrics(front.http.get("/metrics").text)["saccade:fleet_view_age_seconds"] > 2
    assert front.version()["state"] == "ready"
    ask(front)
    front.view = view
    front.wait_until(lambda: front.fleet()["view_age_s"] < 2)


def test_the_fleet_is_shown_to_holders_of_a_key_alone(checkpoint, tmp_path):
    file = tmp_path / "keys.json"
    key = create_key(file, name="me")
    with LocalFront(checkpoint, ("one",), key=key, api_keys=str(file)) as front:
        assert front.http.get("/fleet", headers={"authorization": ""}).status_code == 401
        assert front.fleet()["name"] == "photos"
        assert front.http.get("/page/server.json", headers={"authorization": ""}).json()["has_fleet"] is True
        operation = front.http.get("/openapi.json").json()["paths"]["/fleet"]["get"]
        assert operation["security"] == [{"key": []}]
        health = front.http.get("/-/healthz", headers={"authorization": ""})
        assert (health.status_code, health.text) == (200, "success")
        revoke_key(file, "me")
        front.wait_until(lambda: front.http.get("/fleet").status_code == 401)


def test_a_view_of_a_controller_that_was_replaced_is_not_shown(front):
    front.view = replace(front.view, epoch=5, generation=9)
    front.wait_until(lambda: front.fleet()["generation"] == 9)
    current, front.view = front.view, replace(front.view, epoch=4, generation=8)
    num_reports = len(front.reports)
    front.wait_until(lambda: len(front.reports) >= num_reports + 2)
    assert front.fleet()["generation"] == 9
    front.view = current


# ------------------------------------------------------------------ metrics


@pytest.fixture(scope="module")
def metrics(front):
    ask(front)
    return Metrics(front.http.get("/metrics").text)


EXPRESSIONS = expressions_of("fleet", FLEET_ALERTS)


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS, ids=[where for where, _ in EXPRESSIONS])
def test_every_metric_and_label_of_an_expression_is_exported(metrics, where, expression):
    assert_exported(metrics, where, expression)


def test_every_metric_of_a_front_is_documented(metrics):
    assert undocumented(metrics) == []


def test_metrics_of_a_fleet_are_by_version_and_replica(front, metrics):
    assert metrics["saccade:fleet_replicas_ready", "model_name=tiny", "version=may"] == 2
    assert metrics["saccade:fleet_version_share", "version=may"] == 1
    replicas = {labels["replica"] for labels, _ in metrics.samples_of("saccade:fleet_replica_queue_seconds")}
    assert replicas == {"one", "two"}
    assert metrics["saccade:fleet_fronts"] >= 1
    assert metrics["saccade:fleet_patches_total", "version=may"] > 0


def test_a_front_counts_the_tokens_of_its_requests(front):
    before = Metrics(front.http.get("/metrics").text)
    usage = front.http.post("/v1/chat/completions", json=chat_body("count", max_tokens=5, ignore_eos=True)).json()[
        "usage"
    ]
    grown = Metrics(front.http.get("/metrics").text) - before
    assert grown["vllm:generation_tokens_total", "version=may"] == usage["completion_tokens"] == 5
    assert grown["vllm:prompt_tokens_total", "version=may"] == usage["prompt_tokens"]
