"""Input tensors of a step in one int32 buffer: filled on the host, uploaded by one copy, split into tensors.

    chunks -> the size of the step -> InputBuilder.fill -> StepBuffers.upload -> split

Legend: T tokens, R requests, S sampled tokens.

The decode requests of a step come first, with one token each, then the chunks of the other requests. Host and device
split the buffer with the same function. A step that runs as a CUDA graph (`cuda_graphs.py`) is rounded up to one of a
declared set of sizes with *padding*: requests without tokens in both parts, and trailing tokens whose keys and values
are not stored.

Page tables stay on the device, one row per slot; a step uploads only its new pages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.engine.core.encoder_cache import ENCODER_SLOT_TOKENS
from saccade.engine.core.step import MAX_CHUNKS, MAX_DRAFTING, STEP_TOKENS, Chunk
from saccade.engine.prompt import TokenPrompt
from saccade.engine.request import Request

Ints = NDArray[np.int32]
Array = TypeVar("Array", Ints, Tensor)

_MIXED_SAMPLES = 64
"""Samples of the smaller captured steps with prefill and decode, for when few requests decode."""


class StepSize(NamedTuple):
    """Size of a step: exact, or that of the CUDA graph which it is rounded up to. Contexts may have any length."""

    num_tokens: int
    num_decode: int
    """Decode requests, of one token each."""
    num_chunks: int
    """Prefill requests. A CUDA graph without them has a sample after every token."""
    num_samples: int

    @property
    def num_requests(self) -> int:
        """Decode and prefill requests."""
        return self.num_decode + self.num_chunks

    def padding_over(self, size: StepSize) -> int:
        """Tokens of padding if a step of `size` runs as this one. A sample costs about an eighth of a token."""
        return self.num_tokens - size.num_tokens + (self.num_samples - size.num_samples) // 8

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of elements of each field, in the order of `StepInputs`."""
        tokens, requests, samples = self.num_tokens, self.num_requests, self.num_samples
        return tokens, tokens, 3 * tokens, tokens, tokens, requests + 1, requests, requests, samples, samples

    @property
    def total(self) -> int:
        """Number of elements of the buffer."""
        return sum(map(_aligned, self.lengths))

    def last_part(self, buffer: Tensor) -> Tensor:
        """The last field that `split` returns, without the microseconds of slicing the others."""
        return buffer[self.total - _aligned(self.num_samples) :]


class StepInputs(NamedTuple, Generic[Array]):
    """Views of the buffer, all int32."""

    token_ids: Array
    """[T]: known token ids."""
    last_token_slots: Array
    """[T]: the request slot whose last sampled token this is; the number of slots if `token_ids` has the token."""
    positions: Array
    """[3, T]: positions for the rotary embedding."""
    slot_mapping: Array
    """[T]: KV slot of each token; the number of KV slots for padding."""
    feature_index: Array
    """[T]: index of the token's features in the encoder cache; the size of the cache for other tokens."""
    cu_seqlens: Array
    """[R + 1]: cumulative numbers of tokens."""
    context_lengths: Array
    """[R]: tokens of each request including those of the step; 0 for padding."""
    slots: Array
    """[R]: request slot of each request, its row of the page table."""
    sampled: Array
    """[S]: indices of the tokens after which a token is sampled."""
    sampled_slots: Array
    """[S]: the request slot of each sample; the number of slots for a chunk with drafts, which may be rejected."""


def split(buffer: Array, size: StepSize) -> StepInputs[Array]:
    """Split a flat buffer of at least `size.total` elements into views."""
    parts, start = [], 0
    for length in size.lengths:
        parts.append(buffer[start : start + length])
        start += _aligned(length)
    parts[2] = parts[2].reshape(3, size.num_tokens)
    return StepInputs(*parts)


def _aligned(length: int) -> int:
    """Round up to 16 bytes: Triton compiles another kernel for pointers that are not aligned."""
    return -(-length // 4) * 4


class RequestInputs:
    """Inputs of an open request, and the tokens that were known when it got its slot."""

    __slots__ = ("adapter_slot", "first_output_position", "prompt", "request", "token_ids")

    def __init__(self, request: Request, prompt: TokenPrompt, adapter_slot: int | None = None) -> None:
        self.request, self.prompt, self.adapter_slot = request, prompt, adapter_slot
        self.token_ids: Ints = np.array(prompt.token_ids, np.int32)
        self.first_output_position = int(prompt.positions[:, -1].max()) + 1

    def positions(self, start: int, end: int) -> NDArray[np.int64]:
        """[3, end - start]: positions of prompt or output tokens."""
        num_prompt = len(self.prompt.token_ids)
        shift = self.first_output_position - num_prompt
        if start >= num_prompt:
            return np.broadcast_to(np.arange(start + shift, end + shift), (3, end - start))
        in_prompt = self.prompt.positions[:, start:end]
        rest = np.arange(max(start, num_prompt) + shift, end + shift)
        return np.concatenate([in_prompt, np.broadcast_to(rest, (3, len(rest)))], axis=1)


class InputBuilder:
    """Fills step inputs from chunks. Keeps a host copy of the page tables, to which chunks append."""

    def __init__(
        self, *, max_requests: int, page_size: int, max_pages: int, num_kv_slots: int, num_features: int
    ) -> None:
        self._max_requests, self._page_size, self._num_kv_slots = max_requests, page_size, num_kv_slots
        self._num_features = num_features
        self._table = np.zeros((max_requests, max_pages), dtype=np.int32)
        self._num_pages = [0] * max_requests
        self._position_shift = np.zeros(max_requests, dtype=np.int64)

    def start_slot(self, slot: int, inputs: RequestInputs) -> None:
        """Clear the page table of a slot for a new request."""
        self._num_pages[slot] = 0
        self._position_shift[slot] = inputs.first_output_position - len(inputs.prompt.token_ids)

    def append_pages(self, chunks: Sequence[Chunk]) -> Ints | None:
        """Append the new pages of chunks. Called once per plan, also if some chunks are not computed.

        Returns [2, pages]: indices into the flattened page table, and the pages. None: there are no new pages.
        """
        index: list[int] = []
        pages: list[int] = []
        width = self._table.shape[1]
        for chunk in [chunk for chunk in chunks if chunk.new_pages]:
            first = chunk.slot * width + self._num_pages[chunk.slot]
            self._num_pages[chunk.slot] += len(chunk.new_pages)
            index += range(first, first + len(chunk.new_pages))
            pages += chunk.new_pages
        if not pages:
            return None
        new_pages = np.array([index, pages], np.int32)
        self._table.reshape(-1)[new_pages[0]] = new_pages[1]
        return new_pages

    def fill(
        self,
        out: StepInputs[Ints],
        num_decode: int,
        decode: Sequence[Chunk],
        prefill: Sequence[Chunk],
        requests: Mapping[str, RequestInputs],
    ) -> None:
        """Fill the inputs of a step with room for `num_decode` decode requests. Unused room is filled with padding."""
        n = len(decode)
        out.cu_seqlens[: n + 1] = np.arange(n + 1)
        out.cu_seqlens[n + 1 : num_decode + 1] = n
        out.context_lengths[n:num_decode] = 0
        out.slots[n:num_decode] = 0
        self._fill_decode(out, decode, requests)
        token, sample = self._fill_prefill(out, num_decode, n, prefill, requests)
        end = num_decode + len(prefill)
        out.cu_seqlens[end + 1 :] = token  # padding requests without tokens
        out.context_lengths[end:] = 0
        out.slots[end:] = 0
        out.sampled[sample:] = 0
        out.sampled_slots[sample:] = self._max_requests
        self._fill_padding(out, token)

    def _fill_decode(
        self, out: StepInputs[Ints], chunks: Sequence[Chunk], requests: Mapping[str, RequestInputs]
    ) -> None:
        n = len(chunks)
        if n == 0:
            return
        slots = np.array([chunk.slot for chunk in chunks])
        starts = np.array([chunk.start for chunk in chunks])
        out.token_ids[:n] = 0
        out.last_token_slots[:n] = slots
        out.positions[:, :n] = starts + self._position_shift[slots]
        for index in [index for index, chunk in enumerate(chunks) if not chunk.reads_last_token]:
            chunk = chunks[index]  # the last token of a prompt whose other tokens are cached
            inputs = requests[chunk.request_id]
            out.token_ids[index] = inputs.token_ids[chunk.start]
            out.last_token_slots[index] = self._max_requests
            out.positions[:, index] = inputs.positions(chunk.start, chunk.end)[:, 0]
        pages = self._table[slots, starts // self._page_size]
        out.slot_mapping[:n] = pages * self._page_size + starts % self._page_size
        out.feature_index[:n] = self._num_features
        out.context_lengths[:n] = starts + 1
        out.slots[:n] = slots
        out.sampled[:n] = np.arange(n)
        out.sampled_slots[:n] = slots

    def _fill_prefill(
        self, out: StepInputs[Ints], first_request: int, num_decode: int, chunks: Sequence[Chunk],
        requests: Mapping[str, RequestInputs],
    ) -> tuple[int, int]:  # fmt: skip
        """Fill the chunks after the decode requests. Returns the number of tokens and samples filled so far."""
        token = sample = num_decode
        for number, chunk in enumerate(chunks, start=first_request):
            inputs, end = requests[chunk.request_id], token + chunk.num_tokens
            out.last_token_slots[token:end] = self._max_requests
            known = end - len(chunk.drafts)
            if chunk.reads_last_token:
                out.token_ids[token] = 0
                out.last_token_slots[token] = chunk.slot
            else:
                out.token_ids[token:known] = inputs.token_ids[chunk.start : chunk.start + known - token]
            out.token_ids[known:end] = chunk.drafts
            out.positions[:, token:end] = inputs.positions(chunk.start, chunk.end)
            index = np.arange(chunk.start, chunk.end)
            pages = self._table[chunk.slot, index // self._page_size]
            out.slot_mapping[token:end] = pages * self._page_size + index % self._page_size
            out.feature_index[token:end] = self._num_features
            for image in chunk.images:
                span = inputs.request.images[image.image_index]
                first, last = max(span.start, chunk.start), min(span.end, chunk.end)
                out.feature_index[token + first - chunk.start : token + last - chunk.start] = feature_index(
                    image.slots, first - span.start, last - span.start
                )
            out.cu_seqlens[number + 1] = end
            out.context_lengths[number] = chunk.end
            out.slots[number] = chunk.slot
            if chunk.samples:
                count = 1 + len(chunk.drafts)
                out.sampled[sample : sample + count] = np.arange(end - count, end)
                out.sampled_slots[sample : sample + count] = self._max_requests if chunk.drafts else chunk.slot
                sample += count
            token = end
        return token, sample

    def _fill_padding(self, out: StepInputs[Ints], start: int) -> None:
        """Fill the tokens from `start` on with padding, whose keys and values are not stored."""
        out.token_ids[start:] = 0
        out.last_token_slots[start:] = self._max_requests
        out.positions[:, start:] = 0
        out.slot_mapping[start:] = self._num_kv_slots
        out.feature_index[start:] = self._num_features


def table_width(max_context: int, page_size: int) -> int:
    """Width of the page table, rounded up to 16: Triton compiles another kernel for strides that are not."""
    return -(-max_context // (page_size * 16)) * 16


def feature_index(slots: Sequence[int], start: int, end: int) -> NDArray[np.int64]:
    """Encoder-cache indices of the features of an image's tokens `start` to `end`."""
    index = np.arange(start, end)
    return np.asarray(slots)[index // ENCODER_SLOT_TOKENS] * ENCODER_SLOT_TOKENS + index % ENCODER_SLOT_TOKENS


class StepBuffers:
    """Two host buffers and one device buffer for step inputs.

    A step is filled while the previous step may still be waiting for its copy, so the host buffers alternate. A buffer
    is only filled again after its last copy is complete, which it nearly always is.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self._hosts = [torch.zeros(capacity, dtype=torch.int32, pin_memory=is_gpu) for _ in range(2)]
        self._device = None if device.type == "cpu" else torch.zeros(capacity, dtype=torch.int32, device=device)
        self._copied: list[Any] = [torch.cuda.Event() for _ in self._hosts] if is_gpu else []  # type: ignore[no-untyped-call]
        self._current = 0

    @property
    def capacity(self) -> int:
        """Maximum elements of a step."""
        return len(self._hosts[0])

    @property
    def uploaded(self) -> Tensor:
        """The last upload, on the device. On a GPU it is always in the same memory."""
        return self._hosts[self._current] if self._device is None else self._device

    def next_host(self) -> Ints:
        """The host array to fill for the next step."""
        self._current = 1 - self._current
        if self._copied:
            self._copied[self._current].synchronize()
        array: Ints = self._hosts[self._current].numpy()
        return array

    def upload(self, total: int) -> Tensor:
        """Queue the copy of the first `total` elements that were filled last to the device."""
        if self._device is not None:
            self._device[:total].copy_(self._hosts[self._current][:total], non_blocking=True)
            if self._copied:
                self._copied[self._current].record()
        return self.uploaded


# ------------------------------------------------------------------ sizes of CUDA graphs


def step_size(
    *, num_decode: int, num_tokens: int, num_chunks: int, num_samples: int, max_requests: int
) -> StepSize | None:
    """The captured size for a step with these requests, prefill tokens and samples. None: it runs eagerly."""
    if num_chunks == 0:
        tokens = _round_decode(num_decode)
        return StepSize(tokens, tokens, 0, tokens)
    num_tokens += num_decode
    if num_tokens > STEP_TOKENS[-1] or num_chunks > MAX_CHUNKS:
        return None
    tokens = STEP_TOKENS[bisect_left(STEP_TOKENS, num_tokens)]
    if num_decode == 0:
        return StepSize(tokens, 0, MAX_CHUNKS, _round_samples(num_samples))
    return StepSize(tokens, max_requests, MAX_CHUNKS, _round_mixed_samples(num_samples, max_requests))


def declared_sizes(max_requests: int, max_draft_tokens: int = 0) -> Iterator[StepSize]:
    """Sizes captured at start-up: decode alone, prefill with and without decode, and drafts of a few requests."""
    for tokens in sorted({_round_decode(n) for n in range(1, max_requests + 1)}):
        yield StepSize(tokens, tokens, 0, tokens)
    for tokens in STEP_TOKENS:
        yield StepSize(tokens, 0, MAX_CHUNKS, MAX_CHUNKS)
        most_samples = min(tokens, max_requests + MAX_CHUNKS)
        for samples in sorted({_round_mixed_samples(n, max_requests) for n in (1, most_samples)}):
            yield StepSize(tokens, max_requests, MAX_CHUNKS, samples)
    drafting = [n * (1 + max_draft_tokens) for n in range(1, min(MAX_DRAFTING, max_requests) + 1)]
    sizes = {(STEP_TOKENS[bisect_left(STEP_TOKENS, tokens)], _round_samples(tokens)) for tokens in drafting}
    yield from (StepSize(tokens, 0, MAX_CHUNKS, n) for tokens, n in sorted(sizes) if n > MAX_CHUNKS)


def covers(declared: Iterable[StepSize]) -> dict[StepSize, StepSize]:
    """For each declared size the smallest one of some forty that is at least as large, or itself if it is one of them.

    These are decode alone, decode with any number of prefill tokens and the most samples, and every second number of
    prefill tokens without decode.
    """
    sizes = list(declared)
    tokens, most = {*STEP_TOKENS[1::2], STEP_TOKENS[-1]}, {size[:3]: size for size in sorted(sizes)}

    def is_first(size: StepSize) -> bool:
        return size == most[size[:3]] and (size.num_decode > 0 or size.num_tokens in tokens)

    first = sorted(filter(is_first, sizes), key=lambda size: (size.num_tokens, size.num_samples, size.num_decode))

    def covers_it(size: StepSize, cover: StepSize) -> bool:
        return size.num_chunks == cover.num_chunks and all(a <= b for a, b in zip(size, cover, strict=True))

    return {size: next((cover for cover in first if covers_it(size, cover)), size) for size in sizes}


def _round_samples(num_samples: int) -> int:
    return MAX_CHUNKS if num_samples <= MAX_CHUNKS else 1 << (num_samples - 1).bit_length()


def _round_mixed_samples(num_samples: int, max_requests: int) -> int:
    without_drafts = max_requests + MAX_CHUNKS
    if num_samples <= min(_MIXED_SAMPLES, without_drafts):
        return min(_MIXED_SAMPLES, without_drafts)
    return without_drafts if num_samples <= without_drafts else _round_samples(num_samples)


def _round_decode(num_requests: int) -> int:
    """Up to 64 requests a step takes the time to read the weights, so powers of two are close enough."""
    if num_requests <= 64:
        return 1 << (num_requests - 1).bit_length()
    return -(-num_requests // 32) * 32


def largest_step(max_tokens: int, max_requests: int, max_draft_tokens: int) -> tuple[int, int, int]:
    """Tokens, requests and samples of the largest step, rounded up to a captured size."""
    decode, most_samples = _round_decode(max_requests), max_requests + MAX_CHUNKS * (1 + max_draft_tokens)
    samples = max(decode, _round_mixed_samples(most_samples, max_requests))
    return max(max_tokens, STEP_TOKENS[-1], decode), max(decode, max_requests + MAX_CHUNKS), samples
