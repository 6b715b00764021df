"""Metric trackers: `metrics.jsonl` always, TensorBoard and Weights & Biases if configured.

    with open_trackers(config, run, step=resumed_step, settings=encode(train_config)) as trackers:
        trackers.log(record)                                                # a dict with `step`, on the main rank only

A record is nested JSON; flat trackers get names such as `source_loss/captions`. A run that resumes at step n drops
records beyond n, and that of the validation after step n if it has to be repeated: they will be written again. A
tracker that fails (network, disk) is reported in one warning, and training continues.
"""

import json
import logging
import math
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

from saccade.files import atomic_write

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """Weights & Biases; needs the package wandb and a login."""

    project: str = "saccade"
    """Project name."""
    name: str | None = None
    """Name of the run; default: the run folder's name."""
    mode: Literal["online", "offline", "disabled"] = "online"
    """offline writes into the run folder, for a later `wandb sync`. The variable WANDB_MODE takes precedence."""


@dataclass(frozen=True, kw_only=True)
class TrackersConfig:
    """Trackers in addition to metrics.jsonl."""

    tensorboard: bool = False
    """Write TensorBoard events into the run folder; needs the package tensorboard."""
    wandb: WandbConfig | None = None
    """Log to Weights & Biases if this section is present."""


class Tracker(Protocol):
    """A destination of records."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Log one record."""

    def close(self) -> None:
        """Flush and close."""


class Trackers:
    """Several trackers as one; a failing tracker never stops the run."""

    def __init__(self, makers: Mapping[str, Callable[[], Tracker]]) -> None:
        """`makers` maps a name to the function that opens the tracker."""
        self._has_failed: set[str] = set()
        self._trackers: dict[str, Tracker] = {}
        for name, make in makers.items():
            self._guarded(name, self._open, name, make)

    def log(self, record: Mapping[str, Any]) -> None:
        """Log a record, which must contain `step`, to every tracker."""
        plain = _plain(record)
        for name, tracker in self._trackers.items():
            self._guarded(name, tracker.log, plain)

    def close(self) -> None:
        """Close every tracker."""
        for name, tracker in self._trackers.items():
            self._guarded(name, tracker.close)
        self._trackers = {}

    def _open(self, name: str, make: Callable[[], Tracker]) -> None:
        self._trackers[name] = make()

    def _guarded(self, name: str, action: Callable[..., None], *arguments: object) -> None:
        """Run `action`; report the first error of each tracker. Clients raise their own classes, so all are caught."""
        try:
            action(*arguments)
        except Exception as error:
            if name not in self._has_failed:
                logger.warning("%s: %s: %s. Training continues without it", name, type(error).__name__, error)
            self._has_failed.add(name)

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_trackers(
    config: TrackersConfig, run: Path, *, step: int, settings: Mapping[str, Any], is_validated: bool = True
) -> Trackers:
    """The trackers of a run folder, continuing after `step` (0 for a new run) and, if `is_validated`, its validation.

    `settings`: the config of the run.
    """
    makers: dict[str, Callable[[], Tracker]] = {
        "metrics.jsonl": lambda: JsonLines(run / "metrics.jsonl", step, is_validated=is_validated)
    }
    if config.tensorboard:
        makers["TensorBoard"] = lambda: TensorBoard(run / "tensorboard", step)
    if (wandb := config.wandb) is not None:
        makers["Weights & Biases"] = lambda: WeightsAndBiases(wandb, run, settings)
    return Trackers(makers)


class JsonLines:
    """One JSON object per line, on disk as soon as it is logged."""

    def __init__(self, path: Path, step: int, *, is_validated: bool = True) -> None:
        """Keeps the records up to `step`, that of its validation only if `is_validated`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [
            record
            for record in read_records(path)
            if record["step"] < step or (record["step"] == step and (is_validated or "validation" not in record))
        ]
        with atomic_write(path) as temporary:
            temporary.write_text("".join(f"{json.dumps(record)}\n" for record in kept), encoding="utf-8")
        self._path, self._before = path, ""

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a line, on a new line if the previous one was truncated by a full disk."""
        line, self._before = f"{self._before}{json.dumps(record, allow_nan=False)}\n", "\n"
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line)
        self._before = ""

    def close(self) -> None:
        """Nothing to do: no file is open."""


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics file, if there is one. Lines truncated by a crash are skipped."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield record


class TensorBoard:
    """TensorBoard events of every metric."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=step + 1)

    def log(self, record: Mapping[str, Any]) -> None:
        """Write the metrics of a record."""
        for name, value in flat_numbers(record).items():
            self._writer.add_scalar(name, value, record["step"])
        self._writer.flush()

    def close(self) -> None:
        """Close the events file."""
        self._writer.close()


class WeightsAndBiases:
    """A Weights & Biases run, online or offline. A resumed run keeps its id."""

    def __init__(self, config: WandbConfig, run: Path, settings: Mapping[str, Any]) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or config.mode
        self._run: Any = wandb.init(
            project=config.project,
            name=config.name or run.resolve().name,
            id=_run_id(run / "wandb" / "run-id"),
            resume="allow",
            dir=str(run),
            mode=mode,
            config=dict(settings),
            settings=wandb.Settings(silent=True, init_timeout=60),
        )
        # wandb's own step only increases; with `step` as the x axis, repeated steps are drawn at their place.
        self._run.define_metric("*", step_metric="step")
        if self._run.url:
            logger.info("Weights & Biases: %s", self._run.url)

    def log(self, record: Mapping[str, Any]) -> None:
        """Log the metrics of a record; the client sends them asynchronously."""
        self._run.log(flat_numbers(record) | {"step": record["step"]})

    def close(self) -> None:
        """Wait until everything is sent."""
        self._run.finish()


def _run_id(path: Path) -> str:
    """The id in the file, created if missing."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


def flat_numbers(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a nested record by path, without `step`."""
    numbers: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            numbers |= flat_numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and prefix + key != "step":
            numbers[prefix + key] = value
    return numbers


def _plain(value: Any) -> Any:
    """The value with None instead of NaN and inf, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
