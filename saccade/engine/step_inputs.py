"""Input tensors of a step in one int32 buffer: filled on the host, uploaded by one copy, split into tensors on the device.

Legend: T tokens, R requests, S sampled tokens, W pages of the longest request.

Host and device split the buffer with the same function. A step that runs as a CUDA graph (`cuda_graphs.py`) is rounded up to the
graph's size and filled up with *padding*: tokens that are stored nowhere, of requests without context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.engine.encoder_cache import ENCODER_SLOT_TOKENS
from saccade.engine.prompt import TokenPrompt
from saccade.engine.step_plan import Chunk

Ints = NDArray[np.int32]
Array = TypeVar("Array", Ints, Tensor)


class InputSizes(NamedTuple):
    """Sizes of a step's inputs."""

    num_tokens: int
    num_requests: int
    num_samples: int
    table_width: int

    @property
    def lengths(self) -> tuple[int, ...]:
        """Elements of each part, in the order of `StepInputs`."""
        tokens, requests, samples, width = self
        return tokens, tokens, 3 * tokens, tokens, tokens, requests + 1, requests, samples, requests * width

    @property
    def total(self) -> int:
        """Elements of the buffer."""
        return sum(map(_aligned, self.lengths))


class StepInputs(NamedTuple, Generic[Array]):
    """The parts of the buffer, all int32."""

    token_ids: Array
    """[T]"""
    pending_slots: Array
    """[T]: the request slot whose last sampled token this is; the number of slots where the token id is known."""
    positions: Array
    """[3, T]"""
    slot_mapping: Array
    """[T]: the KV slot that keys and values are written to."""
    feature_index: Array
    """[T]: index of the token's features in the encoder cache; the size of the cache if it has none."""
    cu_seqlens: Array
    """[R + 1]"""
    context_lengths: Array
    """[R]"""
    sampled: Array
    """[S]: indices of the tokens after which one is sampled."""
    page_table: Array
    """[R, W]"""


def split(buffer: Array, sizes: InputSizes) -> StepInputs[Array]:
    """Views of a flat buffer of `sizes.total` elements or more."""
    parts, start = [], 0
    for length in sizes.lengths:
        parts.append(buffer[start : start + length])
        start += _aligned(length)
    parts[2] = parts[2].reshape(3, sizes.num_tokens)
    parts[-1] = parts[-1].reshape(sizes.num_requests, sizes.table_width)
    return StepInputs(*parts)


def _aligned(length: int) -> int:
    """Parts start at multiples of 16 bytes: Triton compiles another kernel for pointers that do not."""
    return -(-length // 4) * 4


class RequestInputs:
    """What the runner keeps of a request: its prompt, and how much of its page table has been written."""

    __slots__ = ("first_output_position", "num_pages_written", "prompt", "seed")

    def __init__(self, prompt: TokenPrompt, seed: int) -> None:
        self.prompt, self.seed = prompt, seed
        self.first_output_position = int(prompt.positions[:, -1].max()) + 1
        self.num_pages_written = 0


class InputBuilder:
    """Fills step inputs from chunks. Keeps the page table of every slot, so that a step writes only new pages."""

    def __init__(
        self, *, max_requests: int, page_size: int, max_pages: int, num_kv_slots: int, num_features: int
    ) -> None:
        self._max_requests, self._page_size, self._num_kv_slots = max_requests, page_size, num_kv_slots
        self._num_features = num_features
        self._table = np.zeros((max_requests, max_pages), dtype=np.int32)

    def fill_decode(self, out: StepInputs[Ints], chunks: Sequence[Chunk], requests: Sequence[RequestInputs]) -> None:
        """Fill a step in which every request computes one text token; the rest of `out` is padding."""
        n, page_size = len(chunks), self._page_size
        self._write_pages(out, chunks, requests)
        starts = [chunk.start for chunk in chunks]
        out.token_ids[:n] = [
            0 if chunk.reads_pending else chunk.request.token_ids[start]
            for chunk, start in zip(chunks, starts, strict=True)
        ]
        out.pending_slots[:n] = [chunk.slot if chunk.reads_pending else self._max_requests for chunk in chunks]
        out.positions[:, :n] = [
            request.first_output_position + start - len(request.prompt.token_ids)
            if start >= len(request.prompt.token_ids)
            else request.prompt.positions[0, start]
            for start, request in zip(starts, requests, strict=True)
        ]
        out.slot_mapping[:n] = [
            chunk.pages[start // page_size] * page_size + start % page_size
            for chunk, start in zip(chunks, starts, strict=True)
        ]
        out.feature_index[:n] = self._num_features
        out.context_lengths[:n] = starts
        out.context_lengths[:n] += 1
        out.cu_seqlens[:] = np.arange(len(out.cu_seqlens))
        self._fill_padding(out, n)
        out.context_lengths[n:] = 0

    def fill(self, out: StepInputs[Ints], chunks: Sequence[Chunk], requests: Sequence[RequestInputs]) -> None:
        """Fill any step; the rest of `out` is padding."""
        page_size, token, sample = self._page_size, 0, 0
        self._write_pages(out, chunks, requests)
        out.cu_seqlens[0] = 0
        out.pending_slots[:] = self._max_requests
        out.feature_index[:] = self._num_features
        for number, (chunk, request) in enumerate(zip(chunks, requests, strict=True)):
            end = token + chunk.num_tokens
            if chunk.reads_pending:
                out.token_ids[token] = 0
                out.pending_slots[token] = chunk.slot
            else:
                known = chunk.request.token_ids[chunk.start : chunk.end]
                out.token_ids[token : token + len(known)] = known
                out.token_ids[token + len(known) : end] = chunk.drafts
            self._fill_positions(out.positions[:, token:end], chunk.start, request)
            index = np.arange(chunk.start, chunk.end)
            out.slot_mapping[token:end] = self._table[chunk.slot, index // page_size] * page_size + index % page_size
            out.cu_seqlens[number + 1] = end
            out.context_lengths[number] = chunk.end
            _fill_feature_index(out.feature_index[token:end], chunk)
            if chunk.samples:
                count = 1 + len(chunk.drafts)
                out.sampled[sample : sample + count] = np.arange(end - count, end)
                sample += count
            token = end
        out.cu_seqlens[len(chunks) + 1 :] = token  # requests without new tokens
        out.context_lengths[len(chunks) :] = 0
        out.sampled[sample:] = 0
        self._fill_padding(out, token)

    def _fill_padding(self, out: StepInputs[Ints], start: int) -> None:
        """Tokens of no request: computed, but stored nowhere."""
        out.token_ids[start:] = 0
        out.pending_slots[start:] = self._max_requests
        out.positions[:, start:] = 0
        out.slot_mapping[start:] = self._num_kv_slots
        out.feature_index[start:] = self._num_features

    def _write_pages(self, out: StepInputs[Ints], chunks: Sequence[Chunk], requests: Sequence[RequestInputs]) -> None:
        for chunk, request in zip(chunks, requests, strict=True):
            if request.num_pages_written < len(chunk.pages):
                written = request.num_pages_written
                self._table[chunk.slot, written : len(chunk.pages)] = chunk.pages[written:]
                request.num_pages_written = len(chunk.pages)
        width = min(out.page_table.shape[1], self._table.shape[1])
        out.page_table[: len(chunks), :width] = self._table[[chunk.slot for chunk in chunks], :width]

    @staticmethod
    def _fill_positions(out: Ints, start: int, request: RequestInputs) -> None:
        num_prompt, count = len(request.prompt.token_ids), out.shape[1]
        in_prompt = max(0, min(count, num_prompt - start))
        out[:, :in_prompt] = request.prompt.positions[:, start : start + in_prompt]
        first = request.first_output_position + start + in_prompt - num_prompt
        out[:, in_prompt:] = np.arange(first, first + count - in_prompt)


def table_width(max_context: int, page_size: int) -> int:
    """Width of the page table, a multiple of 16: Triton compiles another kernel for strides that are not."""
    return -(-max_context // (page_size * 16)) * 16


def feature_index(slots: Sequence[int], start: int, end: int) -> NDArray[np.int64]:
    """Encoder-cache indices of the features of tokens start .. end of an image."""
    index = np.arange(start, end)
    return np.asarray(slots)[index // ENCODER_SLOT_TOKENS] * ENCODER_SLOT_TOKENS + index % ENCODER_SLOT_TOKENS


def _fill_feature_index(out: Ints, chunk: Chunk) -> None:
    for image in chunk.images:
        span = image.span
        start, end = max(span.start, chunk.start), min(span.end, chunk.end)
        out[start - chunk.start : end - chunk.start] = feature_index(image.slots, start - span.start, end - span.start)


class StepBuffers:
    """Two host buffers and one device buffer.

    A step is filled while the previous one may still be waiting for its copy, so the host buffers alternate. Before a buffer is
    filled again its last copy is waited for; it has nearly always completed long ago.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self._hosts = [torch.zeros(capacity, dtype=torch.int32, pin_memory=is_gpu) for _ in range(2)]
        self._device = torch.zeros(capacity, dtype=torch.int32, device=device) if is_gpu else None
        self._copied: list[Any] = [torch.cuda.Event() for _ in self._hosts] if is_gpu else []  # type: ignore[no-untyped-call]
        self._current = 0

    @property
    def capacity(self) -> int:
        """Elements a step may have."""
        return len(self._hosts[0])

    @property
    def uploaded(self) -> Tensor:
        """The last upload, on the device. On a GPU it is always the same memory."""
        return self._hosts[self._current] if self._device is None else self._device

    def next_host(self) -> Ints:
        """The host array to fill for the next step."""
        self._current = 1 - self._current
        if self._copied:
            self._copied[self._current].synchronize()
        array: Ints = self._hosts[self._current].numpy()
        return array

    def upload(self, total: int) -> Tensor:
        """Copy what was filled last to the device, without waiting for it."""
        if self._device is not None:
            self._device[:total].copy_(self._hosts[self._current][:total], non_blocking=True)
            self._copied[self._current].record()
        return self.uploaded
