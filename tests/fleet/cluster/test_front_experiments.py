"""Experiments at a front over HTTP: who is answered by which version, and what the front reports about it."""

from dataclasses import replace

import pytest
from fleet.cluster.local_front import LocalFront
from model.hugging_face import SHAPES, make_checkpoint
from serve.running import chat_body

from saccade.fleet.cluster.names import ENGINE, engine_app
from saccade.fleet.cluster.running_replicas import note_replicas
from saccade.fleet.cluster.view import ExperimentView, VersionView
from saccade.fleet.experiments import Experiment, Variant

MONTHS = Experiment(
    name="months", share=0.6, variants=(Variant(name="old", version="may"), Variant(name="new", version="june"))
)
USERS = [f"user {number}" for number in range(16)]


@pytest.fixture(scope="module")
def front(tmp_path_factory):
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("fleet") / "tiny", SHAPES[0])
    with LocalFront(checkpoint, ("one",)) as front:
        front.replicas.start("two", version="june")
        note_replicas((engine_app("photos", "tiny", "june"), ENGINE), frozenset({"two"}))
        show(front, is_running=True)
        front.wait_until(lambda: ask(front, next(filter(is_new, USERS))) == "june")
        yield front


def is_new(user):
    return MONTHS.has(user) and MONTHS.variant_of(user).name == "new"


def show(front, *, is_running, new="june"):
    """Have the controller say that may has all users by traffic, and whether the experiment runs."""
    [model] = front.view.models
    may = model.versions[0]
    others = tuple(
        VersionView(config=replace(may.config, name=name, traffic=0.0), state="ready")
        for name in dict.fromkeys(("june", new))
    )
    config = replace(MONTHS, variants=(MONTHS.variants[0], replace(MONTHS.variants[1], version=new)))
    generation = front.view.generation + 1
    experiments = (ExperimentView(config=config, is_running=is_running),)
    model = replace(model, versions=(may, *others), experiments=experiments)
    front.view = replace(front.view, models=(model,), generation=generation)
    front.wait_until(lambda: front.fleet()["generation"] == generation)


def ask(front, user):
    response = front.http.post("/v1/chat/completions", json=chat_body(model="tiny", user=user, max_tokens=2))
    assert response.status_code == 200, response.text
    return response.headers["saccade-version"]


def reported(front):
    """Outcomes by user."""
    return {one.user: one for report in front.reports for one in report.outcomes.get("tiny", ())}


def test_users_of_an_experiment_are_answered_by_their_variant_and_reported_with_it(front):
    front.reports.clear()
    asked = {user: ask(front, user) for user in USERS}
    assert set(asked.values()) == {"may", "june"}
    front.wait_until(lambda: reported(front).keys() >= set(USERS))
    for user, version in asked.items():
        variant = MONTHS.variant_of(user) if MONTHS.has(user) else None
        assert version == (variant.version if variant else "may")
        outcome = reported(front)[user]
        assert outcome.version == version
        assert (outcome.experiment, outcome.variant) == (("months", variant.name) if variant else (None, None))


def test_while_an_experiment_pauses_its_users_follow_the_traffic_and_are_reported_as_its_users(front):
    show(front, is_running=False)
    front.reports.clear()
    assert {ask(front, user) for user in USERS} == {"may"}
    front.wait_until(lambda: reported(front).keys() >= set(USERS))
    for user in USERS:
        outcome = reported(front)[user]
        assert (outcome.experiment, outcome.variant) == ("months" if MONTHS.has(user) else None, None)
    show(front, is_running=True)


def test_a_version_that_this_front_cannot_use_yet_is_no_reason_to_refuse_requests(front):
    show(front, is_running=True, new="july")
    assert {ask(front, user) for user in USERS} == {"may"}
    show(front, is_running=True)
    assert {ask(front, user) for user in USERS} == {"may", "june"}


def test_the_share_of_a_version_counts_its_users_by_experiments(front):
    assert [front.version(name)["share"] for name in ("may", "june")] == pytest.approx([0.7, 0.3])
