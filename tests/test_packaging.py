"""What is installed: contents of the wheel and the sdist, and what works without the extras."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import tomllib
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from commands import run_forked

from saccade.data.toy import write_toy_shards
from saccade.imports import missing_extra
from saccade.model.initialize import initialize_random, named_size

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tracked():
    """The files of the repository; skips where there is no git."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


@pytest.fixture(scope="module")
def built(tracked, tmp_path_factory):
    """The wheel and the sdist, built from a copy of the repository."""
    pytest.importorskip("setuptools", "77")
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            (source / name).symlink_to((ROOT / name).readlink())
        else:
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = f"from setuptools import build_meta as b; b.build_sdist({str(dist)!r}); b.build_wheel({str(dist)!r})"
    ended = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    [wheel], [sdist] = dist.glob("*.whl"), dist.glob("*.tar.gz")
    return wheel, sdist


def test_the_wheel_has_all_modules_recipes_the_page_and_the_marker_of_types(built, tracked):
    names = set(zipfile.ZipFile(built[0]).namelist())
    expected = {name for name in tracked if name.startswith("saccade/") and not (ROOT / name).is_symlink()}
    expected |= {f"saccade/{name}" for name in tracked if name.startswith("recipes/")}
    assert {"saccade/py.typed", "saccade/recipes/tiny.toml", "saccade/serve/page/index.html"} <= expected
    assert expected <= names, sorted(expected - names)
    assert {name.partition("/")[0] for name in names - expected} == {"saccade-" + _version() + ".dist-info"}


def test_the_sdist_has_every_file_of_the_repository(built, tracked):
    with tarfile.open(built[1]) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    missing = [name for name in tracked if name not in members]
    assert not missing
    assert members["recipes/tiny.toml"].size > 0
    assert not [name for name in members if "__pycache__" in name]


class OneWord(BaseHTTPRequestHandler):
    """A server with OpenAI's API whose every answer is one word."""

    def do_GET(self):
        self._answer("application/json", json.dumps({"data": [{"id": "word"}]}))

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        chunk = {"choices": [{"delta": {"content": "yes"}, "finish_reason": None}]}
        last = {
            "choices": [{"delta": {}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 1},
        }
        self._answer(
            "text/event-stream", "".join(f"data: {json.dumps(one)}\n\n" for one in (chunk, last)) + "data: [DONE]\n\n"
        )

    def _answer(self, kind, text):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *words):
        pass


@pytest.fixture
def installed(built, tmp_path):
    """Run `saccade ...` of the wheel, in a folder that is no checkout."""
    zipfile.ZipFile(built[0]).extractall(tmp_path / "site")

    def run(*words):
        command = [sys.executable, "-m", "saccade", *map(str, words)]
        environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120
        )

    return run


def test_the_installed_package_loads_a_server(installed):
    with ThreadingHTTPServer(("127.0.0.1", 0), OneWord) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        ended = installed("bench", "serve", url, "--requests", 3, "--images", "none", "--json")
        server.shutdown()
    assert ended.returncode == 0, ended.stderr
    [result] = json.loads(ended.stdout)
    assert (result["completed"], result["failed"]) == (3, 0)


def test_benchmarks_that_need_a_checkout_say_so_in_one_line(installed):
    for words in (("data",), ("serve", "--size", "tiny")):
        ended = installed("bench", *words)
        assert ended.returncode == 2
        [line] = ended.stderr.splitlines()
        assert "source checkout" in line


def _version():
    import saccade

    return saccade.__version__


# ------------------------------------------------------------------ extras

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
OPTIONAL = (
    "pyarrow daft aiohttp fsspec xxhash gguf fastapi uvicorn uvloop httptools orjson prometheus_client starlette "
    "llguidance huggingface_hub av"
).split()
"""What a plain installation lacks. torch brings fsspec, but nothing of ours may rely on it."""

_BLOCKER = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] in {blocked!r}]:
    del sys.modules[name]
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r} and not (
            sys._getframe(2).f_globals.get("__name__", "").startswith("torch")
        ):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {blocked!r} else find(name, package)
"""
_COMMAND = """
sys.modules["torch._dynamo"] = None  # the compiler is for training: importing it would double the start
sys.argv = {words!r}
from saccade.cli.entry import run
run()
"""

COMMANDS = {
    "chat tiny hi --max-tokens 2 --device cpu": None,
    "data prepare x -o y": "data",
    "data inspect x": "data",
    "train tiny.toml": "train",
    "evaluate tiny --tasks vqa --data shards -o results": "eval",
    "serve x": "serve",
    "bench serve http://127.0.0.1:9": "serve",
    "quickstart --dir quickstart": "quickstart",
}
"""Commands and the extra they need."""


@pytest.fixture(scope="module")
def without_extras(tmp_path_factory):
    """How every command ends where no extra is installed, and the import of a function where pyarrow is not."""
    folder = tmp_path_factory.mktemp("made")
    initialize_random(folder / "tiny", named_size("tiny"), dtype=torch.float32)
    write_toy_shards(folder / "shards", first=0, count=2)
    shutil.copy(ROOT / "recipes" / "tiny.toml", folder)
    blocker = _BLOCKER.format(blocked=set(OPTIONAL))
    codes = {words: blocker + _COMMAND.format(words=["saccade", *words.split()]) for words in COMMANDS}
    codes["import"] = _BLOCKER.format(blocked={"pyarrow"}) + "from saccade.train import train"
    return dict(zip(codes, run_forked(codes.values(), folder), strict=True))


@pytest.mark.parametrize(("words", "extra"), COMMANDS.items(), ids=lambda value: value and value.split()[0])
def test_a_command_without_its_extra_says_which_to_install_and_chat_needs_none(without_extras, words, extra):
    ended = without_extras[words]
    if extra is None:
        assert ended.status == 0, ended.err
        return
    assert ended.status == 2, ended.err
    [line] = ended.err.splitlines()
    assert line.startswith("saccade: ")
    assert f"pip install 'saccade[{extra}]'" in line
    assert extra in EXTRAS
    assert ended.out == ""


def test_the_public_api_names_the_extra_it_lacks(without_extras):
    assert "pip install 'saccade[train]'" in without_extras["import"].err.splitlines()[-1]


def test_every_extra_that_a_message_names_exists():
    from saccade import imports

    named = {*imports._EXTRA_OF_MODULE.values(), *imports._EXTRA_OF_COMMAND.values()}
    assert named <= EXTRAS.keys()
    assert missing_extra("numpy") is None
    assert missing_extra("pyarrow.compute", "data").endswith("pip install 'saccade[data]'")


def test_the_extras_are_those_users_guess():
    assert {"data", "train", "eval", "serve", "hub", "quickstart", "dev", "all"} <= EXTRAS.keys()
