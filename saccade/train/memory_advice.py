"""Settings that make a training step fit: activation checkpointing, else shorter sequences, adapters, more GPUs.

`saccade plan` prints the alternatives, and an out-of-memory error ends with the advice.
"""

from dataclasses import replace
from itertools import product
from typing import NamedTuple, get_args

from saccade.train.dry_run import MicroBatchSize
from saccade.train.memory import Extents, MemoryPlanner
from saccade.train.parallel_config import Recompute
from saccade.train.parameter_groups import OptimizerConfig
from saccade.train.stage_config import LoraConfig

_EXTENTS: tuple[Extents, ...] = tuple(product(get_args(Recompute), repeat=2))
"""All combinations of activation checkpointing."""
_STEP = 256
"""Granularity of the search for the largest sequence, in tokens."""
_MAX_TOKENS = 2**20
_MAX_RANKS = 1024


class Checkpointing(NamedTuple):
    """One combination of activation checkpointing, with its cost."""

    recompute_vision: Recompute
    recompute_language: Recompute
    total_gib: float
    """Memory of a micro-batch of the requested size."""
    fits: bool
    """Whether the requested size fits."""
    max_tokens: int
    """Length of the longest sequence that fits, with images in proportion; 0 if none does."""
    extra_compute: float
    """Fraction of a step's FLOPs that is recomputed."""


def compare_checkpointing(planner: MemoryPlanner, size: MicroBatchSize, gib: float) -> list[Checkpointing]:
    """All combinations of activation checkpointing, cheapest first."""
    compared = []
    for extents in _EXTENTS:
        total = planner.plan(size, extents).total_gib
        most = _max_tokens(planner, size, extents, gib)
        compared.append(Checkpointing(*extents, total, total <= gib, most, _extra_compute(planner, size, extents)))
    return sorted(compared, key=lambda one: one.extra_compute)


def _max_tokens(planner: MemoryPlanner, size: MicroBatchSize, extents: Extents, gib: float) -> int:
    """Search the longest sequence by bisection."""
    needed = planner.gib_by_share(size, extents)
    low, high = 0, _MAX_TOKENS // _STEP
    while low < high:
        middle = (low + high + 1) // 2
        fits = needed(middle * _STEP / size.tokens) <= gib
        low, high = (middle, high) if fits else (low, middle - 1)
    return low * _STEP


def _extra_compute(planner: MemoryPlanner, size: MicroBatchSize, extents: Extents) -> float:
    """Matrix products that are computed again, as a fraction of a step without activation checkpointing."""
    chosen, plain = (sum(phase.flops for phase in planner.step(size, x)) for x in (extents, ("none", "none")))
    return chosen / plain - 1.0


# ------------------------------------------------------------------ advice


def advice(
    planner: MemoryPlanner, size: MicroBatchSize, gib: float, compared: list[Checkpointing] | None = None
) -> list[str]:
    """Settings that make the micro-batch fit; if activation checkpointing is not enough, all other options."""
    compared = compared or compare_checkpointing(planner, size, gib)
    for one in compared:
        if one.fits:
            return [
                f"cheapest that fits: --set parallel.recompute_vision={one.recompute_vision} "
                f"--set parallel.recompute_language={one.recompute_language}"
            ]
    found = []
    if most := max(one.max_tokens for one in compared):
        found.append(
            f"shorter sequences: data.max_seq_len = {most}, data.max_patches = {size.patches * most // size.tokens}, "
            "with full activation checkpointing"
        )
    thrifty = replace(planner, optimizer=replace(planner.optimizer, kind="adamw8bit"))
    if planner.optimizer.kind != "adamw8bit" and _fits_somehow(thrifty, size, gib):
        found.append("8-bit moments: optimizer.kind = 'adamw8bit'")
    found += _adapters_that_fit(planner, size, gib)
    if ranks := _ranks_needed(planner, size, gib):
        found.append(f"more GPUs: {ranks} with parallel.strategy = 'fsdp'")
    return [f"to make it fit, {line}" for line in found] or ["no setting makes it fit: use a smaller model"]


def _adapters_that_fit(planner: MemoryPlanner, size: MicroBatchSize, gib: float) -> list[str]:
    """LoRA and QLoRA with full activation checkpointing, if they are less than what is planned."""
    own = planner.lora or LoraConfig()
    settings = {"LoRA": own, "QLoRA": replace(own, quantize_base="int4")}
    found = []
    for name, lora in settings.items():
        if lora == planner.lora:
            continue
        optimizer = planner.optimizer if planner.lora else OptimizerConfig(kind=planner.optimizer.kind)
        total = replace(planner, lora=lora, qat=None, optimizer=optimizer).plan(size, ("full", "full")).total_gib
        if total <= gib:
            line = "lora = {}" if name == "LoRA" else "lora.quantize_base = 'int4'"
            found.append(f"{name}: {line} in the stage, {total:.1f} GiB with full activation checkpointing")
    return found


def _fits_somehow(planner: MemoryPlanner, size: MicroBatchSize, gib: float) -> bool:
    return any(planner.plan(size, extents).total_gib <= gib for extents in _EXTENTS)


def _ranks_needed(planner: MemoryPlanner, size: MicroBatchSize, gib: float) -> int | None:
    """The smallest power of two of ranks with fsdp that fits."""
    parallel = replace(planner.parallel, strategy="fsdp", replicate=None, shard=None, compress_gradients="none")
    ranks = 2 * planner.world_size
    while ranks <= _MAX_RANKS:
        if _fits_somehow(replace(planner, world_size=ranks, parallel=parallel), size, gib):
            return ranks
        ranks *= 2
    return None
