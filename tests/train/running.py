"""Small runs for the tests of training: a tiny checkpoint, toy shards, a recipe, and processes of several ranks."""

import json
import multiprocessing
import os
import signal
import time
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

import torch
from train import ranks

from saccade.config import load_config
from saccade.data.sample import Sample
from saccade.data.shards import ShardWriter
from saccade.data.toy import toy_sample
from saccade.model.initialize import initialize_random, named_size
from saccade.train.config import TrainConfig

RANKS = Path(__file__).with_name("ranks.py")

RECIPE = """
run = "{run}"
seed = 3
[model]
folder = "{checkpoint}"
dtype = "fp32"
[checkpoint]
every = 10
export_dtype = "fp32"
[log]
every = 1
[[stages]]
name = "learn"
steps = 20
[stages.data]
sources = [{{ path = "{shards}" }}]
max_seq_len = 240
max_patches = 512
global_batch_size = 2
num_workers = 0
[stages.optimizer]
lr = 1e-3
weight_decay = 0.1
[stages.schedule]
kind = "constant"
warmup_steps = 3
"""


def make_checkpoint(folder: Path) -> Path:
    initialize_random(folder, named_size("tiny"), dtype=torch.float32)
    return folder


def write_shards(
    folder: Path, count: int = 48, *, text_every: int | None = None, sides: tuple[int, ...] = (56,)
) -> Path:
    """Toy images of 56 px, 4 tokens each, or of `sides`; with `text_every`, only every nth sample has an image."""
    with ShardWriter(folder, max_samples=16) as writer:
        for number in range(count):
            is_text = text_every is not None and number % text_every != 0
            writer.write(_text_sample(number) if is_text else toy_sample(number, side=sides[number % len(sides)]))
    return folder


def _text_sample(number: int) -> Sample:
    messages = [
        {"role": "user", "content": f"Count to {number}."},
        {"role": "assistant", "content": "one two three " * (1 + number % 3)},
    ]
    return Sample(key=f"{number:08d}", source="text", members={"json": json.dumps({"messages": messages}).encode()})


def write_recipe(path: Path, *, run: Path, checkpoint: Path, shards: Path, text: str = RECIPE) -> Path:
    path.write_text(text.format(run=run, checkpoint=checkpoint, shards=shards))
    return path


def recipe_in(root: Path, name: str) -> Path:
    """A recipe for the checkpoint and the shards of a folder, whose run is named like it."""
    return write_recipe(root / f"{name}.toml", run=root / name, checkpoint=root / "checkpoint", shards=root / "shards")


def make_root(folder: Path, *, text_every: int | None = None, num_held_out: int = 0) -> Path:
    """A folder with a checkpoint, shards, and held-out ones."""
    make_checkpoint(folder / "checkpoint")
    write_shards(folder / "shards", text_every=text_every)
    if num_held_out:
        write_shards(folder / "held-out", num_held_out)
    return folder


def read_recipe(path: Path, *overrides: str) -> TrainConfig:
    return load_config(TrainConfig, path, overrides)


def records(run: Path) -> dict[int, dict]:
    """The records of a run by step."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record for record in map(json.loads, lines) if "loss" in record}


def losses(run: Path) -> list[float]:
    return [record["loss"] for _, record in sorted(records(run).items())]


def skipped(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "skipped_steps.jsonl").read_text().splitlines()]


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    path = os.pathsep.join([str(RANKS.parents[1]), os.environ.get("PYTHONPATH", "")])
    return kept | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0", "PYTHONPATH": path} | more


def fork_server():
    """Start a process that imports training once (4 s of CPU) and forks the ranks of all tests."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train.ranks"])
    with mock.patch.dict(os.environ, environment(JE_ARROW_MALLOC_CONF="background_thread:false"), clear=True):
        forkserver.ensure_running()
    return context


def start(jobs: list[dict], file: Path, *, rank: int = 0, size: int = 1, port: int = 0) -> BaseProcess:
    """Start one process that runs the jobs, alone or as a rank of several. See `ranks.py` for what a job is."""
    file.write_text(json.dumps(jobs))
    file.with_suffix(".log").touch()
    rank_variables = {}
    if size > 1:
        rank_variables = {
            "RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_RANK": rank,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": True,  # as with torchrun: the test has the store, no rank binds a port
            "TORCHELASTIC_RESTART_COUNT": 0,
        }
    arguments = (str(file), {name: str(value) for name, value in rank_variables.items()})
    process = fork_server().Process(target=ranks.run_forked, args=arguments)
    process.start()
    return process


def run_with_restarts(jobs: list[dict], folder: Path, *, num_ranks: int, max_restarts: int = 1) -> str:
    """Run the jobs under the agent of `torchrun --max-restarts=1`, with ranks of the fork server; return their log."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.utils import logging as elastic_logging
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    file, logs = folder / "jobs.json", folder / "logs"
    file.write_text(json.dumps(jobs))
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=num_ranks, run_id=folder.name,
        rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0",
        max_restarts=max_restarts, monitor_interval=0.1, start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
    )  # fmt: skip
    fork_server()
    handlers = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    }
    try:
        # The agent searches all modules for the names of its loggers: 3 s in a process that has imported all tests.
        with mock.patch.object(elastic_logging, "_derive_module_name", return_value="torch.distributed.elastic"):
            elastic_launch(config, ranks.run_under_agent)(str(file))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        output = "".join(log.read_text() for log in sorted(logs.rglob("std*.log")))
    return output


def run_together(jobs: list[dict], folder: Path, *, num_ranks: int, timeout_s: float = 600.0) -> None:
    """Run the jobs on several ranks; a failing process fails the test with its output."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    files = [folder / f"jobs-{rank}.json" for rank in range(num_ranks)]
    processes = [start(jobs, file, rank=rank, size=num_ranks, port=store.port) for rank, file in enumerate(files)]
    end = time.monotonic() + timeout_s
    while any(process.exitcode is None for process in processes) and not any(process.exitcode for process in processes):
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    for process in processes:
        process.kill()
        process.join()
    codes = [process.exitcode for process in processes]
    assert not any(codes), "\n----\n".join(map(_ending, range(num_ranks), codes, files))


def _ending(rank: int, code: int, file: Path) -> str:
    """Return a rank's exit code (-9: killed because of another) and the end of its log; after a crash, all stacks."""
    has_crashed = code < 0 and code != -signal.SIGKILL
    return f"rank {rank}: exit code {code}\n{file.with_suffix('.log').read_text()[-30000 if has_crashed else -3000 :]}"
