"""A step's numbers in one buffer: filled on the host, sent to the device by one copy, cut into tensors there.

Legend: T tokens, R requests, S sampled places, M tokens that are image features, W pages of the longest request.

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
    num_features: int
    table_width: int

    @property
    def lengths(self) -> tuple[int, ...]:
        """Numbers of each part, in the order of `StepNumbers`."""
        tokens, requests, samples, features, width = self
        return (
            tokens, tokens, 3 * tokens, tokens, requests + 1, requests, samples, features, features, requests * width
        )  # fmt: skip

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
    cu_seqlens: Numbers
    """[R + 1]"""
    context_lengths: Numbers
    """[R]"""
    sampled: Numbers
    """[S]: the tokens behind which one is sampled."""
    feature_tokens: Numbers
    """[M]: the tokens that are image features."""
    feature_slots: Numbers
    """[M]: where in the image pool each of these features lies."""
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
        self.first_answer_position = int(prompt.positions.max()) + 1
        self.num_listed = 0
        """Pages already written to the host's page table."""


class StepBuilder:
    """Fills buffers from chunks. Keeps the page table of every row, so that a step writes only what is new."""

    def __init__(self, *, num_rows: int, page_size: int, max_pages: int, num_slots: int) -> None:
        self._num_rows, self._page_size, self._num_slots = num_rows, page_size, num_slots
        self._table = np.zeros((num_rows, max_pages), dtype=np.int32)

    def begin(self, place: Place) -> None:
        """The request has a new row, and other pages than before."""
        place.num_listed = 0

    def sizes(self, chunks: Sequence[Chunk]) -> Sizes:
        """The exact sizes of a step."""
        return Sizes(
            num_tokens=sum(chunk.num_tokens for chunk in chunks),
            num_requests=len(chunks),
            num_samples=sum(1 + len(chunk.drafts) for chunk in chunks if chunk.samples),
            num_features=sum(num_features(chunk) for chunk in chunks),
            table_width=table_width(max(chunk.end for chunk in chunks), self._page_size),
        )

    def fill_answers(self, out: StepNumbers[Ints], chunks: Sequence[Chunk], places: Sequence[Place]) -> None:
        """A step in which every request computes one token. `out` may have more places than chunks; those get nobody."""
        n, page_size = len(chunks), self._page_size
        self._list_pages(out, chunks, places)
        starts = [chunk.start for chunk in chunks]
        out.token_ids[:n] = [
            0 if chunk.reads_pending else chunk.request.token_ids[start]
            for chunk, start in zip(chunks, starts, strict=True)
        ]
        out.pending_rows[:n] = [chunk.row if chunk.reads_pending else self._num_rows for chunk in chunks]
        for number, (start, place) in enumerate(zip(starts, places, strict=True)):
            if start >= len(place.prompt.token_ids):
                out.positions[:, number] = place.first_answer_position + start - len(place.prompt.token_ids)
            else:
                out.positions[:, number] = place.prompt.positions[:, start]
        out.slots[:n] = [
            chunk.pages[start // page_size] * page_size + start % page_size
            for chunk, start in zip(chunks, starts, strict=True)
        ]
        out.context_lengths[:n] = starts
        out.context_lengths[:n] += 1
        out.cu_seqlens[:] = np.arange(len(out.cu_seqlens))
        if n < len(out.slots):
            out.token_ids[n:] = 0
            out.pending_rows[n:] = self._num_rows
            out.positions[:, n:] = 0
            out.slots[n:] = self._num_slots
            out.context_lengths[n:] = 0

    def fill(self, out: StepNumbers[Ints], chunks: Sequence[Chunk], places: Sequence[Place]) -> None:
        """Any step, cut exactly."""
        page_size, token, sample, feature = self._page_size, 0, 0, 0
        self._list_pages(out, chunks, places)
        out.cu_seqlens[0] = 0
        out.pending_rows[:] = self._num_rows
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
            feature = _fill_features(out, feature, chunk, token)
            if chunk.samples:
                count = 1 + len(chunk.drafts)
                out.sampled[sample : sample + count] = np.arange(end - count, end)
                sample += count
            token = end

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


def num_features(chunk: Chunk) -> int:
    """Tokens of the chunk that are image features."""
    return sum(min(placed.image.end, chunk.end) - max(placed.image.start, chunk.start) for placed in chunk.images)


def feature_slots(places: Sequence[int], start: int, end: int) -> NDArray[np.int64]:
    """Where in the image pool tokens start .. end of an image lie."""
    index = np.arange(start, end)
    return np.asarray(places)[index // IMAGE_PAGE] * IMAGE_PAGE + index % IMAGE_PAGE


def _fill_features(out: StepNumbers[Ints], feature: int, chunk: Chunk, first_token: int) -> int:
    """Say which tokens are image features; the number of features filled in so far."""
    for placed in chunk.images:
        image = placed.image
        start, end = max(image.start, chunk.start), min(image.end, chunk.end)
        stop = feature + end - start
        out.feature_tokens[feature:stop] = np.arange(start, end) + (first_token - chunk.start)
        out.feature_slots[feature:stop] = feature_slots(placed.places, start - image.start, end - image.start)
        feature = stop
    return feature


class StepBuffers:
    """The buffer on the host, twice, and on the device, once.

    A step is filled while the one before may still wait to be copied, so they take turns; the one before that has been read back.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self._hosts = [torch.zeros(capacity, dtype=torch.int32, pin_memory=is_gpu) for _ in range(2)]
        self._arrays = [host.numpy() for host in self._hosts]
        self.device = torch.zeros(capacity, dtype=torch.int32, device=device) if is_gpu else None
        self._turn = 0

    @property
    def capacity(self) -> int:
        """Numbers a step may have."""
        return len(self._arrays[0])

    def next_host(self) -> Ints:
        """The array to fill for the next step."""
        self._turn = 1 - self._turn
        array: Any = self._arrays[self._turn]
        return array  # type: ignore[no-any-return]

    def upload(self, total: int) -> Tensor:
        """What was filled last, on the device; nothing is waited for."""
        host = self._hosts[self._turn][:total]
        if self.device is None:
            return host
        self.device[:total].copy_(host, non_blocking=True)
        return self.device
