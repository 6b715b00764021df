"""The order of forward and backward passes on every rank of a pipeline, and the layers of its stages. Integers only.

Stage s of `num_ranks * num_chunks` runs on rank s % num_ranks. With one chunk per rank the order is 1F1B, with several
it is interleaved 1F1B: a bubble shorter by that factor, for more messages. 4 ranks, 1 chunk, 5 micro-batches:

    rank 0   F0 F1 F2 F3 B0 F4 B1 B2 B3 B4
    rank 1   F0 F1 F2 B0 F3 B1 F4 B2 B3 B4
    rank 2   F0 F1 B0 F2 B1 F3 B2 F4 B3 B4
    rank 3   F0 B0 F1 B1 F2 B2 F3 B3 F4 B4

With zero-bubble, backward passes (B) compute gradients of activations alone, which the stage before waits for. A rank
computes the gradients of weights (W) when it has nothing else to do, or would hold activations of more micro-batches
than the first rank does in 1F1B. 4 ranks, 5 micro-batches:

    rank 0   F0 F1 F2 F3 B0 W0 F4 B1 W1 B2 W2 B3 W3 B4 W4
    rank 3   F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 W2 W3 W4

With chunks, micro-batches go through them in rounds of about `num_ranks`; any number of micro-batches is divided into
equal rounds. All ranks do forward passes in one order and backward passes in one order, so messages between two ranks
arrive in the order in which they are expected.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

FORWARD_TIME, BACKWARD_TIME = 1, 2
"""The gradients of activations and of weights take equally long: half of a backward pass."""


class Pass(NamedTuple):
    """A forward or backward pass of one chunk of layers over one micro-batch."""

    is_forward: bool
    chunk: int
    micro_batch: int
    is_of_weights: bool = False
    """Whether it is the second half of a backward pass: the gradients of weights."""


@dataclass(frozen=True)
class Schedule:
    """What every rank of a pipeline does in a step."""

    passes: tuple[tuple[Pass, ...], ...]
    """The passes of each rank, in order."""
    duration: int
    """Time of the step, in units of a forward pass of one chunk."""

    @property
    def bubble(self) -> float:
        """Share of the time in which a rank waits, if all stages take equally long."""
        num_forward = sum(one.is_forward for passes in self.passes for one in passes)
        busy = num_forward * (FORWARD_TIME + BACKWARD_TIME)
        return 1.0 - busy / (len(self.passes) * self.duration)


@functools.lru_cache(maxsize=64)
def plan_schedule(num_ranks: int, num_chunks: int, num_micro_batches: int, *, defers_weights: bool = False) -> Schedule:
    """The passes of a step, for any number of micro-batches; the same on every rank.

    `defers_weights`: zero-bubble, with one chunk per rank.
    """
    rounds = _rounds(num_ranks, num_micro_batches)
    chunks = range(num_chunks)
    forwards = [Pass(True, chunk, one) for batches in rounds for chunk in chunks for one in batches]
    backwards = [Pass(False, chunk, one) for batches in rounds for chunk in reversed(chunks) for one in batches]
    passes = []
    for rank in range(num_ranks):
        ahead = num_ranks - rank - 1
        if num_chunks > 1:
            ahead = 2 * ahead + (num_chunks - 1) * max(map(len, rounds))
        warmup = min(ahead, len(forwards))
        pairs = zip(forwards[warmup:], backwards, strict=False)
        steady = [one for pair in pairs for one in pair]
        passes.append((*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :]))
    if defers_weights:
        assert num_chunks == 1, "zero-bubble has one chunk per rank"
        return _with_weights(passes)
    return Schedule(tuple(passes), _duration(passes))


def _with_weights(passes: Sequence[Sequence[Pass]]) -> Schedule:
    """Divide the backward passes of a schedule in two, and place the second halves. All passes take equally long."""
    ranks = [_RankWithWeights(rank, len(passes), of_rank) for rank, of_rank in enumerate(passes)]
    ended: set[tuple[Pass, int]] = set()
    duration = 0
    while any(not rank.is_done for rank in ranks):
        started = [(one, rank.number) for rank in ranks if (one := rank.next(ended)) is not None]
        assert started, "no rank waits for a pass that waits for it"
        ended |= set(started)
        duration += 1
    return Schedule(tuple(tuple(rank.order) for rank in ranks), duration)


class _RankWithWeights:
    """A rank while `_with_weights` places its passes."""

    def __init__(self, number: int, num_ranks: int, passes: Sequence[Pass]) -> None:
        self.number, self._num_ranks, self._passes = number, num_ranks, passes
        self.order: list[Pass] = []
        self._num_done = self._num_held = 0
        self._pending: deque[Pass] = deque()
        """Second halves of the backward passes that were done, oldest first."""

    @property
    def is_done(self) -> bool:
        """Whether all passes are placed."""
        return self._num_done == len(self._passes) and not self._pending

    def next(self, ended: Set[tuple[Pass, int]]) -> Pass | None:
        """Place the pass that begins now, given the passes of all ranks that have ended. None: it has to wait."""
        one = self._passes[self._num_done] if self._num_done < len(self._passes) else None
        is_full = one is not None and one.is_forward and self._num_held >= self._num_ranks and len(self._pending) > 0
        if one is None or is_full or not self._is_ready(one, ended):
            if not self._pending:
                return None
            self._num_held -= 1
            one = self._pending.popleft()
        else:
            self._num_done += 1
            self._num_held += one.is_forward
            if not one.is_forward:
                self._pending.append(one._replace(is_of_weights=True))
        self.order.append(one)
        return one

    def _is_ready(self, one: Pass, ended: Set[tuple[Pass, int]]) -> bool:
        before = self.number - 1 if one.is_forward else self.number + 1
        return not 0 <= before < self._num_ranks or (one, before) in ended


def _rounds(num_ranks: int, num_micro_batches: int) -> list[range]:
    """Consecutive micro-batches in rounds of at least `num_ranks` and equal size, or one more."""
    num_rounds = max(1, num_micro_batches // num_ranks)
    bounds = [num_micro_batches * number // num_rounds for number in range(num_rounds + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def _duration(passes: Sequence[Sequence[Pass]]) -> int:
    """Time of a step on stages that take equally long; a pass starts when its rank is free and its input is there."""
    num_ranks, last_stage = len(passes), len(passes) * (1 + max(one.chunk for one in passes[0])) - 1
    ends: dict[tuple[bool, int, int], int] = {}
    free_at, num_done = [0] * num_ranks, [0] * num_ranks

    def ready(one: Pass, stage: int) -> int | None:
        if one.is_forward:
            return 0 if stage == 0 else ends.get((True, stage - 1, one.micro_batch))
        needed = (True, stage, one.micro_batch) if stage == last_stage else (False, stage + 1, one.micro_batch)
        return ends.get(needed)

    waiting = set(range(num_ranks))
    while waiting:
        was_done = sum(num_done)
        for rank in sorted(waiting):
            for one in passes[rank][num_done[rank] :]:
                stage = one.chunk * num_ranks + rank
                if (start := ready(one, stage)) is None:
                    break
                free_at[rank] = max(start, free_at[rank]) + (FORWARD_TIME if one.is_forward else BACKWARD_TIME)
                ends[one.is_forward, stage, one.micro_batch] = free_at[rank]
                num_done[rank] += 1
            else:
                waiting.discard(rank)
        assert sum(num_done) > was_done, "no rank waits for a pass that waits for it"
    return max(free_at)


def split_layers(first: float, layers: Sequence[float], last: float, num_stages: int) -> tuple[int, ...]:
    """Bounds of the layers of each stage, `num_stages` + 1 of them: the costliest stage costs as little as possible.

    `first` and `last` are further costs of the first and last stage: tower and embedding, head and loss.
    These two may have no layer, others have one or more. Of the splits that are equally good for the costliest stage,
    the one with the least sum of squares is taken.
    """
    num_layers = len(layers)
    assert num_layers >= num_stages - 2, "a layer for every stage between the first and the last"
    sums = [0.0]
    for cost in layers:
        sums.append(sums[-1] + cost)

    def cost_of(stage: int, start: int, stop: int) -> float:
        return sums[stop] - sums[start] + (first if stage == 0 else 0.0) + (last if stage == num_stages - 1 else 0.0)

    # best[stop]: (costliest stage, sum of squares, bounds) of the stages so far, which have the layers before `stop`.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    for stage in range(num_stages):
        least = 0 if stage in (0, num_stages - 1) else 1
        best = _extended(best, stage, least, num_layers, cost_of)
    return best[num_layers][2]


def _extended(
    best: dict[int, tuple[float, float, tuple[int, ...]]],
    stage: int,
    least: int,
    num_layers: int,
    cost_of: Callable[[int, int, int], float],
) -> dict[int, tuple[float, float, tuple[int, ...]]]:
    """The best splits with one stage more, of `least` layers or more."""
    found: dict[int, tuple[float, float, tuple[int, ...]]] = {}
    for start, (worst, squares, bounds) in best.items():
        for stop in range(start + least, num_layers + 1):
            cost = cost_of(stage, start, stop)
            candidate = (max(worst, cost), squares + cost**2, (*bounds, stop))
            if stop not in found or candidate < found[stop]:
                found[stop] = candidate
    return found
