"""A step's numbers in one buffer: filled on the host, sent to the device by one copy, cut into tensors there.

Legend: T tokens, R requests, S sampled places, W pages of the longest request.

The same cut serves host and device, so neither can disagree about where something lies. A recorded step (`graphs.py`) is cut like
any other, only to sizes rounded up, and its unused places are filled with *nobody*: a token that is stored nowhere, of a request
without context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.engine.image_pool import IMAGE_PAGE
from saccade.engine.prompt import TokenPrompt
from saccade.engine.step_plan import Chunk

Ints = NDArray[np.int32]
Numbers = TypeVar("Numbers", Ints, Tensor)


class Sizes(NamedTuple):
    """How the buffer is cut."""

    num_tokens: int
    num_requests: int
    num_samples: int
    table_width: int

    @property
    def lengths(self) -> tuple[int, ...]:
        """Numbers of each part, in the order of `StepNumbers`."""
        tokens, requests, samples, width = self
        return tokens, tokens, 3 * tokens, tokens, tokens, requests + 1, requests, samples, requests * width

    @property
    def total(self) -> int:
        """Numbers in the buffer."""
        return sum(map(_aligned, self.lengths))


class StepNumbers(NamedTuple, Generic[Numbers]):
    """The parts of the buffer, all int32."""

    token_ids: Numbers
    """[T]"""
    pending_rows: Numbers
    """[T]: the row whose last sampled token this one is; the number of rows where the token id is known."""
    positions: Numbers
    """[3, T]"""
    slots: Numbers
    """[T]: where keys and values go."""
    feature_slots: Numbers
    """[T]: where in the image pool a token's features lie; the size of the pool where it has none."""
    cu_seqlens: Numbers
    """[R + 1]"""
    context_lengths: Numbers
    """[R]"""
    sampled: Numbers
    """[S]: the tokens behind which one is sampled."""
    page_table: Numbers
    """[R, W]"""


def cut(buffer: Numbers, sizes: Sizes) -> StepNumbers[Numbers]:
    """The parts of a flat buffer of `sizes.total` numbers or more."""
    parts, start = [], 0
    for length in sizes.lengths:
        parts.append(buffer[start : start + length])
        start += _aligned(length)
    parts[2] = parts[2].reshape(3, sizes.num_tokens)
    parts[-1] = parts[-1].reshape(sizes.num_requests, sizes.table_width)
    return StepNumbers(*parts)


def _aligned(length: int) -> int:
    """Parts begin at multiples of 16 bytes: Triton compiles a kernel anew for pointers that do not."""
    return -(-length // 4) * 4


class Place:
    """What the runner knows of a running request: its prompt, and its pages in the order of its tokens."""

    __slots__ = ("first_answer_position", "num_listed", "prompt")

    def __init__(self, prompt: TokenPrompt) -> None:
        self.prompt = prompt
        self.first_answer_position = int(prompt.positions[:, -1].max()) + 1
        self.num_listed = 0
        """Pages already written to the host's page table."""


class StepBuilder:
    """Fills buffers from chunks. Keeps the page table of every row, so that a step writes only what is new."""

    def __init__(self, *, num_rows: int, page_size: int, max_pages: int, num_slots: int, num_features: int) -> None:
        self._num_rows, self._page_size, self._num_slots = num_rows, page_size, num_slots
        self._num_features = num_features
        self._table = np.zeros((num_rows, max_pages), dtype=np.int32)

    def begin(self, place: Place) -> None:
        """The request has a new row, and other pages than before."""
        place.num_listed = 0

    def fill_answers(self, out: StepNumbers[Ints], chunks: Sequence[Chunk], places: Sequence[Place]) -> None:
        """A step in which every request computes one token of text. Places beyond those of the chunks get nobody."""
        n, page_size = len(chunks), self._page_size
        self._list_pages(out, chunks, places)
        starts = [chunk.start for chunk in chunks]
        out.token_ids[:n] = [
            0 if chunk.reads_pending else chunk.request.token_ids[start]
            for chunk, start in zip(chunks, starts, strict=True)
        ]
        out.pending_rows[:n] = [chunk.row if chunk.reads_pending else self._num_rows for chunk in chunks]
        out.positions[:, :n] = [
            place.first_answer_position + start - len(place.prompt.token_ids)
            if start >= len(place.prompt.token_ids)
            else place.prompt.positions[0, start]
            for start, place in zip(starts, places, strict=True)
        ]
        out.slots[:n] = [
            chunk.pages[start // page_size] * page_size + start % page_size
            for chunk, start in zip(chunks, starts, strict=True)
        ]
        out.feature_slots[:n] = self._num_features
        out.context_lengths[:n] = starts
        out.context_lengths[:n] += 1
        out.cu_seqlens[:] = np.arange(len(out.cu_seqlens))
        self._fill_nobody(out, n)
        out.context_lengths[n:] = 0

    def fill(self, out: StepNumbers[Ints], chunks: Sequence[Chunk], places: Sequence[Place]) -> None:
        """Any step. Places beyond those of the chunks get nobody."""
        page_size, token, sample = self._page_size, 0, 0
        self._list_pages(out, chunks, places)
        out.cu_seqlens[0] = 0
        out.pending_rows[:] = self._num_rows
        out.feature_slots[:] = self._num_features
        for number, (chunk, place) in enumerate(zip(chunks, places, strict=True)):
            end = token + chunk.num_tokens
            if chunk.reads_pending:
                out.token_ids[token] = 0
                out.pending_rows[token] = chunk.row
            else:
                known = chunk.request.token_ids[chunk.start : chunk.end]
                out.token_ids[token : token + len(known)] = known
                out.token_ids[token + len(known) : end] = chunk.drafts
            self._fill_positions(out.positions[:, token:end], chunk.start, place)
            index = np.arange(chunk.start, chunk.end)
            out.slots[token:end] = self._table[chunk.row, index // page_size] * page_size + index % page_size
            out.cu_seqlens[number + 1] = end
            out.context_lengths[number] = chunk.end
            _fill_features(out.feature_slots[token:end], chunk)
            if chunk.samples:
                count = 1 + len(chunk.drafts)
                out.sampled[sample : sample + count] = np.arange(end - count, end)
                sample += count
            token = end
        out.cu_seqlens[len(chunks) + 1 :] = token  # requests without new tokens
        out.context_lengths[len(chunks) :] = 0
        out.sampled[sample:] = 0
        self._fill_nobody(out, token)

    def _fill_nobody(self, out: StepNumbers[Ints], start: int) -> None:
        """Tokens of no request: they are computed and stored nowhere."""
        out.token_ids[start:] = 0
        out.pending_rows[start:] = self._num_rows
        out.positions[:, start:] = 0
        out.slots[start:] = self._num_slots
        out.feature_slots[start:] = self._num_features

    def _list_pages(self, out: StepNumbers[Ints], chunks: Sequence[Chunk], places: Sequence[Place]) -> None:
        for chunk, place in zip(chunks, places, strict=True):
            if place.num_listed < len(chunk.pages):
                self._table[chunk.row, place.num_listed : len(chunk.pages)] = chunk.pages[place.num_listed :]
                place.num_listed = len(chunk.pages)
        width = min(out.page_table.shape[1], self._table.shape[1])
        out.page_table[: len(chunks), :width] = self._table[[chunk.row for chunk in chunks], :width]

    @staticmethod
    def _fill_positions(out: Ints, start: int, place: Place) -> None:
        num_prompt, count = len(place.prompt.token_ids), out.shape[1]
        in_prompt = max(0, min(count, num_prompt - start))
        out[:, :in_prompt] = place.prompt.positions[:, start : start + in_prompt]
        first = place.first_answer_position + start + in_prompt - num_prompt
        out[:, in_prompt:] = np.arange(first, first + count - in_prompt)


def table_width(longest: int, page_size: int) -> int:
    """Entries of a page table's row, in whole multiples of 16: a kernel is compiled anew for strides that are not."""
    return -(-longest // (page_size * 16)) * 16


def feature_slots(places: Sequence[int], start: int, end: int) -> NDArray[np.int64]:
    """Where in the image pool tokens start .. end of an image lie."""
    index = np.arange(start, end)
    return np.asarray(places)[index // IMAGE_PAGE] * IMAGE_PAGE + index % IMAGE_PAGE


def _fill_features(out: Ints, chunk: Chunk) -> None:
    """Say where the features of the chunk's images lie."""
    for placed in chunk.images:
        image = placed.image
        start, end = max(image.start, chunk.start), min(image.end, chunk.end)
        out[start - chunk.start : end - chunk.start] = feature_slots(
            placed.places, start - image.start, end - image.start
        )


class StepBuffers:
    """The buffer on the host, twice, and on the device, once.

    A step is filled while the one before may still wait to be copied, so they take turns. Whoever is filled again first waits for
    its last copy, which has nearly always been made long ago.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self._hosts = [torch.zeros(capacity, dtype=torch.int32, pin_memory=is_gpu) for _ in range(2)]
        self._device = torch.zeros(capacity, dtype=torch.int32, device=device) if is_gpu else None
        self._copied: list[Any] = [torch.cuda.Event() for _ in self._hosts] if is_gpu else []  # type: ignore[no-untyped-call]
        self._turn = 0

    @property
    def capacity(self) -> int:
        """Numbers a step may have."""
        return len(self._hosts[0])

    @property
    def uploaded(self) -> Tensor:
        """What was uploaded last, on the device. On a GPU it is always the same memory."""
        return self._hosts[self._turn] if self._device is None else self._device

    def next_host(self) -> Ints:
        """The array to fill for the next step."""
        self._turn = 1 - self._turn
        if self._copied:
            self._copied[self._turn].synchronize()
        array: Ints = self._hosts[self._turn].numpy()
        return array

    def upload(self, total: int) -> Tensor:
        """Send what was filled last; nothing is waited for."""
        if self._device is not None:
            self._device[:total].copy_(self._hosts[self._turn][:total], non_blocking=True)
            self._copied[self._turn].record()
        return self.uploaded
