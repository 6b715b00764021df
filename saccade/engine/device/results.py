"""Copy the results of a step, sampled tokens and log-probabilities, from the device to the host.

Legend: S sampled tokens.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from saccade.engine.core.step import Chunk, ChunkResult, EncodeResult, StepPlan, StepResult
from saccade.engine.core.step_runner import DeviceError
from saccade.engine.device.sampler import Logprobs
from saccade.engine.device.step_inputs import RequestInputs
from saccade.engine.request import Failure, TokenLogprobs
from saccade.kernels.sampler import NON_FINITE

_NON_FINITE_LOGITS = Failure(
    "running",
    "the model's logits are not finite (NaN or inf). Check the weights, or use dtype bf16 or fp32",
    "non_finite_logits",
)


class Timer:
    """Measures the device time of work on the current stream, from construction to `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._started_at, self._stopped_at = time.perf_counter(), 0.0
        self._start: torch.cuda.Event | None = None
        self.done: torch.cuda.Event | None = None
        """Event at the end of the measured work. None on a CPU, where the work runs synchronously."""
        if device.type == "cuda":
            self._start, self.done = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self._start.record()

    def stop(self) -> None:
        """Stop measuring: all of the work is queued."""
        self._stopped_at = time.perf_counter()
        if self.done is not None:
            self.done.record()

    def seconds(self) -> float:
        """The measured time. Call it after the work is complete."""
        if self._start is None or self.done is None:
            return self._stopped_at - self._started_at
        return float(self._start.elapsed_time(self.done)) / 1e3


class HostMemory:
    """Pinned host memory for sampled tokens, which the device writes.

    It is reused and never freed, because the device may still write results of a step that failed.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._capacity, self._is_pinned = capacity, device.type == "cuda"
        self._free: list[Tensor] = []
        self._all: list[Tensor] = []

    def take(self, count: int) -> Tensor:
        """[count] int64. Return it by `give_back`."""
        if not self._free:
            self._all.append(torch.empty(self._capacity, dtype=torch.int64, pin_memory=self._is_pinned))
            self._free.append(self._all[-1])
        return self._free.pop()[:count]

    def give_back(self, tokens: Tensor) -> None:
        """Reuse memory that `take` returned, after it is read."""
        self._free.append(tokens.as_strided((self._capacity,), (1,)))


class HostLogprobs:
    """Log-probabilities being copied to the host."""

    def __init__(self, found: Logprobs) -> None:
        self._own = _to_host(found.logprobs)
        self._top = None
        if found.top_ids is not None and found.top_logprobs is not None:
            self._top = _to_host(found.top_ids), _to_host(found.top_logprobs)

    def at(self, index: int, token_id: int, num_top: int) -> TokenLogprobs:
        """Log-probabilities of the token at `index`. Call it after the step is complete."""
        top: list[tuple[int, float]] = []
        if self._top is not None:
            ids, values = self._top
            top = list(zip(ids[index, :num_top].tolist(), values[index, :num_top].tolist(), strict=True))
        return TokenLogprobs(token_id, float(self._own[index]), top)


class SampledChunks:
    """Sampled tokens and log-probabilities of chunks, being copied to the host."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        tokens: Tensor,
        memory: HostMemory,
        logprobs: Logprobs | None,
        prompts: Mapping[str, tuple[Sequence[int], HostLogprobs]],
    ) -> None:
        """`tokens` was taken from `memory`. `prompts`: prompt tokens and their log-probabilities, by request id."""
        self._chunks = chunks
        self._tokens, self._memory = tokens, memory
        self._logprobs = None if logprobs is None else HostLogprobs(logprobs)
        self._prompts = prompts
        self._is_plain = logprobs is None and not prompts and not any(chunk.drafts for chunk in chunks)

    def read(self, requests: Mapping[str, RequestInputs]) -> Iterator[ChunkResult]:
        """Results of the chunks. Call it after the step is complete."""
        sampled, first = self._tokens.tolist(), 0
        self._memory.give_back(self._tokens)
        if self._is_plain and NON_FINITE not in sampled:  # at most one token per chunk, and nothing else
            tokens = zip(sampled, strict=True)
            yield from [ChunkResult(chunk.request_id, next(tokens) if chunk.samples else ()) for chunk in self._chunks]
            return
        for chunk in self._chunks:
            rows = range(first, first + 1 + len(chunk.drafts)) if chunk.samples else range(0)
            first += len(rows)
            yield self._read_chunk(chunk, [sampled[row] for row in rows], rows, requests.get(chunk.request_id))

    def _read_chunk(
        self, chunk: Chunk, sampled: Sequence[int], rows: range, inputs: RequestInputs | None
    ) -> ChunkResult:
        """`inputs`: None if the request has ended; then its log-probabilities are not needed."""
        token_ids = _accepted(sampled, chunk.drafts)
        if NON_FINITE in token_ids:
            return ChunkResult(chunk.request_id, failure=_NON_FINITE_LOGITS)
        logprobs: list[TokenLogprobs] = []
        prompt_logprobs: list[TokenLogprobs] = []
        if inputs is not None:
            sampling = inputs.request.sampling
            if sampling.logprobs is not None and self._logprobs is not None:
                found = self._logprobs
                logprobs = [
                    found.at(row, token, sampling.logprobs) for token, row in zip(token_ids, rows, strict=False)
                ]
            if chunk.request_id in self._prompts:
                targets, of_prompt = self._prompts[chunk.request_id]
                num_top = sampling.prompt_logprobs or 0
                prompt_logprobs = [of_prompt.at(index, token, num_top) for index, token in enumerate(targets)]
        return ChunkResult(chunk.request_id, tuple(token_ids), tuple(logprobs), tuple(prompt_logprobs))


class StepHandle:
    """A step in flight, whose sampling is launched."""

    def __init__(
        self,
        plan: StepPlan,
        parts: Sequence[SampledChunks],
        failures: Mapping[str, Failure],
        images: tuple[EncodeResult, ...],
        timer: Timer,
        requests: Mapping[str, RequestInputs],
    ) -> None:
        """`requests`: inputs of the open requests, looked up when the step is read."""
        self.plan = plan
        self._parts, self._failures, self._images, self._requests = parts, failures, images, requests
        self._timer, self._done = timer, timer.done

    @property
    def is_done(self) -> bool:
        """Whether the device has completed the step, so that `read` does not wait."""
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]

    def read(self) -> StepResult:
        """Wait for the step and return its result."""
        if self._done is not None:
            try:
                self._done.synchronize()
            except RuntimeError as error:
                raise DeviceError(f"the device failed: {error}") from error
        results = [ChunkResult(request_id, failure=failure) for request_id, failure in self._failures.items()]
        for part in self._parts:
            results += part.read(self._requests)
        by_request = {result.request_id: result for result in results}
        return StepResult(
            number=self.plan.number,
            chunks=tuple([by_request[chunk.request_id] for chunk in self.plan.chunks]),
            images=self._images,
            duration_s=self._timer.seconds(),
        )


def first_rows(sampling: Sequence[Chunk]) -> list[int]:
    """Index of the first logits row of each chunk that samples."""
    return [0, *itertools.accumulate([1 + len(chunk.drafts) for chunk in sampling])][:-1]


def num_samples(chunks: Sequence[Chunk]) -> int:
    """Number of logits rows of all chunks."""
    return sum([1 + len(chunk.drafts) for chunk in chunks if chunk.samples])


def _accepted(sampled: Sequence[int], drafts: Sequence[int]) -> Sequence[int]:
    """The valid samples: accepted drafts and the token after them."""
    num_accepted = 0
    while num_accepted < len(drafts) and sampled[num_accepted] == drafts[num_accepted]:
        num_accepted += 1
    return sampled[: num_accepted + 1]


def _to_host(tensor: Tensor) -> Tensor:
    """Queue a copy to pinned host memory on the current stream."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
