"""Tensor parallelism: divide a model over the ranks of a node, from outside.

    rank = TensorRank(0, 2)
    model = load_model(folder, tensor_rank=rank)      # or shard_model(model, rank) on the meta device
    connect(model, GroupExchange(group))              # or another `Exchange`

Every projection of the decoder is replaced by one of the same form with this rank's outputs (queries, keys, values,
gate, up: column-parallel) or inputs (output of attention, down: row-parallel); embedding and head hold a part of the
vocabulary. Norms, vision tower and projector are whole on every rank. A module computes what it computed before, with
fewer heads or channels; `connect` exchanges what enters and leaves attention and MLP.

What does not divide evenly:

    query heads         must divide; `check_divisible` names the numbers of ranks that do
    key/value heads     are copied if there are more ranks: neighbours hold the same head
    channels of an MLP  whole units of 8, or of a group of int4 weights; the first ranks may hold one more
    vocabulary          likewise units of 8 rows
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.errors import ConfigError
from saccade.model.config import LanguageConfig
from saccade.model.language import SelfAttention
from saccade.model.layers import FeedForward, ShardedEmbedding
from saccade.model.linear import ALIGNMENT, Projection, projections
from saccade.model.normed_sum import Input
from saccade.model.quantized_linear import Linear4bit
from saccade.model.shard import Exchange, Shard, TensorRank
from saccade.model.vlm import VLM

MAX_RANKS = 64
"""Numbers of ranks that are suggested."""


# ------------------------------------------------------------------ which part of what


def possible_ranks(config: LanguageConfig) -> list[int]:
    """Numbers of ranks that a decoder can be divided over."""
    return [size for size in range(1, MAX_RANKS + 1) if _refusal(config, size) is None]


def check_divisible(config: LanguageConfig, size: int) -> None:
    """Refuse a number of ranks that a decoder cannot be divided over, with the numbers that are possible."""
    if (reason := _refusal(config, size)) is not None:
        possible = ", ".join(map(str, possible_ranks(config)))
        raise ConfigError(f"{reason} over {size} tensor-parallel ranks. Use one of {possible}")


def _refusal(config: LanguageConfig, size: int) -> str | None:
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % size:
        return f"{heads} attention heads cannot be divided"
    if kv_heads % size and size % kv_heads:
        return f"{kv_heads} key/value heads cannot be divided or copied evenly"
    for what, number in (("channels of the MLP", config.intermediate_size), ("tokens", config.vocab_size)):
        if number < size * ALIGNMENT:
            return f"{number} {what} cannot be divided in units of {ALIGNMENT}"
    return None


def kv_heads_of(config: LanguageConfig, rank: TensorRank) -> range:
    """The key/value heads of a rank."""
    count = max(1, config.num_kv_heads // rank.size)
    first = rank.rank // _copies(config, rank) * count
    return range(first, first + count)


def _copies(config: LanguageConfig, rank: TensorRank) -> int:
    """Ranks that hold the same key/value heads."""
    return max(1, rank.size // config.num_kv_heads)


def _bounds(number: int, num_parts: int, unit: int = 1) -> tuple[int, ...]:
    """Parts of whole units, except for the end of the last one; the first ones may have one unit more."""
    each, more = divmod(-(-number // unit), num_parts)
    return tuple(min(number, unit * (index * each + min(index, more))) for index in range(num_parts + 1))


# ------------------------------------------------------------------ divide


def shard_model(model: VLM, rank: TensorRank) -> None:
    """Replace what is divided by this rank's part. The model is on the meta device; its weights are loaded after."""
    if rank.size == 1:
        return
    language, config = model.language, model.config.language
    check_divisible(config, rank.size)
    for layer in language.layers:
        attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
        assert isinstance(attention, SelfAttention), "the decoder's attention"
        assert isinstance(mlp, FeedForward), "the decoder's MLP"
        _shard_attention(attention, config, rank)
        _shard_mlp(mlp, config, rank)
    rows = Shard(0, _bounds(config.vocab_size, rank.size, ALIGNMENT), rank.rank)
    language.embed_tokens = ShardedEmbedding(rows, config.hidden_size, model.dtype)
    _replace(model, "head", rows)
    model.tie_head()


def _shard_attention(attention: SelfAttention, config: LanguageConfig, rank: TensorRank) -> None:
    copies = _copies(config, rank)
    queries = Shard(0, _bounds(config.num_heads * config.head_dim, rank.size), rank.rank)
    kv_bounds = _bounds(config.num_kv_heads * config.head_dim, rank.size // copies)
    keys = Shard(0, kv_bounds, rank.rank // copies, copies)
    _replace(attention, "q_proj", queries)
    _replace(attention, "k_proj", keys)
    _replace(attention, "v_proj", keys)
    _replace(attention, "o_proj", replace(queries, dim=1))


def _shard_mlp(mlp: FeedForward, config: LanguageConfig, rank: TensorRank) -> None:
    down, unit = mlp.down_proj, ALIGNMENT
    if isinstance(down, Linear4bit) and down.scheme.group_size is not None:
        unit = math.lcm(unit, down.scheme.group_size)
    if config.intermediate_size < unit * rank.size:
        raise ConfigError(
            f"{config.intermediate_size} channels of the MLP are {config.intermediate_size // unit} groups of int4 "
            f"weights, too few for {rank.size} tensor-parallel ranks. Use fewer"
        )
    channels = Shard(0, _bounds(config.intermediate_size, rank.size, unit), rank.rank)
    _replace(mlp, "gate_proj", channels)
    _replace(mlp, "up_proj", channels)
    _replace(mlp, "down_proj", replace(channels, dim=1))


def _replace(parent: nn.Module, name: str, shard: Shard) -> None:
    """Replace a projection by one of its form that has this rank's outputs or inputs alone."""
    whole = parent.get_submodule(name)
    assert isinstance(whole, Projection), "what is divided is a projection"
    sizes = list(whole.stored_shape)
    assert sizes[shard.dim] == shard.size, "the sizes of a projection are those of the configuration"
    sizes[shard.dim] = shard.stop - shard.start
    with torch.device("meta"):
        own = whole.of_size(*sizes, of_inputs=shard.dim == 1)
    own.shard = replace(shard, shapes=whole.checkpoint_shapes())
    setattr(parent, name, own)


# ------------------------------------------------------------------ loading


def tensor_slices(model: nn.Module) -> dict[str, tuple[slice, ...]]:
    """The part of each stored tensor that this rank reads, by parameter name; those that it reads whole are left out.

    One number of ranks more than a storage form allows is refused here, before anything is read.
    """
    found: dict[str, tuple[slice, ...]] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, Projection | ShardedEmbedding) and module.shard is not None:
            for name, shape in module.checkpoint_shapes().items():
                found[f"{prefix}.{name}"] = module.shard.slices(name, shape)
    return {name: slices for name, slices in found.items() if any(one != slice(None) for one in slices)}


# ------------------------------------------------------------------ exchange


def connect(model: VLM, exchange: Exchange) -> None:
    """Let a divided model communicate: around attention and MLP, and by hooks of embedding, decoder and head."""
    language: Any = model.language

    def around(forward: Callable[..., Tensor], leave: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
        return lambda x, *inputs: leave(forward(exchange.enter(x), *inputs))

    def divide(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x_TD, attend, features = inputs
        x_TD, features = exchange.divide(x_TD, features)
        return x_TD, attend, features

    language.embed_tokens.register_forward_hook(lambda _, __, out_TD: exchange.total(out_TD))
    language.register_forward_pre_hook(divide)
    language.register_forward_hook(lambda _, __, out_TD: exchange.collect(out_TD))
    next_norms = [*(layer.input_layernorm for layer in language.layers[1:]), language.norm]
    for layer, next_norm in zip(language.layers, next_norms, strict=True):
        is_last = next_norm is language.norm  # tokens are selected between its attention and its norm
        leave = exchange.leave if is_last else exchange.leave_before(layer.post_attention_layernorm)
        layer.self_attn.forward = around(layer.self_attn.forward, leave)
        layer.mlp.forward = around(layer.mlp.forward, exchange.leave_before(next_norm))
    head_shard = model.head.shard
    assert head_shard is not None, "the model is divided"
    model.head.register_forward_pre_hook(lambda _, inputs: exchange.share(inputs[0]))
    model.head.register_forward_hook(lambda _, __, out_TN: exchange.gather(out_TN, head_shard))
    model.head.vocabulary_group = exchange.group
    for _, projection in projections(model):
        if projection.shard is not None and projection.shard.dim == 1:
            projection.maximum = exchange.maximum


class GroupExchange:
    """Exchange without gradients over a process group: the residual stream is whole on every rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group: dist.ProcessGroup | None = group
        self._size = dist.get_world_size(group)

    def divide(self, x_TD: Tensor, features: Any) -> tuple[Tensor, Any]:
        """See `Exchange`."""
        return x_TD, features

    def enter(self, x: Input) -> Input:
        """See `Exchange`."""
        return x

    def leave(self, x_TD: Tensor) -> Tensor:
        """See `Exchange`."""
        dist.all_reduce(x_TD, group=self.group)
        return x_TD

    def leave_before(self, norm: Any) -> Callable[[Tensor], Tensor]:
        """See `Exchange`."""
        return self.leave

    def collect(self, x_TD: Tensor) -> Tensor:
        """See `Exchange`."""
        return x_TD

    def total(self, x_TD: Tensor) -> Tensor:
        """See `Exchange`."""
        return self.leave(x_TD)

    def share(self, x_TD: Tensor) -> Tensor:
        """See `Exchange`."""
        return x_TD

    def gather(self, x_TN: Tensor, shard: Shard) -> Tensor:
        """See `Exchange`."""
        padded_TN = F.pad(x_TN, (0, max(shard.sizes) - x_TN.shape[-1])).contiguous()
        parts = [torch.empty_like(padded_TN) for _ in range(self._size)]
        dist.all_gather(parts, padded_TN, group=self.group)
        return torch.cat([part[..., :size] for part, size in zip(parts, shard.sizes, strict=True)], dim=-1)

    def maximum(self, x: Tensor) -> Tensor:
        """See `Exchange`."""
        dist.all_reduce(x, dist.ReduceOp.MAX, self.group)
        return x
