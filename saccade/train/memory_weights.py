"""Memory that a rank holds between steps: parameters, masters and optimizer state, measured on the meta device."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.kernels import launch
from saccade.model.live_bytes import LiveBytes, peak_bytes
from saccade.model.vlm import VLM
from saccade.train.dry_run import model_blocks
from saccade.train.optimizer import Optimizer, build_optimizer
from saccade.train.parameter_groups import OptimizerConfig


class Elements(NamedTuple):
    """Parameters of a block, or of all that is outside the blocks."""

    total: int
    trained: int


class Weights(NamedTuple):
    """Persistent memory of a rank that has no shards, and the parameters of each block."""

    persistent: Mapping[str, int]
    """Bytes by component."""
    update: int
    """Workspace of the optimizer."""
    blocks: Mapping[str, Elements]
    root: Elements
    """Parameters outside the blocks."""

    @property
    def trained(self) -> int:
        """Elements that are trained."""
        return self.root.trained + sum(block.trained for block in self.blocks.values())


def held_weights(
    model: VLM, config: OptimizerConfig, is_own: Callable[[str], bool], *, has_average: bool, has_saved_copy: bool
) -> Weights:
    """Build the optimizer of a rank that has the parameters of these names; `model` is on the meta device."""
    named = {name: parameter for name, parameter in model.named_parameters() if is_own(name)}
    optimizer = build_optimizer(named.items(), config)
    masters = list(optimizer.masters.values())
    persistent: dict[str, list[Tensor]] = {
        "parameters": list(named.values()),
        "masters": [x for name, x in optimizer.masters.items() if x is not named[name]],
        "moments": [x for state in optimizer.state().values() for x in state.values()],
        "averages": masters if has_average else [],
    }
    if has_saved_copy:
        persistent["copy of the saved state"] = [*masters, *persistent["moments"], *persistent["averages"]]
    names = {
        block: [name for part, _ in module.named_parameters() if (name := f"{block}.{part}") in named]
        for block, module in model_blocks(model).items()
    }
    blocks = {block: _elements([named[name] for name in of_block]) for block, of_block in names.items() if of_block}
    inside = {name for of_block in names.values() for name in of_block}
    root = _elements([parameter for name, parameter in named.items() if name not in inside])
    held = [x for tensors in persistent.values() for x in tensors]
    num_bytes = {part: sum(x.nbytes for x in tensors) for part, tensors in persistent.items()}
    return Weights(num_bytes, _update_bytes(optimizer, named, held), blocks, root)


def _elements(parameters: list[Any]) -> Elements:
    return Elements(sum(x.numel() for x in parameters), sum(x.numel() for x in parameters if x.requires_grad))


def _update_bytes(optimizer: Optimizer, named: Mapping[str, Tensor], held: list[Tensor]) -> int:
    """Measure the workspace of an update in a dry run."""
    gradients = {name: torch.empty_like(x) for name, x in named.items() if x.requires_grad}
    for name, gradient in gradients.items():
        named[name].grad = gradient
    live = LiveBytes(*held, *gradients.values())
    with launch.dry_run(), live:
        optimizer.step(1.0)
    optimizer.zero_grad()
    return peak_bytes(live.phases())
