"""The section `[parallel]` of a recipe: how a run is spread over ranks, and what it computes again to save memory."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from saccade.config import check_positive
from saccade.errors import ConfigError
from saccade.parallel_dims import Axis, ParallelDims, Size, resolve_dims

Strategy = Literal["none", "ddp", "fsdp", "hsdp"]
Recompute = Literal["none", "selective", "full"]
"""Levels of activation checkpointing."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The layout over ranks, activation checkpointing and compilation. See `parallel_dims.py` and `parallelize.py`."""

    strategy: Literal["auto", "none", "ddp", "fsdp", "hsdp"] = "auto"
    """Shorthand. fsdp: shard is the rest; ddp: replicate is; hsdp: with shard given, replicate is. auto: fsdp."""
    replicate: int | Literal["rest"] | None = None
    """Copies of the model, whose gradients are averaged. Default: what `strategy` and `shard` leave."""
    shard: int | Literal["rest"] | None = None
    """Ranks that divide parameters, gradients and optimizer state, such as the GPUs of a node. Default: the rest."""
    context: int | Literal["rest"] = 1
    """Ranks that divide every packed sequence."""
    tensor: int | Literal["rest"] = 1
    """Ranks that divide the matrices of every layer: neighbours, best on one node."""
    pipeline: int | Literal["rest"] = 1
    """Ranks that divide the layers; each step needs several micro-batches."""
    pipeline_schedule: Literal["1f1b", "interleaved", "zero-bubble"] = "1f1b"
    """Order of the passes. interleaved: every rank has several chunks of layers and waits less, for more messages.
    zero-bubble: gradients of weights are computed while a rank would wait; not with fsdp, recompute or compile."""
    pipeline_chunks: int = 2
    """interleaved: chunks of layers of a rank."""
    pipeline_layers: tuple[int, ...] | None = None
    """Decoder layers of each stage, in order; default: stages of equal counted cost, with tower and head."""
    balance_images: bool = False
    """Send images to data and context ranks with less work in the vision tower: for short sequences with few images."""
    reshard_after_forward: bool = True
    """fsdp: free the gathered parameters after forward (ZeRO-3); false keeps them until backward (ZeRO-2)."""
    reduce_each_micro_batch: bool = True
    """fsdp: reduce-scatter gradients after every micro-batch; false reduces once per step, unsharded until then."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """fsdp: dtype of the gradient reduction; bf16 halves the traffic."""
    compress_gradients: Literal["none", "bf16", "int8", "powersgd"] = "none"
    """Gradient communication in bf16 (ddp, fsdp), int8 (fsdp) or low rank (powersgd, ddp). fsdp
    sums in fp32 and adds what rounding lost to the next step: 2 bytes per trained parameter and rank, not saved."""
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
        "shard_size": "shard",
        "reduce_each_row": "reduce_each_micro_batch",
        "powersgd_start": "powersgd_start_step",
    }
    """Former keys, with what replaced each."""

    def __post_init__(self) -> None:
        check_positive(self, "powersgd_rank", "powersgd_start_step", "pipeline_chunks")
        self._check_sizes()
        self._check_compression()
        if self.compress_gradients == "powersgd" and self.powersgd_start_step < 2:
            raise ConfigError(
                f"powersgd_start_step is {self.powersgd_start_step}; the first 2 steps must be uncompressed. "
                "Give 2 or more"
            )
        if self.offload and (self.is_ddp or self.strategy == "none"):
            raise ConfigError(
                f"offload requires fsdp or hsdp, not strategy = {'ddp' if self.is_ddp else 'none'!r}; "
                "optimizer.offload works with any strategy"
            )

    @property
    def is_ddp(self) -> bool:
        """Whether data ranks have whole copies that DDP keeps equal."""
        return self.strategy == "ddp" or (self.strategy == "auto" and self.replicate is not None and self.shard == 1)

    def _check_compression(self) -> None:
        """Refuse a form of gradient communication that the strategy does not have."""
        kind = self.compress_gradients
        if kind == "powersgd" and not self.is_ddp:
            raise ConfigError("compress_gradients = 'powersgd' requires strategy = 'ddp'; with fsdp, use 'int8'")
        if kind == "int8" and self.is_ddp:
            raise ConfigError("compress_gradients = 'int8' requires fsdp. With ddp, use 'bf16' or 'powersgd'")
        if kind in ("bf16", "int8") and not self.is_ddp and self.reduce_dtype != "fp32":
            raise ConfigError(
                f"compress_gradients = {kind!r} rounds fp32 gradients, but reduce_dtype is {self.reduce_dtype}. "
                "Remove one of them"
            )

    @property
    def rounding_of_shards(self) -> Literal["bf16", "int8"] | None:
        """The format of gradients that FSDP sends; None: that of `reduce_dtype`."""
        return self.compress_gradients if self.compress_gradients in ("bf16", "int8") else None

    def _check_sizes(self) -> None:
        """Refuse what is not built, and a strategy that contradicts the sizes."""
        given = [name for name in ("replicate", "shard") if getattr(self, name) is not None]
        if self.strategy == "hsdp" and (given != ["shard"] or self.shard == "rest"):
            raise ConfigError(
                "strategy = 'hsdp' requires shard, the ranks of one copy, and nothing else; replicate is the rest. "
                "Set shard, such as shard = 8"
            )
        if self.strategy not in ("auto", "hsdp") and given:
            raise ConfigError(
                f"strategy = {self.strategy!r} sets {given[0]} itself. Remove strategy, or {' and '.join(given)}"
            )

    @property
    def num_chunks(self) -> int:
        """Stages of a pipeline that each of its ranks has."""
        return self.pipeline_chunks if self.pipeline_schedule == "interleaved" else 1

    @property
    def defers_weights(self) -> bool:
        """Whether a pipeline computes gradients of weights after those of activations."""
        return self.pipeline_schedule == "zero-bubble"

    @property
    def sizes(self) -> dict[Axis, Size]:
        """The size of every axis, with `strategy` written out."""
        replicate, shard = self.replicate, self.shard
        if "rest" in (self.context, self.tensor, self.pipeline) or self.strategy == "none":
            replicate, shard = replicate or 1, shard or 1
        elif self.strategy == "ddp":
            replicate, shard = "rest", 1
        elif shard is None:
            shard, replicate = (1 if replicate == "rest" else "rest"), replicate or 1
        elif replicate is None:
            replicate = 1 if shard == "rest" else "rest"
        return {
            "pipeline": self.pipeline,
            "replicate": replicate or 1,
            "shard": shard,
            "context": self.context,
            "tensor": self.tensor,
        }

    def dims(self, num_ranks: int) -> ParallelDims:
        """The layout on so many ranks."""
        if self.strategy == "none" and (num_ranks > 1 and set(self.sizes.values()) == {1}):
            raise ConfigError(
                f"strategy none is for one rank, but there are {num_ranks}: each would train a separate model. "
                "Use auto, ddp or fsdp"
            )
        return resolve_dims(self.sizes, num_ranks)

    def strategy_of(self, dims: ParallelDims) -> Strategy:
        """How a layout is carried out: with FSDP if anything is sharded, else with DDP if there are several copies."""
        is_sharded = self.strategy in ("fsdp", "hsdp") or dims.shard > 1
        is_sharded |= self.strategy == "auto" and dims.context > 1 and self.shard is None
        if self.offload and not is_sharded:
            raise ConfigError(
                "offload requires fsdp, and auto means no sharding on one rank. "
                "Set parallel.strategy = 'fsdp', or use optimizer.offload"
            )
        if is_sharded and dims.replicate > 1 and self.rounding_of_shards is not None:
            raise ConfigError(
                f"compress_gradients = {self.compress_gradients!r} compresses the reduce-scatter within a copy, and "
                "copies average fp32 gradients between slow nodes. Remove it, or set replicate = 1"
            )
        if is_sharded:
            return "hsdp" if dims.replicate > 1 else "fsdp"
        return "ddp" if self.strategy == "ddp" or dims.count("replicate", "context") > 1 else "none"
