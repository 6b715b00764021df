"""What is said about a stage while it runs: a line in the log and a record for the trackers, once an interval."""

import logging
import time
from collections.abc import Mapping

from saccade.train.metrics import Meter, Step, device_memory_gib, format_line, peak_flops
from saccade.train.trackers import Trackers
from saccade.world import World

logger = logging.getLogger(__name__)


class Journal:
    """Keeps count of a stage's steps. Every rank has one; the main rank's is heard."""

    def __init__(self, trackers: Trackers, stage: str, every: int, world: World) -> None:
        self._trackers, self._stage, self._every, self._world = trackers, stage, every, world
        self._meter: Meter | None = None
        self._num_steps = 0
        self._step_ended = time.perf_counter()

    @property
    def has_begun(self) -> bool:
        """Whether `begin` was called."""
        return self._meter is not None

    def begin(self, *, num_steps: int, tokens: int, samples: int) -> None:
        """Before the first step is added: the step the stage will end at, and what the run has seen so far."""
        self._num_steps = num_steps
        self._meter = Meter(
            num_steps=num_steps,
            world_size=self._world.size,
            peak_flops=peak_flops(self._world.device),
            tokens=tokens,
            samples=samples,
        )

    def seconds_since_last(self) -> float:
        """Time since this was last asked: how long a step took."""
        now = time.perf_counter()
        seconds, self._step_ended = now - self._step_ended, now
        return seconds

    def add(self, step: Step, lrs: Mapping[str, float]) -> None:
        """Count a step; at the end of an interval, say how it went. `lrs`: learning rate by group."""
        assert self._meter is not None, "begin comes first"
        self._meter.add(step)
        if step.number % self._every == 0:
            record = self._meter.record(self._stage, lrs, device_memory_gib(self._world.device))
            self._trackers.log(record)
            logger.info(format_line(record, self._num_steps))

    def add_scores(self, step: int, scores: Mapping[str, float]) -> None:
        """Record what a probe found."""
        self._trackers.log({"step": step, "stage": self._stage, "probe": dict(scores)})
        logger.info("probe after step %d: %s", step, "  ".join(f"{name} {score:.4g}" for name, score in scores.items()))
