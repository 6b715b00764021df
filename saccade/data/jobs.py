"""Run jobs over shards in processes of this machine or of a Ray cluster. A job that crashes its worker ends no other.

    jobs  ->  batches  ->  Daft (its own runner, or Ray's)  ->  worker  ->  child process (parallel.py)  ->  outcome

Every worker has one child process, which does the work. If the child ends during a job (out of memory, a crash in a
decoder), the worker starts another one and tries again; after three tries the job is given up, and the others go on.
Workers and machines that are lost are replaced by Daft and Ray, which run their batches again: a job should first look
whether its result is there already.
"""

from __future__ import annotations

import logging
import os
import socket
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Generic, TypeVar

from saccade import __version__
from saccade.data.parallel import Child, ChildLostError, Children
from saccade.errors import ConfigError, DataError, UserError

logger = logging.getLogger(__name__)

Job = TypeVar("Job")
Result = TypeVar("Result")
Shared = TypeVar("Shared")

MAX_TRIES = 3
"""Child processes that a job may end before it is given up."""
_MAX_BATCH = 16
"""Jobs that a worker of a cluster gets at once: Ray starts at most about a hundred batches per second."""
_NEEDED = ("saccade", "daft", "numpy", "pyarrow", "xxhash", "PIL", "simplejpeg", "fsspec")
"""Packages that a worker imports."""


@dataclass(frozen=True, kw_only=True)
class Workers:
    """The processes that run jobs: children of this one, or tasks on Ray."""

    num_workers: int | None = None
    """Processes; None is one per core. One worker on this machine is this process."""
    ray_address: str | None = None
    """Ray cluster whose machines run the jobs; None is this machine."""


@dataclass(frozen=True)
class Outcome(Generic[Job, Result]):
    """The end of one job: a result, or an error."""

    job: Job
    result: Result | None = None
    error: str | None = None
    """Why there is no result."""
    has_crashed: bool = False
    """Whether the job ended its process `MAX_TRIES` times."""


def run_jobs(
    function: Callable[[Shared, Job], Result], shared: Shared, jobs: Sequence[Job], workers: Workers
) -> Iterator[Outcome[Job, Result]]:
    """Yield the outcome of `function(shared, job)` for each job, as they finish.

    A `UserError` of a job is its outcome; any other exception is raised here. Function, shared, jobs and results are
    pickled by Daft: keep them small. Without Daft, this process does the work.
    """
    if not jobs:
        return
    has_daft = workers.num_workers is not None or find_spec("daft") is not None
    if workers.ray_address or (workers.num_workers != 1 and len(jobs) > 1 and has_daft):
        outcomes = _run_by_daft(function, shared, jobs, workers)
    else:
        outcomes = (_run_here(function, shared, number, job) for number, job in enumerate(jobs))
    for number, kind, value in outcomes:
        if kind == "result":
            yield Outcome(jobs[number], result=value)
        elif kind in ("error", "crash"):
            yield Outcome(jobs[number], error=value, has_crashed=kind == "crash")
        elif kind == "absent":
            raise ConfigError(value)
        else:
            raise RuntimeError(f"a worker failed:\n{value}")


_Answer = tuple[int, str, Any]
"""The number of a job, the kind of its end (result, error, crash, absent, failure), and the result or message."""


@dataclass(frozen=True)
class _Batch:
    """A cell of Daft's table. (Daft takes a list for a nested column.)"""

    items: list[Any]


def _run_here(function: Callable[[Shared, Job], Result], shared: Shared, number: int, job: Job) -> _Answer:
    try:
        return number, "result", function(shared, job)
    except UserError as error:
        return number, "error", str(error)


# ------------------------------------------------------------------ Daft


def _run_by_daft(
    function: Callable[[Shared, Job], Result], shared: Shared, jobs: Sequence[Job], workers: Workers
) -> Iterator[_Answer]:
    daft = _start_daft(workers.ray_address)
    num_workers = workers.num_workers or _num_cores(workers.ray_address)
    if workers.ray_address:
        _check_machines(workers.ray_address)
    objects = daft.DataType.python()

    @daft.cls(max_concurrency=min(num_workers, len(jobs)), use_process=True)
    class Worker:
        """The workers of a process: each thread of Daft that calls `run` has a child process of its own meanwhile."""

        def __init__(self, function: Callable[[Shared, Job], Result], shared: Shared) -> None:
            self._children = Children(function, shared)
            warnings.simplefilter("ignore")  # Daft would print them

        @daft.method.batch(return_dtype=objects, batch_size=1)  # type: ignore[untyped-decorator]
        def run(self, batches: Any) -> list[_Batch]:
            with self._children.one() as child:
                return [
                    _Batch([_run_in(child, number, job) for number, job in batch.items])
                    for batch in batches.to_pylist()
                ]

    size = min(_MAX_BATCH, max(1, len(jobs) // (8 * num_workers))) if workers.ray_address else 1
    numbered = list(enumerate(jobs))
    batches = [_Batch(numbered[begin : begin + size]) for begin in range(0, len(numbered), size)]
    table = daft.from_pydict({"batch": daft.Series.from_pylist(batches, dtype=objects)})
    if workers.ray_address:
        table = table.into_partitions(len(batches))  # Ray schedules partitions; on one machine batches are enough
    query = table.select(Worker(function, shared).run(table["batch"]).alias("answers"))
    try:
        for row in query.iter_rows():
            yield from row["answers"].items
    except GeneratorExit:
        raise
    except BaseException as error:
        if isinstance(error, RuntimeError) or type(error).__name__ == "PanicException":  # of Daft's, no Exception
            raise DataError(
                f"the workers stopped: {_first_line(error)}. Finished work is kept: run the command again, with fewer "
                "workers if memory was short"
            ) from error
        raise


def _run_in(child: Child[Job, Result], number: int, job: Job) -> _Answer:
    """Run one job in the worker's child process."""
    for _ in range(MAX_TRIES):
        try:
            return number, "result", child.run(job)
        except ChildLostError as error:
            lost = str(error)
        except UserError as error:
            return number, "error", str(error)
        except ImportError as error:
            return number, "absent", _absent(socket.gethostname(), str(error))
        except Exception:
            return number, "failure", traceback.format_exc()
    return number, "crash", lost


def _start_daft(ray_address: str | None) -> ModuleType:
    """Import Daft for this machine or a Ray cluster, without telemetry and its own progress bar."""
    os.environ.setdefault("DAFT_ANALYTICS_ENABLED", "0")
    os.environ.setdefault("DAFT_PROGRESS_BAR", "0")
    import daft

    if ray_address:
        try:
            ray = import_module("ray")
        except ImportError as error:
            raise ConfigError(f"{ray_address}: Ray is not installed. Run pip install 'saccade[ray]'") from error
        if not ray.is_initialized():  # workers' lines, such as Daft's progress bars, are not for this screen
            ray.init(ray_address, log_to_driver=False, logging_level=logging.WARNING)
        daft.set_runner_ray(ray_address, noop_if_initialized=True)
    return daft


def _num_cores(ray_address: str | None) -> int:
    if not ray_address:
        return len(os.sched_getaffinity(0))
    return int(import_module("ray").cluster_resources()["CPU"])


def _check_machines(ray_address: str) -> None:
    """Refuse a cluster with a machine that lacks a package: Daft would end in a page of Rust."""
    ray = import_module("ray")
    pinned = import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy

    def import_needed(needed: tuple[str, ...]) -> str:
        """Return the name of what cannot be imported. Pickled by value, since the machine may not have this module."""
        import importlib

        for name in needed:
            try:
                module = importlib.import_module(name)
            except ImportError as error:
                return str(error)
            if name == "saccade" and module.__version__ != version:
                return f"saccade is {module.__version__} there and {version} here"
        return ""

    version = __version__
    nodes = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
    task = ray.remote(num_cpus=0, max_retries=0)(import_needed)
    asked = {
        task.options(scheduling_strategy=pinned(node, soft=True)).remote(_NEEDED): host for node, host in nodes.items()
    }
    for reference, host in asked.items():
        if said := ray.get(reference):
            raise ConfigError(_absent(host, said))


def _absent(host: str, said: str) -> str:
    return f"machine {host}: {said}. Install there what this machine has: pip install 'saccade[data,ray]'"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
