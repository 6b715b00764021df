"""Run engine steps on the device.

    encode images -> copy pages -> embed, decoder layers, head -> sample -> start copying the tokens to the host

Nothing waits for the device but `StepHandle.read`. A token that was sampled but not read yet is read by the next step from
`_last_tokens`, on the device. The forward pass and sampling are two calls, so that masks computed on the host while the forward
pass runs reach the sampler of the very next token.

The vision encoder runs in turn with the steps, as many parts of a pass before a step as the plan says: beside each other both are slower
by as much, and how long a step takes would not be known. Where a plan says so they run beside each other all the same, the encoder on a
stream of lower priority. A chunk that reads features waits for them on the device; an encoding waits for the steps that read its slots
before.

When a step fails, the failing request is isolated: its chunks are retried in halves until one is left. Its result says so; the
others get the tokens they would have had. So are images.

Legend: T tokens, S sampled tokens, D decoder width, V vocabulary, M image tokens.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.device import lazy_zeros, to_device
from saccade.engine.config import EngineConfig
from saccade.engine.core.encoder_cache import ENCODER_SLOT_TOKENS
from saccade.engine.core.grammar import GrammarMasks
from saccade.engine.core.step import (
    ENCODER_PARTS,
    Chunk,
    ChunkResult,
    EncodeResult,
    ImageFeatures,
    ImageToEncode,
    SlotStart,
    StepPlan,
    StepResult,
    new_chunk_result,
)
from saccade.engine.device.cuda_graphs import (
    CudaGraphs,
    StepSize,
    declared_sizes,
    largest_step,
    step_size,
)
from saccade.engine.device.encoder import Encoder, patch_budgets
from saccade.engine.device.kv_cache import KVCache, PagedAttention
from saccade.engine.device.sampler import Logprobs, Sampler, TokenMasks
from saccade.engine.device.step_inputs import (
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
from saccade.engine.prompt import PromptImage, TokenPrompt
from saccade.engine.request import Failure, FailureKind, ImageSpan, Request, Stage, TokenLogprobs
from saccade.engine.sampling_params import SamplingParams
from saccade.errors import CheckpointError, RequestError
from saccade.kernels import launch
from saccade.kernels.embed import ImageRows, StepTokens, embed
from saccade.kernels.paged_attention import plan_decode, plan_gather
from saccade.kernels.sampler import NON_FINITE, Destination
from saccade.model.adapters import Adapter, AdapterBank, load_adapter
from saccade.model.families import family_named
from saccade.model.language import LayerFeatures
from saccade.model.normed_sum import Input, NormedSum
from saccade.model.vlm import VLM

logger = logging.getLogger(__name__)

PromptLogprobs = list[tuple[Chunk, Sequence[int], Logprobs]]
"""Chunks with prompt log-probabilities, the prompt tokens they predict, and the log-probabilities of these."""

_HEAD_ROWS = 1024
"""Rows of logits computed at once for prompt log-probabilities."""

_NUM_SMALL = 64
"""Tokens up to which linear layers may use kernels of their own, which are compiled by an eager run before they are captured."""

_NON_FINITE_LOGITS = Failure(
    "running",
    "the model's logits are not finite (NaN or inf). Check the weights, or use dtype bf16 or fp32",
    "non_finite_logits",
)


class DeviceError(Exception):
    """The device failed: nothing can run on it until the process is restarted."""


@dataclass(frozen=True, kw_only=True)
class PixelScale:
    """Normalization of uint8 pixels."""

    mean: tuple[float, ...]
    """Per channel, in units of the 0..1 range; subtracted."""
    std: tuple[float, ...]
    """Per channel, in units of the 0..1 range; divided by."""


class _Forward(NamedTuple):
    """A forward pass in flight: logits of the samples of `chunks`, in order."""

    chunks: Sequence[Chunk]
    logits: Tensor
    """[S, V]"""
    sampled_slots: Tensor
    """[S]: see `StepInputs`."""
    prompt_logprobs: PromptLogprobs


@dataclass(frozen=True, eq=False)
class StepForward:
    """The forward pass of a plan, to be sampled."""

    plan: StepPlan
    forward: _Forward | None
    """None: it failed, and its chunks are isolated when they are sampled."""
    failures: dict[str, Failure]
    """By request id."""
    timer: _Timer
    """Started before the chunks."""


class _Timer:
    """Measures how long the device takes from now on, on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._started_at, self._stopped_at = time.perf_counter(), 0.0
        self._start: torch.cuda.Event | None = None
        self.done: torch.cuda.Event | None = None
        """Occurs when what is measured is complete. None on a CPU, which waits for it."""
        if device.type == "cuda":
            self._start, self.done = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self._start.record()

    def stop(self) -> None:
        """What is measured is queued."""
        self._stopped_at = time.perf_counter()
        if self.done is not None:
            self.done.record()

    def seconds(self) -> float:
        """The time, once it is complete."""
        if self._start is None or self.done is None:
            return self._stopped_at - self._started_at
        return float(self._start.elapsed_time(self.done)) / 1e3


class _PassImage(NamedTuple):
    """An image of the pass in progress."""

    planned: ImageToEncode
    image: PromptImage
    """Its input; its request may end before the pass does."""


class _Encoding(NamedTuple):
    """A pass of the vision encoder in flight."""

    keys: tuple[bytes, ...]
    slots: frozenset[int]
    done: Any
    """A CUDA event, or None on a CPU."""


class Runner:
    """The model, its KV cache and its encoder cache on one device."""

    def __init__(
        self, model: VLM, config: EngineConfig, *, pixels: PixelScale, num_pages: int, max_length: int
    ) -> None:
        self.model, self.config = model, config
        self.device, self.dtype = model.device, model.dtype
        language = model.config.language
        self.max_length = max_length
        self.max_draft_tokens = config.draft_tokens(self.device.type)
        uses_graphs = config.cuda_graphs and self.device.type == "cuda"
        max_pages = table_width(max_length, config.page_size)
        tokens, requests, self._max_samples = largest_step(
            config.max_step_tokens, config.max_requests, self.max_draft_tokens
        )
        self._stream = self._open_stream(priority=-1)
        self._encoder_stream = self._open_stream(priority=0)
        with self.on_stream():
            self.cache = KVCache(
                language, num_pages=num_pages, page_size=config.page_size, kv_format=config.cache_format,
                dtype=self.dtype, device=self.device,
            )  # fmt: skip
            self._num_features = config.encoder_cache_tokens // ENCODER_SLOT_TOKENS * ENCODER_SLOT_TOKENS
            shape = (self._num_features + 1, model.feature_size)  # the last row is read for tokens without features
            self._features = lazy_zeros(shape, self.dtype, self.device)
            self._last_tokens = torch.zeros(config.max_requests + 1, dtype=torch.int64, device=self.device)
            self._sampled_on_host = _HostMemory(self._max_samples, self.device)
            self.sampler = Sampler(vocab_size=language.vocab_size, num_slots=config.max_requests, device=self.device)
            self._buffers = StepBuffers(InputSizes(tokens, requests, tokens).total, self.device)
            self._page_table = torch.zeros(config.max_requests, max_pages, dtype=torch.int32, device=self.device)
            # All steps share one memory for logits, captured or not.
            self._logits = torch.empty(self._max_samples, language.vocab_size, dtype=self.dtype, device=self.device)
            self.adapters: AdapterBank | None = None
            if config.max_adapters:
                self.adapters = AdapterBank(
                    model, num_slots=config.max_adapters, max_rank=config.max_adapter_rank, dtype=self.dtype,
                    device=self.device,
                )  # fmt: skip
            # By slot of the runner: the slot of its request's adapter from 1, 0 for the base model.
            self._adapter_of_slot = torch.zeros(config.max_requests, dtype=torch.int32, device=self.device)
        with self._on(self._encoder_stream):
            budgets = patch_budgets(config.max_encoder_patches, model.config.vision.patches_per_token)
            self._encoder = Encoder(
                model, pixel_mean=pixels.mean, pixel_std=pixels.std, budgets=budgets if uses_graphs else ()
            )
        self._builder = InputBuilder(
            max_requests=config.max_requests,
            page_size=config.page_size,
            max_pages=max_pages,
            num_kv_slots=self.cache.num_slots,
            num_features=self._num_features,
        )
        self._graphs = CudaGraphs(self._forward_captured) if uses_graphs else None
        self._requests: dict[str, RequestInputs] = {}
        self._encodings: list[_Encoding] = []
        self._pass: Sequence[_PassImage] = ()  # in progress
        self._encode_results: list[EncodeResult] = []
        self._compiles = launch.CompileCounter()
        self._slot_read_by = np.full(self._num_features // ENCODER_SLOT_TOKENS, -1)  # the last step that read each slot
        self._num_steps_read = 0
        self._uncopied: dict[int, Failure] = {}  # pages whose copy failed, until a chunk reads them
        self._num_eager_steps = 0
        self._unsampled: StepPlan | None = None  # the launched step that is not sampled yet

    def close(self) -> None:
        """Free the device memory at once: reference cycles would keep it until the next garbage collection."""
        is_gpu = self.device.type == "cuda" and self.is_alive()  # which also waits for the last step
        vars(self).clear()
        if is_gpu:
            torch.cuda.empty_cache()

    # -------------------------------------------------------------- streams

    def _open_stream(self, *, priority: int) -> torch.cuda.Stream | None:
        """A stream that starts after the weights are loaded; not the default one, which cannot be captured."""
        if self.device.type != "cuda":
            return None
        stream = torch.cuda.Stream(self.device, priority=priority)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        return stream

    @contextlib.contextmanager
    def _on(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            yield

    def on_stream(self) -> contextlib.AbstractContextManager[None]:
        """Queue work on the stream of the steps."""
        return self._on(self._stream)

    def is_alive(self) -> bool:
        """Whether the device still works. After some errors (an illegal address) it does not, until the process ends."""
        if self.device.type != "cuda":
            return True
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:
            return False
        return True

    def _failure(self, stage: Stage, request_id: str, error: Exception) -> Failure:
        """The message for the client; the exception itself goes to the log. DeviceError if no other request could run either."""
        if not self.is_alive():
            raise DeviceError(f"the device failed while {stage}: {error}") from error
        logger.warning("request %s failed while %s: %r", request_id, stage, error, exc_info=error)
        if isinstance(error, RequestError):
            return Failure(stage, str(error), "invalid_request")
        is_memory = isinstance(error, MemoryError | torch.cuda.OutOfMemoryError)
        kind: FailureKind = "out_of_memory" if is_memory else "internal_error"
        return Failure(stage, f"the request failed while {stage}; other requests continue", kind)

    # -------------------------------------------------------------- requests

    def register(self, request: Request, prompt: TokenPrompt, adapter_slot: int | None = None) -> None:
        """Keep the inputs of a request. `adapter_slot`: of its adapter, from 0."""
        self._requests[request.id] = RequestInputs(request, prompt, adapter_slot)

    def read_adapter(self, folder: str) -> Adapter:
        """Read and check an adapter folder, on any thread."""
        assert self.adapters is not None, "a slot was reserved"
        adapter = load_adapter(folder, self.adapters.shapes, family_named(self.model.config.family))
        if adapter.rank > self.adapters.max_rank:
            raise CheckpointError(
                f"{folder}: its rank is {adapter.rank}, the engine's max_adapter_rank {self.adapters.max_rank}. Raise it"
            )
        return adapter

    def set_adapter(self, slot: int, adapter: Adapter) -> None:
        """Fill a slot, from 0, behind the steps in flight."""
        assert self.adapters is not None, "a slot was reserved"
        with self.on_stream():
            self.adapters.set(slot, adapter)

    def unregister(self, request_id: str) -> None:
        """Drop the inputs of an ended request."""
        self._requests.pop(request_id, None)

    @property
    def num_registered(self) -> int:
        """Registered requests."""
        return len(self._requests)

    # -------------------------------------------------------------- a step

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> StepForward:
        """Launch the encodings and the forward pass of a plan. Plans are launched in order, each sampled before the next."""
        self._compiles.thread_id = threading.get_ident()
        failures: dict[str, Failure] = {}
        self._run_encoder(plan, failures)
        self._start_slots(plan)
        self._unsampled = plan if plan.chunks else self._unsampled
        with self.on_stream():
            self._copy_pages(plan.page_copies)
            for chunk in plan.chunks if self._uncopied else ():
                for page in self._uncopied.keys() & set(chunk.new_pages):
                    failures[chunk.request_id] = self._uncopied.pop(page)
            self._wait_for_features(plan)
            chunks = _without(failures, plan.chunks)
            timer = _Timer(self.device)
            if not chunks:
                return StepForward(plan, None, failures, timer)
            try:
                return StepForward(plan, self._forward_chunks(chunks), failures, timer)
            except Exception as error:
                if not self.is_alive():
                    raise DeviceError(f"the device failed: {error}") from error
                logger.warning("a step failed and is run again in halves: %r", error)
                return StepForward(plan, None, failures, timer)

    @torch.inference_mode()
    def start_encodings(self, plan: StepPlan) -> None:
        """Launch the encodings of a plan without chunks."""
        self.forward(plan)

    @torch.inference_mode()
    def sample(self, step: StepForward, masks: GrammarMasks | None = None) -> StepHandle:
        """Launch sampling, and start copying the tokens to the host."""
        failures = dict(step.failures)
        parts: list[_SampledChunks] = []
        self._unsampled = None
        with self.on_stream():
            chunks = _without(failures, step.plan.chunks)
            if step.forward is None:
                parts = self._sample_isolated(chunks, masks, failures)
            else:
                try:
                    parts = [self._sample_chunks(step.forward, masks)]
                except Exception as error:
                    if not self.is_alive():
                        raise DeviceError(f"the device failed: {error}") from error
                    parts = self._sample_isolated(chunks, masks, failures)
            step.timer.stop()
            return StepHandle(self, step.plan, parts, failures, step.timer)

    def _sample_isolated(
        self, chunks: Sequence[Chunk], masks: GrammarMasks | None, failures: dict[str, Failure]
    ) -> list[_SampledChunks]:
        """Forward and sample chunks, in halves where that fails, so that only the failing request is lost."""
        if not chunks:
            return []
        try:
            return [self._sample_chunks(self._forward_chunks(chunks), masks)]
        except Exception as error:
            if len(chunks) == 1:
                failures[chunks[0].request_id] = self._failure("running", chunks[0].request_id, error)
                return []
            if not self.is_alive():
                raise DeviceError(f"the device failed: {error}") from error
        middle = len(chunks) // 2
        halves = (chunks[:middle], chunks[middle:])
        return [part for half in halves for part in self._sample_isolated(half, masks, failures)]

    def _start_slots(self, plan: StepPlan) -> None:
        """Set up the slots of requests that start, and append new pages."""
        if plan.started and self._unsampled is not None:
            reused = {start.slot for start in plan.started} & {chunk.slot for chunk in self._unsampled.chunks}
            assert not reused, (
                f"slots {reused} are reused before step {self._unsampled.number}, which names them, is sampled"
            )
        for start in plan.started:
            inputs = self._requests[start.request_id]
            inputs.token_ids = np.array([*inputs.prompt.token_ids, *start.output_token_ids], np.int32)
            self._builder.start_slot(start.slot, inputs)
            with self.on_stream():
                self.sampler.set_request(start.slot, inputs.request, start.output_token_ids)
        if self.adapters is not None and plan.started:
            self._start_adapters(plan)
        new_pages = self._builder.append_pages(plan.chunks)
        if new_pages is not None:
            with self.on_stream():  # behind the steps in flight, which may read the rows of requests that have ended
                index, pages = to_device(new_pages, self.device)
                self._page_table.view(-1)[index] = pages

    def _start_adapters(self, plan: StepPlan) -> None:
        """Note the adapters of requests that start."""
        adapters = [self._requests[start.request_id].adapter_slot for start in plan.started]
        values = [[start.slot for start in plan.started], [0 if slot is None else slot + 1 for slot in adapters]]
        with self.on_stream():  # behind the steps in flight
            slots, numbers = to_device(np.array(values, np.int32), self.device)
            self._adapter_of_slot[slots.long()] = numbers

    def _copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy (source, target) pages, one by one where that fails. A failed copy fails the request that reads the target, alone."""
        if not copies:
            return
        try:
            self.cache.copy(copies)
        except Exception as error:
            if len(copies) > 1:
                for pair in copies:
                    self._copy_pages([pair])
                return
            [(_, target)] = copies
            self._uncopied[target] = self._failure("running", "with a shared prefix", error)

    def _forward_chunks(self, chunks: Sequence[Chunk]) -> _Forward:
        """Decode requests first, then the others: see `step_inputs.py`."""
        prefill = [chunk for chunk in chunks if chunk.num_tokens > 1 or not chunk.samples or chunk.images]
        decode = chunks
        if prefill:
            decode = [chunk for chunk in chunks if chunk.num_tokens == 1 and chunk.samples and not chunk.images]
        num_samples = len(decode) + _num_samples(prefill)
        needs_all = any(self._request(chunk).sampling.prompt_logprobs is not None for chunk in prefill)
        size = self._size(decode, prefill, num_samples)
        if self._graphs is None or needs_all or size is None:
            self._num_eager_steps += 1
            return self._forward_eager(decode, prefill, needs_all)
        sizes = self._input_sizes(size)
        self._builder.fill(split(self._next_host(sizes), sizes), size.num_decode, decode, prefill, self._requests)
        ordered = [*decode, *prefill] if prefill else chunks
        slots = sizes.last_part(self._buffers.upload(sizes.total))[:num_samples]
        return _Forward(ordered, self._graphs.run(size)[:num_samples], slots, [])

    def _size(self, decode: Sequence[Chunk], prefill: Sequence[Chunk], num_samples: int) -> StepSize | None:
        return step_size(
            num_decode=len(decode),
            num_tokens=sum([chunk.num_tokens for chunk in prefill]),
            num_chunks=len(prefill),
            num_samples=num_samples,
            max_requests=self.config.max_requests,
        )

    def _forward_eager(self, decode: Sequence[Chunk], prefill: Sequence[Chunk], needs_all: bool) -> _Forward:
        ordered = [*decode, *prefill]
        sizes = InputSizes(
            num_tokens=sum(chunk.num_tokens for chunk in ordered),
            num_requests=len(ordered),
            num_samples=_num_samples(ordered),
        )
        self._builder.fill(split(self._next_host(sizes), sizes), len(decode), decode, prefill, self._requests)
        inputs = split(self._buffers.upload(sizes.total), sizes)
        hidden = self._forward(
            inputs,
            index_S=None if needs_all else inputs.sampled,
            num_decode=len(decode),
            max_new=max(chunk.num_tokens for chunk in ordered),
            max_context=max(chunk.end for chunk in ordered),
            has_images=any(chunk.images for chunk in prefill),
            has_adapters=any(self._requests[chunk.request_id].adapter_slot is not None for chunk in ordered),
        )
        if not needs_all:
            return _Forward(ordered, self._head(hidden.input), inputs.sampled_slots, [])
        logits_SV = self._head(hidden.normed.index_select(0, inputs.sampled))
        return _Forward(ordered, logits_SV, inputs.sampled_slots, self._prompt_logprobs(ordered, hidden.normed))

    def _input_sizes(self, size: StepSize) -> InputSizes:
        return InputSizes(size.num_tokens, size.num_requests, size.num_samples)

    def _forward_captured(self, size: StepSize) -> Tensor:
        """Logits of the step in the device buffer. Capturable: its control flow depends on the size only."""
        is_decode = size.num_chunks == 0
        inputs = split(self._buffers.uploaded, self._input_sizes(size))
        hidden = self._forward(
            inputs,
            index_S=None if is_decode else inputs.sampled,
            num_decode=size.num_decode,
            max_new=1 if is_decode else size.num_tokens,
            max_context=self.max_length,
            has_images=not is_decode,
            has_adapters=self.adapters is not None,
        )
        return self._head(hidden.input)

    def _next_host(self, sizes: InputSizes) -> Ints:
        assert sizes.total <= self._buffers.capacity, f"a step of {sizes} is larger than the buffers"
        return self._buffers.next_host()

    def _forward(
        self,
        inputs: StepInputs[Tensor],
        *,
        index_S: Tensor | None,
        num_decode: int,
        max_new: int,
        max_context: int,
        has_images: bool,
        has_adapters: bool = False,
    ) -> NormedSum:
        """[S, D]: input of the head, at the given token indices (None: at all)."""
        tokens = StepTokens(inputs.token_ids, inputs.last_token_slots, self._last_tokens)
        images = ImageRows(self._features, inputs.feature_index) if has_images else None
        x_TD = embed(tokens, self.model.language.embed_tokens.weight, images)
        features: LayerFeatures | None = None
        if images is not None and self.model.config.vision.feature_sets > 1:
            _, later_LTD = self.model.split_features(self._features.index_select(0, inputs.feature_index))
            features = None if later_LTD is None else LayerFeatures(later_LTD)  # the last row of the cache is zero
        plan, window = None, self.model.config.language.window
        if num_decode and self.device.type == "cuda":
            keys = self.cache.entries[0, 0]
            plan = plan_decode(inputs.cu_seqlens, inputs.context_lengths, keys, num_decode=num_decode, window=window)
        cos_sin = self.model.cos_sin(inputs.positions)
        gather_plan = None
        if self.device.type == "cpu":
            gather_plan = plan_gather(
                cos_sin, inputs.slot_mapping, self._page_table[inputs.slots], inputs.cu_seqlens, inputs.context_lengths,
                num_slots=self.cache.num_slots, page_size=self.cache.page_size,
                num_kv_heads=self.model.config.language.num_kv_heads, window=window,
            )  # fmt: skip
        attend = PagedAttention(
            self.cache, cos_sin, inputs.slot_mapping, self._page_table, inputs.slots,
            inputs.cu_seqlens, inputs.context_lengths, num_decode, max_new, max_context, plan, gather_plan, window,
        )  # fmt: skip
        adapter_T = self._adapter_of_token(inputs) if has_adapters else None
        return self.model.language.run_layers(x_TD, attend, index_S, adapter_T, features)

    def _adapter_of_token(self, inputs: StepInputs[Tensor]) -> Tensor:
        """[T]: the slot of each token's adapter from 1, 0 for the base model. Padding has any."""
        token = torch.arange(len(inputs.token_ids), dtype=torch.int32, device=self.device)
        request = torch.searchsorted(inputs.cu_seqlens[1:], token, right=True).clamp_(max=len(inputs.slots) - 1)
        return self._adapter_of_slot[inputs.slots[request]]

    def _head(self, hidden_SD: Input) -> Tensor:
        """[S, V] logits, overwritten by the next step."""
        return self.model.head.forward_into(hidden_SD, self._logits[: len(hidden_SD)])

    def _sample_chunks(self, forward: _Forward, masks: GrammarMasks | None) -> _SampledChunks:
        sampling = [chunk for chunk in forward.chunks if chunk.samples]
        slots = [chunk.slot for chunk in sampling for _ in range(1 + len(chunk.drafts))]
        positions = [chunk.end - count for chunk in sampling for count in range(len(chunk.drafts), -1, -1)]
        token_masks = None if masks is None else _token_masks(masks, sampling)
        prompts = {
            chunk.request_id: (targets, _HostLogprobs(found)) for chunk, targets, found in forward.prompt_logprobs
        }
        host = self._sampled_on_host.take(len(slots))
        destination = Destination(self._last_tokens, forward.sampled_slots, host)
        sampled = self.sampler.sample(forward.logits, _int64(slots), _int64(positions), token_masks, destination)
        logprobs = None
        if sampled.logprobs is not None:
            logprobs = Logprobs(sampled.logprobs, sampled.top_ids, sampled.top_logprobs)
        part = _SampledChunks(forward.chunks, host, self._sampled_on_host, logprobs, prompts)
        # Last, when nothing can fail any more: a step that is run again must find the same state.
        self.sampler.commit()
        self._store_accepted(sampling, sampled.token_ids)
        return part

    def _store_accepted(self, sampling: Sequence[Chunk], token_ids_S: Tensor) -> None:
        """Keep the last token of slots with drafts: that after the accepted ones, which are known here on the device alone."""
        first = 0
        for chunk in sampling:
            rows = slice(first, first + 1 + len(chunk.drafts))
            first = rows.stop
            if chunk.drafts:
                sampled = token_ids_S[rows].clamp(min=0)  # NON_FINITE has no embedding
                drafts = to_device(_int64(chunk.drafts), self.device)
                num_accepted = (sampled[:-1] == drafts).int().cumprod(0).sum().view(1)
                self._last_tokens[chunk.slot : chunk.slot + 1] = sampled.index_select(0, num_accepted)

    def _prompt_logprobs(self, chunks: Sequence[Chunk], hidden_TD: Tensor) -> PromptLogprobs:
        found: PromptLogprobs = []
        start = 0
        for chunk in chunks:
            request = self._request(chunk)
            targets = list(request.token_ids[chunk.start + 1 : min(chunk.end + 1, request.num_prompt_tokens)])
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

    def _request(self, chunk: Chunk) -> Request:
        return self._requests[chunk.request_id].request

    def _event(self) -> torch.cuda.Event | None:
        """Recorded on the current stream."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    # -------------------------------------------------------------- images

    @property
    def max_patches_in_turn(self) -> int:
        """Patches of passes that can take turns with the steps: those captured in parts. On a CPU all: the host waits for them in any case."""
        return self.config.max_encoder_patches if self.device.type != "cuda" else self._encoder.largest_budget

    def encode_ms(self, num_patches: int) -> float:
        """How long the encoder takes for so many patches. 0: it is not known, or the host waits for it."""
        return self._encoder.pass_ms(num_patches)

    def _run_encoder(self, plan: StepPlan, failures: dict[str, Failure]) -> None:
        """Run parts of a pass: of the plan's images, or of the pass in progress."""
        images = [_PassImage(image, self._image(image)) for image in plan.images] or self._pass
        if not images or not plan.encoder_parts:
            return
        try:
            with self._on(self._encoder_stream):
                if plan.images:
                    self._start_pass(images)
                if not plan.encodes_beside:
                    self._wait(self._encoder_stream, self._stream)
                self._run_parts(plan.encoder_parts)
        except Exception as error:
            self._pass = ()
            self._isolate_image(plan, images, failures, error)
        if not plan.encodes_beside:
            self._wait(self._stream, self._encoder_stream)

    def _isolate_image(
        self, plan: StepPlan, images: Sequence[_PassImage], failures: dict[str, Failure], error: Exception
    ) -> None:
        """Encode images again, in halves. An image that fails alone fails all chunks of the step that read it."""
        if len(images) == 1:
            planned = images[0].planned
            failure = self._failure("encoding", planned.request_id, error)
            self._encode_results.append(EncodeResult(planned.key, failure))
            for chunk in plan.chunks:
                if any(read.slots == planned.slots for read in chunk.images):
                    failures[chunk.request_id] = failure
            return
        if not self.is_alive():
            raise DeviceError(f"the device failed: {error}") from error
        middle = len(images) // 2
        for half in (images[:middle], images[middle:]):
            try:
                with self._on(self._encoder_stream):
                    self._start_pass(half)
                    self._run_parts(ENCODER_PARTS)
            except Exception as again:
                self._pass = ()
                self._isolate_image(plan, half, failures, again)

    def _start_pass(self, images: Sequence[_PassImage]) -> None:
        slots = [slot for one in images for slot in one.planned.slots]
        if self._slot_read_by[slots].max() >= self._num_steps_read:
            self._wait(self._encoder_stream, self._stream)  # a step in flight reads the features that are overwritten
        self._pass = images
        self._encoder.start([one.image for one in images])

    def _run_parts(self, num_parts: int) -> None:
        features_MF = self._encoder.run(num_parts)
        if features_MF is None:
            return
        images, self._pass = self._pass, ()
        index = [feature_index(planned.slots, 0, image.span.num_tokens) for planned, image in images]
        self._features.index_copy_(0, to_device(np.concatenate(index), self.device), features_MF.to(self.dtype))
        slots = frozenset([slot for one in images for slot in one.planned.slots])
        self._encodings.append(_Encoding(tuple([one.planned.key for one in images]), slots, self._event()))

    def _image(self, image: ImageToEncode) -> PromptImage:
        return self._requests[image.request_id].prompt.images[image.image_index]

    @staticmethod
    def _wait(stream: torch.cuda.Stream | None, for_stream: torch.cuda.Stream | None) -> None:
        """Let what is queued on a stream from now on wait for what is queued on another one."""
        if stream is not None and for_stream is not None:
            stream.wait_stream(for_stream)

    def _wait_for_features(self, plan: StepPlan) -> None:
        """Let the step wait, on the device, for the encodings it reads; remember which slots it reads."""
        images = [chunk.images for chunk in plan.chunks if chunk.images]
        slots = [slot for read in images for image in read for slot in image.slots]
        if not slots:
            return
        self._slot_read_by[slots] = plan.number
        for encoding in self._encodings:
            if self._stream is not None and not encoding.slots.isdisjoint(slots):
                self._stream.wait_event(encoding.done)

    def finished_encodings(self, *, waits: bool = False) -> tuple[EncodeResult, ...]:
        """Encodings that ended since the last call; `waits` for at least one in flight."""
        while self._encodings:
            encoding = self._encodings[0]
            if encoding.done is not None and not encoding.done.query():
                if not waits:
                    break
                encoding.done.synchronize()
            waits = False
            self._encode_results += [EncodeResult(key) for key in encoding.keys]
            del self._encodings[0]
        results, self._encode_results = tuple(self._encode_results), []
        return results

    def graph_counters(self) -> tuple[int, int]:
        """CUDA graphs captured while serving, and steps that ran without one although they are on."""
        if self._graphs is None:
            return 0, 0
        late = self._graphs.num_late_captures + self._encoder.num_late_captures
        return late, self._graphs.num_eager_runs + self._num_eager_steps

    def num_late_compiles(self) -> int:
        """Kernels compiled, or read from the cache, by steps since the warm-up."""
        return self._compiles.num_kernels

    # -------------------------------------------------------------- start-up

    @torch.inference_mode()
    def compile_kernels(self) -> None:
        """Run all declared sizes on padding, within `launch.compile_only`: what is computed is not used."""
        self.profile_largest_step()
        with self.on_stream():
            for size in declared_sizes(self.config.max_requests, self.max_draft_tokens):
                self._upload_padding(size)
                self._forward_captured(size)
            self._warm_up_sampler(with_logprobs=False)
        with self._on(self._encoder_stream):
            self._encoder.run_largest()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture CUDA graphs of all declared sizes of steps and encodings. No effect without CUDA graphs."""
        if self._graphs is None:
            return
        compiled: set[int] = set()
        with self.on_stream():
            for size in declared_sizes(self.config.max_requests, self.max_draft_tokens):
                self._upload_padding(size)
                if size.num_tokens <= _NUM_SMALL or size.num_decode not in compiled:  # kernels differ by these
                    self._forward_captured(size)
                    compiled.add(size.num_decode)
                self._graphs.capture(size)
            self._warm_up_sampler()
        with self._on(self._encoder_stream):
            self._encoder.warm_up()
        self.run_blank_request()
        torch.cuda.synchronize(self.device)
        self._compiles = launch.CompileCounter()

    @torch.inference_mode()
    def run_blank_request(self) -> Failure | None:
        """Run a request with a small image as any other, and copy a page. What torch runs beside the captured graphs is loaded by that; the
        first request on a fresh machine waits a third of a second for it otherwise. Returns why it failed, if it did."""
        vision, page_size = self.model.config.vision, self.config.page_size
        grid, num_patches = self.model.vision.square_grid(0)
        num_features = self.model.vision.layout([grid]).sizes.num_tokens
        num_tokens = num_features + 1
        pages, slots = range(-(-num_tokens // page_size)), range(-(-num_features // ENCODER_SLOT_TOKENS))
        fits = num_tokens <= self.max_length and len(pages) <= self.cache.num_pages
        if not fits or len(slots) * ENCODER_SLOT_TOKENS > self._num_features:
            return None
        name, span = "warm-up", ImageSpan(key=b"", start=0, num_tokens=num_features, num_patches=num_patches)
        patches = np.zeros((num_patches, vision.in_channels * vision.patch_size**2), np.uint8)
        prompt = TokenPrompt(
            token_ids=[0] * num_tokens,
            positions=np.tile(np.arange(num_tokens), (3, 1)),
            images=(PromptImage(span=span, grid=grid, patches=patches),),
        )
        chunk = Chunk(
            request_id=name, slot=0, start=0, num_tokens=num_tokens, new_pages=tuple(pages), images=(ImageFeatures(0, tuple(slots)),),
            reads_last_token=False, drafts=(), samples=True,
        )  # fmt: skip
        plan = StepPlan(
            number=-1,  # before the first
            chunks=(chunk,),
            images=(ImageToEncode(name, 0, span.key, tuple(slots)),),
            encoder_parts=ENCODER_PARTS,
            page_copies=((0, self.cache.num_pages - 1),) if len(pages) < self.cache.num_pages else (),
            started=(SlotStart(name, 0, ()),),
        )
        self.register(Request(id=name, token_ids=prompt.token_ids, images=(span,)), prompt)
        [result] = self.sample(self.forward(plan)).read().chunks
        self.unregister(name)
        self._uncopied.clear()
        return result.failure

    def _upload_padding(self, size: StepSize) -> None:
        """Inputs of a step without requests."""
        sizes = self._input_sizes(size)
        self._builder.fill(split(self._next_host(sizes), sizes), size.num_decode, (), (), {})
        self._buffers.upload(sizes.total)

    def _warm_up_sampler(self, *, with_logprobs: bool = True) -> None:
        """Sample with and without randomness and log-probabilities, which compiles its kernels."""
        greedy = SamplingParams(logprobs=1 if with_logprobs else None)
        for sampling in (greedy, SamplingParams(temperature=1.0, top_p=0.9, top_k=50, min_p=0.01)):
            self.sampler.set_request(0, Request(id="warm-up", token_ids=[0], sampling=sampling))
            for count in (1, min(16, self._max_samples)):
                zeros, host = np.zeros(count, np.int64), self._sampled_on_host.take(count)
                no_slot = torch.full((count,), self.config.max_requests, dtype=torch.int32, device=self.device)
                destination = Destination(self._last_tokens, no_slot, host)
                self.sampler.sample(self._logits[:count].zero_(), zeros, zeros + 1, destination=destination)
                self.sampler.commit()
                self._sampled_on_host.give_back(host)

    @torch.inference_mode()
    def profile_largest_step(self) -> None:
        """Run the largest step on padding: compiles kernels and shows how much memory a step needs."""
        config, vision = self.config, self.model.config.vision
        with self.on_stream():
            if config.max_encoder_patches >= 4 * vision.patches_per_token:
                grid, num_patches = self.model.vision.square_grid(config.max_encoder_patches)
                pixels = torch.zeros(num_patches, vision.patch_dim, device=self.device)
                self.model.encode_images(pixels, torch.tensor([grid]))
            num_tokens = min(config.max_step_tokens, self.max_length)
            sizes = InputSizes(num_tokens, 1, 1)
            inputs = split(self._next_host(sizes), sizes)
            for part in inputs:
                part[...] = 0
            inputs.last_token_slots[:] = config.max_requests
            inputs.slot_mapping[:] = self.cache.num_slots
            inputs.feature_index[:] = self._num_features
            inputs.cu_seqlens[:] = (0, num_tokens)
            inputs.context_lengths[:] = num_tokens
            on_device = split(self._buffers.upload(sizes.total), sizes)
            hidden = self._forward(
                on_device, index_S=None, num_decode=0, max_new=num_tokens, max_context=num_tokens, has_images=True
            )
            num_samples = min(self._max_samples, num_tokens)
            self._head(hidden.normed[:num_samples]).float()
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()


class _HostMemory:
    """Pinned memory of the host for sampled tokens, which the device writes. It is reused, and never freed: a step that failed may still be
    written."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._capacity, self._is_pinned = capacity, device.type == "cuda"
        self._free: list[Tensor] = []
        self._all: list[Tensor] = []

    def take(self, count: int) -> Tensor:
        """[count] int64, to be given back."""
        if not self._free:
            self._all.append(torch.empty(self._capacity, dtype=torch.int64, pin_memory=self._is_pinned))
            self._free.append(self._all[-1])
        return self._free.pop()[:count]

    def give_back(self, tokens: Tensor) -> None:
        """What `take` returned, when it is read."""
        self._free.append(tokens.as_strided((self._capacity,), (1,)))


class _SampledChunks:
    """Sampled tokens and log-probabilities of chunks, being copied to the host."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        tokens: Tensor,
        memory: _HostMemory,
        logprobs: Logprobs | None,
        prompts: Mapping[str, tuple[Sequence[int], _HostLogprobs]],
    ) -> None:
        """`tokens` in `memory`, to which it is given back when they are read. `prompts`: log-probabilities by request."""
        self._chunks = chunks
        self._tokens, self._memory = tokens, memory
        self._logprobs = None if logprobs is None else _HostLogprobs(logprobs)
        self._prompts = prompts
        self._is_plain = logprobs is None and not prompts and not any(chunk.drafts for chunk in chunks)

    def read(self, requests: Mapping[str, RequestInputs]) -> Iterator[ChunkResult]:
        """Results of the chunks, complete once the step is."""
        sampled, first = self._tokens.tolist(), 0
        self._memory.give_back(self._tokens)
        if self._is_plain and NON_FINITE not in sampled:  # one token each, and nothing else
            tokens = zip(sampled, strict=True)
            yield from [
                new_chunk_result((chunk.request_id, next(tokens) if chunk.samples else (), (), (), None))
                for chunk in self._chunks
            ]
            return
        for chunk in self._chunks:
            token_ids: list[int] = []
            logprobs: list[TokenLogprobs] = []
            inputs = requests.get(chunk.request_id)  # None: it has ended, and its result is not read
            if chunk.samples:
                index = range(first, first + 1 + len(chunk.drafts))
                first = index.stop
                token_ids = _accepted([sampled[i] for i in index], chunk.drafts)
                if NON_FINITE in token_ids:
                    yield ChunkResult(chunk.request_id, failure=_NON_FINITE_LOGITS)
                    continue
                num_top = None if inputs is None else inputs.request.sampling.logprobs
                if num_top is not None and self._logprobs is not None:
                    logprobs = [
                        self._logprobs.at(i, token, num_top) for token, i in zip(token_ids, index, strict=False)
                    ]
            prompt_logprobs: list[TokenLogprobs] = []
            if chunk.request_id in self._prompts and inputs is not None:
                targets, found = self._prompts[chunk.request_id]
                num_top = inputs.request.sampling.prompt_logprobs or 0
                prompt_logprobs = [found.at(i, token, num_top) for i, token in enumerate(targets)]
            yield ChunkResult(chunk.request_id, tuple(token_ids), tuple(logprobs), tuple(prompt_logprobs))


class StepHandle:
    """A step in flight."""

    def __init__(
        self,
        runner: Runner,
        plan: StepPlan,
        parts: Sequence[_SampledChunks],
        failures: dict[str, Failure],
        timer: _Timer,
    ) -> None:
        self.plan = plan
        self._runner, self._parts, self._failures, self._timer, self._done = runner, parts, failures, timer, timer.done

    @property
    def is_done(self) -> bool:
        """Whether the device has completed the step; reading it then does not wait."""
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]

    def read(self) -> StepResult:
        """Wait for the step and return its result."""
        runner = self._runner
        if self._done is not None:
            try:
                self._done.synchronize()
            except RuntimeError as error:
                raise DeviceError(f"the device failed: {error}") from error
        runner._num_steps_read = self.plan.number + 1
        results = [ChunkResult(request_id, failure=failure) for request_id, failure in self._failures.items()]
        for part in self._parts:
            results += part.read(runner._requests)
        by_request = {result.request_id: result for result in results}
        return StepResult(
            number=self.plan.number,
            chunks=tuple([by_request[chunk.request_id] for chunk in self.plan.chunks]),
            images=runner.finished_encodings(),
            duration_s=self._timer.seconds(),
        )


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


def _token_masks(masks: GrammarMasks, sampling: Sequence[Chunk]) -> TokenMasks | None:
    """The masks of requests that are sampled, with their rows of logits. A request with a grammar has no drafts."""
    rows = dict(zip([chunk.request_id for chunk in sampling], _first_rows(sampling), strict=True))
    index = [i for i, request_id in enumerate(masks.request_ids) if request_id in rows]
    words = masks.words if len(index) == len(masks.request_ids) else masks.words[index]
    return TokenMasks(_int64([rows[masks.request_ids[i]] for i in index]), words) if index else None


def _first_rows(sampling: Sequence[Chunk]) -> list[int]:
    """The first row of logits of each chunk."""
    return [0, *itertools.accumulate([1 + len(chunk.drafts) for chunk in sampling])][:-1]


def _without(failures: Mapping[str, Failure], chunks: Sequence[Chunk]) -> Sequence[Chunk]:
    """The chunks of requests that have not failed."""
    return [chunk for chunk in chunks if chunk.request_id not in failures] if failures else chunks


def _num_samples(chunks: Sequence[Chunk]) -> int:
    return sum([1 + len(chunk.drafts) for chunk in chunks if chunk.samples])


def _int64(values: Sequence[int]) -> NDArray[np.int64]:
    return np.array(values, np.int64)
