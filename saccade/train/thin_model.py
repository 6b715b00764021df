"""A model with few layers that stands for one with many: layers of one kind are alike, so one of them is run.

    thin = ThinModel.of(config)
    thin.repeated(record_of(thin.config), ...)     the record of the whole model, each layer under its own name

Kept are the first two and the last two layers (FSDP gathers two layers ahead, so what runs in these differs), layers
that hand on or are given features, and one layer of each kind between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

from saccade.model.config import LanguageConfig, ModelConfig, VisionConfig

_STACKS = ("vision.blocks", "language.layers")
_ENDS = 2
"""Layers at each end whose operations differ from those between them."""
T = TypeVar("T")


@dataclass(frozen=True)
class ThinModel:
    """A thin model, and which of its layers stands for each layer of the whole one."""

    config: ModelConfig
    """The thin model."""
    stands_for: dict[str, tuple[int, ...]]
    """For each layer of a stack, the layer of the thin model that stands for it."""

    @classmethod
    def of(cls, config: ModelConfig) -> ThinModel:
        """Thin a model."""
        vision, blocks = _thin_tower(config.vision)
        language, layers = _thin_decoder(config.language, config.vision.feature_sets - 1)
        thin = replace(config, vision=vision, language=language)
        return cls(thin, dict(zip(_STACKS, (blocks, layers), strict=True)))

    def repeated(self, record: Sequence[T], phase_of: Callable[[T], str], renamed: Callable[[T, str], T]) -> list[T]:
        """The record of the whole model, given that of the thin one; its items name their phases."""
        found: list[T] = []
        for key, runs in _stacks(record, phase_of):
            if key is None:
                found += runs[0]
                continue
            direction, stack = key
            layers = list(enumerate(self.stands_for[stack]))
            for number, thin in layers if direction == "forward" else reversed(layers):
                found += [renamed(one, f"{direction} of {stack}.{number}") for one in runs.get(thin, [])]
        return found


def _stacks(
    record: Sequence[T], phase_of: Callable[[T], str]
) -> Iterator[tuple[tuple[str, str] | None, dict[int, list[T]]]]:
    """(direction and stack, items of each layer) of each pass through a stack; of other parts None, all as layer 0."""
    places = [(place(phase_of(one)), one) for one in record]
    for key, group in groupby(places, key=lambda item: item[0][:2] if item[0] else None):
        runs: dict[int, list[T]] = {}
        for at, one in group:
            runs.setdefault(0 if at is None else at[2], []).append(one)
        yield key, runs


def place(phase: str) -> tuple[str, str, int] | None:
    """(direction, stack, layer) of a phase; None: it is not that of a layer."""
    direction, _, name = phase.partition(" of ")
    stack, _, layer = name.rpartition(".")
    return (direction, stack, int(layer)) if stack in _STACKS else None


def _thin_decoder(config: LanguageConfig, num_feature_layers: int) -> tuple[LanguageConfig, tuple[int, ...]]:
    """Image features of several layers enter after the first layers; backward, before the layer that follows them."""
    num_given = num_feature_layers + 1 if num_feature_layers else 0
    kinds = [layer if layer < num_given else "alike" for layer in range(config.num_layers)]
    is_kept = _kept(kinds)
    return replace(config, num_layers=sum(is_kept)), _stand_ins(is_kept, kinds)


def _thin_tower(config: VisionConfig) -> tuple[VisionConfig, tuple[int, ...]]:
    """Blocks attend within windows or over the whole image. Some are projected, and the last ones may be idle.

    Gradients of what is projected arrive before the backward pass of the block, in that of the next one.
    """
    projected = {*config.feature_layers, *(layer - 1 for layer in config.selected_layers)}
    projected |= {layer + 1 for layer in projected}
    kinds: list[object] = [layer in config.full_attention_layers for layer in range(config.num_run_layers)]
    kinds = [layer if layer in projected else kind for layer, kind in enumerate(kinds)]
    idle = range(config.num_run_layers, config.num_layers)
    is_kept = [*_kept(kinds), *(True for _ in idle)]

    def renumbered(chosen: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sum(is_kept[:layer]) for layer in chosen if is_kept[layer])

    thin = replace(
        config,
        num_layers=sum(is_kept),
        full_attention_layers=renumbered(config.full_attention_layers),
        feature_layers=renumbered(config.feature_layers),
        selected_layers=tuple(sum(is_kept[:layer]) for layer in config.selected_layers),
    )
    return thin, _stand_ins(is_kept, [*kinds, *idle])


def _kept(kinds: Sequence[object]) -> list[bool]:
    """Whether each layer is kept: both ends, and the first of each kind between them."""
    layers = range(len(kinds))
    firsts = {kinds[layer]: layer for layer in reversed(layers[_ENDS:-_ENDS])}
    kept = {*layers[:_ENDS], *layers[-_ENDS:], *firsts.values()}
    return [layer in kept for layer in layers]


def _stand_ins(is_kept: Sequence[bool], kinds: Sequence[object]) -> tuple[int, ...]:
    """For each layer: its number in the thin model if it is kept, or that of the last one of its kind before it."""
    numbers: list[int] = []
    of_kind: dict[object, int] = {}
    for layer, kind in enumerate(kinds):
        number = of_kind[kind] if not is_kept[layer] else sum(is_kept[:layer])
        if is_kept[layer]:
            of_kind[kind] = number
        numbers.append(number)
    return tuple(numbers)
