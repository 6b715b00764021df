"""Run engine steps on the device.

    copy pages -> encode images -> embed, decoder layers, head -> sample -> start copying the tokens to the host

All work is queued on one stream without synchronizing; only `StepHandle.read` waits. A token that was sampled but not read yet is
read by the next step from `_last_tokens`, on the device.

Legend: T tokens, S sampled tokens, D decoder width, V vocabulary, M image tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.device import to_device
from saccade.engine.config import EngineConfig
from saccade.engine.cuda_graphs import CudaGraphs, StepSize, decode_size, largest_size, mixed_size
from saccade.engine.encoder import Encoder, patch_budgets
from saccade.engine.encoder_cache import ENCODER_SLOT_TOKENS
from saccade.engine.kv_cache import KVCache, PagedAttention
from saccade.engine.prompt import PromptImage, TokenPrompt
from saccade.engine.request import Request, TokenLogprobs
from saccade.engine.sampler import Logprobs, Sampler
from saccade.engine.step_inputs import (
    InputBuilder,
    InputSizes,
    Ints,
    RequestInputs,
    StepBuffers,
    StepInputs,
    feature_index,
    split,
    table_width,
)
from saccade.engine.step_plan import Chunk, ImageToEncode
from saccade.kernels.sampler import NON_FINITE
from saccade.model.vlm import VLM

PromptLogprobs = list[tuple[Chunk, Sequence[int], Logprobs]]
"""Chunks with prompt log-probabilities, the prompt tokens they predict, and the log-probabilities of these."""

_HEAD_ROWS = 1024
"""Rows of logits computed at once for prompt log-probabilities."""


class StepTokens(NamedTuple):
    """Output of a step on the host, by request id."""

    token_ids: dict[str, list[int]]
    """Sampled tokens; with drafts the accepted ones and the one after them."""
    logprobs: dict[str, list[TokenLogprobs]]
    """Of these tokens, where requested."""
    prompt_logprobs: dict[str, list[TokenLogprobs]]
    """Of prompt tokens that follow those computed in this step, where requested."""
    non_finite: list[Request]
    """Requests whose logits were not finite; their tokens are meaningless."""


class StepHandle:
    """A step in flight."""

    def __init__(
        self, chunks: Sequence[Chunk], tokens: Tensor, logprobs: Logprobs | None,
        prompt_logprobs: PromptLogprobs,
    ) -> None:  # fmt: skip
        self._chunks = chunks
        self._tokens = _to_host(tokens)
        self._logprobs = None if logprobs is None else _HostLogprobs(logprobs)
        self._prompts = [(chunk, targets, _HostLogprobs(found)) for chunk, targets, found in prompt_logprobs]
        self._done: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def read(self) -> StepTokens:
        """Wait for the step and return its tokens."""
        if self._done is not None:
            self._done.synchronize()
        step = StepTokens({}, {}, {}, [])
        sampled, first = self._tokens.tolist(), 0
        for chunk in self._chunks:
            if not chunk.samples:
                continue
            index = range(first, first + 1 + len(chunk.drafts))
            first = index.stop
            accepted = _accepted([sampled[i] for i in index], chunk.drafts)
            step.token_ids[chunk.request.id] = accepted
            if NON_FINITE in accepted:
                step.non_finite.append(chunk.request)
                continue
            num_top = chunk.request.sampling.logprobs
            if num_top is not None and self._logprobs is not None:
                tokens = zip(accepted, index, strict=False)
                step.logprobs[chunk.request.id] = [self._logprobs.at(i, token, num_top) for token, i in tokens]
        for chunk, targets, found in self._prompts:
            num_top = chunk.request.sampling.prompt_logprobs or 0
            step.prompt_logprobs[chunk.request.id] = [found.at(i, token, num_top) for i, token in enumerate(targets)]
        return step


def _accepted(sampled: list[int], drafts: Sequence[int]) -> list[int]:
    """The valid samples: those that follow accepted drafts only."""
    num_accepted = 0
    while num_accepted < len(drafts) and sampled[num_accepted] == drafts[num_accepted]:
        num_accepted += 1
    return sampled[: num_accepted + 1]


class _HostLogprobs:
    """Log-probabilities being copied to the host."""

    def __init__(self, found: Logprobs) -> None:
        self._own = _to_host(found.logprobs)
        self._top = None
        if found.top_ids is not None and found.top_logprobs is not None:
            self._top = _to_host(found.top_ids), _to_host(found.top_logprobs)

    def at(self, index: int, token_id: int, num_top: int) -> TokenLogprobs:
        top: list[tuple[int, float]] = []
        if self._top is not None:
            ids, values = (column[index, :num_top].tolist() for column in self._top)
            top = list(zip(ids, values, strict=True))
        return TokenLogprobs(token_id, float(self._own[index]), top)


def _to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned host memory, complete once the stream has reached it."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


@dataclass(frozen=True, kw_only=True)
class PixelScale:
    """Normalization of uint8 pixels."""

    mean: tuple[float, ...]
    """Per channel, in units of the 0..1 range; subtracted."""
    std: tuple[float, ...]
    """Per channel, in units of the 0..1 range; divided by."""


class Runner:
    """The model, its KV cache and its encoder cache on one device."""

    def __init__(
        self, model: VLM, config: EngineConfig, *, pixels: PixelScale, num_pages: int, max_length: int
    ) -> None:
        """The model's projections must be merged (`model/merge.py`)."""
        self.model, self.config = model, config
        self.device, self.dtype = model.head.weight.device, model.head.weight.dtype
        language = model.config.language
        self.max_length = max_length
        uses_graphs = config.cuda_graphs and self.device.type == "cuda"
        max_pages = table_width(max_length, config.page_size)
        tokens, requests, self._max_samples = largest_size(
            config.max_step_tokens, config.max_requests, config.max_draft_tokens
        )
        with self.on_stream():
            self.cache = KVCache(
                language, num_pages=num_pages, page_size=config.page_size, kv_format=config.kv_format,
                dtype=self.dtype, device=self.device,
            )  # fmt: skip
            self._num_features = config.encoder_cache_tokens // ENCODER_SLOT_TOKENS * ENCODER_SLOT_TOKENS
            shape = (self._num_features + 1, language.hidden_size)  # the last row is read for tokens without features
            self._features = torch.zeros(shape, dtype=self.dtype, device=self.device)
            self._last_tokens = torch.zeros(config.max_requests + 1, dtype=torch.int32, device=self.device)
            self.sampler = Sampler(vocab_size=language.vocab_size, num_slots=config.max_requests, device=self.device)
            budgets = patch_budgets(config.max_step_patches, model.config.vision.patches_per_token)
            self._encoder = Encoder(
                model, pixel_mean=pixels.mean, pixel_std=pixels.std, budgets=budgets if uses_graphs else ()
            )
            self._buffers = StepBuffers(InputSizes(tokens, requests, tokens, max_pages).total, self.device)
            # All steps share one memory for logits, captured or not.
            self._logits = torch.empty(self._max_samples, language.vocab_size, dtype=self.dtype, device=self.device)
        self._builder = InputBuilder(
            max_requests=config.max_requests,
            page_size=config.page_size,
            max_pages=max_pages,
            num_kv_slots=self.cache.num_slots,
            num_features=self._num_features,
        )
        self._graphs: CudaGraphs[StepSize] | None = None
        if uses_graphs:
            self._graphs = CudaGraphs(self._forward_captured, lambda size: size.num_eager_runs_before_capture)
        self._requests: dict[str, RequestInputs] = {}

    def close(self) -> None:
        """Free the device memory at once: reference cycles would keep it until the next garbage collection."""
        is_gpu = self.device.type == "cuda" and self.is_alive()  # which also waits for the last step
        vars(self).clear()
        if is_gpu:
            torch.cuda.empty_cache()

    def _head(self, hidden_SD: Tensor) -> Tensor:
        """[S, V] logits, overwritten by the next step."""
        return torch.mm(hidden_SD, self.model.head.weight.t(), out=self._logits[: len(hidden_SD)])

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Use the runner's own stream: the default one cannot be captured."""
        if self.device.type != "cuda":
            yield
            return
        if not hasattr(self, "_stream"):
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(self.device))  # which loaded the weights
        with torch.cuda.stream(self._stream):
            yield

    # -------------------------------------------------------------- requests

    def register(self, request: Request, prompt: TokenPrompt, seed: int) -> None:
        """Keep the inputs of a request."""
        self._requests[request.id] = RequestInputs(prompt, seed)

    def unregister(self, request: Request) -> None:
        """Drop the inputs of an ended request."""
        self._requests.pop(request.id, None)

    @property
    def num_registered(self) -> int:
        """Registered requests."""
        return len(self._requests)

    def is_alive(self) -> bool:
        """Whether the device still works. After some errors (an illegal address) it does not, until the process ends."""
        if self.device.type != "cuda":
            return True
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:
            return False
        return True

    # -------------------------------------------------------------- the three parts of a step

    @torch.inference_mode()
    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (source, target) pages."""
        with self.on_stream():
            if pairs:
                self.cache.copy(pairs)

    @torch.inference_mode()
    def encode(self, images: Sequence[ImageToEncode]) -> None:
        """Write the features of images into the encoder cache, all in one forward pass."""
        with self.on_stream():
            features_MD = self._encoder.encode([self._preprocessed(image) for image in images])
            index = [feature_index(image.slots, 0, image.span.num_tokens) for image in images]
            self._features.index_copy_(0, to_device(np.concatenate(index), self.device), features_MD.to(self.dtype))

    def _preprocessed(self, image: ImageToEncode) -> PromptImage:
        for found in self._requests[image.request.id].prompt.images:
            if found.span.start == image.span.start:
                return found
        raise AssertionError(f"request {image.request.id} has no image at token {image.span.start}")

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk], started: Sequence[Request]) -> StepHandle:
        """Compute the chunks and sample after those that reach the end of their request."""
        with self.on_stream():
            self._set_up(chunks, started)
            requests = [self._requests[chunk.request.id] for chunk in chunks]
            size = None if self._graphs is None else self._captured_size(chunks)
            if self._graphs is not None and size is not None:
                return self._sample(chunks, self._run_graph(self._graphs, size, chunks, requests), [])
            return self._sample(chunks, *self._run_eager(chunks, requests))

    def _set_up(self, chunks: Sequence[Chunk], started: Sequence[Request]) -> None:
        """Set up slots of requests that started: page table and sampling parameters."""
        slots = {chunk.request.id: chunk.slot for chunk in chunks} if started else {}
        for request in started:
            if request.id in slots:
                inputs = self._requests[request.id]
                inputs.num_pages_written = 0
                self.sampler.set_request(slots[request.id], request, inputs.seed)

    def _run_eager(self, chunks: Sequence[Chunk], requests: Sequence[RequestInputs]) -> tuple[Tensor, PromptLogprobs]:
        sizes = InputSizes(
            num_tokens=sum(chunk.num_tokens for chunk in chunks),
            num_requests=len(chunks),
            num_samples=_num_samples(chunks),
            table_width=table_width(max(chunk.end for chunk in chunks), self.config.page_size),
        )
        self._builder.fill(split(self._next_host(sizes), sizes), chunks, requests)
        step = split(self._buffers.upload(sizes.total), sizes)
        needs_all = any(chunk.request.sampling.prompt_logprobs is not None for chunk in chunks)
        hidden = self._forward(
            step,
            index_S=None if needs_all else step.sampled,
            max_new=max(chunk.num_tokens for chunk in chunks),
            max_context=max(chunk.end for chunk in chunks),
            has_images=any(chunk.images for chunk in chunks),
        )
        if not needs_all:
            return self._head(hidden), []
        return self._head(hidden.index_select(0, step.sampled)), self._prompt_logprobs(chunks, hidden)

    def _captured_size(self, chunks: Sequence[Chunk]) -> StepSize | None:
        """The size of the CUDA graph for this step; None: it runs eagerly."""
        max_context = max(chunk.end for chunk in chunks)
        if all(chunk.num_tokens == 1 and chunk.samples and not chunk.images for chunk in chunks):
            return decode_size(len(chunks), max_context, self.max_length)
        if any(chunk.request.sampling.prompt_logprobs is not None for chunk in chunks):
            return None
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        return mixed_size(
            num_tokens, len(chunks), _num_samples(chunks), self._max_samples, max_context, self.max_length
        )

    def _run_graph(
        self, graphs: CudaGraphs[StepSize], size: StepSize, chunks: Sequence[Chunk], requests: Sequence[RequestInputs]
    ) -> Tensor:
        sizes = self._input_sizes(size)
        fill = self._builder.fill_decode if size.is_decode else self._builder.fill
        fill(split(self._next_host(sizes), sizes), chunks, requests)
        self._buffers.upload(sizes.total)
        return graphs.run(size)[: _num_samples(chunks)]

    def _input_sizes(self, size: StepSize) -> InputSizes:
        width = table_width(size.max_context, self.config.page_size)
        return InputSizes(size.num_tokens, size.num_requests, size.num_samples, width)

    def _forward_captured(self, size: StepSize) -> Tensor:
        """Logits of the step in the device buffer. Capturable: its control flow depends on the size only."""
        step = split(self._buffers.uploaded, self._input_sizes(size))
        hidden_SD = self._forward(
            step,
            index_S=None if size.is_decode else step.sampled,
            max_new=1 if size.is_decode else size.num_tokens,
            max_context=size.max_context,
            has_images=not size.is_decode,
        )
        return self._head(hidden_SD)

    def _next_host(self, sizes: InputSizes) -> Ints:
        assert sizes.total <= self._buffers.capacity, f"a step of {sizes} is larger than the buffers"
        return self._buffers.next_host()

    def _forward(
        self,
        step: StepInputs[Tensor],
        *,
        index_S: Tensor | None,
        max_new: int,
        max_context: int,
        has_images: bool,
    ) -> Tensor:
        """[S, D]: input of the head, at the given token indices (None: at all)."""
        is_pending = step.pending_slots < self.config.max_requests
        token_ids = torch.where(is_pending, self._last_tokens[step.pending_slots], step.token_ids)
        x_TD: Tensor = self.model.language.embed_tokens(token_ids)
        if has_images:
            is_feature = step.feature_index < self._num_features
            x_TD = torch.where(is_feature[:, None], self._features.index_select(0, step.feature_index), x_TD)
        attend = PagedAttention(
            self.cache, self.model.cos_sin(step.positions), step.slot_mapping, step.page_table, step.cu_seqlens,
            step.context_lengths, max_new, max_context,
        )  # fmt: skip
        return self.model.forward_layers(x_TD, attend, index_S)

    def _sample(self, chunks: Sequence[Chunk], logits_SV: Tensor, prompt_logprobs: PromptLogprobs) -> StepHandle:
        slots: list[int] = []
        positions: list[int] = []
        num_output_tokens: list[int] = []
        for chunk in chunks:
            if chunk.samples:
                for end in range(chunk.end - len(chunk.drafts), chunk.end + 1):
                    slots.append(chunk.slot)
                    positions.append(end)
                    num_output_tokens.append(end - chunk.request.num_prompt_tokens)
        on_device = to_device(_int64(slots), self.device)
        sampled = self.sampler.sample(logits_SV, _int64(slots), _int64(positions), _int64(num_output_tokens))
        logprobs = None
        if sampled.logprobs is not None:
            logprobs = Logprobs(sampled.logprobs, sampled.top_ids, sampled.top_logprobs)
        handle = StepHandle(chunks, sampled.token_ids, logprobs, prompt_logprobs)
        # Last, when nothing can fail any more: a step that is run again must find the same state.
        self.sampler.commit()
        self._last_tokens[on_device] = sampled.token_ids.clamp(min=0).int()  # NON_FINITE has no embedding
        return handle

    def _prompt_logprobs(self, chunks: Sequence[Chunk], hidden_TD: Tensor) -> PromptLogprobs:
        found: PromptLogprobs = []
        start = 0
        for chunk in chunks:
            request = chunk.request
            targets = request.token_ids[chunk.start + 1 : min(chunk.end + 1, request.num_prompt_tokens)]
            if request.sampling.prompt_logprobs is not None and targets:
                found.append(
                    (chunk, targets, self._logprobs(hidden_TD[start:], targets, request.sampling.prompt_logprobs))
                )
            start += chunk.num_tokens
        return found

    def _logprobs(self, hidden_TD: Tensor, targets: Sequence[int], num_top: int) -> Logprobs:
        """Of `targets`, predicted by the first rows of `hidden`."""
        target_ids = to_device(_int64(targets), self.device)
        parts = [
            self.sampler.logprobs_of(self.model.head(hidden), ids, num_top)
            for hidden, ids in zip(
                torch.split(hidden_TD[: len(targets)], _HEAD_ROWS), torch.split(target_ids, _HEAD_ROWS), strict=True
            )
        ]
        own, ids, values = zip(*parts, strict=True)
        if num_top == 0:
            return Logprobs(torch.cat(own), None, None)
        return Logprobs(torch.cat(own), torch.cat(ids), torch.cat(values))

    # -------------------------------------------------------------- start-up

    @torch.inference_mode()
    def profile_largest_step(self) -> None:
        """Run the largest step on padding: compiles kernels and shows how much memory a step needs."""
        config, vision = self.config, self.model.config.vision
        with self.on_stream():
            if config.max_step_patches >= 4 * vision.patches_per_token:
                side = vision.merge_size * 2 * max(1, int(config.max_step_patches**0.5) // (2 * vision.merge_size))
                pixels = torch.zeros(side * side, vision.patch_dim, device=self.device)
                self.model.encode_images(pixels, torch.tensor([[1, side, side]]))
            num_tokens = min(config.max_step_tokens, self.max_length)
            sizes = InputSizes(num_tokens, 1, 1, table_width(num_tokens, config.page_size))
            step = split(self._next_host(sizes), sizes)
            for part in step:
                part[...] = 0
            step.pending_slots[:] = config.max_requests
            step.slot_mapping[:] = self.cache.num_slots
            step.feature_index[:] = self._num_features
            step.cu_seqlens[:] = (0, num_tokens)
            step.context_lengths[:] = num_tokens
            on_device = split(self._buffers.upload(sizes.total), sizes)
            hidden_TD = self._forward(
                on_device, index_S=None, max_new=num_tokens, max_context=num_tokens, has_images=True
            )
            num_samples = min(self._max_samples, num_tokens)
            self._head(hidden_TD[:num_samples]).float()
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()


def _num_samples(chunks: Sequence[Chunk]) -> int:
    return sum([1 + len(chunk.drafts) for chunk in chunks if chunk.samples])


def _int64(values: Sequence[int]) -> NDArray[np.int64]:
    return np.array(values, np.int64)
