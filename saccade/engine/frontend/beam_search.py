"""Beam search on top of the engine's requests. Plain Python, no torch.

Each live beam is a request for one token with the log-probabilities of the most likely ones. Its prompt is the original
prompt followed by the tokens of the beam. The original is preprocessed once, and the prefix cache has all pages but the
last. Beams are batched like all other requests.

    prompt -> one request -> most likely tokens -> num_beams requests -> ... -> the best finished beam

The result is that of `transformers` with `do_sample=False, early_stopping=False`. The score of a live beam is the sum
of its log-probabilities. A beam finishes at an end-of-turn token or at `max_tokens`; its score is then divided by
`length ** length_penalty`. The search ends when `num_beams` beams are finished and the best live one, at its present
length, scores no better than the worst finished one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from saccade.engine.frontend.batch import Preprocess, progress_bar
from saccade.engine.frontend.front_end import FrontEnd
from saccade.engine.frontend.futures import done
from saccade.engine.prompt import TokenPrompt
from saccade.engine.request import Completion, CompletionDelta, RequestOptions, TokenLogprobs
from saccade.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from saccade.errors import ConfigError

_MAX_LENGTH_PENALTY = 100.0
_LIVE_BEAMS = 2
"""Live beams per running request: one computes while the host extends the other."""
TopTokens = Sequence[tuple[int, float]]
"""The most likely next tokens with their log-probabilities, best first."""


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """How beams are kept and scored. The names are those of `transformers`."""

    num_beams: int
    """Beams that are live at once; 1 is greedy decoding."""
    max_tokens: int = 256
    """Maximum number of output tokens."""
    length_penalty: float = 1.0
    """Exponent of the length by which a finished beam's score is divided: above 0 favours long outputs."""
    num_return_sequences: int = 1
    """Completions of each prompt, best first; `num_beams` at most."""

    def __post_init__(self) -> None:
        SamplingParams(max_tokens=self.max_tokens)
        if not _is_whole(self.num_beams) or not 1 <= self.num_beams < MAX_LOGPROBS:
            raise ConfigError(f"num_beams is {self.num_beams!r}; use a whole number from 1 to {MAX_LOGPROBS - 1}")
        if not _is_whole(self.num_return_sequences) or not 1 <= self.num_return_sequences <= self.num_beams:
            raise ConfigError(
                f"num_return_sequences is {self.num_return_sequences!r}; use 1 to num_beams, which is {self.num_beams}"
            )
        is_number = isinstance(self.length_penalty, int | float) and not isinstance(self.length_penalty, bool)
        if not is_number or not abs(self.length_penalty) <= _MAX_LENGTH_PENALTY:
            raise ConfigError(
                f"length_penalty is {self.length_penalty!r}; use a number from -{_MAX_LENGTH_PENALTY:g} to "
                f"{_MAX_LENGTH_PENALTY:g}"
            )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# ------------------------------------------------------------------ which beams are kept


class Beam(NamedTuple):
    """Output tokens of one hypothesis."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    score: float = 0.0
    """Sum of the log-probabilities; divided by the length penalty once it is finished."""

    def extended(self, token_id: int, logprob: float) -> Beam:
        """The beam with one more token."""
        return Beam((*self.token_ids, token_id), (*self.logprobs, logprob), self.score + logprob)


class Beams:
    """Live and finished beams of one prompt."""

    def __init__(self, params: BeamSearchParams, eos_ids: frozenset[int], max_tokens: int) -> None:
        self.live = [Beam()]
        """Best first, all of one length."""
        self.finished: list[Beam] = []
        """Best first, `num_beams` at most."""
        self.is_done = False
        """Whether no live beam, at its present length, can become one of the best."""
        self._params, self._eos_ids, self._max_tokens = params, eos_ids, max_tokens

    def extend(self, top_tokens: Sequence[TopTokens]) -> None:
        """Extend the live beams by their most likely tokens, `num_beams` and one for each end-of-turn token."""
        num_beams, length = self._params.num_beams, len(self.live[0].token_ids) + 1
        candidates = sorted(
            [
                (-beam.score - logprob, index, token_id, logprob)
                for index, (beam, top) in enumerate(zip(self.live, top_tokens, strict=True))
                for token_id, logprob in top
            ]
        )
        live: list[Beam] = []
        is_last = length >= self._max_tokens
        for rank, (_, index, token_id, logprob) in enumerate(candidates):
            if is_last or token_id in self._eos_ids:
                if rank < num_beams:  # an end that is less likely than `num_beams` continuations is none of the best
                    self._finish(self.live[index].extended(token_id, logprob))
            elif len(live) < num_beams:
                live.append(self.live[index].extended(token_id, logprob))
        self.live, is_full = live, len(self.finished) == num_beams
        self.is_done = not live or (is_full and self._penalized(live[0]) <= self.finished[-1].score)

    def _finish(self, beam: Beam) -> None:
        self.finished.append(beam._replace(score=self._penalized(beam)))
        self.finished.sort(key=lambda one: -one.score)
        del self.finished[self._params.num_beams :]

    def _penalized(self, beam: Beam) -> float:
        score: float = beam.score / len(beam.token_ids) ** self._params.length_penalty
        return score


# ------------------------------------------------------------------ the requests of one prompt


def search_all(
    front_end: FrontEnd,
    prompts: Sequence[Preprocess],
    params: BeamSearchParams,
    options: RequestOptions,
    *,
    progress: bool,
) -> list[Completion]:
    """Search all prompts and wait for their completions, best first for each. An interruption cancels all."""
    live = threading.Semaphore(max(1, _LIVE_BEAMS * front_end.info.max_requests // params.num_beams))
    searches: list[BeamSearch] = []
    try:
        with progress_bar(len(prompts), is_shown=progress) as advance:
            for preprocess in prompts:
                live.acquire()
                searches.append(BeamSearch(front_end, preprocess(), params, options))
                searches[-1].result.add_done_callback(advance)
                searches[-1].result.add_done_callback(lambda _: live.release())
            return [completion for search in searches for completion in search.result.result()]
    except BaseException:
        for search in searches:
            search.cancel()
        raise


class BeamSearch:
    """The search of one prompt. It continues by itself, in the callbacks of its requests."""

    def __init__(
        self, front_end: FrontEnd, prompt: Future[TokenPrompt], params: BeamSearchParams, options: RequestOptions
    ) -> None:
        """Submit the first request."""
        self.result: Future[list[Completion]] = Future()
        """The completions, best first; one with its failure if a request failed."""
        self._front_end, self._prompt, self._params, self._options = front_end, prompt, params, options
        vocab_size = front_end.info.vocab_size
        self._eos_ids = frozenset(token_id for token_id in front_end.processor.eos_ids if token_id < vocab_size)
        num_top = params.num_beams + len(self._eos_ids)
        if num_top > MAX_LOGPROBS:
            raise ConfigError(
                f"num_beams is {params.num_beams}; use up to {MAX_LOGPROBS - len(self._eos_ids)} with the "
                f"{len(self._eos_ids)} end-of-turn tokens of this checkpoint"
            )
        self._sampling = SamplingParams(max_tokens=1, logprobs=num_top, ignore_eos=True, seed=0)
        self._beams: Beams | None = None
        self._first: Completion | None = None
        self._is_cancelled = False
        self._request_ids: list[str] = []
        self._submit([prompt])

    def cancel(self) -> None:
        """End the search; its completion has the finish reason `cancelled`."""
        self._is_cancelled = True
        for request_id in self._request_ids:
            self._front_end.cancel(request_id)

    def _submit(self, prompts: Sequence[Future[TokenPrompt]]) -> None:
        """Submit a request for each live beam."""
        self._completions: list[Completion | None] = [None] * len(prompts)
        self._num_open = len(prompts)
        self._request_ids = []
        for index, prompt in enumerate(prompts):
            on_delta = partial(self._on_delta, index)
            self._request_ids.append(
                self._front_end.submit(prompt, self._sampling, on_delta, self._options, streams=False)
            )

    def _on_delta(self, index: int, delta: CompletionDelta) -> None:
        """Continue when the last request of the step has ended. An exception is the search's result: the front end's
        thread would only log it."""
        self._completions[index] = delta.completion
        self._num_open -= 1
        if self._num_open == 0:
            try:
                self._continue([one for one in self._completions if one is not None])
            except BaseException as error:
                self.result.set_exception(error)

    def _continue(self, completions: Sequence[Completion]) -> None:
        """Keep the best continuations, and submit them or end."""
        bad = next((one for one in completions if one.finish_reason in ("failed", "cancelled")), None)
        if bad is not None or self._is_cancelled:
            self._end_early(bad or replace(completions[0], finish_reason="cancelled"))
            return
        prompt = self._prompt.result()
        if self._beams is None or self._first is None:
            room = self._front_end.info.max_length - len(prompt.token_ids)
            self._beams = Beams(self._params, self._eos_ids, min(self._params.max_tokens, room))
            self._first = completions[0]
        self._beams.extend([one.logprobs[0].top if one.logprobs else () for one in completions])
        if self._beams.is_done:
            best = self._beams.finished[: self._params.num_return_sequences]
            self.result.set_result([self._completion(beam, self._first) for beam in best])
        else:
            self._submit([done(prompt.continued(beam.token_ids)) for beam in self._beams.live])

    def _completion(self, beam: Beam, first: Completion) -> Completion:
        return replace(
            first,
            text=self._front_end.processor.decode(beam.token_ids),
            token_ids=list(beam.token_ids),
            finish_reason="stop" if beam.token_ids[-1] in self._eos_ids else "length",
            logprobs=[TokenLogprobs(*token) for token in zip(beam.token_ids, beam.logprobs, strict=True)],
        )

    def _end_early(self, completion: Completion) -> None:
        """A failed or cancelled request ends the search, without output."""
        if self._first is not None:
            completion = replace(completion, num_prompt_tokens=self._first.num_prompt_tokens)
        self.result.set_result([replace(completion, text="", token_ids=[], logprobs=None)])
