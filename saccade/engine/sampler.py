"""Logits to tokens on the device, never waiting for it.

Legend: S places (one per logits row), V vocabulary, R rows, P places with penalties, A places that ask for log-probabilities,
K likeliest tokens.

A request may have several places in a step, one behind each guessed token. At every place, in this order:

    logit bias     added to the logits of the tokens it names
    penalties      repetition (tokens of prompt and answer, as Hugging Face), then frequency and presence (tokens of the answer
                   alone, as OpenAI and vLLM)
    bans           -inf for tokens that would end the answer, while it has fewer than `min_tokens`
    the kernel     temperature, top-k, top-p, min-p, and the draw: see `kernels/sampler.py`

Log-probabilities are log softmax of the raw logits: before bias, penalties, bans and temperature. The draw depends on a request's
seed and the token's index alone, so a request gets the same tokens in any row, in any batch, and after preemption.

What a request asks for is kept on the host, one record per row. A step gathers the records of its places and uploads them in two
copies. Penalties need to know which tokens came before; those counts live on the device, where they are updated with tokens the
host has not seen yet. They are allocated when the first request with penalties begins (`penalty_bytes`). Everything here must be
called on one stream: a row's next request overwrites its counts behind the last step that read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.device import to_device
from saccade.engine.request import Request, SamplingParams
from saccade.errors import RequestError
from saccade.kernels import sampler as kernel

_ROWS_AT_ONCE = 64
"""Logits rows that are penalised or normalised at once, which bounds the memory in between: 40 MB per copy at V = 152k."""

_GREEDY_BELOW = 1e-5
"""A temperature that leaves nothing to chance counts as 0."""

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
        ("min_tokens", np.int64),
        ("num_top", np.int64),
        ("is_taken", np.bool_),
        ("is_biased", np.bool_),
        ("has_penalties", np.bool_),
        ("wants_logprobs", np.bool_),
    ]
)
"""What is kept of a row's request, beside its biases and stop ids."""


class SampledStep(NamedTuple):
    """What was drawn at each place, on the device. Log-probabilities mean something only where the request asked for them."""

    token_ids: Tensor
    """[S] int64."""
    logprobs: Tensor | None
    """[S] fp32. None if nobody asked."""
    top_ids: Tensor | None
    """[S, K] int64, best first; K is the most that a request of this step asked for. None if that is 0."""
    top_logprobs: Tensor | None
    """[S, K] fp32."""


class Logprobs(NamedTuple):
    """Log-probabilities of given tokens, and of the K likeliest (None if K is 0), best first."""

    logprobs: Tensor
    top_ids: Tensor | None
    top_logprobs: Tensor | None


class _Step(NamedTuple):
    """What a step needs on the device."""

    temperature: Tensor  # these per place
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    seed: Tensor
    position: Tensor
    penalized: Tensor  # these per place with penalties, and this is which one
    penalized_row: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    biased: Tensor  # these per biased logit, and this is which one: place * V + token
    bias: Tensor
    banned: Tensor  # the banned logits: place * V + token
    asking: Tensor  # the places that ask for log-probabilities
    num_top: int


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Refuse token ids the model does not have."""
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        strangers = [token_id for token_id in ids if not 0 <= token_id < vocab_size]
        if strangers:
            raise RequestError(
                f"{name} names token {strangers[0]}, but the model has tokens 0 to {vocab_size - 1}. Use ids of its tokenizer"
            )


class Sampler:
    """Draws the tokens of all running requests. See the top of this file."""

    def __init__(self, *, vocab_size: int, num_rows: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._settings = np.zeros(num_rows, _SETTINGS)
        self._bias: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        self._stop_ids: dict[int, NDArray[np.int64]] = {}
        self._drawn: tuple[Tensor, _Step] | None = None
        self._is_prompt_RV: Tensor | None = None
        self._num_answer_RV: Tensor | None = None

    @property
    def penalty_bytes(self) -> int:
        """Device memory that the first request with penalties takes, for good."""
        return len(self._settings) * self._vocab_size * (torch.int32.itemsize + torch.bool.itemsize)

    def begin(self, row: int, request: Request, seed: int) -> None:
        """A request takes a row, the first time or again after preemption. Tokens it drew in earlier steps must have been read."""
        params = request.sampling
        self._settings[row] = (
            params.temperature if params.temperature >= _GREEDY_BELOW else 0.0,
            params.top_p,
            params.min_p,
            min(params.top_k or self._vocab_size, self._vocab_size),
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            seed,
            params.min_tokens,
            params.logprobs or 0,
            True,
            bool(params.logit_bias),
            params.has_penalties,
            params.logprobs is not None,
        )
        biases = params.logit_bias
        self._bias[row] = np.array(list(biases), np.int64), np.array(list(biases.values()), np.float32)
        self._stop_ids[row] = self._known(sorted(request.stop_ids))
        if params.has_penalties:
            self._count_anew(row, request)

    def end(self, row: int) -> None:
        """The row's request has ended or was preempted."""
        self._settings[row] = np.zeros((), _SETTINGS)
        self._bias.pop(row, None)
        self._stop_ids.pop(row, None)

    @torch.inference_mode()
    def sample(
        self,
        logits_SV: Tensor,
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        num_answered: NDArray[np.int64],
    ) -> SampledStep:
        """Draw one token per place. The logits are used up.

        For each place: the row of its request, the index its token will have among the request's tokens, and how many tokens of
        the answer come before it. Places of one request may differ by guessed tokens, unless it has penalties: the counts would
        have to go back when a guess is rejected.
        """
        if not len(rows):
            return SampledStep(torch.empty(0, dtype=torch.int64, device=self._device), None, None, None)
        step = self._upload(rows, positions, num_answered)
        adjusted_SV = self._adjust(logits_SV, step)
        token_ids = kernel.sample(
            adjusted_SV, step.temperature, step.top_k, step.top_p, step.min_p, step.seed, step.position
        ).token_ids
        self._drawn = token_ids, step
        if not len(step.asking):
            return SampledStep(token_ids, None, None, None)
        return SampledStep(token_ids, *self._ask(logits_SV, token_ids, step))

    @torch.inference_mode()
    def commit(self) -> None:
        """The tokens drawn last belong to their answers from now on. Until then drawing them again changes nothing."""
        if self._drawn is not None:
            self._count(*self._drawn)
            self._drawn = None

    @staticmethod
    @torch.inference_mode()
    def logprobs_of(logits_SV: Tensor, token_ids_S: Tensor, num_top: int) -> Logprobs:
        """log softmax of the logits in fp32 at the given tokens, and the largest `num_top` of it (V at most)."""
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
        """Those that have a logit: some checkpoints name an end-of-turn token, or embed tokens, beyond the head's vocabulary."""
        ids = np.array(token_ids, np.int64)
        return ids[ids < self._vocab_size]

    @torch.inference_mode()
    def _count_anew(self, row: int, request: Request) -> None:
        """Counts of a row from the tokens of its request."""
        is_prompt_RV, num_answer_RV = self._counts()
        prompt = self._known(request.token_ids[: request.num_prompt_tokens])
        answer = self._known(request.answer)
        ids_prompt, ids_answer = _in_one_copy([prompt, answer], self._device)
        is_prompt_RV[row].zero_().index_fill_(0, ids_prompt, True)
        num_answer_RV[row].zero_().index_add_(0, ids_answer, torch.ones_like(ids_answer, dtype=torch.int32))

    def _counts(self) -> tuple[Tensor, Tensor]:
        """Per row and token: whether the prompt has it, how often the answer has it."""
        if self._is_prompt_RV is None or self._num_answer_RV is None:
            shape = len(self._settings), self._vocab_size
            self._is_prompt_RV = torch.zeros(shape, dtype=torch.bool, device=self._device)
            self._num_answer_RV = torch.zeros(shape, dtype=torch.int32, device=self._device)
        return self._is_prompt_RV, self._num_answer_RV

    def _upload(self, rows: NDArray[np.int64], positions: NDArray[np.int64], num_answered: NDArray[np.int64]) -> _Step:
        chosen = self._settings[rows]
        assert chosen["is_taken"].all(), f"no request in rows {rows[~chosen['is_taken']]}"
        penalized, asking = np.flatnonzero(chosen["has_penalties"]), np.flatnonzero(chosen["wants_logprobs"])
        assert len(np.unique(rows[penalized])) == len(penalized), "a request with penalties has one place in a step"
        harsh = chosen[penalized]
        biased, bias = self._biases(np.flatnonzero(chosen["is_biased"]), rows)
        banned = self._bans(np.flatnonzero(num_answered < chosen["min_tokens"]), rows)
        numbers = _in_one_copy(
            [
                chosen["temperature"],
                chosen["top_p"],
                chosen["min_p"],
                chosen["top_k"].view(np.float32),  # the same 32 bits; read as integers again on the device
                harsh["repetition"],
                harsh["frequency"],
                harsh["presence"],
                bias,
            ],
            self._device,
        )
        indices = _in_one_copy(
            [chosen["seed"], positions, penalized, rows[penalized], biased, banned, asking], self._device
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
            penalized_row=indices[3],
            biased=indices[4],
            banned=indices[5],
            asking=indices[6],
            num_top=int(chosen["num_top"].max()),
        )

    def _biases(
        self, places: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        found = [(place, *self._bias[int(rows[place])]) for place in places]
        if not found:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        indices = np.concatenate([place * self._vocab_size + ids for place, ids, _ in found])
        return indices, np.concatenate([bias for _, _, bias in found])

    def _bans(self, places: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
        found = [place * self._vocab_size + self._stop_ids[int(rows[place])] for place in places]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _adjust(self, logits_SV: Tensor, step: _Step) -> Tensor:
        """Bias, penalties and bans, in fp32; the raw logits stay as they are if somebody asks for log-probabilities."""
        if not (len(step.biased) or len(step.penalized) or len(step.banned)):
            return logits_SV
        adjusted_SV = logits_SV.to(torch.float32, copy=len(step.asking) > 0).contiguous()
        if len(step.biased):
            adjusted_SV.view(-1).index_add_(0, step.biased, step.bias)
        if len(step.penalized):
            self._penalize(adjusted_SV, step)
        if len(step.banned):
            adjusted_SV.view(-1).index_fill_(0, step.banned, float("-inf"))
        return adjusted_SV

    def _penalize(self, logits_SV: Tensor, step: _Step) -> None:
        is_prompt_RV, num_answer_RV = self._counts()
        by_place = (step.penalized, step.penalized_row, step.repetition, step.frequency, step.presence)
        for places, rows, repetition, frequency, presence in zip(*map(_in_parts, by_place), strict=True):
            x_PV, num_PV = logits_SV.index_select(0, places), num_answer_RV.index_select(0, rows)
            is_answer_PV = num_PV > 0
            is_seen_PV = is_prompt_RV.index_select(0, rows) | is_answer_PV
            by = repetition.unsqueeze(1)
            x_PV = torch.where(is_seen_PV, torch.where(x_PV < 0, x_PV * by, x_PV / by), x_PV)
            x_PV -= frequency.unsqueeze(1) * num_PV
            x_PV -= presence.unsqueeze(1) * is_answer_PV
            logits_SV.index_copy_(0, places, x_PV)

    def _count(self, token_ids_S: Tensor, step: _Step) -> None:
        """The tokens just drawn belong to their answers from now on."""
        if len(step.penalized):
            _, num_answer_RV = self._counts()
            drawn_P = step.penalized_row * self._vocab_size + token_ids_S.index_select(0, step.penalized)
            num_answer_RV.view(-1).index_add_(0, drawn_P, torch.ones_like(drawn_P, dtype=torch.int32))

    def _ask(self, logits_SV: Tensor, token_ids_S: Tensor, step: _Step) -> Logprobs:
        """Log-probabilities at the places that ask; zeros elsewhere."""
        num_places = len(token_ids_S)
        if len(step.asking) == num_places:
            return self.logprobs_of(logits_SV, token_ids_S, step.num_top)
        logits_AV, token_ids_A = (x.index_select(0, step.asking) for x in (logits_SV, token_ids_S))
        own, top_ids, top = self.logprobs_of(logits_AV, token_ids_A, step.num_top)
        own = _spread(own, step.asking, num_places)
        if top_ids is None or top is None:
            return Logprobs(own, None, None)
        return Logprobs(own, _spread(top_ids, step.asking, num_places), _spread(top, step.asking, num_places))


def _spread(values_A: Tensor, places_A: Tensor, num_places: int) -> Tensor:
    return values_A.new_zeros(num_places, *values_A.shape[1:]).index_copy_(0, places_A, values_A)


def _in_parts(x: Tensor) -> tuple[Tensor, ...]:
    return torch.split(x, _ROWS_AT_ONCE)


def _in_one_copy(parts: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Arrays of one type on the device. Each begins at a multiple of 16 bytes, as Triton compiles anew for other pointers."""
    ends = np.cumsum([-(-len(part) // 4) * 4 for part in parts])
    buffer = np.zeros(ends[-1], parts[0].dtype)
    starts = [0, *ends[:-1].tolist()]
    for start, part in zip(starts, parts, strict=True):
        buffer[start : start + len(part)] = part
    uploaded = to_device(buffer, device)
    return [uploaded[start : start + len(part)] for start, part in zip(starts, parts, strict=True)]
