"""Run engine steps on the device.

    parts of the encoder -> copy pages -> forward pass -> sample -> start copying the tokens to the host

Only `StepHandle.read` waits for the device. The next step reads tokens that are sampled but not read yet from
`last_tokens` on the device. The forward pass and sampling are two launches, so that masks computed on the host during
the forward pass reach the sampler of the very next token. All work is queued on one stream.

When a step fails, its chunks are run again in halves until the failing request is alone. Its result has the failure,
and the other requests get the same tokens as without it. Images (`image_runner.py`) and page copies fail in the same
way.

Legend: T tokens, S sampled tokens, D decoder width.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.device import to_device
from saccade.engine.config import EngineConfig
from saccade.engine.core.grammar.masks import GrammarMasks
from saccade.engine.core.step import Chunk, EncodeResult, StepPlan
from saccade.engine.core.step_runner import DeviceCounters, DeviceInfo
from saccade.engine.device.divided_encoder import DividedEncoder
from saccade.engine.device.divided_forward import DividedForwardPass
from saccade.engine.device.encoder import Encoder, patch_budgets
from saccade.engine.device.failures import check_alive, failure_of, is_alive
from saccade.engine.device.forward import ForwardPass, Logits
from saccade.engine.device.image_runner import ImageRunner
from saccade.engine.device.kv_cache import KVCache, kv_shape
from saccade.engine.device.profiler import CoreProfiler
from saccade.engine.device.rank_exchange import RankExchange
from saccade.engine.device.results import HostLogprobs, HostMemory, SampledChunks, StepHandle, Timer, first_rows
from saccade.engine.device.sampler import Logprobs, Sampler, TokenMasks
from saccade.engine.device.step_inputs import RequestInputs
from saccade.engine.prompt import TokenPrompt
from saccade.engine.request import Failure, Request
from saccade.engine.sampling_params import SamplingParams
from saccade.errors import CheckpointError
from saccade.kernels import launch
from saccade.kernels.sampler import Destination
from saccade.model.adapters import Adapter, AdapterBank, load_adapter
from saccade.model.families import family_named
from saccade.model.vlm import VLM

logger = logging.getLogger(__name__)

_HEAD_ROWS = 1024
"""Maximum rows of logits computed at once for prompt log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class PixelScale:
    """Normalization of uint8 pixels, in units of the 0..1 range."""

    mean: tuple[float, ...]
    """Value to subtract, per channel."""
    std: tuple[float, ...]
    """Value to divide by, per channel."""


class StepForward(NamedTuple):
    """The forward pass of a plan, before it is sampled."""

    plan: StepPlan
    logits: Logits | None
    """None if there are no chunks, or if their forward pass failed; then `sample` runs them again."""
    failures: dict[str, Failure]
    """Failures of chunks, by request id."""
    images: tuple[EncodeResult, ...]
    """Results of images whose encoding ends with this step."""
    timer: Timer
    """Timer that was started before the chunks."""


class Runner:
    """The model, its KV cache and its encoder cache on one device. Implements `StepRunner`."""

    _image_runner = ImageRunner

    def __init__(
        self, model: VLM, config: EngineConfig, *, pixels: PixelScale, num_pages: int, max_length: int,
        exchange: RankExchange | None = None,
    ) -> None:  # fmt: skip
        """`exchange`: of this rank of a tensor-parallel engine; all ranks make a runner and run the same steps."""
        self.model, self.config, self.device = model, config, model.device
        language, vision = model.config.language, model.config.vision
        max_drafts = config.draft_tokens(self.device.type)
        uses_graphs = config.cuda_graphs and self.device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":  # the default stream cannot be captured
            self._stream = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(self.device))  # weights may still be loading on it
        with self.on_stream():
            self.cache = KVCache(
                kv_shape(model), num_pages=num_pages, page_size=config.page_size, kv_format=config.cache_format,
                dtype=model.dtype, device=self.device,
            )  # fmt: skip
            budgets = patch_budgets(config.max_encoder_patches, vision.patches_per_token) if uses_graphs else ()
            settings: Any = {"pixel_mean": pixels.mean, "pixel_std": pixels.std, "budgets": budgets}
            encoder = Encoder(model, **settings) if exchange is None else DividedEncoder(model, exchange, **settings)
            self.images = self._image_runner(
                encoder, num_tokens=config.encoder_cache_tokens, feature_size=model.feature_size
            )
            kind: Any = ForwardPass if exchange is None else partial(DividedForwardPass, exchange=exchange)
            self.forward_pass: ForwardPass = kind(
                model, config, self.images, self.cache, max_length=max_length, max_drafts=max_drafts
            )
            self.sampler = Sampler(vocab_size=language.vocab_size, num_slots=config.max_requests, device=self.device)
            self._sampled_on_host = HostMemory(self.forward_pass.max_samples, self.device)
            self.adapters: AdapterBank | None = None
            if config.max_adapters:
                self.adapters = AdapterBank(
                    model, num_slots=config.max_adapters, max_rank=config.max_adapter_rank, dtype=model.dtype,
                    device=self.device,
                )  # fmt: skip
        self.info = DeviceInfo(
            max_length=max_length,
            vocab_size=language.vocab_size,
            num_pages=num_pages,
            max_draft_tokens=max_drafts,
            max_pass_patches=min(encoder.largest_budget or config.max_encoder_patches, config.max_encoder_patches),
            is_cpu=self.device.type == "cpu",
            feature_bytes=model.feature_size * model.dtype.itemsize,
        )
        self._requests: dict[str, RequestInputs] = {}
        self._uncopied: dict[int, Failure] = {}  # by page whose copy failed, until a chunk reads it
        self._unsampled: StepPlan | None = None  # the step that is launched but not sampled
        self._compiles = launch.CompileCounter()
        self._profiler = CoreProfiler()

    def on_stream(self) -> contextlib.AbstractContextManager[None]:
        """Context in which work is queued on the stream of the steps."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def close(self) -> None:
        """Free the device memory now; reference cycles would keep it until the next garbage collection."""
        is_gpu = self.device.type == "cuda" and is_alive(self.device)  # waits for the last step too
        vars(self).clear()
        if is_gpu:
            torch.cuda.empty_cache()

    # -------------------------------------------------------------- requests and adapters

    def register(self, request: Request, prompt: TokenPrompt, adapter_slot: int | None = None) -> None:
        """Store the inputs of a request until `unregister`. `adapter_slot`: slot of its adapter, from 0."""
        self._requests[request.id] = RequestInputs(request, prompt, adapter_slot)

    def unregister(self, request_id: str) -> None:
        """Drop the inputs of an ended request."""
        self._requests.pop(request_id, None)

    @property
    def num_registered(self) -> int:
        """Number of registered requests."""
        return len(self._requests)

    def read_adapter(self, folder: str) -> Adapter:
        """Read and check an adapter folder, on any thread."""
        assert self.adapters is not None, "a slot was reserved"
        adapter = load_adapter(folder, self.adapters.shapes, family_named(self.model.config.family))
        if adapter.rank > self.adapters.max_rank:
            raise CheckpointError(
                f"{folder}: its rank is {adapter.rank}, the engine's max_adapter_rank {self.adapters.max_rank}. "
                "Raise it"
            )
        return adapter

    def set_adapter(self, slot: int, adapter: Adapter) -> None:
        """Write an adapter into a slot, from 0, after the steps in flight."""
        assert self.adapters is not None, "a slot was reserved"
        with self.on_stream():
            self.adapters.set(slot, adapter)

    # -------------------------------------------------------------- a step

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> StepForward:
        """Launch the encoder parts and the forward pass of a plan.

        Plans are launched in order, and each is sampled before the next is launched.
        """
        self._compiles.thread_id = threading.get_ident()
        with self.on_stream():
            images = self.images.run(plan, self._requests) if plan.encoder_parts else ()
            if plan.loads:
                images += self.images.load(plan, self._requests)
            self._start_slots(plan)
            self._unsampled = plan if plan.chunks else self._unsampled
            self._copy_pages(plan.page_copies)
            failures = self.images.failures_of(plan.chunks) if self.images.failures else {}
            for chunk in plan.chunks if self._uncopied else ():
                for page in self._uncopied.keys() & set(chunk.new_pages):
                    failures[chunk.request_id] = self._uncopied.pop(page)
            timer, logits = Timer(self.device), None
            if chunks := _without(failures, plan.chunks):
                try:
                    logits = self._run_chunks(chunks)
                except Exception as error:
                    check_alive(self.device, error)
                    logger.warning("a step failed and is run again in halves: %r", error)
            return StepForward(plan, logits, failures, images, timer)

    @torch.inference_mode()
    def sample(self, step: StepForward, masks: GrammarMasks | None = None) -> StepHandle:
        """Launch sampling, and start copying the tokens to the host."""
        plan, failures = step.plan, dict(step.failures)
        self._unsampled = None
        with self.on_stream():
            parts = self._sample_or_isolate(_without(failures, plan.chunks), step.logits, masks, failures)
            step.timer.stop()
        return StepHandle(plan, parts, failures, step.images, step.timer, self._requests)

    # What a step does to the device, apart from sampling. A tensor-parallel engine does it on every rank.

    def start_slots(self, plan: StepPlan) -> None:
        """Set up the slots of requests that start, and append the new pages of all chunks."""
        for start in plan.started:
            inputs = self._requests[start.request_id]
            inputs.token_ids = np.array([*inputs.prompt.token_ids, *start.output_token_ids], np.int32)
        self.forward_pass.start_slots(plan, self._requests)

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy (source, target) pages."""
        self.cache.copy(copies)

    def _run_chunks(self, chunks: Sequence[Chunk]) -> Logits:
        """Launch the forward pass of chunks of the last plan."""
        return self.forward_pass.run(chunks, self._requests)

    def run_head(self, hidden_TD: Tensor, rows: slice) -> Tensor:
        """Logits of some rows of the hidden states that the last forward pass returned."""
        return self.forward_pass.run_head(hidden_TD[rows])

    def _sample_or_isolate(
        self,
        chunks: Sequence[Chunk],
        logits: Logits | None,
        masks: GrammarMasks | None,
        failures: dict[str, Failure],
    ) -> list[SampledChunks]:
        """Sample chunks. If that fails, run and sample them again in halves, so that only the failing request fails.

        `logits`: None if the forward pass has to be run first.
        """
        if not chunks:
            return []
        error: Exception | None = None
        if logits is not None:
            try:
                return [self._sample_chunks(logits, masks)]
            except Exception as failed:
                check_alive(self.device, failed)
        try:
            return [self._sample_chunks(self._run_chunks(chunks), masks)]
        except Exception as failed:
            error = failed
        if len(chunks) == 1:
            failures[chunks[0].request_id] = failure_of(self.device, "running", chunks[0].request_id, error)
            return []
        check_alive(self.device, error)
        middle = len(chunks) // 2
        halves = (chunks[:middle], chunks[middle:])
        return [part for half in halves for part in self._sample_or_isolate(half, None, masks, failures)]

    def _start_slots(self, plan: StepPlan) -> None:
        if plan.started and self._unsampled is not None:
            reused = {start.slot for start in plan.started} & {chunk.slot for chunk in self._unsampled.chunks}
            assert not reused, (
                f"slots {reused} are reused before step {self._unsampled.number}, which names them, is sampled"
            )
        self.start_slots(plan)
        for start in plan.started:
            self.sampler.set_request(start.slot, self._requests[start.request_id].request, start.output_token_ids)

    def _copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy (source, target) pages, one by one if that fails. A failed copy fails the request that reads it."""
        if not copies:
            return
        try:
            self.copy_pages(copies)
        except Exception as error:
            if len(copies) > 1:
                for pair in copies:
                    self._copy_pages([pair])
                return
            [(_, target)] = copies
            self._uncopied[target] = failure_of(self.device, "running", "with a shared prefix", error)

    # -------------------------------------------------------------- sampling

    def _sample_chunks(self, step: Logits, masks: GrammarMasks | None) -> SampledChunks:
        sampling = [chunk for chunk in step.chunks if chunk.samples]
        slots = [chunk.slot for chunk in sampling for _ in range(1 + len(chunk.drafts))]
        ends = [chunk.start + chunk.num_tokens for chunk in sampling]
        positions = [
            end - count for chunk, end in zip(sampling, ends, strict=True) for count in range(len(chunk.drafts), -1, -1)
        ]
        token_masks = None if masks is None else _token_masks(masks, sampling)
        prompts = {} if step.hidden is None else self._prompt_logprobs(step.chunks, step.hidden)
        host = self._sampled_on_host.take(len(slots))
        destination = Destination(self.forward_pass.last_tokens, step.sampled_slots, host)
        sampled = self.sampler.sample(step.logits, _int64(slots), _int64(positions), token_masks, destination)
        logprobs = None
        if sampled.logprobs is not None:
            logprobs = Logprobs(sampled.logprobs, sampled.top_ids, sampled.top_logprobs)
        part = SampledChunks(step.chunks, host, self._sampled_on_host, logprobs, prompts)
        # Last, when nothing can fail any more: a step that is run again must start from the same state.
        self.sampler.commit()
        self._store_accepted(sampling, sampled.token_ids)
        return part

    def _store_accepted(self, sampling: Sequence[Chunk], token_ids_S: Tensor) -> None:
        """Store the last token of slots with drafts, the one after the accepted drafts, in `last_tokens`."""
        first = 0
        for chunk in sampling:
            rows = slice(first, first + 1 + len(chunk.drafts))
            first = rows.stop
            if chunk.drafts:
                sampled = token_ids_S[rows].clamp(min=0)  # NON_FINITE has no embedding
                drafts = to_device(_int64(chunk.drafts), self.device)
                num_accepted = (sampled[:-1] == drafts).int().cumprod(0).sum().view(1)
                last = self.forward_pass.last_tokens[chunk.slot : chunk.slot + 1]
                last.copy_(sampled.index_select(0, num_accepted))

    def _prompt_logprobs(
        self, chunks: Sequence[Chunk], hidden_TD: Tensor
    ) -> dict[str, tuple[Sequence[int], HostLogprobs]]:
        """Prompt tokens that chunks predict, and their log-probabilities, by request id."""
        found: dict[str, tuple[Sequence[int], HostLogprobs]] = {}
        start = 0
        for chunk in chunks:
            request = self._requests[chunk.request_id].request
            targets = list(request.token_ids[chunk.start + 1 : min(chunk.end + 1, request.num_prompt_tokens)])
            num_top = request.prompt_logprobs
            if num_top is not None and targets:
                logprobs = self._logprobs(hidden_TD, start, targets, num_top)
                found[chunk.request_id] = targets, HostLogprobs(logprobs)
            start += chunk.num_tokens
        return found

    def _logprobs(self, hidden_TD: Tensor, first: int, targets: Sequence[int], num_top: int) -> Logprobs:
        """Log-probabilities of `targets`, each predicted by its row of `hidden_TD` from `first` on."""
        parts = []
        for target_ids in torch.split(to_device(_int64(targets), self.device), _HEAD_ROWS):
            logits = self.run_head(hidden_TD, slice(first, first + len(target_ids)))
            parts.append(self.sampler.logprobs_of(logits, target_ids, num_top))
            first += len(target_ids)
        own, ids, values = zip(*parts, strict=True)
        if num_top == 0:
            return Logprobs(torch.cat(own), None, None)
        return Logprobs(torch.cat(own), torch.cat(ids), torch.cat(values))

    # -------------------------------------------------------------- times, counters, profiles

    def encode_ms(self, num_patches: int) -> float:
        """Time of an encoder pass in ms. 0: unknown."""
        return self.images.encoder.pass_ms(num_patches)

    def counters(self) -> DeviceCounters:
        """Counts, since the warm-up, of events that delayed steps."""
        compiles, graphs = self._compiles.num_kernels, self.forward_pass.graphs
        if graphs is None:
            return DeviceCounters(0, compiles, 0)
        late = graphs.num_late_captures + self.images.encoder.num_late_captures
        return DeviceCounters(late, compiles, graphs.num_eager_runs + self.forward_pass.num_eager_steps)

    @torch.inference_mode()
    def prepare_more(self) -> bool:
        """Capture a CUDA graph that was postponed at start-up. False: there is none."""
        graphs = self.forward_pass.graphs
        if graphs is None:
            return False
        with self.on_stream():
            return graphs.capture_next() or self.images.encoder.capture_next()

    def forget_warm_up(self) -> None:
        """Reset the counters and failures of the warm-up."""
        self._compiles = launch.CompileCounter()
        self._uncopied.clear()

    def start_profile(self, begun: Path) -> None:
        """Profile this thread and the device; create the file `begun` once the profile has begun."""
        self._profiler.start(begun)

    def stop_profile(self, path: Path) -> None:
        """End the profile and write its trace. No effect without one."""
        self._profiler.stop(path)

    def warm_up_sampler(self, *, with_logprobs: bool = True) -> None:
        """Sample with and without randomness and log-probabilities, which compiles the sampler's kernels."""
        forward, max_requests = self.forward_pass, self.config.max_requests
        greedy = SamplingParams(logprobs=1 if with_logprobs else None)
        for sampling in (greedy, SamplingParams(temperature=1.0, top_p=0.9, top_k=50, min_p=0.01)):
            self.sampler.set_request(0, Request(id="warm-up", token_ids=[0], sampling=sampling))
            for count in (1, min(16, forward.max_samples)):
                zeros, host = np.zeros(count, np.int64), self._sampled_on_host.take(count)
                no_slot = torch.full((count,), max_requests, dtype=torch.int32, device=self.device)
                destination = Destination(forward.last_tokens, no_slot, host)
                self.sampler.sample(forward.logits[:count].zero_(), zeros, zeros + 1, destination=destination)
                self.sampler.commit()
                self._sampled_on_host.give_back(host)


def _token_masks(masks: GrammarMasks, sampling: Sequence[Chunk]) -> TokenMasks | None:
    """The masks of the requests that are sampled, by logits row. A request with a grammar has no drafts."""
    rows = dict(zip([chunk.request_id for chunk in sampling], first_rows(sampling), strict=True))
    index = [i for i, request_id in enumerate(masks.request_ids) if request_id in rows]
    words = masks.words if len(index) == len(masks.request_ids) else masks.words[index]
    return TokenMasks(_int64([rows[masks.request_ids[i]] for i in index]), words) if index else None


def _without(failures: Mapping[str, Failure], chunks: Sequence[Chunk]) -> Sequence[Chunk]:
    """The chunks of requests that have not failed."""
    return [chunk for chunk in chunks if chunk.request_id not in failures] if failures else chunks


def _int64(values: Sequence[int]) -> NDArray[np.int64]:
    return np.array(values, np.int64)
