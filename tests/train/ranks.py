"""A process that runs training jobs in sequence, alone or as a rank of several.

A job: `recipe` (a TOML file), `set` (overrides), `set_of_rank` (overrides of one rank), `before` (a function below to
call first), `validate` (the name of one of the functions below, called every step if the recipe says so), `ending`
(what is expected). Or one of these: `world` and `threads` (a file to write what is found to), `crash` (a rank), `call`
(a function).
"""

import contextlib
import faulthandler
import gc
import importlib
import json
import logging
import os
import resource
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import torch
import torch._dynamo  # a run imports it, 0.6 s in every rank: here once, in the fork server
from PIL import Image
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from saccade.config import load_config
from saccade.data.loader import Stream
from saccade.errors import UserError
from saccade.train.config import TrainConfig
from saccade.train.stages import train_in
from saccade.world import open_world

Image.init()  # likewise

CURRENT = {}
"""The running job."""


def no_validation(model, step):
    return {}


def kill_rank_1_once(model, step):
    """Like a node that fails: only in the first attempt of the run, when the state of step 5 is complete."""
    if step == 7 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        wait_for_state_5()
        os.kill(os.getpid(), signal.SIGKILL)
    return {}


def die_while_saving(model, step):
    """The save of step 10 is running, and its files never reach the disk."""
    if step == 9:
        os.fsync = lambda descriptor: time.sleep(
            600 * ("step-00000010" in str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        )
    if step == 10:
        wait_for_file("state/.step-00000010.partial")
        os.kill(os.getpid(), signal.SIGKILL)
    return {}


def die_in_the_last_validation(model, step):
    if step == 13:
        os.kill(os.getpid(), signal.SIGKILL)
    return {}


def is_rank_1_in_attempt(number):
    return os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == str(number)


def kill_rank_1_in_a_save(model, step):
    """In the first attempt the files of rank 1 for the state of step 10 never reach the disk."""
    if step == 9 and is_rank_1_in_attempt(0):
        FileSystemWriter.write_data = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    return {}


def die_in_a_load():
    """In the second attempt rank 1 is killed while it reads the state to resume from."""
    if is_rank_1_in_attempt(1):
        FileSystemReader.read_data = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def hang_on_rank_1(model, step):
    """It exits last, so that the other rank reports too."""
    if step == 2 and os.environ["RANK"] == "1":
        logging.shutdown = lambda: time.sleep(5)
        model.register_forward_pre_hook(lambda *_: hang_in_forward())
    return {}


def late_data_on_rank_1(model, step):
    """From step 1 on, every batch of rank 1 arrives late."""
    if step == 1 and os.environ["RANK"] == "1":
        original = Stream.__next__

        def late(stream):
            time.sleep(0.2)
            return original(stream)

        Stream.__next__ = late
    return {}


def terminate(model, step):
    if step == 7:
        os.kill(os.getpid(), signal.SIGTERM)
    return {}


def terminate_rank_1(model, step):
    if step == 7 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    return {}


def terminate_rank_1_in_forward(model, step):
    """Send SIGTERM in the forward pass of step 8, which is its only micro-batch."""
    if step == 7 and os.environ["RANK"] == "1":
        handle = model.register_forward_pre_hook(lambda *_: (handle.remove(), os.kill(os.getpid(), signal.SIGTERM))[1])
    return {}


def validate_for_long(model, step):
    if step == 2:
        time.sleep(6)
    return {}


def fill_the_disk(model, step):
    """Limit files to a megabyte from step 9 on, when the state of step 5 is complete.

    Two steps after the save of step 10 has failed, there is room again.
    """
    if step == 9:
        wait_for_state_5()
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
        logging.getLogger("saccade.train.saver").addHandler(FailedSave())
    if step == 10:
        [handler] = logging.getLogger("saccade.train.saver").handlers
        assert handler.has_failed.wait(120), "the save of step 10 did not fail"
        logging.getLogger("saccade.train.saver").removeHandler(handler)
    if step == 12:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return {}


class FailedSave(logging.Handler):
    """Waits for the error message of a save, which runs concurrently with the steps."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.has_failed = threading.Event()

    def emit(self, record):
        if "the state was not saved" in record.getMessage():
            self.has_failed.set()


def wait_for_state_5():
    wait_for_file("state/step-00000005/complete.json")


def wait_for_file(name):
    run = load_config(TrainConfig, Path(CURRENT["recipe"]), CURRENT.get("set", [])).run
    deadline = time.monotonic() + 120
    while not (Path(run) / name).exists():
        assert time.monotonic() < deadline, f"{name} was never written"
        time.sleep(0.01)


def hang(model, step):
    """The forward pass of the third step hangs."""
    if step == 2:
        model.register_forward_pre_hook(lambda *_: hang_in_forward())
    return {}


def hang_in_forward():
    time.sleep(600)


def record_collectives(world, job):
    total = world.all_sum(torch.tensor([1.0, float(world.rank)]))
    world.barrier()
    found = {
        "sum": total.tolist(),
        "gathered": world.gather({"rank": world.rank}),
        "broadcast": world.broadcast(world.rank),
    }
    Path(job["world"]).with_suffix(f".{world.rank}").write_text(json.dumps(found))


def record_gloo_threads(world, job):
    """The number of threads of gloo groups, once those that are ending have ended."""
    deadline = time.monotonic() + 10
    while (count := count_gloo_threads()) > job["expected"] and time.monotonic() < deadline:
        time.sleep(0.01)
    Path(job["threads"]).with_suffix(f".{world.rank}").write_text(str(count))


def count_gloo_threads():
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            count += "gloo" in (task / "comm").read_text()
    return count


def crash(world, job):
    """One rank crashes, as in a library; the others wait for it."""
    if world.rank == job["crash"]:
        os.kill(os.getpid(), signal.SIGSEGV)
    world.barrier()


def call(world, job):
    """Call a function of a test's module on every rank: `call` is module:function."""
    module, _, function = job["call"].partition(":")
    getattr(importlib.import_module(module), function)(world, job)


def do(world, job):
    kinds = {
        "world": record_collectives, "threads": record_gloo_threads, "crash": crash,
        "call": call,
    }  # fmt: skip
    for kind, function in kinds.items():
        if kind in job:
            function(world, job)
            return
    CURRENT.clear()
    CURRENT.update(job)
    of_rank = job.get("set_of_rank", {}).get(str(world.rank), [])
    config = load_config(TrainConfig, Path(job["recipe"]), [*job.get("set", []), *of_rank])
    if "before" in job:
        globals()[job["before"]]()
    try:
        ending = train_in(world, config, validate=globals()[job.get("validate", "no_validation")]).value
    except UserError as error:
        ending = f"{type(error).__name__}: {error}"
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if not ending.startswith(job.get("ending", "finished")):
        sys.exit(f"{job} ended with {ending!r}")


def run_jobs(file):
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    gc.freeze()
    gc.unfreeze = lambda: None  # a run collects garbage twice: what was imported is left out
    with open_world("cpu") as world:
        for job in json.loads(Path(file).read_text()):
            do(world, job)


def run_forked(file, environment):
    """Run `run_jobs` in a forked process, with the environment, log and warning filter of a process of its own."""
    os.environ.update(environment)
    warnings.simplefilter("error")
    with Path(file).with_suffix(".log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    faulthandler.enable()  # a crash of a library leaves the stacks in the log: of Python, and of all threads in C++
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    run_jobs(file)


def run_under_agent(file):
    """`run_jobs` in a process that torchrun's agent has forked."""
    warnings.simplefilter("error")
    run_jobs(file)


if __name__ == "__main__":
    run_jobs(sys.argv[1])
