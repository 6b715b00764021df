"""Count an open request for admission and for the rate limit of its key."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from saccade.engine.prompt import TokenPrompt
from saccade.serve.admission import Admission, AdmittedRequest, Refusal
from saccade.serve.errors import ApiError
from saccade.serve.keys import ApiKey
from saccade.serve.rate_limit import RateLimiter
from saccade.serve.record import RequestRecord


def overloaded(admission: Admission, refusal: Refusal) -> ApiError:
    """Return the error of a request that is refused for now, and count it."""
    admission.refuse(refusal)
    return ApiError(
        429, "the server is at its limit; try again later", code="overloaded", retry_after_s=refusal.retry_after_s
    )


class CountedRequest:
    """One admitted request, which counts for admission and for the rate limit of its key until it is closed."""

    def __init__(
        self,
        admission: Admission,
        admitted: AdmittedRequest,
        rates: RateLimiter,
        record: RequestRecord,
        key: ApiKey | None,
        num_charged: int,
    ) -> None:
        """`num_charged`: tokens that the key was charged by estimate."""
        self._admission, self._admitted, self._rates = admission, admitted, rates
        self._record, self._key, self._num_charged = record, key, num_charged

    def add_media(self, num_bytes: int) -> None:
        """Count media that are being fetched. Raises if the media of all requests are too large."""
        if (refusal := self._admission.add_media(self._admitted, num_bytes, time.monotonic())) is not None:
            raise overloaded(self._admission, refusal)

    def watch_preprocessing(self, prompts: Sequence[Future[TokenPrompt]]) -> None:
        """Count the request as preprocessed when its last prompt is ready."""
        loop, waiting = asyncio.get_running_loop(), list(prompts)

        def done(prompt: Future[TokenPrompt]) -> None:
            waiting.remove(prompt)
            if not waiting:
                self._admission.preprocessed(self._admitted, sum(map(_num_image_tokens, prompts)))

        for prompt in prompts:
            prompt.add_done_callback(partial(_post, loop, done))

    def close(self) -> None:
        """Count the end of the request. A second call has no effect."""
        if not self._admitted.is_open:
            return
        record, now = self._record, time.monotonic()
        is_whole = record.ending in ("stop", "length")
        self._admission.close(self._admitted, now, num_output_tokens=record.num_output_tokens if is_whole else None)
        if self._key is not None:
            num_used = record.num_prompt_tokens + record.num_output_tokens
            self._rates.settle_tokens(self._key, self._num_charged, num_used, now)


def _post(
    loop: asyncio.AbstractEventLoop, call: Callable[[Future[TokenPrompt]], None], prompt: Future[TokenPrompt]
) -> None:
    """Run a call in the event loop, from another thread. It has no effect after the loop has ended."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call, prompt)


def _num_image_tokens(prompt: Future[TokenPrompt]) -> int:
    if prompt.cancelled() or prompt.exception() is not None:
        return 0
    return sum(image.span.num_tokens for image in prompt.result().images)
