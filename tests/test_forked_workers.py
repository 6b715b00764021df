"""Tests that run in forked workers are reported like those that run in one process."""

import os
import subprocess
import sys
from pathlib import Path

CONFTEST = """
from forked_workers import pytest_addoption, pytest_runtestloop
import pytest

@pytest.fixture(scope="session")
def log(request):
    with open(request.config.rootpath / "log", "a") as file:
        yield file
        file.write("closed ")
"""
TESTS = """
import os, pytest

@pytest.mark.parametrize("number", range(4))
def test_numbers(number, log):
    print("printed by", number)
    log.write(f"{number} ")
    log.flush()
    if number == 1:
        os.kill(os.getpid(), 9)
    assert number != 2

def test_of_a_gpu():
    pytest.skip("no GPU")
"""


def test_failures_crashes_and_skipped_tests_are_reported_and_the_other_tests_run(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_first.py").write_text(TESTS)
    (tmp_path / "test_second.py").write_text("def test_passes():\n    pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider -p no:schemathesis\n")
    command = [sys.executable, "-m", "pytest", "--workers", "2", "-ra"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "COLUMNS": "200"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "2 failed, 3 passed, 1 skipped" in run.stdout
    assert "test_numbers[1] - the worker that ran this test ended with exit code -9" in run.stdout
    assert "test_numbers[2] - assert 2 != 2" in run.stdout
    assert "printed by 2" in run.stdout
    assert "printed by 3" not in run.stdout
    assert "SKIPPED [1] test_first.py:14: no GPU" in run.stdout
    assert (tmp_path / "log").read_text() == "0 1 2 3 closed ", "the test that crashed is not repeated"
