"""One server for all tests of the package, on a tiny checkpoint and a free port."""

from importlib.util import find_spec

import pytest

NEEDED = ("aiohttp", "fastapi", "httpx", "openai", "opentelemetry", "orjson", "prometheus_client", "uvicorn", "yaml")
if missing := [name for name in NEEDED if find_spec(name) is None]:
    pytest.skip(f"tests of the server need {', '.join(missing)}: pip install -e '.[dev]'", allow_module_level=True)

from model.hugging_face import SHAPES, make_checkpoint  # noqa: E402
from serve.browsing import browser, open_page  # noqa: E402, F401
from serve.running import RunningServer  # noqa: E402


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("serve") / "tiny", SHAPES[0])


@pytest.fixture(scope="session")
def server(checkpoint, tmp_path_factory):
    with RunningServer(checkpoint, tmp_path_factory.mktemp("server")) as running:
        yield running
    assert running.process.returncode == 0, running.log


@pytest.fixture
def page(browser, server):  # noqa: F811
    with open_page(browser, server.url) as page:
        yield page
