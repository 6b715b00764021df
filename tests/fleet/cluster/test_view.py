"""Messages between fronts and the controller: what is sent is what is read, and other versions are refused."""

import msgpack
import pytest

from saccade.engine.config import EngineConfig
from saccade.errors import ConfigError
from saccade.fleet.cluster.view import FleetView, FrontReport, ModelView, VersionView
from saccade.fleet.config import VersionConfig
from saccade.fleet.objectives import Outcome
from saccade.fleet.split import Split, SplitEntry
from saccade.serve.rate_limit import Consumption

REPORT = FrontReport(
    front="front-1", number=7, url="http://127.0.0.1:8000",
    outcomes={"assistant": (Outcome(user="ann", version="may", values={"errors": 0.0, "ttft": 0.25}),)},
    consumption={"a" * 64: Consumption(requests=3, tokens=-20)}, poison=(b"\x00\xff",),
)  # fmt: skip
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
VIEW = FleetView(
    epoch=3, generation=2, models=(ModelView(name="assistant", versions=VERSIONS, split=SPLIT),), num_fronts=2,
    consumption={"b" * 64: Consumption(requests=1, tokens=100)}, poison=frozenset({b"x", b"y"}),
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
    with pytest.raises(ConfigError, match="version 99, and this process knows version 1"):
        kind.from_bytes(msgpack.packb([99, "anything"]))


@pytest.mark.parametrize("message", [b"", b"\xc1", msgpack.packb(1), msgpack.packb([]), msgpack.packb([1, 2])])
def test_bytes_that_are_no_message_are_refused(message):
    for kind in (FrontReport, FleetView):
        with pytest.raises(ConfigError, match="no message"):
            kind.from_bytes(message)
