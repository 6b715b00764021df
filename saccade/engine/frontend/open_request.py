"""One accepted request, from its prompt to its last delta.

preprocessed prompt -> AddRequest -> core -> RequestOutput -> text, stop strings -> CompletionDelta
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

from saccade.engine.core.messages import AddRequest, CoreInfo, EndRequest
from saccade.engine.frontend.core_client import CoreClient
from saccade.engine.frontend.detokenizer import Detokenizer
from saccade.engine.prompt import TokenPrompt
from saccade.engine.request import (
    CompletionDelta,
    Failure,
    FinishReason,
    Request,
    RequestOptions,
    RequestOutput,
    Timings,
    TokenLogprobs,
)
from saccade.engine.sampling_params import SamplingParams
from saccade.errors import RequestError
from saccade.processor import Processor

logger = logging.getLogger(__name__)

_UNSTREAMED_INTERVAL = 32
"""Tokens per output of a request that needs no text before its end. An output costs as much as scheduling a token."""

OnDelta = Callable[[CompletionDelta], None]
"""Called from the front end's thread; it must return at once."""


class OpenRequest:
    """A request that has not ended. Only the front end's thread calls it, except for `cancel`."""

    def __init__(
        self,
        request_id: str,
        prompt: Future[TokenPrompt],
        sampling: SamplingParams,
        options: RequestOptions,
        on_delta: OnDelta,
        *,
        streams: bool,
        core: CoreClient,
        processor: Processor,
        on_end: Callable[[str], None],
    ) -> None:
        """`on_end` is called with the request's id before `on_delta` gets the last delta."""
        self.id = request_id
        self._prompt, self._sampling, self._options = prompt, sampling, options
        self._on_delta, self._on_end, self._streams = on_delta, on_end, streams
        self._core, self._eos_ids = core, processor.eos_ids
        self._reads_text = streams or bool(sampling.stop)
        """Whether text is needed before the end."""
        self._detokenizer = Detokenizer(processor.decode, sampling)
        self._undecoded: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs | None] = [None]
        self._num_prompt_tokens = 0
        self._is_cancelled = threading.Event()
        self._has_ended = False
        self.submitted_at = time.perf_counter()
        self._preprocessed_at: float | None = None
        self._first_token_at: float | None = None

    def cancel(self) -> None:
        """Cancel the request in any state, from any thread. No effect if it has ended."""
        self._is_cancelled.set()
        self._prompt.cancel()  # ends preprocessing
        self._core.send(EndRequest(request_id=self.id, reason="cancelled"))

    # -------------------------------------------------------------- to the core

    def start(self) -> None:
        """Send the request to the core, or end it if its prompt could not be preprocessed."""
        self._preprocessed_at = time.perf_counter()
        if self._has_ended:  # failed with the core
            return
        if self._is_cancelled.is_set():
            self.end_early("cancelled")
            return
        try:
            prompt = self._prompt.result()
            if (failure := _refusal(prompt.token_ids, self._core.info)) is not None:
                self.end_early("failed", failure)
                return
            self._core.send(AddRequest(request=self._request(prompt), prompt=prompt))
        except RequestError as error:
            self.end_early("failed", Failure("preprocessing", str(error), "invalid_request"))
        except CancelledError:
            self.end_early("cancelled")
        except BaseException as error:
            logger.warning("request %s failed while preprocessing: %r", self.id, error, exc_info=error)
            self.end_early("failed", Failure("preprocessing", "the request could not be preprocessed"))
        else:
            if self._is_cancelled.is_set():  # meanwhile, and before the core knew the request
                self._core.send(EndRequest(request_id=self.id, reason="cancelled"))

    def _request(self, prompt: TokenPrompt) -> Request:
        sampling, options = self._sampling, self._options
        self._num_prompt_tokens = len(prompt.token_ids)
        return Request(
            id=self.id,
            token_ids=prompt.token_ids,
            images=tuple(image.span for image in prompt.images),
            sampling=sampling,
            stop_ids=frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos_ids),
            seed=random.getrandbits(63) if sampling.seed is None else sampling.seed,
            priority=options.priority,
            adapter=options.adapter,
            salt=options.salt,
            queue_timeout_s=self._remaining(options.queue_timeout_s),
            timeout_s=self._remaining(options.timeout_s),
            stream_interval=1 if self._reads_text else _UNSTREAMED_INTERVAL,
        )

    def _remaining(self, timeout_s: float | None) -> float | None:
        """Remaining time of a limit that began when the request was submitted."""
        return None if timeout_s is None else max(0.0, timeout_s - (time.perf_counter() - self.submitted_at))

    # -------------------------------------------------------------- from the core

    def on_output(self, output: RequestOutput) -> None:
        """Process new tokens. No exception of a callback, not even SystemExit, may reach the front end's thread."""
        if self._has_ended:
            return
        try:
            self._process(output)
        except BaseException as error:
            logger.warning("request %s is cancelled, its callback failed: %r", self.id, error, exc_info=error)
            self._set_ended()
            self._end_in_core(output, "cancelled")

    def _end_in_core(self, output: RequestOutput, reason: FinishReason) -> None:
        if output.finish_reason is None:
            self._core.send(EndRequest(request_id=self.id, reason=reason))

    def _process(self, output: RequestOutput) -> None:
        if self._first_token_at is None and output.token_ids:
            self._first_token_at = time.perf_counter()
        self._logprobs += output.logprobs
        self._prompt_logprobs += output.prompt_logprobs
        num_known = len(self._detokenizer.token_ids)
        text, is_stopped = self._detokenize(output)
        if is_stopped:
            self._end_in_core(output, "stop")
            num_kept = len(self._detokenizer.token_ids) - num_known  # the stop string drops the tokens after these
            output = output._replace(token_ids=output.token_ids[:num_kept], logprobs=output.logprobs[:num_kept])
        if is_stopped or output.finish_reason is not None:
            self._end(output, text)
        elif self._streams:
            self._on_delta(CompletionDelta(text=text, token_ids=output.token_ids, logprobs=output.logprobs))

    def _detokenize(self, output: RequestOutput) -> tuple[str, bool]:
        """New text, and whether a stop string is complete. Text that is needed only at the end is decoded there."""
        if not self._reads_text:
            self._undecoded += output.token_ids
            return "", False
        text, is_stopped = self._detokenizer.push(output.token_ids)
        return text, is_stopped

    # -------------------------------------------------------------- the end

    def expire(self) -> None:
        """Fail the request if it is still being preprocessed when its deadline passes."""
        if self._preprocessed_at is None:
            message = "the request did not start within its time limit"
            self.end_early("failed", Failure("preprocessing", message, "timeout"))
            self._prompt.cancel()

    def end_early(self, reason: FinishReason, failure: Failure | None = None) -> None:
        """End a request that the core does not know."""
        if not self._has_ended:
            self._end(RequestOutput(request_id=self.id, finish_reason=reason, failure=failure), "")

    def _end(self, last: RequestOutput, text: str) -> None:
        """Send the last delta, with the whole completion."""
        if self._undecoded:
            text += self._detokenizer.push(self._undecoded).text
        text += self._detokenizer.finish()
        completion = self._detokenizer.completion(
            last,
            num_prompt_tokens=self._num_prompt_tokens,
            logprobs=self._logprobs if self._sampling.logprobs is not None else None,
            prompt_logprobs=self._prompt_logprobs if self._sampling.prompt_logprobs is not None else None,
            timings=self._timings(),
        )
        self._set_ended()
        try:
            self._on_delta(
                CompletionDelta(text=text, token_ids=last.token_ids, logprobs=last.logprobs, completion=completion)
            )
        except BaseException as error:
            logger.warning("request %s: the callback of its last delta failed: %r", self.id, error)

    def _set_ended(self) -> None:
        self._has_ended = True
        self._on_end(self.id)

    def _timings(self) -> Timings:
        moments = self._preprocessed_at, self._first_token_at
        preprocessed_s, first_token_s = [None if at is None else at - self.submitted_at for at in moments]
        return Timings(preprocessed_s=preprocessed_s, first_token_s=first_token_s)


def _refusal(token_ids: list[int], info: CoreInfo) -> Failure | None:
    """Why a prompt cannot be served, or None. A token id without an embedding would crash the device."""
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < info.vocab_size:
            message = f"token {token_id} is not in the model's vocabulary of {info.vocab_size}. Use its own tokenizer"
            return Failure("preprocessing", message, "invalid_request")
    if len(token_ids) >= info.max_length:
        message = (
            f"This model's maximum context length is {info.max_length} tokens, prompt and output together; the prompt "
            f"has {len(token_ids)}. Shorten it, or use smaller or fewer images"
        )
        return Failure("preprocessing", message, "context_length_exceeded")
    return None
