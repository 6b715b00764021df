"""The worker pool: results are in order of submission, crashes counted, stuck workers replaced, jobs isolated."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from commands import is_alive
from workers import echo_worker

from saccade.errors import ConfigError, RequestError
from saccade.workers.fork_server import ForkServer, ForkServerError
from saccade.workers.messages import send
from saccade.workers.pool import Job, PoolClosedError, WorkerLostError, WorkerPool

TIMEOUT_S = 300


class NoMemory:
    fds = ()


class Echo(Job):
    def __init__(self, message, timeout_s=None, max_crashes=3):
        super().__init__()
        self.message, self.timeout_s, self.max_crashes = message, timeout_s, max_crashes

    def send(self, worker):
        send(worker.connection, self.message)

    def receive(self, message, worker):
        if "pid" not in message:
            raise WorkerLostError("no pid")
        return message["pid"], message["echo"]

    def error(self, reason):
        return RequestError(f"lost {self.num_crashes}: {reason}")

    def __str__(self):
        return "an echo"


def opened(num_workers=2, config=None, **options):
    return WorkerPool(ForkServer(echo_worker.initialize, config or {}), num_workers, NoMemory, **options)


@pytest.fixture(scope="module")
def shared_pool():
    pool = opened(2, max_message_bytes=10_000)
    yield pool
    pool.close()


@pytest.fixture
def pool(shared_pool):
    """The shared pool, with its counters at zero."""
    shared_pool.submit(Echo({})).result(TIMEOUT_S)  # starts workers that an earlier test has lost
    wait_for(lambda: len(shared_pool.pids) == 2)
    shared_pool.num_crashes = 0
    return shared_pool


def run(pool, message, **options):
    return pool.submit(Echo(message, **options)).result(TIMEOUT_S)


def wait_for(condition):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_jobs_of_many_threads_get_their_own_results(pool):
    results = {}

    def submit(first):
        futures = {number: pool.submit(Echo({"echo": number})) for number in range(first, first + 50)}
        results.update({number: future.result(TIMEOUT_S)[1] for number, future in futures.items()})

    threads = [threading.Thread(target=submit, args=(1000 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 200
    assert all(number == echo for number, echo in results.items())
    assert pool.metadata.result(TIMEOUT_S) == {"config": {}}


def test_a_job_that_is_cancelled_before_a_worker_starts_it_is_dropped(pool):
    for pid in pool.pids:
        os.kill(pid, signal.SIGSTOP)
    futures = [pool.submit(Echo({"exit": True} if number in (2, 4) else {"echo": number})) for number in range(6)]
    wait_for(lambda: sum(future.running() for future in futures) == 2)
    assert futures[2].cancel()
    assert futures[4].cancel()
    assert not futures[0].cancel(), "it has started"
    for pid in pool.pids:
        os.kill(pid, signal.SIGCONT)
    assert [futures[number].result(TIMEOUT_S)[1] for number in (0, 1, 3, 5)] == [0, 1, 3, 5]
    assert pool.num_crashes == 0


def test_a_job_that_crashes_its_worker_fails_after_its_attempts_and_alone(pool):
    crashing = pool.submit(Echo({"exit": True}))
    others = [pool.submit(Echo({"echo": number})) for number in range(10)]
    with pytest.raises(RequestError, match="lost 3: it exited"):
        crashing.result(TIMEOUT_S)
    assert [other.result(TIMEOUT_S)[1] for other in others] == list(range(10))
    assert pool.num_crashes == 3


def test_queued_jobs_of_a_crashed_worker_are_retried_and_not_held_responsible():
    pool = opened(1, queue_depth=2)
    first, second = pool.submit(Echo({"sleep": 600})), pool.submit(Echo({"echo": 7}, max_crashes=1))
    for num_crashes in range(3):
        wait_for(lambda n=num_crashes: pool.num_crashes == n and pool._workers and len(pool._workers[0].jobs) == 2)
        assert not first.done()
        os.kill(pool.pids[0], signal.SIGKILL)
    with pytest.raises(RequestError, match="lost 3"):
        first.result(TIMEOUT_S)
    assert second.result(TIMEOUT_S)[1] == 7
    pool.close()


def test_a_stuck_worker_is_replaced_after_the_timeout(pool):
    before = set(pool.pids)
    with pytest.raises(RequestError, match=r"lost 1: no result within 0\.2 s"):
        run(pool, {"sleep": 600}, timeout_s=0.2)
    [lost] = before - set(pool.pids)
    wait_for(lambda: not is_alive(lost))
    assert run(pool, {"echo": 1})[1] == 1


def test_a_stopped_worker_is_replaced_after_the_timeout():
    pool = opened(1)
    pid, _ = run(pool, {})
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RequestError, match="no result within"):
        run(pool, {}, timeout_s=0.2)
    assert run(pool, {})[0] != pid
    pool.close()


def test_the_time_in_the_queue_does_not_count():
    pool = opened(1, queue_depth=3)
    pool.metadata.result(TIMEOUT_S)
    futures = [pool.submit(Echo({"sleep": 0.6}, timeout_s=1.5)) for _ in range(3)]
    assert len({future.result(TIMEOUT_S)[0] for future in futures}) == 1
    pool.close()


INVALID = {
    "not JSON": b"\x03" + bytes(7) + b"abc",
    "not an object": b"\x06" + bytes(7) + b"[1, 2]",
    "not UTF-8": b"\x02" + bytes(7) + b"\xff\xfe",
    "deeply nested": (9999).to_bytes(8, "little") + b"[" * 9999,
    "empty": bytes(8),
    "too large": b"\xff" * 8,
    "an object without the result": b"\x02" + bytes(7) + b"{}",
}


@pytest.mark.parametrize("name", INVALID)
def test_a_worker_that_sends_an_invalid_message_is_replaced(pool, name):
    with pytest.raises(RequestError, match="lost 1"):
        run(pool, {"bytes": list(INVALID[name])}, max_crashes=1)
    assert run(pool, {"echo": 1})[1] == 1


def test_a_worker_that_sends_half_a_message_holds_up_no_other(pool):
    half = pool.submit(Echo({"bytes": [1]}, timeout_s=3.0))
    for number in range(20):
        assert run(pool, {"echo": number})[1] == number
    assert not half.done()
    with pytest.raises(RequestError, match="no result within 3 s"):
        half.result(TIMEOUT_S)


def test_a_message_without_a_job_loses_the_worker(pool):
    twice = (b"\x18" + bytes(7) + b'{"pid": 1, "echo": null}') * 2
    assert run(pool, {"bytes": list(twice)}) == (1, None)
    wait_for(lambda: pool.num_crashes == 1)
    assert run(pool, {"echo": 1})[1] == 1


def test_errors_of_a_job_are_raised_by_its_future_and_cost_no_worker(pool):
    with pytest.raises(ConfigError, match=r"^bad$"):
        run(pool, {"raise": "user"})
    with pytest.raises(RuntimeError, match=r"(?s)an echo failed:.*KeyError"):
        run(pool, {"raise": "bug"})
    assert pool.num_crashes == 0


def test_a_job_that_cannot_be_sent_fails_alone(pool):
    with pytest.raises(TypeError, match="not JSON serializable"):
        run(pool, {"echo": object()}, timeout_s=0.1)
    assert run(pool, {"echo": 1, "sleep": 0.15})[1] == 1
    assert pool.num_crashes == 0


def test_workers_killed_while_idle_are_not_held_against_the_next_job(pool):
    run(pool, {})
    pids = pool.pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(map(is_alive, pids)))
    assert run(pool, {"echo": 1}, max_crashes=1)[1] == 1


def test_workers_killed_just_before_a_job_is_sent_are_not_held_against_it(pool, monkeypatch):
    """The pool is woken up by the job, not by their end, which it has not waited for."""
    run(pool, {})

    def kill_all(self):
        pids = pool.pids
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not any(map(is_alive, pids)))
        monkeypatch.undo()

    monkeypatch.setattr(pool, "_remove_stuck", lambda: kill_all(pool))
    assert run(pool, {"echo": 1}, max_crashes=1)[1] == 1


def test_workers_leave_signals_to_the_group_to_their_owner():
    pool = opened(1)
    pid, _ = pool.submit(Echo({})).result(TIMEOUT_S)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
        assert pool.submit(Echo({})).result(TIMEOUT_S)[0] == pid
    pool.close()


def test_what_keeps_workers_from_starting_fails_all_jobs():
    pool = opened(1, {"error": "no such checkpoint"})
    for _ in range(2):
        with pytest.raises(ConfigError, match="no such checkpoint"):
            run(pool, {})
    with pytest.raises(ConfigError, match="no such checkpoint"):
        pool.metadata.result(TIMEOUT_S)
    pool.close()


def test_two_pools_share_a_fork_server():
    fork_server = ForkServer(echo_worker.initialize, {})
    pools = [WorkerPool(fork_server, 1, NoMemory) for _ in range(2)]
    pids = [run(pool, {})[0] for pool in pools]
    parents = {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] for pid in pids}
    assert (len(set(pids)), len(parents)) == (2, 1)
    for pool in pools:
        pool.close()
    wait_for(lambda: not any(map(is_alive, pids)))


def test_workers_that_end_with_the_pool_that_shares_their_fork_server_are_not_counted_as_crashed(caplog):
    fork_server = ForkServer(echo_worker.initialize, {})
    pools = [WorkerPool(fork_server, 1, NoMemory) for _ in range(2)]
    for pool in pools:
        run(pool, {})
    pools[0].close()
    wait_for(lambda: not pools[1].pids)
    pools[1].close()
    assert (pools[1].num_crashes, caplog.messages) == (0, [])


def test_closing_fails_unfinished_and_later_jobs():
    pool = opened(1)
    futures = [pool.submit(Echo({"sleep": 600})) for _ in range(3)]
    wait_for(lambda: pool.pids)
    pool.close()
    pool.close()
    for future in [*futures, pool.submit(Echo({}))]:
        with pytest.raises(PoolClosedError):
            future.result(TIMEOUT_S)
    with pytest.raises(ForkServerError):
        pool._fork_server.start_worker()


@pytest.mark.parametrize("has_config", [False, True], ids=["before the configuration", "while it initializes"])
def test_a_fork_server_whose_owner_has_gone_exits_without_a_word(has_config):
    control, child_end = socket.socketpair()
    if has_config:
        send(control, {"error": "no such folder"})
    control.close()
    code = "import sys; from saccade.workers.fork_server import serve; serve(*sys.argv[1:])"
    arguments = ["workers.echo_worker", "initialize", str(child_end.fileno()), str(os.getpid())]
    with child_end:
        process = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            pass_fds=[child_end.fileno()],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            timeout=TIMEOUT_S,
        )
    assert (process.returncode, process.stderr) == (0, b"")


def test_a_fork_server_that_is_killed_while_it_starts_is_started_again(tmp_path):
    pool = opened(1, {"dies_once": str(tmp_path / "died")})
    assert run(pool, {"echo": 3})[1] == 3
    assert (tmp_path / "died").exists()
    pool.close()


def test_a_fork_server_that_always_dies_while_it_starts_fails_its_jobs(tmp_path):
    pool = opened(1, {"dies": True})
    for _ in range(2):
        with pytest.raises(ForkServerError, match="exited 3 times while it started"):
            run(pool, {})
    pool.close()
