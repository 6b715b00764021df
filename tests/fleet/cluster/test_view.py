"""Messages between fronts and the controller: what is sent is what is read, and other versions are refused."""

from collections import Counter
from dataclasses import replace

import msgpack
import pytest

from saccade.engine.config import EngineConfig
from saccade.errors import ConfigError
from saccade.fleet.cluster.view import (
    MESSAGE_VERSION,
    Assignment,
    DecisionView,
    ExperimentView,
    FleetView,
    FrontReport,
    ModelView,
    VersionView,
    newest_decisions,
)
from saccade.fleet.config import FleetConfig, ModelConfig, VersionConfig
from saccade.fleet.driver import Driver
from saccade.fleet.experiments import Experiment, Variant
from saccade.fleet.objectives import Outcome
from saccade.fleet.split import Split, SplitEntry
from saccade.fleet.state import Desired
from saccade.serve.rate_limit import Consumption

REPORT = FrontReport(
    front="front-1", number=7, url="http://127.0.0.1:8000",
    outcomes={
        "assistant": (
            Outcome(user="ann", version="may", values={"errors": 0.0, "ttft": 0.25}),
            Outcome(user="bob", version="may", values={"errors": 1.0}, experiment="quantized", variant="bf16"),
        )
    },
    consumption={"a" * 64: Consumption(requests=3, tokens=-20)}, poison=(b"\x00\xff",),
)  # fmt: skip
VERSION = VersionConfig(name="may", checkpoint="/c/may", traffic=100.0)
VERSIONS = (
    VersionView(config=VersionConfig(name="may", checkpoint="/c/may", traffic=90.0), state="ready"),
    VersionView(
        config=VersionConfig(
            name="june", checkpoint="/c/june", traffic=10.0, adapters={"receipts": "/a/receipts"},
            engine=EngineConfig(max_adapters=4),
        ),
        state="probing",
    ),
)  # fmt: skip
SPLIT = Split(entries=(SplitEntry(rollout="assistant/june@2", version="june", share=0.1),), default="may")
QUANTIZED = Experiment(
    name="quantized", share=0.5, metrics=("tpot",),
    variants=(Variant(name="bf16", version="may"), Variant(name="int4", version="june", proportion=3.0)),
)  # fmt: skip
MODEL = ModelView(
    name="assistant", versions=VERSIONS, split=SPLIT,
    experiments=(ExperimentView(config=QUANTIZED, is_running=True),),
)  # fmt: skip
VIEW = FleetView(
    epoch=3, generation=2, models=(MODEL,), num_fronts=2,
    consumption={"b" * 64: Consumption(requests=1, tokens=100)}, poison=frozenset({b"x", b"y"}),
    reports={"assistant": [{"experiment": "quantized", "is_running": True, "variants": {"bf16": {"users": 3}}}]},
    decisions=(
        DecisionView(number=1, time_s=1_700_000_000.5, what="update", reason="generation 2 by ann"),
        DecisionView(
            number=2, time_s=1_700_000_001.0, what="ramping", reason="it keeps its objectives", model="assistant",
            version="june", share=0.1,
        ),
    ),
)  # fmt: skip


def test_messages_are_read_as_they_were_written():
    assert FrontReport.from_bytes(REPORT.to_bytes()) == REPORT
    assert FleetView.from_bytes(VIEW.to_bytes()) == VIEW
    assert FleetView.from_bytes(FleetView(epoch=1, generation=1, models=()).to_bytes()).models == ()


def test_adapters_of_a_version_that_is_not_ready_are_not_offered():
    [model] = VIEW.models
    assert model.adapters == frozenset()


@pytest.mark.parametrize("kind", [FrontReport, FleetView])
def test_a_message_of_another_version_is_refused_in_one_line(kind):
    with pytest.raises(ConfigError, match=f"version 99, and this process knows version {MESSAGE_VERSION}"):
        kind.from_bytes(msgpack.packb([99, "anything"]))


@pytest.mark.parametrize(
    "message", [b"", b"\xc1", msgpack.packb(1), msgpack.packb([]), msgpack.packb([MESSAGE_VERSION, 2])]
)
def test_bytes_that_are_no_message_are_refused(message):
    for kind in (FrontReport, FleetView):
        with pytest.raises(ConfigError, match="no message"):
            kind.from_bytes(message)


USERS = [f"user {number}" for number in range(4000)]


def test_users_of_an_experiment_have_their_variant_and_the_others_follow_the_split():
    assigned = {user: MODEL.assign(user, ["may", "june"]) for user in USERS}
    for user, found in assigned.items():
        if QUANTIZED.has(user):
            variant = QUANTIZED.variant_of(user)
            assert found == Assignment(variant.version, "quantized", variant.name)
        else:
            assert found == Assignment(SPLIT.version_of(user))
    counts = Counter(found.version for found in assigned.values())
    for version, share in MODEL.shares.items():
        assert counts[version] / len(USERS) == pytest.approx(share, abs=0.03)
    assert MODEL.shares == pytest.approx({"may": 0.5 * 0.25 + 0.5 * 0.9, "june": 0.5 * 0.75 + 0.5 * 0.1})


@pytest.mark.parametrize("able", [["may"], ["june"], []])
def test_an_experiment_with_a_version_that_cannot_answer_sends_all_its_users_by_the_split(able):
    for user in USERS[:200]:
        expected = Assignment(SPLIT.version_of(user), "quantized" if QUANTIZED.has(user) else None)
        assert MODEL.assign(user, able) == expected


def test_a_user_of_two_experiments_takes_part_in_the_first_even_while_it_pauses():
    second = replace(QUANTIZED, name="another", share=1.0)
    for is_running in (True, False):
        views = (
            ExperimentView(config=QUANTIZED, is_running=is_running), ExperimentView(config=second, is_running=True)
        )  # fmt: skip
        both = replace(MODEL, experiments=views)
        for user in USERS[:200]:
            experiment = both.assign(user, ["may", "june"]).experiment
            assert experiment == ("quantized" if QUANTIZED.has(user) else "another")
        assert sum(both.shares.values()) == pytest.approx(1.0)


def test_a_view_has_the_newest_decisions_of_a_driver_without_their_evidence():
    driver = Driver()
    for number in range(30):
        fleet = FleetConfig(name="photos", models=(ModelConfig(name="a", versions=(VERSION,)),))
        driver.set_desired(Desired(generation=number, config=fleet, command="update", by="ann", time_s=5.0), now=5.0)
    found = newest_decisions(driver.recent)
    assert [one.number for one in found] == [one["number"] for one in driver.recent][-20:]
    assert found[-1].reason == driver.recent[-1]["reason"]
    assert len(FleetView(epoch=1, generation=1, models=(), decisions=found).to_bytes()) < 10_000
