"""Where records of a run go: `metrics.jsonl` always, TensorBoard and Weights & Biases where asked for.

    with open_trackers(config, run, step=resumed_step, settings=encode(train_config)) as trackers:
        trackers.log(record)                                                # a dict with `step`, on one rank only

A record is nested JSON; viewers that know only numbers with names get `source_loss/captions` and the like. A run that is taken up
at step n forgets what was written beyond n: it will be written again. A tracker that fails, for the network or the disk, is named
in one warning, and training goes on.
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
    """A run on Weights & Biases; needs the package wandb and its login."""

    project: str = "saccade"
    """Project the run appears in."""
    name: str | None = None
    """What the run is called there; the run folder's name where not given."""
    mode: Literal["online", "offline", "disabled"] = "online"
    """offline writes into the run folder, for `wandb sync` later. The environment variable WANDB_MODE takes precedence."""


@dataclass(frozen=True, kw_only=True)
class TrackersConfig:
    """Where the records of a run go besides metrics.jsonl."""

    tensorboard: bool = False
    """Write TensorBoard events into the run folder; needs the package of that name."""
    wandb: WandbConfig | None = None
    """Send records to Weights & Biases, if the section is there."""


class Tracker(Protocol):
    """One place where records go."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Take one record."""

    def close(self) -> None:
        """Finish what is under way."""


class Trackers:
    """Several trackers as one; none of them can stop the run."""

    def __init__(self, makers: Mapping[str, Callable[[], Tracker]]) -> None:
        """`makers`: how each tracker is opened, by its name."""
        self._has_failed: set[str] = set()
        self._trackers: dict[str, Tracker] = {}
        for name, make in makers.items():
            self._guarded(name, self._open, name, make)

    def log(self, record: Mapping[str, Any]) -> None:
        """Hand the record to every tracker. It holds `step`."""
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
        """Run it; what goes wrong is said once for each tracker. Clients raise classes of their own, so any is caught."""
        try:
            action(*arguments)
        except Exception as error:
            if name not in self._has_failed:
                logger.warning("%s: %s: %s. Training goes on without it", name, type(error).__name__, error)
            self._has_failed.add(name)

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_trackers(config: TrackersConfig, run: Path, *, step: int, settings: Mapping[str, Any]) -> Trackers:
    """The trackers of a run folder, going on after `step` (0 at the beginning). `settings`: the run's, to be shown beside it."""
    makers: dict[str, Callable[[], Tracker]] = {"metrics.jsonl": lambda: JsonLines(run / "metrics.jsonl", step)}
    if config.tensorboard:
        makers["TensorBoard"] = lambda: TensorBoard(run / "tensorboard", step)
    if (wandb := config.wandb) is not None:
        makers["Weights & Biases"] = lambda: WeightsAndBiases(wandb, run, settings)
    return Trackers(makers)


class JsonLines:
    """One JSON object a line, on disk as soon as it is logged."""

    def __init__(self, path: Path, step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [record for record in read_records(path) if record["step"] <= step]
        with atomic_write(path) as temporary:
            temporary.write_text("".join(f"{json.dumps(record)}\n" for record in kept), encoding="utf-8")
        self._path, self._before = path, ""

    def log(self, record: Mapping[str, Any]) -> None:
        """Add the line. If one before it was cut off by a full disk, begin a new one."""
        line, self._before = f"{self._before}{json.dumps(record, allow_nan=False)}\n", "\n"
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line)
        self._before = ""

    def close(self) -> None:
        """Nothing is left open."""


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics file; none if there is no file. Lines cut off by a crash are passed over."""
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
    """Events of every number, by step."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=step + 1)

    def log(self, record: Mapping[str, Any]) -> None:
        """Write its numbers."""
        for name, value in flat_numbers(record).items():
            self._writer.add_scalar(name, value, record["step"])
        self._writer.flush()

    def close(self) -> None:
        """Close the events file."""
        self._writer.close()


class WeightsAndBiases:
    """A run on wandb.ai, or in a folder to be sent there later. A resumed run goes on under the id it had."""

    def __init__(self, config: WandbConfig, run: Path, settings: Mapping[str, Any]) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=config.project,
            name=config.name or run.resolve().name,
            id=_kept_id(run / "wandb" / "run-id"),
            resume="allow",
            dir=str(run),
            mode=os.environ.get("WANDB_MODE") or config.mode,
            config=dict(settings),
            settings=wandb.Settings(silent=True, init_timeout=60),
        )
        # Its own counter only rises; with `step` as the axis, steps that are done again are drawn where they belong.
        self._run.define_metric("*", step_metric="step")
        if self._run.url:
            logger.info("Weights & Biases: %s", self._run.url)

    def log(self, record: Mapping[str, Any]) -> None:
        """Hand its numbers to the client, which sends them behind our back."""
        self._run.log(flat_numbers(record) | {"step": record["step"]})

    def close(self) -> None:
        """Wait until everything is sent or written."""
        self._run.finish()


def _kept_id(path: Path) -> str:
    """The id in the file; a new one where there is none yet."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


def flat_numbers(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a nested record by path; what is not a number is left out, and so is `step`, the axis."""
    numbers: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            numbers |= flat_numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and prefix + key != "step":
            numbers[prefix + key] = value
    return numbers


def _plain(value: Any) -> Any:
    """The value with None in the place of numbers that JSON does not know."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
