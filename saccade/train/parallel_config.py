"""The section `[parallel]` of a recipe: how a run is spread over ranks, and what it computes again to save memory."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from saccade.config import check_positive
from saccade.errors import ConfigError

Strategy = Literal["none", "ddp", "fsdp", "hsdp"]
Recompute = Literal["none", "selective", "full"]
"""Levels of activation checkpointing."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Data parallelism, sharding, activation checkpointing and compilation. See `parallelize.py`."""

    strategy: Literal["auto", "none", "ddp", "fsdp", "hsdp"] = "auto"
    """auto: none on one rank, fsdp on several."""
    shard_size: int | None = None
    """hsdp only: number of ranks that shard one replica of the model, usually the GPUs of one node."""
    reshard_after_forward: bool = True
    """fsdp: free the gathered parameters after forward (ZeRO-3); false keeps them until backward (ZeRO-2)."""
    reduce_each_micro_batch: bool = True
    """fsdp: reduce-scatter gradients after every micro-batch; false reduces once per step, unsharded until then."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """fsdp: dtype of the gradient reduction; bf16 halves the traffic."""
    compress_gradients: Literal["none", "bf16", "powersgd"] = "none"
    """ddp: gradient communication hook. powersgd (low-rank) is lossy; its error feedback is not saved."""
    powersgd_rank: int = 4
    """powersgd: rank of the approximation; lower means less traffic and more error."""
    powersgd_start_step: int = 1000
    """powersgd: number of uncompressed steps before it is enabled."""
    recompute_vision: Recompute = "none"
    """Activation checkpointing of the vision tower: of each block's MLP (selective) or of whole blocks (full)."""
    recompute_language: Recompute = "none"
    """Activation checkpointing of the decoder, likewise."""
    compile: bool = False
    """Compile the transformer blocks with torch.compile; the first steps take a minute longer."""
    offload: bool = False
    """fsdp: keep parameters, gradients and optimizer state in host memory; slow, for models that do not fit."""

    RENAMED: ClassVar[dict[str, str]] = {
        "reduce_each_row": "reduce_each_micro_batch",
        "powersgd_start": "powersgd_start_step",
    }
    """Former keys, with what replaced each."""

    def __post_init__(self) -> None:
        check_positive(self, "shard_size", "powersgd_rank", "powersgd_start_step")
        if (self.strategy == "hsdp") != (self.shard_size is not None):
            raise ConfigError(
                "shard_size requires strategy = 'hsdp', and hsdp requires shard_size. Give both, or neither"
            )
        if self.compress_gradients != "none" and self.strategy != "ddp":
            raise ConfigError(
                f"compress_gradients = {self.compress_gradients!r} requires strategy = 'ddp'; "
                "with fsdp, set reduce_dtype"
            )
        if self.compress_gradients == "powersgd" and self.powersgd_start_step < 2:
            raise ConfigError(
                f"powersgd_start_step is {self.powersgd_start_step}; the first 2 steps must be uncompressed. "
                "Give 2 or more"
            )
        if self.offload and self.strategy in ("none", "ddp"):
            raise ConfigError(
                f"offload requires fsdp or hsdp, not strategy = {self.strategy!r}; "
                "optimizer.offload works with any strategy"
            )
