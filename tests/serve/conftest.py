"""One server for all tests of the package, on a tiny checkpoint and a free port."""

import pytest
from model.hugging_face import SHAPES, make_checkpoint
from serve.running import RunningServer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("serve") / "tiny", SHAPES[0])


@pytest.fixture(scope="session")
def server(checkpoint, tmp_path_factory):
    with RunningServer(checkpoint, tmp_path_factory.mktemp("server")) as running:
        yield running
    assert running.process.returncode == 0, running.log
