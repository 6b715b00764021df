"""Steps, carried out on the device.

    copy pages -> encode images -> embed, decode, project -> sample -> start the copy of the tokens to the host

Everything is queued on one stream and nothing is waited for; `Launched.read` waits. A token that was sampled but not read yet is
taken by the next step from `_last_tokens`, on the device.

Legend: T tokens, S sampled places, D decoder width, V vocabulary, M tokens of images.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.device import to_device
from saccade.engine.batch import (
    Ints,
    Place,
    Sizes,
    StepBuffers,
    StepBuilder,
    StepNumbers,
    cut,
    feature_slots,
    table_width,
)
from saccade.engine.config import EngineConfig
from saccade.engine.encoder import Encoder, patch_budgets
from saccade.engine.graphs import Graphs, StepSize, answers_size, mixed_size, most_places
from saccade.engine.image_pool import IMAGE_PAGE
from saccade.engine.kv_cache import KVCache, PagedAttention
from saccade.engine.prompt import PromptImage, TokenPrompt
from saccade.engine.request import Request, TokenLogprobs
from saccade.engine.sampler import Logprobs, Sampler
from saccade.engine.step_plan import Chunk, ImageToEncode
from saccade.model.vlm import VLM

logger = logging.getLogger(__name__)

PromptLogprobs = list[tuple[Chunk, Sequence[int], Logprobs]]
"""Chunks with prompt tokens to report, these tokens (each behind one of the chunk's), and their log-probabilities."""

_HEAD_ROWS = 1024
"""Rows of logits made at once for the log-probabilities of prompts."""


class StepTokens(NamedTuple):
    """What a step gave, on the host, by request id."""

    token_ids: dict[str, list[int]]
    """Sampled tokens; with drafts those that were accepted, and the one behind them."""
    logprobs: dict[str, list[TokenLogprobs]]
    """Of these tokens, where asked for."""
    prompt_logprobs: dict[str, list[TokenLogprobs]]
    """Of the prompt tokens behind those computed in this step, where asked for."""


class Launched:
    """A step under way."""

    def __init__(
        self, chunks: Sequence[Chunk], tokens: Tensor, logprobs: Logprobs | None,
        prompt_logprobs: PromptLogprobs,
    ) -> None:  # fmt: skip
        self._chunks = chunks
        self._tokens = _to_host(tokens)
        self._logprobs = None if logprobs is None else _LogprobsToRead(logprobs)
        self._prompts = [(chunk, targets, _LogprobsToRead(found)) for chunk, targets, found in prompt_logprobs]
        self._done: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def read(self) -> StepTokens:
        """Wait for the step and take its tokens."""
        if self._done is not None:
            self._done.synchronize()
        step = StepTokens({}, {}, {})
        sampled, place = self._tokens.tolist(), 0
        for chunk in self._chunks:
            if not chunk.samples:
                continue
            places = range(place, place + 1 + len(chunk.drafts))
            place = places.stop
            accepted = _accepted([sampled[i] for i in places], chunk.drafts)
            step.token_ids[chunk.request.id] = accepted
            num_top = chunk.request.sampling.logprobs
            if num_top is not None and self._logprobs is not None:
                asked = zip(accepted, places, strict=False)
                step.logprobs[chunk.request.id] = [self._logprobs.at(i, token, num_top) for token, i in asked]
        for chunk, targets, found in self._prompts:
            num_top = chunk.request.sampling.prompt_logprobs or 0
            step.prompt_logprobs[chunk.request.id] = [found.at(i, token, num_top) for i, token in enumerate(targets)]
        return step


def _accepted(sampled: list[int], drafts: Sequence[int]) -> list[int]:
    """The tokens that stand: each was sampled behind guesses that were all right."""
    num_right = 0
    while num_right < len(drafts) and sampled[num_right] == drafts[num_right]:
        num_right += 1
    return sampled[: num_right + 1]


class _LogprobsToRead:
    """Log-probabilities on their way to the host."""

    def __init__(self, found: Logprobs) -> None:
        self._own = _to_host(found.logprobs)
        self._top = None
        if found.top_ids is not None and found.top_logprobs is not None:
            self._top = _to_host(found.top_ids), _to_host(found.top_logprobs)

    def at(self, place: int, token_id: int, num_top: int) -> TokenLogprobs:
        top: list[tuple[int, float]] = []
        if self._top is not None:
            ids, values = (column[place, :num_top].tolist() for column in self._top)
            top = list(zip(ids, values, strict=True))
        return TokenLogprobs(token_id, float(self._own[place]), top)


def _to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, complete once the stream has come to it."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


@dataclass(frozen=True, kw_only=True)
class PixelScale:
    """How uint8 pixels become what the tower reads."""

    mean: tuple[float, ...]
    """Per channel, in units of the 0..1 range; subtracted."""
    std: tuple[float, ...]
    """Per channel, in units of the 0..1 range; divided by."""


class Runner:
    """The model, its pages and its image features on one device."""

    def __init__(
        self, model: VLM, config: EngineConfig, *, pixels: PixelScale, num_pages: int, max_length: int
    ) -> None:
        """The model must have been merged (`model/merge.py`)."""
        self.model, self.config = model, config
        self.device, self.dtype = model.head.weight.device, model.head.weight.dtype
        language = model.config.language
        self.max_length = max_length
        with self.on_stream():
            self.cache = KVCache(
                language, num_pages=num_pages, page_size=config.page_size, kv_format=config.kv_format,
                dtype=self.dtype, device=self.device,
            )  # fmt: skip
            self._num_features = config.image_pool_tokens // IMAGE_PAGE * IMAGE_PAGE
            shape = (self._num_features + 1, language.hidden_size)  # the last row is read for tokens that are none
            self._features = torch.zeros(shape, dtype=self.dtype, device=self.device)
            self._last_tokens = torch.zeros(config.max_requests + 1, dtype=torch.int32, device=self.device)
            self.sampler = Sampler(vocab_size=language.vocab_size, num_rows=config.max_requests, device=self.device)
            budgets = patch_budgets(config.max_step_patches, model.config.vision.patches_per_token)
            is_recorded = config.cuda_graphs and self.device.type == "cuda"
            self._encoder = Encoder(
                model, pixel_mean=pixels.mean, pixel_std=pixels.std, budgets=budgets if is_recorded else ()
            )
        max_pages = table_width(max_length, config.page_size)
        self._builder = StepBuilder(
            num_rows=config.max_requests,
            page_size=config.page_size,
            max_pages=max_pages,
            num_slots=self.cache.num_slots,
            num_features=self._num_features,
        )
        with self.on_stream():
            self._buffers = StepBuffers(self._largest_step(max_pages), self.device)
            self._logits = torch.empty(self._most_samples(), language.vocab_size, dtype=self.dtype, device=self.device)
        self._graphs: Graphs[StepSize] | None = None
        if config.cuda_graphs and self.device.type == "cuda":
            self._graphs = Graphs(self._recordable, lambda size: size.times_before)
        self._places: dict[str, Place] = {}
        self._seeds: dict[str, int] = {}

    def _largest_step(self, max_pages: int) -> int:
        config = self.config
        tokens, requests = most_places(config.max_step_tokens, config.max_requests)
        return Sizes(tokens, requests, tokens, max_pages).total

    def _most_samples(self) -> int:
        """Places of the largest step, rounded up. All steps share one memory for logits, recorded or not."""
        config = self.config
        tokens, requests = most_places(config.max_step_tokens, config.max_requests)
        return requests if config.max_draft_tokens == 0 else tokens

    def _head(self, hidden_SD: Tensor) -> Tensor:
        """[S, V] logits, overwritten by the next step's."""
        return torch.mm(hidden_SD, self.model.head.weight.t(), out=self._logits[: len(hidden_SD)])

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Everything on the device happens on one stream, which is not the default one: that cannot be recorded."""
        if self.device.type != "cuda":
            yield
            return
        if not hasattr(self, "_stream"):
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(self.device))  # the weights were made there
        with torch.cuda.stream(self._stream):
            yield

    # -------------------------------------------------------------- requests come and go

    def admit(self, request: Request, prompt: TokenPrompt, seed: int) -> None:
        """Keep what computing the request will need."""
        self._places[request.id] = Place(prompt)
        self._seeds[request.id] = seed

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._places.pop(request.id, None)
        self._seeds.pop(request.id, None)

    def is_alive(self) -> bool:
        """Whether the device still computes. After some errors (an illegal address) it does not, until the process ends."""
        if self.device.type != "cuda":
            return True
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:
            return False
        return True

    @property
    def num_admitted(self) -> int:
        """Requests kept."""
        return len(self._places)

    # -------------------------------------------------------------- the three parts of a step

    @torch.inference_mode()
    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages before they are written to."""
        with self.on_stream():
            if pairs:
                self.cache.copy(pairs)

    @torch.inference_mode()
    def encode(self, images: Sequence[ImageToEncode]) -> None:
        """Put the features of images into the pool, all of them in one pass of the tower."""
        with self.on_stream():
            features_MD = self._encoder.encode([self._prepared(image) for image in images])
            slots = [feature_slots(image.places, 0, image.image.num_tokens) for image in images]
            self._features.index_copy_(0, to_device(np.concatenate(slots), self.device), features_MD.to(self.dtype))

    def _prepared(self, image: ImageToEncode) -> PromptImage:
        for prepared in self._places[image.request.id].prompt.images:
            if prepared.span.start == image.image.start:
                return prepared
        raise AssertionError(f"request {image.request.id} has no image at token {image.image.start}")

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk], began: Sequence[Request]) -> Launched:
        """Compute the chunks and sample behind those that reach the end of their request."""
        with self.on_stream():
            self._begin(chunks, began)
            places = [self._places[chunk.request.id] for chunk in chunks]
            size = None if self._graphs is None else self._size_to_record(chunks)
            if self._graphs is not None and size is not None:
                return self._sample(chunks, self._run_recorded(self._graphs, size, chunks, places), [])
            return self._sample(chunks, *self._run(chunks, places))

    # -------------------------------------------------------------- inside

    def _begin(self, chunks: Sequence[Chunk], began: Sequence[Request]) -> None:
        """Requests that got a row: their pages are other ones, and the sampler must know what they ask for."""
        rows = {chunk.request.id: chunk.row for chunk in chunks} if began else {}
        for request in began:
            if request.id in rows:
                self._builder.begin(self._places[request.id])
                self.sampler.begin(rows[request.id], request, self._seeds[request.id])

    def _run(self, chunks: Sequence[Chunk], places: Sequence[Place]) -> tuple[Tensor, PromptLogprobs]:
        """The step as it is."""
        sizes = Sizes(
            num_tokens=sum(chunk.num_tokens for chunk in chunks),
            num_requests=len(chunks),
            num_samples=_num_samples(chunks),
            table_width=table_width(max(chunk.end for chunk in chunks), self.config.page_size),
        )
        self._builder.fill(cut(self._host(sizes), sizes), chunks, places)
        step = cut(self._buffers.upload(sizes.total), sizes)
        wants_all = any(chunk.request.sampling.prompt_logprobs is not None for chunk in chunks)
        hidden = self._decode(
            step,
            places_S=None if wants_all else step.sampled,
            max_new=max(chunk.num_tokens for chunk in chunks),
            max_context=max(chunk.end for chunk in chunks),
            has_images=any(chunk.images for chunk in chunks),
        )
        if not wants_all:
            return self._head(hidden), []
        return self._head(hidden.index_select(0, step.sampled)), self._prompt_logprobs(chunks, hidden)

    def _size_to_record(self, chunks: Sequence[Chunk]) -> StepSize | None:
        """The size of a recording that does this step, if there is to be one."""
        longest = max(chunk.end for chunk in chunks)
        if all(chunk.num_tokens == 1 and chunk.samples and not chunk.images for chunk in chunks):
            return answers_size(len(chunks), longest, self.max_length)
        if any(chunk.request.sampling.prompt_logprobs is not None for chunk in chunks):
            return None
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        return mixed_size(num_tokens, len(chunks), _num_samples(chunks), longest, self.max_length)

    def _run_recorded(
        self, graphs: Graphs[StepSize], size: StepSize, chunks: Sequence[Chunk], places: Sequence[Place]
    ) -> Tensor:
        sizes = self._sizes_of(size)
        fill = self._builder.fill_answers if size.is_answers else self._builder.fill
        fill(cut(self._host(sizes), sizes), chunks, places)
        self._buffers.upload(sizes.total)
        return graphs.run(size)[: _num_samples(chunks)]

    def _sizes_of(self, size: StepSize) -> Sizes:
        width = table_width(size.max_context, self.config.page_size)
        return Sizes(size.num_tokens, size.num_requests, size.num_samples, width)

    def _recordable(self, size: StepSize) -> Tensor:
        """Logits of the step whose numbers lie in the device's buffer. Only tensors decide what it does."""
        step = cut(self._buffers.uploaded, self._sizes_of(size))
        max_new = 1 if size.is_answers else size.num_tokens
        hidden_SD = self._decode(
            step,
            places_S=None if size.is_answers else step.sampled,
            max_new=max_new,
            max_context=size.max_context,
            has_images=not size.is_answers,
        )
        return self._head(hidden_SD)

    def _host(self, sizes: Sizes) -> Ints:
        assert sizes.total <= self._buffers.capacity, f"a step of {sizes} is larger than the buffers"
        return self._buffers.next_host()

    def _decode(
        self,
        step: StepNumbers[Tensor],
        *,
        places_S: Tensor | None,
        max_new: int,
        max_context: int,
        has_images: bool,
    ) -> Tensor:
        """[S, D]: what the head reads, at the given places (None: at all)."""
        is_pending = step.pending_rows < self.config.max_requests
        token_ids = torch.where(is_pending, self._last_tokens[step.pending_rows], step.token_ids)
        x_TD: Tensor = self.model.language.embed_tokens(token_ids)
        if has_images:
            is_feature = step.feature_slots < self._num_features
            x_TD = torch.where(is_feature[:, None], self._features.index_select(0, step.feature_slots), x_TD)
        attend = PagedAttention(
            self.cache, self.model.cos_sin(step.positions), step.slots, step.page_table, step.cu_seqlens,
            step.context_lengths, max_new, max_context,
        )  # fmt: skip
        return self.model.forward_layers(x_TD, attend, places_S)

    def _sample(self, chunks: Sequence[Chunk], logits_SV: Tensor, prompt_logprobs: PromptLogprobs) -> Launched:
        rows: list[int] = []
        positions: list[int] = []
        answered: list[int] = []
        for chunk in chunks:
            if chunk.samples:
                for end in range(chunk.end - len(chunk.drafts), chunk.end + 1):
                    rows.append(chunk.row)
                    positions.append(end)
                    answered.append(end - chunk.request.num_prompt_tokens)
        on_device = to_device(_int64(rows), self.device)
        sampled = self.sampler.sample(logits_SV, _int64(rows), _int64(positions), _int64(answered))
        logprobs = None
        if sampled.logprobs is not None:
            logprobs = Logprobs(sampled.logprobs, sampled.top_ids, sampled.top_logprobs)
        launched = Launched(chunks, sampled.token_ids, logprobs, prompt_logprobs)
        # Last, when nothing can fail any more: a step that is tried again must find all as it was.
        self.sampler.commit()
        self._last_tokens[on_device] = sampled.token_ids.int()
        return launched

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
        """Of `targets`, each behind one of the first rows of `hidden`."""
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
    def rehearse(self) -> None:
        """The largest step there can be, with nobody's tokens: compiles kernels and shows how much memory a step takes."""
        config, vision = self.config, self.model.config.vision
        with self.on_stream():
            if config.max_step_patches >= 4 * vision.patches_per_token:
                side = vision.merge_size * 2 * max(1, int(config.max_step_patches**0.5) // (2 * vision.merge_size))
                pixels = torch.zeros(side * side, vision.patch_dim, device=self.device)
                self.model.encode_images(pixels, torch.tensor([[1, side, side]]))
            num_tokens = min(config.max_step_tokens, self.max_length)
            sizes = Sizes(num_tokens, 1, 1, table_width(num_tokens, config.page_size))
            step = cut(self._host(sizes), sizes)
            for part in step:
                part[...] = 0
            step.pending_rows[:] = config.max_requests
            step.slots[:] = self.cache.num_slots
            step.feature_slots[:] = self._num_features
            step.cu_seqlens[:] = (0, num_tokens)
            step.context_lengths[:] = num_tokens
            on_device = cut(self._buffers.upload(sizes.total), sizes)
            hidden_TD = self._decode(
                on_device, places_S=None, max_new=num_tokens, max_context=num_tokens, has_images=True
            )
            num_samples = min(config.max_requests, num_tokens)
            self._head(hidden_TD[:num_samples]).float()
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()


def _num_samples(chunks: Sequence[Chunk]) -> int:
    return sum([1 + len(chunk.drafts) for chunk in chunks if chunk.samples])


def _int64(values: Sequence[int]) -> NDArray[np.int64]:
    return np.array(values, np.int64)
