"""Run tests in several processes, forked from the one that has imported and collected them: `--workers 4`.

    collect  ->  fork workers  ->  give each the next group of files  ->  report what they send

Collecting takes 13 s of CPU time, which would be spent again in every worker that is not forked. Tests of one file run
in one worker, and files that share a costly fixture too (`group_of`), so that it is set up once.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import re
import sys
import threading
import types
from collections import deque
from itertools import groupby
from pathlib import Path

import pytest
from _pytest import runner  # ends the fixtures of a session


def pytest_addoption(parser):
    parser.addoption("--workers", type=int, default=0, help="run the tests in so many forked processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    option = session.config.option
    if not option.workers or option.collectonly or not session.items or session.testsfailed:
        return None
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        return None  # a forked process cannot use CUDA: the tests run one after another
    run_in_workers(session, option.workers)
    return True


def run_in_workers(session, num_workers):
    assert_can_fork()
    groups = deque(grouped(session.items))
    if reporter := session.config.pluginmanager.get_plugin("terminalreporter"):
        reporter.showfspath = False  # results of several files arrive in turn
    workers = {}
    try:
        for _ in range(num_workers):
            start_worker(session, workers)
        while workers:
            for connection in multiprocessing.connection.wait(list(workers)):
                if not workers[connection].handle(groups):
                    unfinished = workers.pop(connection).group
                    if unfinished:  # the worker has crashed
                        groups.appendleft(unfinished)
                        start_worker(session, workers)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
        assert not groups, "all workers ended before these tests ran"
    finally:
        for worker in workers.values():
            worker.connection.close()  # it ends after its test
        for worker in workers.values():
            worker.process.join()


def start_worker(session, workers):
    worker = Worker(session)
    workers[worker.connection] = worker


def assert_can_fork():
    """A lock that another thread holds would stay held in the forked processes."""
    tasks = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    assert len(tasks) == 1, f"importing the tests started threads: {tasks}, {threading.enumerate()}"


def grouped(items):
    """Return numbers of items, in the order of the first of each group."""
    groups = {}
    for file, of_file in groupby(range(len(items)), key=lambda number: items[number].path):
        groups.setdefault(group_of(file), []).extend(of_file)
    return [deque(group) for group in groups.values()]


def group_of(file):
    """Return the group of a file with the server of `serve/conftest.py` or the fork server of `train/running.py`.

    A server takes 10 s of CPU time to start, a fork server 4 s.
    """
    text = file.read_text()
    if re.search("run_together|run_with_restarts|forkserver", text):
        return "ranks"
    in_serve = file.parent.name == "serve" and "def server(" not in text
    return "server" if in_serve and re.search(r"^def \w+\(.*\bserver\b", text, re.M) else file


class Worker:
    """A forked process that runs tests, seen from the process that has collected them."""

    def __init__(self, session):
        self.session = session
        self.group = deque()
        """Numbers of the tests that were given to the worker and have not ended; it runs the first."""
        self.connection, other = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=work, args=(session, other, self.connection))
        self.process.start()
        other.close()

    def handle(self, groups):
        """Do what the next message says; return whether the worker still runs."""
        try:
            kind, value = self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            if self.group:
                self.report_crash()
            elif self.process.exitcode:
                self.session.shouldfail = f"a worker ended with exit code {self.process.exitcode} after its tests"
            return False
        hook, config = self.session.config.hook, self.session.config
        match kind:
            case "next":
                group = groups.popleft() if groups else deque()
                self.group.extend(group)
                self.connection.send(group)
            case "logstart":
                hook.pytest_runtest_logstart(**value)
            case "logreport":
                report = hook.pytest_report_from_serializable(config=config, data=value)
                hook.pytest_runtest_logreport(report=report)
            case "logfinish":
                self.group.popleft()
                hook.pytest_runtest_logfinish(**value)
        return True

    def report_crash(self):
        """Fail the test during which the process ended."""
        item = self.session.items[self.group.popleft()]
        reason = f"the worker that ran this test ended with exit code {self.process.exitcode}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", reason, "call")
        self.session.config.hook.pytest_runtest_logreport(report=report)


# ------------------------------------------------------------------ worker


def work(session, connection, other_end):
    """Run groups of tests until there are no more, or the other process has closed the connection."""
    other_end.close()
    sys.modules["__main__"] = types.ModuleType("__main__")  # else processes that tests spawn would import pytest's
    plugins = session.config.pluginmanager
    plugins.unregister(name="terminalreporter")
    plugins.register(Sender(connection, session.config))
    capture = plugins.get_plugin("capturemanager")
    capture.stop_global_capturing()  # its files are shared with the other workers
    capture.start_global_capturing()
    try:
        with contextlib.suppress(ConnectionError, KeyboardInterrupt):
            run_groups(session, connection)
    finally:
        runner.pytest_sessionfinish(session)  # of all plugins only this one: it ends fixtures
        capture.stop_global_capturing()


def run_groups(session, connection):
    group = next_group(connection)
    while group:
        item = session.items[group.popleft()]
        if not group:
            group = next_group(connection)  # a fixture is kept for the next test that uses it
        following = session.items[group[0]] if group else None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)


def next_group(connection):
    connection.send(("next", None))
    return connection.recv()


class Sender:
    """Sends what a worker would report."""

    def __init__(self, connection, config):
        self.connection, self.config = connection, config

    def pytest_runtest_logstart(self, nodeid, location):
        self.connection.send(("logstart", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logreport(self, report):
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.connection.send(("logreport", data))

    def pytest_runtest_logfinish(self, nodeid, location):
        self.connection.send(("logfinish", {"nodeid": nodeid, "location": location}))
