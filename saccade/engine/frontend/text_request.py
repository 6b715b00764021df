"""One accepted request whose output is text: outputs of the core -> text, stop strings -> CompletionDelta."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from concurrent.futures import Future

from saccade.engine.core.messages import AddRequest
from saccade.engine.frontend.core_client import CoreClient
from saccade.engine.frontend.detokenizer import Detokenizer
from saccade.engine.frontend.open_request import OpenRequest
from saccade.engine.prompt import TokenPrompt
from saccade.engine.request import (
    CompletionDelta,
    Request,
    RequestOptions,
    RequestOutput,
    Timings,
    TokenLogprobs,
)
from saccade.engine.sampling_params import SamplingParams
from saccade.processor import Processor

logger = logging.getLogger(__name__)

_UNSTREAMED_INTERVAL = 32
"""Tokens per output of a request that needs no text before its end. An output costs as much as scheduling a token."""

OnDelta = Callable[[CompletionDelta], None]
"""Called from the front end's thread; it must return at once."""


class TextRequest(OpenRequest):
    """A request that gets deltas of text."""

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
        """`on_delta` gets the last delta after `on_end` is called."""
        super().__init__(
            request_id,
            prompt,
            queue_timeout_s=options.queue_timeout_s,
            timeout_s=options.timeout_s,
            core=core,
            on_end=on_end,
        )
        self._sampling, self._options = sampling, options
        self._on_delta, self._streams = on_delta, streams
        self._eos_ids = processor.eos_ids
        self._reads_text = streams or bool(sampling.stop)
        """Whether text is needed before the end."""
        self._detokenizer = Detokenizer(processor.decode, sampling)
        self._undecoded: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs | None] = [None]
        self._num_prompt_tokens = 0
        self._first_token_at: float | None = None

    # -------------------------------------------------------------- to the core

    def _message(self, prompt: TokenPrompt) -> AddRequest:
        sampling, options = self._sampling, self._options
        self._num_prompt_tokens = len(prompt.token_ids)
        request = Request(
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
            traceparent=options.traceparent,
        )
        return AddRequest(request=request, prompt=prompt)

    # -------------------------------------------------------------- from the core

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

    def _timings(self) -> Timings:
        moments = self._preprocessed_at, self._first_token_at
        preprocessed_s, first_token_s = [None if at is None else at - self.submitted_at for at in moments]
        return Timings(preprocessed_s=preprocessed_s, first_token_s=first_token_s)
