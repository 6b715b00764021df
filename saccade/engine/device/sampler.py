"""Sample tokens from logits on the device, without synchronizing.

Legend: S samples (one per logits row), V vocabulary, R request slots, P samples with penalties, A samples with
log-probabilities, K most likely tokens.

A request may have several samples in a step, one after each draft token. For each sample, in this order:

    logit bias     added to the logits of the tokens it names
    penalties      repetition (tokens of prompt and output, as in Hugging Face), then frequency and presence
                   (tokens of the output only, as in OpenAI and vLLM)
    bans           -inf for stop tokens, while the output has fewer than `min_tokens`
    mask           -inf for tokens that the request's grammar does not allow
    the kernel     temperature, top-k, top-p, min-p, and the draw: see `kernels/sampler.py`

Log-probabilities are the log softmax of the raw logits: before bias, penalties, bans, mask and temperature. A draw
depends only on the logits, the request's seed and the token's index, so a request gets the same tokens in any slot, in
any batch, and after preemption. A row of non-finite logits (NaN, +inf, or no finite value) samples `NON_FINITE`.

Sampling parameters are kept on the host, one record per slot. A step gathers the records of its samples and uploads
them in two copies. Token counts for penalties are on the device, where they include tokens that the host has not read
yet. They are allocated when the first request with penalties starts (`penalty_bytes`). All calls must use one stream:
the next request of a slot overwrites its counts after the last step that read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.device import to_device
from saccade.engine.request import Request
from saccade.engine.sampling_params import SamplingParams
from saccade.kernels import sampler as kernel
from saccade.kernels.token_mask import apply_token_mask

_ROWS_AT_ONCE = 64
"""Maximum logits rows penalized or normalized at once. Bounds temporary memory: 40 MB per copy at V = 152k."""

_GREEDY_BELOW = 1e-5
"""Temperatures below this count as 0."""

_SETTINGS = np.dtype(
    [
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int32),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("seed", np.int64),
        ("num_prompt_tokens", np.int64),
        ("min_tokens", np.int64),
        ("num_top", np.int64),
        ("is_set", np.bool_),
        ("needs_more", np.bool_),
        ("is_biased", np.bool_),
        ("has_penalties", np.bool_),
        ("has_logprobs", np.bool_),
    ]
)
"""Sampling parameters of a slot, except its biases and stop ids."""


class SampledStep(NamedTuple):
    """Sampled tokens on the device. Log-probabilities are defined only for requests with `logprobs`."""

    token_ids: Tensor
    """[S] int64; `NON_FINITE` for a row of non-finite logits."""
    logprobs: Tensor | None
    """[S] fp32. None if no request has `logprobs`."""
    top_ids: Tensor | None
    """[S, K] int64, most likely first; K is the maximum `logprobs` of the step. None if K is 0."""
    top_logprobs: Tensor | None
    """[S, K] fp32."""


class Logprobs(NamedTuple):
    """Log-probabilities of given tokens, and of the K most likely tokens, best first (None if K is 0)."""

    logprobs: Tensor
    top_ids: Tensor | None
    top_logprobs: Tensor | None


class TokenMasks(NamedTuple):
    """Tokens that grammars allow, for some logits rows."""

    rows: NDArray[np.int64]
    """[N]: logits rows."""
    mask: NDArray[np.int32]
    """[N, ceil(V / 32)]: one bit per token."""


class _Step(NamedTuple):
    """Sampling inputs of a step on the device."""

    temperature: Tensor  # per sample
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    seed: Tensor
    position: Tensor
    penalized: Tensor  # per sample with penalties: index of the sample
    penalized_slot: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    biased: Tensor  # per biased logit: sample * V + token
    bias: Tensor
    banned: Tensor  # per banned logit: sample * V + token
    with_logprobs: Tensor  # indices of samples with log-probabilities
    num_top: int


def penalty_bytes(num_slots: int, vocab_size: int) -> int:
    """Bytes of device memory that the first request with penalties allocates."""
    return num_slots * vocab_size * (torch.int32.itemsize + torch.bool.itemsize)


class Sampler:
    """Samples the tokens of all running requests; see the docstring of this module."""

    def __init__(self, *, vocab_size: int, num_slots: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._settings = np.zeros(num_slots, _SETTINGS)
        self._bias: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        self._stop_ids: dict[int, NDArray[np.int64]] = {}
        self._uncommitted: tuple[Tensor, _Step, kernel.Destination | None] | None = None
        self._is_prompt_RV: Tensor | None = None
        self._num_output_RV: Tensor | None = None

    def set_request(self, slot: int, request: Request, output_token_ids: Sequence[int] = ()) -> None:
        """Set the request of a slot when it starts or resumes. All its sampled tokens must have been read."""
        params = request.sampling
        self._settings[slot] = (
            params.temperature if params.temperature >= _GREEDY_BELOW else 0.0,
            params.top_p,
            params.min_p,
            min(params.top_k or self._vocab_size, self._vocab_size),
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            request.seed,
            request.num_prompt_tokens,
            params.min_tokens,
            params.logprobs or 0,
            True,
            params.temperature >= _GREEDY_BELOW or _has_effects(params),
            bool(params.logit_bias),
            params.has_penalties,
            params.logprobs is not None,
        )
        biases = params.logit_bias
        self._bias[slot] = np.array(list(biases), np.int64), np.array(list(biases.values()), np.float32)
        self._stop_ids[slot] = self._known(sorted(request.stop_ids))
        if params.has_penalties:
            self._reset_counts(slot, request, output_token_ids)

    @torch.inference_mode()
    def sample(
        self,
        logits_SV: Tensor,
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        masks: TokenMasks | None = None,
        destination: kernel.Destination | None = None,
    ) -> SampledStep:
        """Sample one token per row of the logits, which are overwritten.

        `slots`: request slot of each row; `positions`: index of the new token in its request. `masks` restrict some
        rows to the tokens that a grammar allows. `destination`: device and host memory that also receives the tokens,
        by `commit` at the latest. A request with penalties has one sample per step: its counts could not be rolled
        back when a draft is rejected.
        """
        self._uncommitted = None  # drops a step that failed after its sampling
        if not len(slots):
            return SampledStep(torch.empty(0, dtype=torch.int64, device=self._device), None, None, None)
        chosen = self._settings[slots]
        assert chosen["is_set"].all(), f"no request in slots {slots[~chosen['is_set']]}"
        if masks is None and not chosen["needs_more"].any():
            return SampledStep(kernel.most_likely(logits_SV, destination), None, None, None)
        step = self._upload(chosen, slots, positions)
        adjusted_SV = self._adjust(logits_SV, step)
        if masks is not None:
            adjusted_SV = self._mask(adjusted_SV, masks, keeps=adjusted_SV is logits_SV and len(step.with_logprobs) > 0)
        is_last = not len(step.with_logprobs) and not len(step.penalized)  # then nothing can fail after the kernel
        token_ids = kernel.sample(
            adjusted_SV, step.temperature, step.top_k, step.top_p, step.min_p, step.seed, step.position,
            destination=destination if is_last else None,
        ).token_ids  # fmt: skip
        self._uncommitted = None if is_last else (token_ids, step, destination)
        if not len(step.with_logprobs):
            return SampledStep(token_ids, None, None, None)
        return SampledStep(token_ids, *self._logprobs(logits_SV, token_ids, step))

    @torch.inference_mode()
    def commit(self) -> None:
        """Add the tokens sampled last to the penalty counts, and store them unless the kernel has.

        Before this call a step can be run and sampled again with the same result.
        """
        if self._uncommitted is not None:
            token_ids, step, destination = self._uncommitted
            self._add_counts(token_ids, step)
            kernel.store(token_ids, destination)
            self._uncommitted = None

    @staticmethod
    @torch.inference_mode()
    def logprobs_of(logits_SV: Tensor, token_ids_S: Tensor, num_top: int) -> Logprobs:
        """fp32 log softmax of the logits at the given tokens, and its `num_top` (at most V) largest values."""
        num_top = min(num_top, logits_SV.shape[1])
        own, top_ids, top = [], [], []
        for logits, token_ids in zip(_in_parts(logits_SV), _in_parts(token_ids_S), strict=True):
            logprobs = logits.log_softmax(-1, dtype=torch.float32)
            own.append(logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1))
            best = logprobs.topk(num_top)
            top_ids.append(best.indices)
            top.append(best.values)
        return Logprobs(torch.cat(own), *((torch.cat(top_ids), torch.cat(top)) if num_top else (None, None)))

    def _known(self, token_ids: Sequence[int]) -> NDArray[np.int64]:
        """Ids that have a logit: some checkpoints have end-of-turn tokens or embeddings beyond the vocabulary."""
        ids = np.array(token_ids, np.int64)
        return ids[ids < self._vocab_size]

    @torch.inference_mode()
    def _reset_counts(self, slot: int, request: Request, output_token_ids: Sequence[int]) -> None:
        """Count the tokens of a request that starts in a slot."""
        is_prompt_RV, num_output_RV = self._counts()
        prompt = self._known(request.token_ids)
        output = self._known(output_token_ids)
        ids_prompt, ids_output = _in_one_copy([prompt, output], self._device)
        is_prompt_RV[slot].zero_().index_fill_(0, ids_prompt, True)
        num_output_RV[slot].zero_().index_add_(0, ids_output, torch.ones_like(ids_output, dtype=torch.int32))

    def _counts(self) -> tuple[Tensor, Tensor]:
        """Per slot and token: whether the prompt has it, and how often the output has it."""
        if self._is_prompt_RV is None or self._num_output_RV is None:
            shape = len(self._settings), self._vocab_size
            self._is_prompt_RV = torch.zeros(shape, dtype=torch.bool, device=self._device)
            self._num_output_RV = torch.zeros(shape, dtype=torch.int32, device=self._device)
        return self._is_prompt_RV, self._num_output_RV

    def _upload(self, chosen: NDArray[Any], slots: NDArray[np.int64], positions: NDArray[np.int64]) -> _Step:
        num_output_tokens = positions - chosen["num_prompt_tokens"]
        penalized, with_logprobs = np.flatnonzero(chosen["has_penalties"]), np.flatnonzero(chosen["has_logprobs"])
        assert len(np.unique(slots[penalized])) == len(penalized), "a request with penalties has one sample per step"
        penalties = chosen[penalized]
        biased, bias = self._biases(np.flatnonzero(chosen["is_biased"]), slots)
        banned = self._bans(np.flatnonzero(num_output_tokens < chosen["min_tokens"]), slots)
        numbers = _in_one_copy(
            [
                chosen["temperature"],
                chosen["top_p"],
                chosen["min_p"],
                chosen["top_k"].view(np.float32),  # same 32 bits; viewed as integers again on the device
                penalties["repetition"],
                penalties["frequency"],
                penalties["presence"],
                bias,
            ],
            self._device,
        )
        indices = _in_one_copy(
            [chosen["seed"], positions, penalized, slots[penalized], biased, banned, with_logprobs], self._device
        )
        return _Step(
            temperature=numbers[0],
            top_p=numbers[1],
            min_p=numbers[2],
            top_k=numbers[3].view(torch.int32),
            repetition=numbers[4],
            frequency=numbers[5],
            presence=numbers[6],
            bias=numbers[7],
            seed=indices[0],
            position=indices[1],
            penalized=indices[2],
            penalized_slot=indices[3],
            biased=indices[4],
            banned=indices[5],
            with_logprobs=indices[6],
            num_top=int(chosen["num_top"].max()),
        )

    def _biases(
        self, samples: NDArray[np.int64], slots: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        found = [(sample, *self._bias[int(slots[sample])]) for sample in samples]
        if not found:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        indices = np.concatenate([sample * self._vocab_size + ids for sample, ids, _ in found])
        return indices, np.concatenate([bias for _, _, bias in found])

    def _bans(self, samples: NDArray[np.int64], slots: NDArray[np.int64]) -> NDArray[np.int64]:
        found = [sample * self._vocab_size + self._stop_ids[int(slots[sample])] for sample in samples]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _adjust(self, logits_SV: Tensor, step: _Step) -> Tensor:
        """Apply bias, penalties and bans in fp32. Preserves the raw logits if log-probabilities are needed."""
        if not (len(step.biased) or len(step.penalized) or len(step.banned)):
            return logits_SV
        adjusted_SV = logits_SV.to(torch.float32, copy=len(step.with_logprobs) > 0).contiguous()
        if len(step.biased):
            adjusted_SV.view(-1).index_add_(0, step.biased, step.bias)
        if len(step.penalized):
            self._penalize(adjusted_SV, step)
        if len(step.banned):
            adjusted_SV.view(-1).index_fill_(0, step.banned, float("-inf"))
        return adjusted_SV

    def _mask(self, logits_SV: Tensor, masks: TokenMasks, *, keeps: bool) -> Tensor:
        """Apply token masks. `keeps`: to a copy, because log-probabilities need the raw logits."""
        logits_SV = logits_SV.clone() if keeps else logits_SV
        apply_token_mask(logits_SV, to_device(masks.mask, self._device), to_device(masks.rows, self._device))
        return logits_SV

    def _penalize(self, logits_SV: Tensor, step: _Step) -> None:
        is_prompt_RV, num_output_RV = self._counts()
        by_sample = (step.penalized, step.penalized_slot, step.repetition, step.frequency, step.presence)
        for samples, slots, repetition, frequency, presence in zip(*map(_in_parts, by_sample), strict=True):
            x_PV, num_PV = logits_SV.index_select(0, samples), num_output_RV.index_select(0, slots)
            is_output_PV = num_PV > 0
            is_seen_PV = is_prompt_RV.index_select(0, slots) | is_output_PV
            by = repetition.unsqueeze(1)
            x_PV = torch.where(is_seen_PV, torch.where(x_PV < 0, x_PV * by, x_PV / by), x_PV)
            x_PV -= frequency.unsqueeze(1) * num_PV
            x_PV -= presence.unsqueeze(1) * is_output_PV
            logits_SV.index_copy_(0, samples, x_PV)

    def _add_counts(self, token_ids_S: Tensor, step: _Step) -> None:
        if len(step.penalized):
            _, num_output_RV = self._counts()
            token_ids_P = token_ids_S.index_select(0, step.penalized).clamp_(min=0)  # NON_FINITE has no count
            index_P = step.penalized_slot * self._vocab_size + token_ids_P
            num_output_RV.view(-1).index_add_(0, index_P, torch.ones_like(index_P, dtype=torch.int32))

    def _logprobs(self, logits_SV: Tensor, token_ids_S: Tensor, step: _Step) -> Logprobs:
        """Log-probabilities of the samples that need them; zeros for the others."""
        num_samples, token_ids_S = len(token_ids_S), token_ids_S.clamp(min=0)
        if len(step.with_logprobs) == num_samples:
            return self.logprobs_of(logits_SV, token_ids_S, step.num_top)
        logits_AV, token_ids_A = (x.index_select(0, step.with_logprobs) for x in (logits_SV, token_ids_S))
        own, top_ids, top = self.logprobs_of(logits_AV, token_ids_A, step.num_top)
        own = _scatter(own, step.with_logprobs, num_samples)
        if top_ids is None or top is None:
            return Logprobs(own, None, None)
        return Logprobs(
            own, _scatter(top_ids, step.with_logprobs, num_samples), _scatter(top, step.with_logprobs, num_samples)
        )


def _has_effects(params: SamplingParams) -> bool:
    """Whether a greedy request needs more than the most likely token."""
    return bool(params.logit_bias) or params.has_penalties or params.min_tokens > 0 or params.logprobs is not None


def _scatter(values_A: Tensor, samples_A: Tensor, num_samples: int) -> Tensor:
    return values_A.new_zeros(num_samples, *values_A.shape[1:]).index_copy_(0, samples_A, values_A)


def _in_parts(x: Tensor) -> tuple[Tensor, ...]:
    return torch.split(x, _ROWS_AT_ONCE)


def _in_one_copy(parts: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Upload arrays of one type by one copy.

    Each starts at a multiple of 16 bytes: Triton compiles another kernel for pointers that do not.
    """
    ends = np.cumsum([-(-len(part) // 4) * 4 for part in parts])
    buffer = np.zeros(ends[-1], parts[0].dtype)
    starts = [0, *ends[:-1].tolist()]
    for start, part in zip(starts, parts, strict=True):
        buffer[start : start + len(part)] = part
    uploaded = to_device(buffer, device)
    return [uploaded[start : start + len(part)] for start, part in zip(starts, parts, strict=True)]
