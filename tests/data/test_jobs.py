"""Jobs over shards: outcomes of every job, whatever happens to the processes that run them."""

import gc
import importlib
import os
import signal
import time
from pathlib import Path

import pytest

from saccade.data import jobs
from saccade.data.jobs import MAX_TRIES, Workers, run_jobs
from saccade.errors import ConfigError, DataError

pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


@pytest.fixture(autouse=True)
def _collect_pipes():
    """Daft leaves the pipes of its workers to the garbage collector: they are collected in the test that made them."""
    yield
    gc.collect()


def tenfold(folder, job):
    """Crash on 3, or refuse 4; every try leaves a file."""
    Path(folder, f"{job}-{os.getpid()}").touch()
    if job == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if job == 4:
        raise DataError("shard 4 is bad")
    return {"times ten": 10 * job}


def test_a_job_that_crashes_its_worker_is_given_up_after_three_tries_and_the_others_finish(tmp_path):
    outcomes = list(run_jobs(tenfold, str(tmp_path), range(6), Workers(num_workers=2)))
    results = {outcome.job: outcome.result for outcome in outcomes}
    assert results == {number: {"times ten": 10 * number} if number not in (3, 4) else None for number in range(6)}
    crashed, refused = (next(outcome for outcome in outcomes if outcome.job == number) for number in (3, 4))
    assert (crashed.has_crashed, refused.has_crashed) == (True, False)
    assert "its process ended" in crashed.error
    assert refused.error == "shard 4 is bad"
    assert len(list(tmp_path.glob("3-*"))) == MAX_TRIES == 3


def wait_for(folder, job):
    """The second of two jobs crashes; the first waits until it has been tried three times."""
    Path(folder, f"{job}-{os.getpid()}").touch()
    if job % 2:
        os.kill(os.getpid(), signal.SIGKILL)
    end = time.monotonic() + 20
    while len(tries := list(Path(folder).glob(f"{job + 1}-*"))) < MAX_TRIES and time.monotonic() < end:
        time.sleep(0.01)
    return len(tries)


def test_two_workers_run_two_jobs_at_once_and_a_crash_of_one_does_not_end_the_other(tmp_path):
    results = {
        outcome.job: outcome.result for outcome in run_jobs(wait_for, str(tmp_path), range(4), Workers(num_workers=2))
    }
    assert results == {0: MAX_TRIES, 1: None, 2: MAX_TRIES, 3: None}
    assert [len(list(tmp_path.glob(f"{job}-*"))) for job in range(4)] == [1, MAX_TRIES, 1, MAX_TRIES]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_on_ray_too_a_job_that_crashes_its_worker_is_given_up_after_three_tries(tmp_path, monkeypatch):
    """A machine without a package is refused before any job."""
    ray = pytest.importorskip("ray")
    cluster = importlib.import_module("ray.cluster_utils").Cluster(head_node_args={"num_cpus": 2}, initialize_head=True)
    try:
        workers = Workers(num_workers=2, ray_address=cluster.address)
        outcomes = {outcome.job: outcome for outcome in run_jobs(tenfold, str(tmp_path), range(6), workers)}
        assert sorted(outcomes) == list(range(6))
        assert outcomes[3].has_crashed
        assert outcomes[4].error == "shard 4 is bad"
        assert outcomes[5].result == {"times ten": 50}
        assert len(list(tmp_path.glob("3-*"))) == MAX_TRIES
        assert list(run_jobs(tenfold, str(tmp_path), [], workers)) == []
        monkeypatch.setattr(jobs, "_NEEDED", ("saccade", "no_such_package"))
        with pytest.raises(ConfigError, match=rf"^machine \S+: {NO_PACKAGE}"):
            list(run_jobs(tenfold, str(tmp_path), range(2), workers))
    finally:
        ray.shutdown()
        cluster.shutdown()


NO_PACKAGE = "No module named 'no_such_package'. Install there what this machine has"


def need_package(_, job):
    import no_such_package  # noqa: F401


def test_a_package_that_a_worker_lacks_is_one_line():
    with pytest.raises(ConfigError, match=rf"^machine \S+: {NO_PACKAGE}.*$"):
        list(run_jobs(need_package, None, range(2), Workers(num_workers=2)))


def fail(_, job):
    if job:
        raise ZeroDivisionError(f"job {job}")


def test_a_bug_in_a_worker_shows_its_traceback():
    with pytest.raises(RuntimeError, match=r"in fail\n(?s:.*)ZeroDivisionError: job 1"):
        list(run_jobs(fail, None, range(2), Workers(num_workers=2)))
