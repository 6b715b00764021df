"""Dry run of a training step on the meta device: bytes of all live tensors, and FLOPs of the matrix products.

Modules, autograd, activation checkpointing and the launchers of kernels run; nothing is allocated and no kernel is
launched. So the dry run knows nothing of the architecture. Where a block starts forward or backward, a phase begins:

    forward of vision.blocks.0 ... forward of projector, forward of language.layers.0 ... the loss,
    backward of language.layers.35 ...

The phases of a model are the same for every size of a micro-batch and every activation checkpointing. So a step whose
vision tower and decoder are checkpointed differently is composed of two runs (`combined`).

A step of a 3B model takes about half a second: results of operations are cached by the shapes of their inputs, since
most layers are alike.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from saccade.errors import ConfigError
from saccade.kernels import launch
from saccade.model.live_bytes import Bytes, LiveBytes, Phase, Phases, plus
from saccade.model.vlm import VLM
from saccade.processor.inputs import ModelInputs
from saccade.processor.patches import Grid
from saccade.train.loss import ModelWithLoss
from saccade.train.objectives.cross_entropy import CrossEntropy
from saccade.train.objectives.objective import Objective

_IMAGE_PATCHES = 1024
"""Patches of an image in a dry run, at most: 448 x 448 pixels."""

KeptGradients = Literal["all", "root", "none"]
"""Gradients that stay where backward made them.

all; root: those outside the blocks, since fsdp reduces a block's at once; none: they are added to accumulated ones
or to buckets.
"""


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
                f"{self.tokens} tokens, {self.patches} patches and {self.loss_tokens} loss tokens are not a valid "
                "size. Give at least one token"
            )

    @property
    def num_loss_tokens(self) -> int:
        """Number of loss tokens."""
        return self.tokens if self.loss_tokens is None else self.loss_tokens


# ------------------------------------------------------------------ phases


def combined(vision: Phases, language: Phases) -> Phases:
    """A step with the phases of the vision tower of one run and all others of another, of equal sizes."""
    assert [phase.name for phase in vision] == [phase.name for phase in language], "phases depend on the model alone"
    return [a if _is_vision(a) else b for a, b in zip(vision, language, strict=True)]


def renamed(phase: Phase, name: str) -> Phase:
    """A phase of another layer."""
    return replace(phase, name=name, block=None if phase.block is None else name.partition(" of ")[2])


def _is_vision(phase: Phase) -> bool:
    return " of vision." in phase.name


def saved(step: Phases) -> Bytes:
    """Bytes held when the forward pass ends: what is saved for backward."""
    held: Bytes = {}
    for phase in step:
        if phase.name == "the loss":
            break
        held = plus(held, phase.change)
    return {kind: num_bytes for kind, num_bytes in held.items() if num_bytes and kind != "frozen models"}


# ------------------------------------------------------------------ the run


def dry_run(
    model: VLM, batch: "DryBatch", kept: KeptGradients = "all", make_objective: Callable[[], Objective] = CrossEntropy
) -> Phases:
    """Forward and backward of one micro-batch on a model on the meta device, prepared for training.

    `make_objective` puts frozen models on the meta device too; they are counted.
    """
    blocks = model_blocks(model)
    live = LiveBytes(*model.parameters(), *model.buffers(), *batch.tensors)
    hooks = [*mark_phases(model, blocks, live), *_follow_gradients(model, blocks, live, kept)]
    try:
        with launch.dry_run(), live:
            live.kind = "frozen models"
            module = ModelWithLoss(model, make_objective())
            live.kind = "activations of the decoder: embedding"
            loss, _ = module(batch.inputs, batch.labels, batch.count, batch.num_loss_tokens)
            loss.backward()
            del loss
            live.start_phase("the update")
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in model.parameters():
            parameter.grad = None
    return live.phases()


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
    """Return grids of square images that have about `num_patches` patches in total.

    As many of `_IMAGE_PATCHES` as fit, then smaller ones.
    """
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


# ------------------------------------------------------------------ hooks


class PhaseMarks(Protocol):
    """Callbacks at the beginning of a phase."""

    kind: str
    """Kind of what is made meanwhile."""

    def start_phase(self, name: str, block: str | None = None) -> None:
        """Begin another phase; `block`: whose backward pass it is."""


def mark_phases(model: VLM, blocks: Mapping[str, nn.Module], live: PhaseMarks) -> Iterator[Any]:
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


def _name_kind(live: PhaseMarks, kind: str) -> Callable[..., None]:
    def hook(*_: object) -> None:
        if live.kind != "workspace":
            live.kind = kind

    return hook


def _start(live: PhaseMarks, name: str) -> Callable[..., None]:
    return lambda *_: live.start_phase(name)


def _start_backward(live: PhaseMarks, block: str | None, name: str) -> Callable[..., None]:
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
    model: VLM, blocks: Mapping[str, nn.Module], live: LiveBytes, kept: KeptGradients
) -> Iterator[Any]:
    """Count gradients as such, and free those that are not kept."""
    inside = {parameter for block in blocks.values() for parameter in block.parameters()}
    for parameter in model.parameters():
        if parameter.requires_grad:
            is_kept = kept == "all" or (kept == "root" and parameter not in inside)
            hook = _keep_gradient(live) if is_kept else _drop_gradient
            yield parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _keep_gradient(live: LiveBytes) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:
            live.move(parameter.grad, "gradients")

    return hook


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None
