"""Bytes of all tensors that are alive while operations run on the meta device: a dry run of training or inference.

With `kernels.launch.dry_run`, modules, autograd and the launchers of kernels run as they are; nothing is allocated and
nothing is computed, so that memory is measured without knowledge of the architecture.

    live = LiveBytes(*model.parameters())
    with launch.dry_run(), live:
        model(inputs)
    peak_bytes(live.phases())
"""

import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

Bytes = dict[str, int]
"""Bytes by kind: `activations of the decoder: mlp`, `workspace`, ..."""


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
    """FLOPs of matrix products."""


Phases = list[Phase]
"""The phases of a dry run in order."""


def moments(phases: Phases) -> Iterator[tuple[Phase, Bytes]]:
    """Every phase, and the bytes at its peak."""
    held: Bytes = {}
    for phase in phases:
        yield phase, plus(held, phase.peak)
        held = plus(held, phase.change)


def peak_bytes(phases: Phases) -> int:
    """The peak over all phases."""
    return max(sum(held.values()) for _, held in moments(phases))


def plus(a: Bytes, b: Bytes) -> Bytes:
    """The sum by kind."""
    return {key: a.get(key, 0) + b.get(key, 0) for key in a | b}


# ------------------------------------------------------------------ operations on the meta device


_results: dict[Any, tuple[Any, ...] | None] = {}
"""(shape, strides, dtype, FLOPs) of the result of a pure operation on meta tensors; None: it has several tensors."""


class MetaCache(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes the shape of a result on the meta device once for all equal inputs: most layers of a model are alike."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No dry run is compiled; torch's check would import the compiler, for a second."""
        return False

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.result(operation, args, kwargs or {})[0]

    def result(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, float]:
        """(result, FLOPs) of an operation."""
        if _changes_values(operation) and args[0].is_meta:
            return args[0], flops_of(operation, args, kwargs, args[0])
        key = _cache_key(operation, args, kwargs)
        found = None if key is None else _results.get(key)
        if found is not None:
            shape, stride, dtype, flops = found
            return torch.empty_strided(shape, stride, dtype=dtype, device="meta"), flops
        out = operation(*args, **kwargs)
        flops = flops_of(operation, args, kwargs, out)
        if key is not None and key not in _results:
            is_plain = isinstance(out, Tensor) and out.is_meta
            _results[key] = (out.shape, out.stride(), out.dtype, flops) if is_plain else None
        return out, flops


def flops_of(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """FLOPs of a matrix product, in place or not; 0 of other operations."""
    count = _flop_formula(operation)
    if count is None:
        return 0.0
    options = {name: value for name, value in kwargs.items() if name != "out"}
    return float(count(*args, **options, out_val=out))


@functools.cache
def _flop_formula(operation: Any) -> Any:
    in_place = {torch.ops.aten.addmm_: torch.ops.aten.addmm}
    return flop_registry.get(in_place.get(operation.overloadpacket, operation.overloadpacket))


@functools.cache
def _changes_values(operation: Any) -> bool:
    """Whether it writes to its first argument, whose shape stays, and returns it."""
    schema = operation._schema
    is_in_place = len(schema.returns) == 1 and schema.returns[0].alias_info and schema.returns[0].alias_info.is_write
    changes_shape = torch.Tag.inplace_view in operation.tags or schema.name in ("aten::resize_", "aten::set_")
    return bool(is_in_place) and schema.name.endswith("_") and not changes_shape


@functools.cache
def _is_pure(operation: Any) -> bool:
    """Whether it only makes new tensors: it returns and changes none of its inputs."""
    return not any(x.alias_info for x in (*operation._schema.arguments, *operation._schema.returns))


def _cache_key(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The key of a result's shape: everything it depends on. None: it cannot be cached."""
    if not _is_pure(operation):
        return None
    described: list[Any] = [operation]
    for value in (*args, *kwargs.items()):
        if isinstance(value, Tensor):
            if not value.is_meta:
                return None
            described.append((value.shape, value.stride(), value.dtype))
        elif isinstance(value, (list, tuple)):
            if any(isinstance(x, Tensor) for x in value):
                return None
            described.append(tuple(map(_hashable, value)))
        else:
            described.append(value)
    return tuple(described)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class LiveBytes(MetaCache):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages on the meta device that operations make, until they are freed."""

    def __init__(self, *ignored: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kind = "all"
        """Kind of the storages that operations currently make."""
        self._kinds: dict[int, tuple[str, int, Any]] = {}
        """(kind, bytes, weak reference) of each live storage, by its address."""
        self._ignored = {tensor.untyped_storage()._cdata: tensor for tensor in ignored}
        self._phases: list[Phase] = [Phase("the start")]
        self._change, self._total, self._peak = dict[str, int](), 0, 0

    def start_phase(self, name: str, block: str | None = None) -> None:
        """Begin another phase."""
        self._phases[-1].change = {kind: size for kind, size in self._change.items() if size}
        self._phases.append(Phase(name, block))
        self._change, self._total, self._peak = {}, 0, 0

    def phases(self) -> Phases:
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
        for value in out if isinstance(out, (tuple, list)) else (out,):
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
