"""Fixtures all packages share."""

# ruff: noqa: E402  modules are imported below what must be said before

import atexit
import gc
import logging
import os
import random
import re
import sys
from importlib.util import find_spec
from pathlib import Path

TESTS = Path(__file__).parent

gc.disable()  # until all tests are collected: every module stays, and collections in between take a seventh of the time

# This is set before torch is imported, and for all processes that tests start: their threads slow each other down.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # a process with threads cannot fork
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # they would compile every module again

import pytest
from commands import Ended
from forked_workers import pytest_addoption, pytest_runtestloop  # noqa: F401
from interpreter import speed_up

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch

from saccade.device import resolve_device

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: its decorators ask for it
resolve_device("cpu")  # before anything multiplies: it keeps oneDNN off instructions this machine only announces


SLOW_FIRST = ("end_to_end", "serve", "train", "engine", "test_", "compress", "model")
"""How the names of folders and files below `tests` begin, in the order in which they run; then all others."""


def pytest_collection_modifyitems(items):
    """Run long files first, so that no worker has one left when the others are done; skip GPU tests without a GPU."""

    def turn(item):
        name = item.path.relative_to(TESTS).parts[0]
        return next((i for i, start in enumerate(SLOW_FIRST) if name.startswith(start)), len(SLOW_FIRST))

    items.sort(key=turn)
    if not torch.cuda.is_available():
        skip_marked(items, "gpu", "needs a CUDA GPU")
    elif "PYTEST_XDIST_WORKER" in os.environ:
        skip_marked(items, "whole_gpu", "needs a whole GPU: run pytest -m whole_gpu without -n")


def skip_marked(items, marker, reason):
    for item in items:
        if item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_ignore_collect(collection_path, config):
    """Import only files with GPU tests for `-m gpu`: a machine with a GPU may have only the packages of the engine."""
    asks_for_gpu = re.match("gpu|whole_gpu", config.option.markexpr)
    if asks_for_gpu and collection_path.name.startswith("test_") and collection_path.suffix == ".py":
        text = collection_path.read_text()
        has_packages = find_spec("compressed_tensors") or not re.search("^from compressed_tensors", text, re.MULTILINE)
        return "mark.gpu" not in text or not has_packages or None
    return None


def pytest_collection_finish(session):
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # else Triton's bindings report leaks
    # Runs and engines unfreeze at their end; a later garbage collection would traverse a million objects of modules.
    gc.unfreeze = lambda: None
    if os.environ.get("TRITON_INTERPRET") and (interpreter := sys.modules.get("triton.runtime.interpreter")):
        speed_up(interpreter)


@pytest.fixture(autouse=True)
def sync_debug_mode_is_reset():
    """A test that makes synchronisation an error must not make it one for the tests after it."""
    yield
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def restore_the_logger():
    """Commands set up logging for the process; later tests want to find it as it was."""
    logger = logging.getLogger("saccade")
    before = logger.handlers[:], logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate = before[:2]
    logger.setLevel(before[2])


@pytest.fixture
def command(monkeypatch, capsys, restore_the_logger):
    """Run `saccade ...` through its real entry, in this process."""

    from saccade.cli import main

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["saccade", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(ended.value.code or 0, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def s3_port():
    """moto's real S3 server."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@pytest.fixture
def new_bucket(s3_port, tmp_path, monkeypatch):
    """Configure clients of S3, with the server's address or another one, and make a bucket: (client, its name)."""
    import s3fs

    def make(url=f"http://127.0.0.1:{s3_port}"):
        names = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
        for name, value in (names | {"AWS_ENDPOINT_URL": url}).items():
            monkeypatch.setenv(name, value)
        client = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
        bucket = f"bucket-{random.Random(str(tmp_path)).randrange(10**9)}"
        client.mkdir(bucket)
        return client, bucket

    return make
