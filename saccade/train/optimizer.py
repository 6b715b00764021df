"""Optimizers: AdamW with fp32 or 8-bit moments, and Muon, on plain or sharded parameters.

    freeze(model.named_parameters(), config)                          # before the model is parallelized
    optimizer = build_optimizer(model.named_parameters(), config)     # after
    optimizer.step(lr_factor, grad_scale)

Every trained parameter has a fp32 master (the parameter itself if it is fp32) and the state of its method:

    adamw       first and second moment in fp32
    adamw8bit   the same in 8 bits with fp32 scales; vectors and small tensors keep fp32
    muon        momentum in fp32, for the matrices of the decoder's layers; see `muon.py`

Parameters may be plain tensors or DTensors sharded on dim 0: element-wise methods work on the local shard, Muon
gathers. A missing gradient counts as zero, as on a rank without images, so that sharded and single-device runs take the
same steps. 8-bit rounding noise differs between shardings.

With `offload`, masters and state are in pinned host memory; a step streams them through the device in chunks.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from saccade.errors import ConfigError
from saccade.kernels.adamw import Moment8bit, Settings, adamw, adamw8bit, zero_moment
from saccade.train.dtensor import dtensor_like, local_tensor
from saccade.train.muon import muon_step
from saccade.train.parameter_groups import (
    MUON_MATRICES,
    OptimizerConfig,
    ParameterGroup,
    learning_rates,
    parameter_groups,
)

SMALLEST_8BIT = 4096
"""Tensors with fewer elements keep fp32 moments: norms and biases, where 8 bits would save nothing."""
_STREAMED_BYTES = 512 * 2**20
"""Offloaded state that is on the device at once."""

Method = Literal["adamw", "adamw8bit", "muon"]
NamedParameters = Iterable[tuple[str, Tensor]]


def freeze(named_parameters: NamedParameters, config: OptimizerConfig) -> None:
    """Disable gradients of parameters with a learning rate of 0. At least one parameter must remain."""
    parameters = dict(named_parameters)
    for name, (_, lr) in learning_rates(list(parameters), config).items():
        parameters[name].requires_grad_(lr > 0.0)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(
            "every learning rate is 0: nothing would be trained. Set optimizer.lr or one of optimizer.lrs"
        )


def build_optimizer(
    named_parameters: NamedParameters,
    config: OptimizerConfig,
    masters: dict[str, Tensor] | None = None,
    everything: NamedParameters | None = None,
) -> "Optimizer":
    """An optimizer for every parameter that requires gradients.

    `masters`: initial fp32 values by name, which it takes out of the dict; default: those of the parameters.
    `everything`: the parameters of the whole model, if other ranks have some of them (default: it has all).
    """
    parameters = dict(named_parameters)
    every = parameters if everything is None else dict(everything)
    groups = parameter_groups({name: parameter.ndim for name, parameter in every.items()}, config)
    trained = {name: parameter for name, parameter in every.items() if parameter.requires_grad}
    unplanned = trained.keys() - {name for group in groups for name in group.parameter_names}
    assert not unplanned, f"call freeze first: {sorted(unplanned)[:3]} have a learning rate of 0 but require gradients"
    kept = [own for group in groups if (own := _only(group, trained)).parameter_names]
    return Optimizer({name: parameters[name] for name in trained if name in parameters}, kept, config, masters or {})


def _only(group: ParameterGroup, names: Mapping[str, Tensor]) -> ParameterGroup:
    """The group restricted to `names`."""
    decayed, undecayed = (tuple(name for name in part if name in names) for part in (group.decayed, group.undecayed))
    return group._replace(decayed=decayed, undecayed=undecayed)


@dataclass
class _Slot:
    """A parameter and this rank's shard of its optimizer state."""

    parameter: Tensor
    method: Method
    held: dict[str, Tensor]
    """Moments by name, and `master` if the parameter is not fp32."""
    index: int
    """Index of the parameter in the optimizer's ages."""


class Optimizer:
    """Trained parameters with their masters and optimizer state."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        groups: Sequence[ParameterGroup],
        config: OptimizerConfig,
        masters: dict[str, Tensor],
    ) -> None:
        self.groups = list(groups)
        self.num_steps = 0
        """Total number of steps. Bias correction uses the count of each parameter, which is part of its state."""
        self._config = config
        self._slots = {
            name: _open_slot(index, name, parameter, config, masters.pop(name, None))
            for index, (name, parameter) in enumerate(parameters.items())
        }
        self._ages = torch.zeros(len(self._slots), dtype=torch.int64)
        """Number of updates of each parameter, one CPU tensor: a call per parameter would take milliseconds a step."""

    @property
    def masters(self) -> dict[str, Tensor]:
        """fp32 weights by name, sharded like the parameters. No copies: loading into them changes the optimizer."""
        self._synchronize_offload()
        return {
            name: dtensor_like(slot.parameter, slot.held["master"]) if "master" in slot.held else slot.parameter
            for name, slot in self._slots.items()
        }

    @torch.no_grad()
    def step(self, lr_factor: float, grad_scale: float = 1.0) -> None:
        """Update all parameters without host sync: `lr_factor` scales learning rates, `grad_scale` gradients."""
        config = self._config
        self.num_steps += 1
        self._ages += 1
        ages = self._ages.tolist()
        for group in self.groups:
            for names, decay in ((group.decayed, config.weight_decay), (group.undecayed, 0.0)):
                for slots in self._alike([self._slots[name] for name in names if name in self._slots], ages):
                    lr, step = group.lr * lr_factor, ages[slots[0].index]
                    self._update(slots, Settings(lr, config.beta1, config.beta2, config.eps, decay, step, grad_scale))

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for slot in self._slots.values():
            slot.parameter.grad = None

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Optimizer state of every parameter by name: the original tensors, sharded like the parameters.

        Masters are not included; a checkpoint stores them as the weights.
        """
        self._synchronize_offload()
        return {
            name: {key: dtensor_like(slot.parameter, x) for key, x in slot.held.items() if key != "master"}
            | {"step": self._ages[slot.index]}
            for name, slot in self._slots.items()
        }

    @torch.no_grad()
    def write_parameters(self) -> None:
        """Copy masters into parameters of lower precision, after a checkpoint was loaded into the masters."""
        for slot in self._slots.values():
            if "master" in slot.held:
                local_tensor(slot.parameter).copy_(slot.held["master"], non_blocking=True)

    def _synchronize_offload(self) -> None:
        """Wait for asynchronous copies of offloaded state before the host reads it."""
        if self._config.offload and torch.cuda.is_available():
            torch.cuda.synchronize()

    def _alike(self, slots: Sequence[_Slot], ages: Sequence[int]) -> Iterator[list[_Slot]]:
        """Group slots that one kernel call can update.

        They have the same method and age, all or none have a master, and offloaded groups have a bounded size.
        """
        lists: dict[tuple[Method, int, bool], list[_Slot]] = {}
        for slot in slots:
            lists.setdefault((slot.method, ages[slot.index], "master" in slot.held), []).append(slot)
        for alike in lists.values():
            yield from _chunks(alike, _STREAMED_BYTES) if self._config.offload else [alike]

    def _update(self, slots: list[_Slot], settings: Settings) -> None:
        """Update slots that are alike with one kernel call."""
        parameters = [local_tensor(slot.parameter) for slot in slots]
        gradients = [_gradient(slot.parameter) for slot in slots]
        held = [_to_device(slot.held, parameters[0].device) if self._config.offload else slot.held for slot in slots]
        masters = [tensors.get("master", x) for tensors, x in zip(held, parameters, strict=True)]
        written = parameters if "master" in slots[0].held else None
        if slots[0].method == "adamw":
            adamw(gradients, masters, [x["first"] for x in held], [x["second"] for x in held], written, settings)
        elif slots[0].method == "adamw8bit":
            first = [Moment8bit(x["first"], x["first_scale"]) for x in held]
            second = [Moment8bit(x["second"], x["second_scale"]) for x in held]
            adamw8bit(gradients, masters, first, second, written, settings)
        else:
            for i, slot in enumerate(slots):
                muon_step(
                    slot.parameter, gradients[i], masters[i], held[i]["momentum"], self._config.momentum, settings
                )
                if written is not None:
                    written[i].copy_(masters[i])
        if self._config.offload:
            for slot, tensors in zip(slots, held, strict=True):
                _to_host(tensors, slot.held)


def _open_slot(index: int, name: str, parameter: Tensor, config: OptimizerConfig, master: Tensor | None) -> _Slot:
    """Allocate zero state, and the master."""
    local, method = local_tensor(parameter.detach()), _method(name, parameter, config)
    held = {} if local.dtype == torch.float32 else {"master": local.float() if master is None else master}
    if method == "adamw8bit":
        first, second = (zero_moment(local, dtype) for dtype in (torch.int8, torch.uint8))
        held |= {"first": first.codes, "first_scale": first.scales}
        held |= {"second": second.codes, "second_scale": second.scales}
    else:
        for key in ("momentum",) if method == "muon" else ("first", "second"):
            held[key] = torch.zeros_like(local, dtype=torch.float32)
    if config.offload and local.is_cuda:
        held = {key: x.cpu().pin_memory() for key, x in held.items()}
    return _Slot(parameter, method, held, index)


def _method(name: str, parameter: Tensor, config: OptimizerConfig) -> Method:
    if config.kind == "muon" and parameter.ndim == 2 and re.search(MUON_MATRICES, name):
        return "muon"
    if config.kind == "adamw8bit" and parameter.ndim > 1 and parameter.numel() >= SMALLEST_8BIT:
        return "adamw8bit"
    return "adamw"


def _chunks(slots: Sequence[_Slot], max_bytes: int) -> Iterator[list[_Slot]]:
    """Chunks of slots whose state is at most `max_bytes`, at least one slot each."""
    chunk: list[_Slot] = []
    size = 0
    for slot in slots:
        added = sum(x.nbytes for x in slot.held.values())
        if chunk and size + added > max_bytes:
            yield chunk
            chunk, size = [], 0
        chunk.append(slot)
        size += added
    if chunk:
        yield chunk


def _to_device(held: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copy the tensors to the device if they are not there."""
    return {key: x.to(device, non_blocking=True) for key, x in held.items()}


def _to_host(fetched: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
    """Copy back to the host. The next step reads on the same stream, so nothing waits."""
    for key, x in fetched.items():
        if x is not held[key]:
            held[key].copy_(x, non_blocking=True)


def _gradient(parameter: Tensor) -> Tensor:
    """This rank's shard of the gradient; zero if there is none."""
    local = local_tensor(parameter)
    return torch.zeros_like(local) if parameter.grad is None else local_tensor(parameter.grad).contiguous()


@torch.no_grad()
def total_norm(parameters: Iterable[Tensor]) -> Tensor:
    """L2 norm of all gradients together, on the device: a fp32 scalar, the same on every rank. No host sync.

    Every rank must hold gradients of the same parameters: the squares of shards are summed over the ranks that hold
    them.
    """
    shards: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        gradient, key = parameter.grad, None
        if isinstance(gradient, DTensor):
            assert not any(placement.is_partial() for placement in gradient.placements), "gradients are reduced"
            axes = tuple(axis for axis, placement in enumerate(gradient.placements) if not placement.is_replicate())
            key = (gradient.device_mesh, axes)
        if gradient is not None:
            shards.setdefault(key, []).append(local_tensor(gradient))
    squares = []
    for key, gradients in shards.items():
        norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float32)
        square = torch.stack(norms).square().sum()
        if key:  # offloaded gradients are on the host, their mesh is not
            square = square.to(key[0].device_type)
        for axis in key[1] if key else ():
            dist.all_reduce(square, group=key[0].get_group(axis))
        squares.append(square)
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())
