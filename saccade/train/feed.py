"""Batches from the stream to the device: labels added, the next row copied while the one before computes.

    stream -> host rows with labels -> pinned memory -> (side stream) device

A rank has as many rows in a step as the rank with most: what it lacks is filled with empty rows.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.data.collate import PackedSequence
from saccade.data.loader import Stream
from saccade.model.config import ModelConfig
from saccade.processor.inputs import ModelInputs
from saccade.train.loss import empty_row, num_labels, row_labels, source_labels
from saccade.train.metrics import Work, row_work


@dataclass(frozen=True)
class Row:
    """A row with all the model is called with, in host memory or on the device."""

    inputs: ModelInputs
    labels: Tensor
    num_learned: int
    by_source: list[tuple[Tensor, int]]
    """Labels of each source, and how many; empty where losses by source are not asked for."""


@dataclass(frozen=True)
class StepRows:
    """One step's rows of this rank."""

    num_rows: int
    """As many as the rank with most has, some of them empty."""
    on_device: Iterator[Row]
    """The rows on the device, each once."""
    work: Work
    """What they hold and cost."""
    learned_by_source: list[int]
    """Tokens that learn, of each source; empty where losses by source are not asked for."""
    sample_ids: list[list[str]]
    """Of each row that is not empty."""
    state: dict[str, int | str]
    """Where the data goes on after this step."""


class Feed:
    """Draws batches from a stream and brings them to the device."""

    def __init__(
        self, stream: Stream, config: ModelConfig, trained_parts: Collection[str], device: torch.device
    ) -> None:
        """`trained_parts`: the parts of the model that learn, for counting work."""
        self.source_names = stream.source_names
        self.waited_s = 0.0
        """Time the host stood waiting for the last batch."""
        self._stream, self._config, self._trained_parts, self._device = stream, config, trained_parts, device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._empty = empty_row(config.vision)

    def next(self, *, with_sources: bool) -> StepRows | None:
        """The next step's rows, the first already on its way; None when the data has ended."""
        began = time.perf_counter()
        try:
            batch = next(self._stream)
        except StopIteration:
            return None
        finally:
            self.waited_s = time.perf_counter() - began
        full = [row for row in batch.sequences if row.inputs.num_tokens]  # a row whose samples are all bad is empty
        rows = [self._prepared(row, with_sources) for row in full]
        work = sum_work(row_work(self._config, row.inputs, row.num_learned, self._trained_parts) for row in rows)
        rows += [self._nothing(with_sources)] * (batch.max_sequences_per_rank - len(rows))
        return StepRows(
            num_rows=len(rows),
            on_device=self._sent(rows),
            work=work,
            learned_by_source=[
                sum(counts) for counts in zip(*([n for _, n in row.by_source] for row in rows), strict=True)
            ],
            sample_ids=[row.sample_ids for row in full],
            state=batch.state,
        )

    def _prepared(self, row: PackedSequence, with_sources: bool) -> Row:
        labels = row_labels(row.inputs)
        num_sources = len(self.source_names) if with_sources else 0
        parts = source_labels(row.inputs, labels, row.source_of_conversation, num_sources)
        return Row(row.inputs, labels, num_labels(labels), [(part, num_labels(part)) for part in parts])

    def _nothing(self, with_sources: bool) -> Row:
        labels = row_labels(self._empty)
        return Row(self._empty, labels, 0, [(labels, 0) for _ in self.source_names] if with_sources else [])

    def _sent(self, rows: Sequence[Row]) -> Iterator[Row]:
        """The rows on the device. The first is sent now, each next one when the one before is taken."""
        first = self._send(rows[0])

        def received() -> Iterator[Row]:
            sent = first
            for following in rows[1:]:
                current, sent = sent, self._send(following)
                yield self._receive(*current)
            yield self._receive(*sent)

        return received()

    def _send(self, row: Row) -> tuple[Row, torch.cuda.Event | None]:
        """Begin to copy, and mark the end of the copy; the host goes on at once."""
        if self._side is None:
            return row, None
        with torch.cuda.stream(self._side):
            sent = _mapped(row, lambda tensor: tensor.pin_memory().to(self._device, non_blocking=True))
            return sent, self._side.record_event()

    def _receive(self, row: Row, copied: torch.cuda.Event | None) -> Row:
        """Let the computation wait for the copy, not the host."""
        if copied is not None:
            computing = torch.cuda.current_stream(self._device)
            computing.wait_event(copied)
            _mapped(row, lambda tensor: _used_by(computing, tensor))
        return row


def sum_work(works: Iterable[Work]) -> Work:
    """What several rows hold and cost."""
    total = Work()
    for work in works:
        total = total.plus(work)
    return total


def _used_by(stream: torch.cuda.Stream, tensor: Tensor) -> Tensor:
    """The tensor's memory, taken by another stream, is free only when `stream` has done with it."""
    tensor.record_stream(stream)
    return tensor


def _mapped(row: Row, function: Callable[[Tensor], Tensor]) -> Row:
    """The row with `function` applied to every tensor that lives on the device."""
    inputs: dict[str, Any] = {
        field.name: function(value)
        for field in dataclasses.fields(row.inputs)
        if isinstance(value := getattr(row.inputs, field.name), Tensor) and field.name != "image_grids"
    }
    return Row(
        dataclasses.replace(row.inputs, **inputs),
        function(row.labels),
        row.num_learned,
        [(function(labels), learned) for labels, learned in row.by_source],
    )
