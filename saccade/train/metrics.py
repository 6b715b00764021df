"""Metrics of training: FLOPs, throughput, MFU, the log line, and the metrics log.

Work is counted from shapes on the host, before a micro-batch is copied to the device (`micro_batch_work`); it is
additive over micro-batches and ranks. Model FLOPs are those of the matmuls: decoder, head (loss tokens only: others are
dropped before it), vision tower and projector, counted from the projections the model has, and attention, 4 n^2 d with
the causal half counted once, vision blocks over full images or windows. Training costs up to three times the forward
pass: a frozen part needs no weight gradients, and no activation gradients unless something before it is trained.
Activation checkpointing is not counted.

MFU is those FLOPs over time and the device's peak: `mfu` with vision tower and projector, `mfu_decoder` without. A
`Meter` collects steps and gives one record per interval; the first steps of a process (compilation, allocation, caches)
are excluded from times.
"""

import functools
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from saccade.model.config import ModelConfig
from saccade.model.linear import checkpoint_shapes, projections
from saccade.model.vlm import VLM
from saccade.processor.inputs import ModelInputs
from saccade.train.trackers import Trackers
from saccade.world import World

logger = logging.getLogger(__name__)

PEAK_FLOPS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}
"""Published dense bf16 peak, by substring of the device name; the first match counts."""

Record = dict[str, Any]
"""Metrics of one interval: JSON, with None for unknown values."""


def peak_flops(device: torch.device) -> float | None:
    """bf16 peak FLOP/s of a GPU; None for an unknown one and for a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


class Flops(NamedTuple):
    """FLOPs of each part, in forward order; a multiply-add is two."""

    vision: float
    projector: float
    language: float
    head: float


def forward_flops(
    config: ModelConfig,
    conversation_lengths: Sequence[int],
    image_grids: Sequence[Sequence[int]],
    num_head_tokens: int | None = None,
) -> Flops:
    """Forward pass over a packed sequence. Without `num_head_tokens`, every token goes through the head."""
    language, model = config.language, _meta_model(config)
    num_tokens = sum(conversation_lengths)
    num_head_tokens = num_tokens if num_head_tokens is None else num_head_tokens
    patches, weights = model.vision.num_patches(image_grids), _num_weights(config)
    pairs = sum(_causal_pairs(n, language.sliding_window) for n in conversation_lengths)
    attention = 4 * pairs * language.num_heads * language.head_dim
    return Flops(
        vision=2 * patches * weights["vision"]
        + 4 * model.vision.attention_pairs(image_grids) * config.vision.hidden_size,
        projector=2 * patches / config.vision.patches_per_token * weights["projector"],
        language=2 * num_tokens * weights["language"] + attention * language.num_layers,
        head=2 * num_head_tokens * language.hidden_size * language.vocab_size,
    )


def _causal_pairs(num_tokens: int, sliding_window: int | None) -> float:
    """Pairs of tokens that attend to each other, the causal half counted once."""
    if sliding_window is None or num_tokens <= sliding_window:
        return num_tokens**2 / 2
    return sliding_window * (num_tokens - sliding_window / 2)


@functools.lru_cache(maxsize=8)
def _meta_model(config: ModelConfig) -> VLM:
    with torch.device("meta"):
        return VLM(config)


@functools.lru_cache(maxsize=8)
def _num_weights(config: ModelConfig) -> dict[str, int]:
    """Count the projection weights that run, by part: each costs two FLOPs per patch (vision) or token (others)."""
    model, total = _meta_model(config), {"vision": 0, "projector": 0, "language": 0, "head": 0}
    shapes = checkpoint_shapes(model)
    unused = {inner for module in model.vision.unused_modules() for inner in module.modules()}
    for name in (name for name, layer in projections(model) if layer not in unused):
        total[name.partition(".")[0]] += math.prod(shapes.get(f"{name}.weight", ()))
    return total


def training_flops(forward: Flops, trained_parts: Iterable[str], *, tied_head: bool) -> Flops:
    """Forward and backward, given the trained parts (vision, projector, embedding, language, head).

    A part with LoRA adapters (`language.lora`) needs activation gradients only; the adapters themselves are not
    counted.
    """
    trained = set(trained_parts)
    order = [{"vision"}, {"projector"}, {"embedding", "language"}, {"embedding" if tied_head else "head"}]
    total, reached = [], set[str]()
    for flops, parts in zip(forward, order, strict=True):
        reached |= parts | {f"{part}.lora" for part in parts}
        total.append(flops * (1 + bool(parts & trained) + bool(reached & trained)))
    return Flops(*total)


class Work(NamedTuple):
    """Contents and cost of micro-batches. All values are additive over micro-batches and ranks."""

    samples: float = 0.0
    """Number of conversations."""
    text_tokens: float = 0.0
    image_tokens: float = 0.0
    loss_tokens: float = 0.0
    vision_flops: float = 0.0
    """Vision tower and projector, forward and backward."""
    decoder_flops: float = 0.0
    """Decoder and head, forward and backward."""

    def plus(self, other: "Work") -> "Work":
        """The sum."""
        return Work(*(a + b for a, b in zip(self, other, strict=True)))


def micro_batch_work(config: ModelConfig, inputs: ModelInputs, num_loss_tokens: int, trained: Iterable[str]) -> Work:
    """The work of one micro-batch on the CPU, given the trained parts."""
    assert inputs.cu_seqlens.is_cpu, "micro_batch_work reads lengths on the host: call it before the copy to the device"
    lengths, grids = inputs.cu_seqlens.diff().tolist(), inputs.image_grids.tolist()
    flops = training_flops(forward_flops(config, lengths, grids, num_loss_tokens), trained, tied_head=config.tied_head)
    num_image_tokens = inputs.image_token_index.shape[0]
    return Work(
        samples=inputs.num_conversations,
        text_tokens=inputs.num_tokens - num_image_tokens,
        image_tokens=num_image_tokens,
        loss_tokens=num_loss_tokens,
        vision_flops=flops.vision + flops.projector,
        decoder_flops=flops.language + flops.head,
    )


@dataclass(frozen=True)
class Step:
    """One optimizer step, summed over ranks."""

    number: int
    """Steps of the run so far, including this one."""
    loss: float
    """Loss per unit of the objective: per loss token, for cross entropy."""
    grad_norm: float
    """Norm before clipping."""
    seconds: float
    """Time from the end of the previous step to the end of this one."""
    data_wait_s: float
    """Part of this time spent waiting for the next batch."""
    work: Work
    """Work of all ranks."""
    source_losses: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Maps a source to (sum of the loss, number of loss tokens)."""
    of_objective: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Maps a metric of the objective to (sum, number of units)."""
    is_skipped: bool = False
    """Whether the guard skipped it; its loss is excluded from averages."""


class Meter:
    """Averages steps into one record per interval."""

    def __init__(
        self,
        *,
        num_steps: int,
        world_size: int = 1,
        peak_flops: float | None = None,
        num_warmup: int = 3,
        tokens: int = 0,
        samples: int = 0,
    ) -> None:
        """The first `num_warmup` steps are not timed; a resumed run has already seen `tokens` and `samples`."""
        self.tokens, self.samples = tokens, samples
        """Tokens and samples seen since the start of the run."""
        self._num_steps, self._world_size, self._peak = num_steps, world_size, peak_flops
        self._num_warmup = num_warmup
        self._steps: list[Step] = []
        self._timed: list[Step] = []
        self._timed_seconds, self._num_timed = 0.0, 0

    def add(self, step: Step) -> None:
        """Count one step."""
        self.tokens += int(step.work.text_tokens + step.work.image_tokens)
        self.samples += int(step.work.samples)
        self._steps.append(step)
        if self._num_warmup > 0:
            self._num_warmup -= 1
            return
        self._timed.append(step)
        self._timed_seconds += step.seconds
        self._num_timed += 1

    def record(self, stage: str, lrs: Mapping[str, float], memory_gib: float | None = None) -> Record:
        """The record of the interval since the last one. `lrs`: current learning rate by parameter group."""
        assert self._steps, "a record needs at least one step"
        steps, number = self._steps, self._steps[-1].number
        good = [step for step in steps if not step.is_skipped]
        mean_s = self._timed_seconds / self._num_timed if self._num_timed else None
        record = {
            "step": number,
            "stage": stage,
            "loss": _mean([step.loss for step in good]),
            "grad_norm": _mean([step.grad_norm for step in good]),
            "lr": dict(lrs),
            **self._speeds(),
            "memory_gib": memory_gib,
            "eta_s": None if mean_s is None else mean_s * (self._num_steps - number),
            "tokens": self.tokens,
            "samples": self.samples,
            "skipped": len(steps) - len(good),
            "source_loss": _means([step.source_losses for step in good]),
        }
        if of_objective := _means([step.of_objective for step in good]):
            record["objective"] = of_objective
        self._steps, self._timed = [], []
        return record

    def _speeds(self) -> Record:
        """Times and rates of the interval; None during warm-up."""
        names = ("ms", "text_tokens_per_s", "image_tokens_per_s", "mfu", "mfu_decoder", "data_wait")
        if not self._timed:
            return dict.fromkeys(names)
        seconds, work = sum(step.seconds for step in self._timed), Work()
        for step in self._timed:
            work = work.plus(step.work)
        available = None if self._peak is None else self._peak * self._world_size * seconds
        values = (
            seconds / len(self._timed) * 1e3,
            work.text_tokens / seconds,
            work.image_tokens / seconds,
            None if available is None else (work.vision_flops + work.decoder_flops) / available,
            None if available is None else work.decoder_flops / available,
            sum(step.data_wait_s for step in self._timed) / seconds,
        )
        return dict(zip(names, values, strict=True))


class MetricsLog:
    """Metrics log of a stage: one line in the log and one record for the trackers per interval, and for the first step.

    Every rank has one; only the main rank's output is seen.
    """

    def __init__(self, trackers: Trackers, stage: str, every: int, world: World) -> None:
        self._trackers, self._stage, self._every, self._world = trackers, stage, every, world
        self._meter: Meter | None = None
        self._num_steps = 0
        self._is_first = True
        self._last_time = time.perf_counter()

    @property
    def is_started(self) -> bool:
        """Whether `start` was called."""
        return self._meter is not None

    def start(self, *, num_steps: int, tokens: int, samples: int) -> None:
        """Before the first step: the last step of the stage, and what the run has seen so far."""
        self._num_steps = num_steps
        self._meter = Meter(
            num_steps=num_steps,
            world_size=self._world.size,
            peak_flops=peak_flops(self._world.device),
            tokens=tokens,
            samples=samples,
        )

    def seconds_since_last(self) -> float:
        """Time since the last call: the duration of a step."""
        now = time.perf_counter()
        seconds, self._last_time = now - self._last_time, now
        return seconds

    def add(self, step: Step, lrs: Mapping[str, float]) -> None:
        """Count a step; write a record after the first step and each interval. `lrs` are learning rates by group."""
        assert self._meter is not None, "start comes first"
        self._meter.add(step)
        if step.number % self._every == 0 or self._is_first:
            record = self._meter.record(self._stage, lrs, device_memory_gib(self._world.device))
            self._trackers.log(record)
            logger.info(format_line(record, self._num_steps))
        self._is_first = False

    def add_validation(self, step: int, scores: Mapping[str, float]) -> None:
        """Record the scores of a validation."""
        self._trackers.log({"step": step, "stage": self._stage, "validation": dict(scores)})
        logger.info("step %d: validation %s", step, "  ".join(f"{name} {score:.4g}" for name, score in scores.items()))


def _mean(values: Sequence[float]) -> float | None:
    """The mean; None without values, or if it is not finite."""
    mean = sum(values) / len(values) if values else math.nan
    return mean if math.isfinite(mean) else None


def _means(steps: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """The mean of every name over all steps that have it, from (sum, count) of each."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    for step in steps:
        for name, sum_and_count in step.items():
            pairs.setdefault(name, []).append(sum_and_count)
    return {
        name: sum(s for s, _ in found) / count
        for name, found in sorted(pairs.items())
        if (count := sum(n for _, n in found)) > 0
    }


def device_memory_gib(device: torch.device) -> float | None:
    """Peak allocated memory of a GPU since the last call; None on a CPU."""
    if device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated(device) / 2**30
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def format_line(record: Record, num_steps: int) -> str:
    """The record as one aligned log line."""
    tokens = None if record["ms"] is None else record["text_tokens_per_s"] + record["image_tokens_per_s"]
    rate = max(record["lr"].values(), default=None)
    fields = [
        f"step {record['step']:0{len(str(num_steps))}d}/{num_steps}",
        f"{record['step'] / num_steps:6.1%}",
        f"loss {_format(record['loss'], '6.3f')}",
        f"grad {_format(record['grad_norm'], '5.2f')}",
        f"lr {_short_exponent(rate):>6}",
        f"{_format(record['ms'], '5.0f')} ms",
        f"{thousands(tokens):>5} tok/s",
        f"mfu {_format(record['mfu'], '4.0%')}",
        f"data wait {_format(record['data_wait'], '6.1%')}",
        f"eta {duration(record['eta_s']):>6}",
    ]
    fields += [f"{name} {value:.4g}" for name, value in record.get("objective", {}).items()]
    if record["skipped"]:
        fields.append(f"skipped {record['skipped']}")
    return "  ".join(fields)


def _format(value: float | None, spec: str) -> str:
    """The number, or a dash of the same width."""
    return f"{'-':>{spec.split('.')[0]}}" if value is None else f"{value:{spec}}"


def _short_exponent(value: float | None) -> str:
    """2.9e-4 rather than 2.9e-04."""
    if value is None:
        return "-"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}" if value else "0"


def thousands(value: float | None) -> str:
    """318k, 1.2M."""
    if value is None:
        return "-"
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.0f}"


def duration(seconds: float | None) -> str:
    """2d04h, 2h09m, 3m20s, 12s."""
    if seconds is None:
        return "-"
    for unit, part, letters in ((86400, 3600, "dh"), (3600, 60, "hm"), (60, 1, "ms")):
        if seconds >= unit:
            return f"{int(seconds // unit)}{letters[0]}{int(seconds % unit // part):02d}{letters[1]}"
    return f"{seconds:.0f}s"
