"""The forward pass of a step: chunks of requests in, logits out. Runs as a CUDA graph if its size is captured.

    chunks -> step inputs, uploaded by one copy -> embed, decoder layers over the KV cache, head -> logits

Legend: T tokens, R requests, S sampled tokens, D decoder width, V vocabulary; H query heads, G key/value heads,
K head dim, W pages of the longest request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from saccade.device import to_device
from saccade.engine.config import EngineConfig
from saccade.engine.core.step import Chunk, StepPlan
from saccade.engine.device.cuda_graphs import CudaGraphs
from saccade.engine.device.image_runner import ImageRunner
from saccade.engine.device.kv_cache import KVCache
from saccade.engine.device.results import num_samples
from saccade.engine.device.step_inputs import (
    InputBuilder,
    Ints,
    RequestInputs,
    StepBuffers,
    StepInputs,
    StepSize,
    covers,
    declared_sizes,
    largest_step,
    split,
    step_size,
    table_width,
)
from saccade.kernels.embed import ImageRows, StepTokens, embed
from saccade.kernels.paged_attention import DecodePlan, GatherPlan, NewTokens, paged_attention, plan_decode, plan_gather
from saccade.kernels.rope import CosSin
from saccade.model.language import LayerFeatures
from saccade.model.normed_sum import Input, NormedSum
from saccade.model.vlm import VLM

_NUM_SMALL = 64
"""Steps with up to this many tokens may use special kernels of linear layers, which an eager run compiles first."""


class Logits(NamedTuple):
    """A forward pass in flight: the logits of all samples of `chunks`, in order."""

    chunks: Sequence[Chunk]
    logits: Tensor
    """[S, V]"""
    sampled_slots: Tensor
    """[S] int32: see `StepInputs`."""
    hidden: Tensor | None = None
    """[T, D]: normalized hidden states of all tokens. None unless prompt log-probabilities are requested."""


class ForwardPass:
    """Runs the language model over chunks. All work is queued on the current stream."""

    def __init__(
        self, model: VLM, config: EngineConfig, images: ImageRunner, cache: KVCache, *, max_length: int,
        max_drafts: int,
    ) -> None:  # fmt: skip
        self._model, self._config, self._images, self.cache = model, config, images, cache
        self._device, self._max_length, self._max_drafts = model.device, max_length, max_drafts
        tokens, requests, self.max_samples = largest_step(config.max_step_tokens, config.max_requests, max_drafts)
        max_pages = table_width(max_length, config.page_size)
        self._buffers = StepBuffers(StepSize(tokens, 0, requests, tokens).total, self._device)
        self._page_table = torch.zeros(config.max_requests, max_pages, dtype=torch.int32, device=self._device)
        self._builder = InputBuilder(
            max_requests=config.max_requests,
            page_size=config.page_size,
            max_pages=max_pages,
            num_kv_slots=cache.num_slots,
            num_features=images.num_features,
        )
        self.last_tokens = torch.zeros(config.max_requests + 1, dtype=torch.int64, device=self._device)
        """[slots + 1]: the token sampled last in each slot. Samples that may be rejected write the last entry."""
        # All steps, captured or not, write their logits here.
        vocab_size = model.config.language.vocab_size
        self.logits = torch.empty(self.max_samples, vocab_size, dtype=model.dtype, device=self._device)
        # For each request slot: 1 + its adapter's slot, or 0 for the base model.
        self._adapter_of_slot = torch.zeros(config.max_requests, dtype=torch.int32, device=self._device)
        uses_graphs = config.cuda_graphs and self._device.type == "cuda"
        self.graphs = CudaGraphs(self.run_captured) if uses_graphs else None
        self.num_eager_steps = 0
        """Number of steps that ran without a CUDA graph."""

    # -------------------------------------------------------------- slots

    def start_slots(self, plan: StepPlan, requests: Mapping[str, RequestInputs]) -> None:
        """Clear the page tables of slots that start, and append the new pages of all chunks."""
        for start in plan.started:
            self._builder.start_slot(start.slot, requests[start.request_id])
        if self._config.max_adapters and plan.started:
            adapters = [requests[start.request_id].adapter_slot for start in plan.started]
            values = [[start.slot for start in plan.started], [0 if slot is None else slot + 1 for slot in adapters]]
            slots, numbers = to_device(np.array(values, np.int32), self._device)
            self._adapter_of_slot[slots.long()] = numbers
        new_pages = self._builder.append_pages(plan.chunks)
        if new_pages is not None:
            index, pages = to_device(new_pages, self._device)
            self._page_table.view(-1)[index] = pages

    # -------------------------------------------------------------- run

    def run(self, chunks: Sequence[Chunk], requests: Mapping[str, RequestInputs]) -> Logits:
        """Launch the forward pass of chunks, ordered as in `step_inputs.py`: decode requests first."""
        prefill = [chunk for chunk in chunks if chunk.num_tokens > 1 or not chunk.samples or chunk.images]
        decode = chunks
        if prefill:
            decode = [chunk for chunk in chunks if chunk.num_tokens == 1 and chunk.samples and not chunk.images]
        count = len(decode) + num_samples(prefill)
        needs_all = any(requests[chunk.request_id].request.prompt_logprobs is not None for chunk in prefill)
        size = step_size(
            num_decode=len(decode),
            num_tokens=sum([chunk.num_tokens for chunk in prefill]),
            num_chunks=len(prefill),
            num_samples=count,
            max_requests=self._config.max_requests,
        )
        if self.graphs is None or needs_all or size is None:
            self.num_eager_steps += 1
            return self._run_eager(decode, prefill, requests, needs_all=needs_all)
        size = self.graphs.fitting(size)
        self._builder.fill(split(self._next_host(size), size), size.num_decode, decode, prefill, requests)
        ordered = [*decode, *prefill] if prefill else chunks
        slots = size.last_part(self._buffers.upload(size.total))[:count]
        return Logits(ordered, self._run_size(size)[:count], slots)

    def _run_size(self, size: StepSize) -> Tensor:
        """Run the step in the device buffer as a CUDA graph."""
        assert self.graphs is not None, "the engine uses CUDA graphs"
        return self.graphs.run(size)

    def run_head(self, hidden_SD: Tensor) -> Tensor:
        """[S, V]: logits of hidden states that `run` returned."""
        return self._model.head(hidden_SD)  # type: ignore[no-any-return]

    def _run_eager(
        self,
        decode: Sequence[Chunk],
        prefill: Sequence[Chunk],
        requests: Mapping[str, RequestInputs],
        *,
        needs_all: bool,
    ) -> Logits:
        ordered = [*decode, *prefill]
        size = StepSize(
            num_tokens=sum([chunk.num_tokens for chunk in ordered]),
            num_decode=len(decode),
            num_chunks=len(prefill),
            num_samples=num_samples(ordered),
        )
        self._builder.fill(split(self._next_host(size), size), len(decode), decode, prefill, requests)
        inputs = split(self._buffers.upload(size.total), size)
        hidden = self._layers(
            inputs,
            index_S=None if needs_all else inputs.sampled,
            num_decode=len(decode),
            max_new=max([chunk.num_tokens for chunk in ordered]),
            max_context=max([chunk.start + chunk.num_tokens for chunk in ordered]),
            has_images=any(chunk.images for chunk in prefill),
            has_adapters=any(requests[chunk.request_id].adapter_slot is not None for chunk in ordered),
        )
        if not needs_all:
            return Logits(ordered, self._head(hidden.input), inputs.sampled_slots)
        normed_TD = hidden.normed
        logits_SV = self._head(normed_TD.index_select(0, inputs.sampled))
        return Logits(ordered, logits_SV, inputs.sampled_slots, normed_TD)

    def run_captured(self, size: StepSize) -> Iterator[Tensor]:
        """Yields the logits of the step in the device buffer. Capturable: control flow depends only on the size."""
        is_decode = size.num_chunks == 0
        inputs = split(self._buffers.uploaded, size)
        hidden = self._layers(
            inputs,
            index_S=None if is_decode else inputs.sampled,
            num_decode=size.num_decode,
            max_new=1 if is_decode else size.num_tokens,
            max_context=self._max_length,
            has_images=not is_decode,
            has_adapters=self._config.max_adapters > 0,
        )
        yield self._head(hidden.input)

    def _next_host(self, size: StepSize) -> Ints:
        assert size.total <= self._buffers.capacity, f"a step of {size} is larger than the buffers"
        return self._buffers.next_host()

    def _layers(
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
        """Run embedding and decoder layers. Returns the head's input [S, D] at tokens `index_S`; None: at all."""
        model, language = self._model, self._model.config.language
        images = ImageRows(self._images.features, inputs.feature_index) if has_images else None
        x_TD = self._embed(inputs, images)
        features: LayerFeatures | None = None
        if images is not None and model.config.vision.feature_sets > 1:
            _, later_LTD = model.split_features(self._images.features.index_select(0, inputs.feature_index))
            features = None if later_LTD is None else LayerFeatures(later_LTD)  # zeros for tokens without an image
        plan = None
        if num_decode and self._device.type == "cuda":
            keys = self.cache.entries[0, 0]
            plan = plan_decode(
                inputs.cu_seqlens, inputs.context_lengths, keys, num_decode=num_decode, window=language.window
            )
        cos_sin = model.cos_sin(inputs.positions)
        gather_plan = None
        if self._device.type == "cpu":
            gather_plan = plan_gather(
                cos_sin, inputs.slot_mapping, self._page_table[inputs.slots], inputs.cu_seqlens, inputs.context_lengths,
                num_slots=self.cache.num_slots, page_size=self.cache.page_size,
                num_kv_heads=self.cache.num_kv_heads, window=language.window,
            )  # fmt: skip
        attend = PagedAttention(
            self.cache, cos_sin, inputs.slot_mapping, self._page_table, inputs.slots,
            inputs.cu_seqlens, inputs.context_lengths, num_decode, max_new, max_context, plan, gather_plan,
            language.window,
        )  # fmt: skip
        adapter_T = self._adapter_of_token(inputs) if has_adapters else None
        return model.language.run_layers(x_TD, attend, index_S, adapter_T, features)

    def _embed(self, inputs: StepInputs[Tensor], images: ImageRows | None) -> Tensor:
        """[T, D]: the input of the first layer."""
        tokens = StepTokens(inputs.token_ids, inputs.last_token_slots, self.last_tokens)
        return embed(tokens, self._model.language.embed_tokens.weight, images)

    def _adapter_of_token(self, inputs: StepInputs[Tensor]) -> Tensor:
        """[T]: 1 + the adapter slot of each token, 0 for the base model. Undefined for padding."""
        token = torch.arange(len(inputs.token_ids), dtype=torch.int32, device=self._device)
        request = torch.searchsorted(inputs.cu_seqlens[1:], token, right=True).clamp_(max=len(inputs.slots) - 1)
        return self._adapter_of_slot[inputs.slots[request]]

    def _head(self, hidden_SD: Input) -> Tensor:
        """[S, V]: logits, which the next step overwrites."""
        return self._model.head.forward_into(hidden_SD, self.logits[: len(hidden_SD)])

    # -------------------------------------------------------------- start-up

    def run_padding(self) -> None:
        """Run steps of padding that together use every kernel of the declared sizes."""
        seen: set[tuple[int, bool]] = set()
        for size in declared_sizes(self._config.max_requests, self._max_drafts):
            kernels = size.num_decode, size.num_samples > size.num_chunks
            if size.num_tokens <= _NUM_SMALL or kernels not in seen:
                seen.add(kernels)
                self._upload_padding(size)
                list(self.run_captured(size))

    def capture(self) -> None:
        """Capture CUDA graphs of sizes that cover all declared ones, and postpone the others.

        Their kernels must be compiled and loaded.
        """
        assert self.graphs is not None, "the engine uses CUDA graphs"
        for size, cover in covers(declared_sizes(self._config.max_requests, self._max_drafts)).items():
            if size == cover:
                self._upload_padding(size)
                self.graphs.capture(size)
            else:
                self.graphs.postpone(size, cover, cover.padding_over(size))

    def _upload_padding(self, size: StepSize) -> None:
        """Upload the inputs of a step without requests."""
        self._builder.fill(split(self._next_host(size), size), size.num_decode, (), (), {})
        self._buffers.upload(size.total)

    def run_largest(self) -> None:
        """Run the largest step eagerly on padding, which compiles kernels and allocates a step's peak memory."""
        num_tokens = min(self._config.max_step_tokens, self._max_length)
        size = StepSize(num_tokens, 0, 1, 1)
        inputs = split(self._next_host(size), size)
        for part in inputs:
            part[...] = 0
        inputs.last_token_slots[:] = self._config.max_requests
        inputs.slot_mapping[:] = self.cache.num_slots
        inputs.feature_index[:] = self._images.num_features
        inputs.cu_seqlens[:] = (0, num_tokens)
        inputs.context_lengths[:] = num_tokens
        on_device = split(self._buffers.upload(size.total), size)
        hidden = self._layers(
            on_device, index_S=None, num_decode=0, max_new=num_tokens, max_context=num_tokens, has_images=True
        )
        self._head(hidden.normed[: min(self.max_samples, num_tokens)]).float()


@dataclass(frozen=True, eq=False)
class PagedAttention:
    """An `AttentionContext` that writes KV of new tokens into pages and attends over all tokens of their request."""

    cache: KVCache
    angles: CosSin
    slot_mapping: Tensor
    """[T]: KV slot of each token."""
    page_table: Tensor
    """[slots, W] int32."""
    slots: Tensor
    """[R] int32: request slot of each request, its row of the page table."""
    cu_seqlens: Tensor
    """[R + 1] int32: cumulative new tokens."""
    context_lengths: Tensor
    """[R] int32: tokens including the new ones."""
    num_decode: int
    """Number of leading requests with at most one new token each."""
    max_new: int
    """Upper bound of new tokens per request, known on the host."""
    max_context: int
    """Upper bound of context lengths, known on the host."""
    decode_plan: DecodePlan | None
    """How decode attention is divided, shared by all layers. None: each layer computes it."""
    gather_plan: GatherPlan | None = None
    """On a CPU: where tokens are stored and pages are read, shared by all layers."""
    window: int | None = None
    """Preceding tokens that a token attends to; None: all. The plans have the same window."""

    def __call__(self, layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
        """See `AttentionContext`. `q` and `k` may be rotated in place."""
        keys, values = self.cache.entries[layer]
        key_scales, value_scales = (None, None) if self.cache.scales is None else self.cache.scales[layer]
        return paged_attention(
            q_THK, keys, values, self.page_table, self.cu_seqlens, self.context_lengths, max_seqlen_q=self.max_new,
            num_decode=self.num_decode, max_context_length=self.max_context, table_rows_R=self.slots,
            decode_plan=self.decode_plan, gather_plan=self.gather_plan, key_scales_NGP=key_scales,
            value_scales_NGP=value_scales, window=self.window,
            new=NewTokens(k_TGK, v_TGK, self.angles, self.slot_mapping),
        )  # fmt: skip
