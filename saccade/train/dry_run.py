"""Dry run of a training step on the meta device: bytes of all tensors that are alive meanwhile, and FLOPs of the matrix products.

Modules, autograd, activation checkpointing and the launchers of kernels run as they are; nothing is allocated and no kernel is
launched. So it knows nothing of the architecture. A run is divided into phases where a block starts forward or backward:

    forward of vision.blocks.0 ... forward of projector, forward of language.layers.0 ... the loss, backward of language.layers.35 ...

Phases of a model are the same for every size of a micro-batch and every activation checkpointing, so that a step whose vision tower
and decoder are checkpointed differently is composed of two runs (`combined`).

A step of a 3B model takes about half a second: results of operations are cached by the shapes of their inputs, as most layers are alike.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from saccade.errors import ConfigError
from saccade.kernels import launch
from saccade.model.vlm import VLM
from saccade.processor.image import Grid
from saccade.processor.inputs import ModelInputs
from saccade.train.loss import ModelWithLoss

_IMAGE_PATCHES = 1024
"""Patches of an image in a dry run, at most: 448 x 448 pixels."""

Bytes = dict[str, int]
"""Bytes by kind: `activations of the decoder: mlp`, `workspace`, ..."""
KeptGradients = Literal["all", "root", "none"]
"""Gradients that stay where backward made them: all, those outside the blocks (fsdp reduces a block's at once), or none (they are added
to accumulated ones or to buckets)."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchSize:
    """Maximum size of a micro-batch, that is of a packed sequence."""

    tokens: int
    """Tokens, including image tokens."""
    patches: int
    """Vision patches."""
    loss_tokens: int | None = None
    """Loss tokens; default: all tokens."""

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.patches < 0 or not 0 <= self.num_loss_tokens <= self.tokens:
            raise ConfigError(
                f"{self.tokens} tokens, {self.patches} patches and {self.loss_tokens} loss tokens are not a valid size. Give at least one token"
            )

    @property
    def num_loss_tokens(self) -> int:
        """Number of loss tokens."""
        return self.tokens if self.loss_tokens is None else self.loss_tokens


# ------------------------------------------------------------------ phases


@dataclass
class Phase:
    """A part of a step, between two blocks."""

    name: str
    """`forward of language.layers.3`, `the loss`, `backward of language.layers.3`, ..."""
    block: str | None = None
    """The block whose backward pass it is."""
    change: Bytes = field(default_factory=dict)
    """Bytes at its end, compared with its start."""
    peak: Bytes = field(default_factory=dict)
    """Bytes at its peak, compared with its start."""
    flops: float = 0.0
    """Of matrix products."""

    @property
    def is_vision(self) -> bool:
        """Whether it is in the vision tower."""
        return " of vision." in self.name


Step = list[Phase]
"""The phases of a dry run in order."""


def combined(vision: Step, language: Step) -> Step:
    """A step with the phases of the vision tower of one run and all others of another, of equal sizes."""
    assert [phase.name for phase in vision] == [phase.name for phase in language], "phases depend on the model alone"
    return [a if a.is_vision else b for a, b in zip(vision, language, strict=True)]


def moments(step: Step) -> Iterator[tuple[Phase, Bytes]]:
    """Every phase, and the bytes at its peak."""
    held: Bytes = {}
    for phase in step:
        yield phase, _plus(held, phase.peak)
        held = _plus(held, phase.change)


def saved(step: Step) -> Bytes:
    """Bytes held when the forward pass ends: what is saved for backward."""
    held: Bytes = {}
    for phase in step:
        if phase.name == "the loss":
            break
        held = _plus(held, phase.change)
    return {kind: num_bytes for kind, num_bytes in held.items() if num_bytes}


def _plus(a: Bytes, b: Bytes) -> Bytes:
    return {key: a.get(key, 0) + b.get(key, 0) for key in a | b}


# ------------------------------------------------------------------ the run


def dry_run(model: VLM, batch: "DryBatch", kept: KeptGradients = "all") -> Step:
    """Forward and backward of one micro-batch on a model on the meta device, prepared for training."""
    blocks = model_blocks(model)
    live = _LiveBytes(*model.parameters(), *model.buffers(), *batch.tensors)
    hooks = [*_mark_phases(model, blocks, live), *_follow_gradients(model, blocks, live, kept)]
    try:
        with launch.dry_run(), live:
            loss, _ = ModelWithLoss(model)(batch.inputs, batch.labels, batch.count, batch.num_loss_tokens)
            loss.backward()
            del loss
            live.start_phase("the update")
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in model.parameters():
            parameter.grad = None
    return live.phases()


def update_bytes(update: Callable[[], None], *persistent: Tensor) -> int:
    """Peak memory of an optimizer step beside the given tensors."""
    live = _LiveBytes(*persistent)
    with launch.dry_run(), live:
        update()
    return max(sum(phase.peak.values()) for phase in live.phases())


def model_blocks(model: VLM) -> dict[str, nn.Module]:
    """The blocks by name, in forward order: units of activation checkpointing and of FSDP."""
    stacks = {"vision.blocks": model.vision.blocks, "language.layers": model.language.layers}
    return {f"{stack}.{i}": block for stack, blocks in stacks.items() for i, block in enumerate(blocks)}


@dataclass(frozen=True)
class DryBatch:
    """A micro-batch on the meta device."""

    inputs: ModelInputs
    labels: Tensor
    count: Tensor
    num_loss_tokens: int

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors."""
        inputs = [value for value in vars(self.inputs).values() if isinstance(value, Tensor)]
        return [*inputs, self.labels, self.count]


def dry_batch(model: VLM, size: MicroBatchSize) -> DryBatch:
    """A micro-batch of this size, with square images."""
    config = model.config.vision
    grids = image_grids(model, size.patches)
    num_patches = model.vision.num_patches(grids)
    num_image_tokens = model.vision.layout(grids).sizes.num_tokens if grids else 0
    grey = (0.5,) * config.in_channels
    with torch.device("meta"):
        inputs = ModelInputs(
            token_ids=torch.empty(size.tokens, dtype=torch.int64),
            cu_seqlens=torch.empty(len(grids) + 2, dtype=torch.int32),
            positions=torch.empty(3, size.tokens, dtype=torch.int64),
            loss_mask=torch.empty(size.tokens, dtype=torch.bool),
            patches=torch.empty(num_patches, config.patch_dim, dtype=torch.uint8),
            image_grids=torch.tensor(grids, dtype=torch.int64, device="cpu").view(-1, 3),
            image_token_index=torch.empty(num_image_tokens, dtype=torch.int64),
            pixel_mean=grey,
            pixel_std=grey,
            max_seqlen=max(1, size.tokens // (len(grids) + 1)),
        )
        labels, count = torch.empty(size.tokens, dtype=torch.int64), torch.empty(())
    return DryBatch(inputs, labels, count, size.num_loss_tokens)


def image_grids(model: VLM, num_patches: int) -> list[Grid]:
    """Square images of about so many patches in total: as many as fit of `_IMAGE_PATCHES`, the rest smaller."""
    grids: list[Grid] = []
    largest = _IMAGE_PATCHES
    while num_patches > 0:
        grid, size = model.vision.square_grid(min(largest, num_patches))
        if size > num_patches and grids:
            break
        grids += [grid] * max(1, num_patches // size)
        num_patches -= max(1, num_patches // size) * size
        largest = size - 1
    return grids


_results: dict[Any, tuple[Any, ...] | None] = {}
"""(shape, strides, dtype, FLOPs) of results of pure operations on meta tensors, by operation and inputs; None: several tensors."""


class MetaCache(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes shapes of results on the meta device once for all operations with equal inputs: most layers of a model are alike."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.result(operation, args, kwargs or {})[0]

    def result(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, float]:
        """(result, FLOPs) of an operation."""
        if _changes_values(operation) and args[0].is_meta:
            return args[0], _flops(operation, args, kwargs, args[0])
        key = _cache_key(operation, args, kwargs)
        found = None if key is None else _results.get(key)
        if found is not None:
            shape, stride, dtype, flops = found
            return torch.empty_strided(shape, stride, dtype=dtype, device="meta"), flops
        out = operation(*args, **kwargs)
        flops = _flops(operation, args, kwargs, out)
        if key is not None and key not in _results:
            is_plain = isinstance(out, Tensor) and out.is_meta
            _results[key] = (out.shape, out.stride(), out.dtype, flops) if is_plain else None
        return out, flops


def _flops(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """FLOPs of a matrix product, also of one in place; 0 of anything else."""
    in_place = {torch.ops.aten.addmm_: torch.ops.aten.addmm}
    count = flop_registry.get(in_place.get(operation.overloadpacket, operation.overloadpacket))
    options = {name: value for name, value in kwargs.items() if name != "out"}
    return 0.0 if count is None else float(count(*args, **options, out_val=out))


@functools.cache
def _changes_values(operation: Any) -> bool:
    """Whether it writes to its first argument, whose shape stays, and returns it."""
    schema = operation._schema
    is_in_place = len(schema.returns) == 1 and schema.returns[0].alias_info and schema.returns[0].alias_info.is_write
    changes_shape = torch.Tag.inplace_view in operation.tags or schema.name in ("aten::resize_", "aten::set_")
    return bool(is_in_place) and schema.name.endswith("_") and not changes_shape


@functools.cache
def _is_pure(operation: Any) -> bool:
    """Whether it makes new tensors only: it returns and changes none of its inputs."""
    return not any(x.alias_info for x in (*operation._schema.arguments, *operation._schema.returns))


def _cache_key(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a result's shape depends on. None: it cannot be cached."""
    if not _is_pure(operation):
        return None
    described: list[Any] = [operation]
    for value in (*args, *kwargs.items()):
        if isinstance(value, Tensor):
            if not value.is_meta:
                return None
            described.append((value.shape, value.stride(), value.dtype))
        elif isinstance(value, list | tuple):
            if any(isinstance(x, Tensor) for x in value):
                return None
            described.append(tuple(map(_hashable, value)))
        else:
            described.append(value)
    return tuple(described)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class _LiveBytes(MetaCache):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages on the meta device that operations make, until they are freed."""

    def __init__(self, *ignored: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kind = "activations of the decoder: embedding"
        """Kind of the storages that are made now."""
        self._kinds: dict[int, tuple[str, int, Any]] = {}
        """(kind, bytes, weak reference) of each live storage, by its address."""
        self._ignored = {tensor.untyped_storage()._cdata: tensor for tensor in ignored}
        self._phases: list[Phase] = [Phase("the start")]
        self._change, self._total, self._peak = dict[str, int](), 0, 0

    def start_phase(self, name: str, block: str | None = None) -> None:
        """Count what follows as another phase."""
        self._phases[-1].change = {kind: size for kind, size in self._change.items() if size}
        self._phases.append(Phase(name, block))
        self._change, self._total, self._peak = {}, 0, 0

    def phases(self) -> Step:
        """All phases."""
        self.start_phase("the end")
        return self._phases[:-1]

    def move(self, tensor: Tensor, kind: str) -> None:
        """Count a tensor as another kind."""
        key = tensor.untyped_storage()._cdata
        if key in self._kinds:
            before, size, reference = self._kinds[key]
            self._kinds[key] = kind, size, reference
            self._add(before, -size)
            self._add(kind, size)

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out, flops = self.result(operation, args, kwargs or {})
        self._phases[-1].flops += flops
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor) and value.is_meta:
                self._count(value.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._kinds or key in self._ignored:
            return
        size = storage.nbytes()
        self._kinds[key] = self.kind, size, weakref.ref(storage, lambda _: self._free(key))
        self._add(self.kind, size)

    def _free(self, key: int) -> None:
        kind, size, _ = self._kinds.pop(key)
        self._add(kind, -size)

    def _add(self, kind: str, size: int) -> None:
        self._change[kind] = self._change.get(kind, 0) + size
        self._total += size
        if self._total > self._peak:
            self._peak = self._total
            self._phases[-1].peak = self._change.copy()


# ------------------------------------------------------------------ hooks


def _mark_phases(model: VLM, blocks: Mapping[str, nn.Module], live: _LiveBytes) -> Iterator[Any]:
    """Start phases at the blocks, the projector and the loss, and name the kind of what is made meanwhile."""
    for name, module in {**blocks, "projector": model.projector}.items():
        yield module.register_forward_pre_hook(_start(live, f"forward of {name}"))
        yield module.register_forward_hook(_start_backward(live, name if name in blocks else None, name))
    parts = {"vision": "activations of the vision tower", "language": "activations of the decoder"}
    for part, kind in parts.items():
        for name, block in blocks.items():
            if name.startswith(f"{part}."):
                for child, module in block.named_children():
                    yield module.register_forward_pre_hook(_name_kind(live, f"{kind}: {child}"))
        yield model.get_submodule(part).register_forward_pre_hook(_name_kind(live, f"{kind}: residual stream"))
    yield model.projector.register_forward_pre_hook(_name_kind(live, "activations of the vision tower: projector"))
    yield model.projector.register_forward_hook(_name_kind(live, "activations of the decoder: embedding"))
    yield model.language.register_forward_hook(_start(live, "the loss"))
    yield model.language.register_forward_hook(_name_kind(live, "loss"))


def _name_kind(live: _LiveBytes, kind: str) -> Callable[..., None]:
    def hook(*_: object) -> None:
        if live.kind != "workspace":
            live.kind = kind

    return hook


def _start(live: _LiveBytes, name: str) -> Callable[..., None]:
    return lambda *_: live.start_phase(name)


def _start_backward(live: _LiveBytes, block: str | None, name: str) -> Callable[..., None]:
    """A forward hook: when the gradient of an output is known, the module's backward pass starts."""
    is_started = False

    def start(_: Tensor) -> None:
        nonlocal is_started
        if not is_started:
            live.kind = "workspace"
            live.start_phase(f"backward of {name}", block)
            is_started = True

    def hook(_: nn.Module, __: object, output: Any) -> None:
        for value in output if isinstance(output, Sequence) else (output,):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(start)  # type: ignore[no-untyped-call]

    return hook


def _follow_gradients(
    model: VLM, blocks: Mapping[str, nn.Module], live: _LiveBytes, kept: KeptGradients
) -> Iterator[Any]:
    """Count gradients as such, and free those that are not kept."""
    inside = {parameter for block in blocks.values() for parameter in block.parameters()}
    for parameter in model.parameters():
        if parameter.requires_grad:
            is_kept = kept == "all" or (kept == "root" and parameter not in inside)
            hook = _keep_gradient(live) if is_kept else _drop_gradient
            yield parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _keep_gradient(live: _LiveBytes) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:
            live.move(parameter.grad, "gradients")

    return hook


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None
