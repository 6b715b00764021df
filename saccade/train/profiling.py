"""Profiler traces of selected steps, and CUDA memory snapshots.

    RUN/trace/steps-20-22-rank0.json     for https://ui.perfetto.dev or chrome://tracing
    RUN/trace/communication-rank0.json   compute, exposed communication of each kind, the longest bubble: also logged
    RUN/trace/memory-rank0.pickle        for https://pytorch.org/memory_viz; a pickle: load only files you trust

Every rank writes its own files. Both cost time and host memory while active, so they are off by default.
"""

import dataclasses
import json
import logging
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile

from saccade.errors import ConfigError
from saccade.train.communication import report_communication
from saccade.train.run_config import LogConfig
from saccade.world import World

logger = logging.getLogger(__name__)

PROFILED_STEPS = (3, 5)
"""First and last step of a process that `log.profile` profiles; the first are not typical."""
SNAPSHOT_STEP = 3
"""Step of a process after which the memory snapshot is written if no steps are profiled; the first are not typical."""
_MAX_EVENTS = 200_000
"""Maximum number of recorded allocations; a step of a 3B model makes about 10,000."""


class StepProfiler:
    """Profiles the configured steps, as a context manager around the training loop."""

    def __init__(self, config: LogConfig, folder: Path, world: World) -> None:
        if config.memory_snapshot and world.device.type != "cuda":
            raise ConfigError("log.memory_snapshot needs a GPU, but this run is on the CPU. Remove it")
        self._folder, self._world = folder, world
        steps = config.profile_steps
        self._first = steps[0] if steps else None
        self._last = steps[1] if steps else None
        self._profiles_process_steps = config.profile
        self._has_snapshot = not config.memory_snapshot
        self._num_steps = 0
        self._profiler: profile | None = None

    def __enter__(self) -> Self:
        if not self._has_snapshot:
            torch.cuda.memory._record_memory_history(max_entries=_MAX_EVENTS)
        return self

    def start_step(self, step: int) -> None:
        """Start or stop profiling before step `step` of the run."""
        if self._profiles_process_steps and self._num_steps == 0:
            self._first, self._last = (step - 1 + number for number in PROFILED_STEPS)
        if step == self._first:
            kinds = [ProfilerActivity.CPU]
            if self._world.device.type == "cuda":
                kinds.append(ProfilerActivity.CUDA)
            self._profiler = profile(activities=kinds, acc_events=True)
            self._profiler.start()

    def end_step(self, step: int) -> None:
        """Call after step `step`, when its update is enqueued."""
        self._num_steps += 1
        if step == self._last:
            self._write_trace()
        if step == self._last or (self._last is None and self._num_steps == SNAPSHOT_STEP):
            self._write_snapshot()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write what was recorded, also after an out-of-memory error."""
        self._write_trace()
        self._write_snapshot()

    def _write_trace(self) -> None:
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        name = f"steps-{self._first}-{self._last}-rank{self._world.rank}.json"
        file = self._file(name)
        profiler.export_chrome_trace(str(file))
        self._report(json.loads(file.read_text(encoding="utf-8"))["traceEvents"])

    def _report(self, events: list[dict[str, Any]]) -> None:
        """Log the communication of this rank, and write it."""
        report = report_communication(events)
        for line in report.lines():
            logger.info("%s", line)
        text = json.dumps(dataclasses.asdict(report), indent=1)
        self._file(f"communication-rank{self._world.rank}.json").write_text(text, encoding="utf-8")

    def _write_snapshot(self) -> None:
        if self._has_snapshot:
            return
        self._has_snapshot = True
        file = self._file(f"memory-rank{self._world.rank}.pickle")
        torch.cuda.memory._dump_snapshot(str(file))  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None)

    def _file(self, name: str) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        logger.info("wrote %s", self._folder / name)
        return self._folder / name
