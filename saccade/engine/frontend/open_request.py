"""One accepted request, from its prompt to its last output.

    preprocessed prompt -> AddRequest -> core -> RequestOutput

What becomes of the outputs is up to the kind of request: text (`text_request.py`), or nothing but outputs
(`saccade.engine.host`).
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

from saccade.engine.core.messages import AddRequest, CoreInfo, EndRequest
from saccade.engine.frontend.core_client import CoreClient
from saccade.engine.prompt import TokenPrompt
from saccade.engine.request import Failure, FinishReason, RequestOutput
from saccade.errors import RequestError

logger = logging.getLogger(__name__)


class OpenRequest(ABC):
    """A request that has not ended. Only the thread of `OpenRequests` calls it, except for `cancel`."""

    def __init__(
        self,
        request_id: str,
        prompt: Future[TokenPrompt],
        *,
        queue_timeout_s: float | None,
        timeout_s: float | None,
        core: CoreClient,
        on_end: Callable[[str], None],
    ) -> None:
        """The limits count from now. `on_end` is called with the request's id before its last output is passed on."""
        self.id, self.prompt = request_id, prompt
        self.limits_s = [limit for limit in (queue_timeout_s, timeout_s) if limit is not None]
        """Limits that hold while the prompt is preprocessed."""
        self._core, self._on_end = core, on_end
        self._is_cancelled = threading.Event()
        self._has_ended = False
        self.submitted_at = time.perf_counter()
        self._preprocessed_at: float | None = None

    @abstractmethod
    def _message(self, prompt: TokenPrompt) -> AddRequest | Failure:
        """The message that adds the request to the core, or why it cannot be served."""

    @abstractmethod
    def _process(self, output: RequestOutput) -> None:
        """Pass on an output of the core; call `_set_ended` before the last one."""

    def cancel(self) -> None:
        """Cancel the request in any state, from any thread. No effect if it has ended."""
        self._is_cancelled.set()
        self.prompt.cancel()  # ends preprocessing
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
            message = self._checked_message(self.prompt.result())
            if isinstance(message, Failure):
                self.end_early("failed", message)
                return
            self._core.send(message)
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

    def _checked_message(self, prompt: TokenPrompt) -> AddRequest | Failure:
        message = self._message(prompt)
        if isinstance(message, Failure):
            return message
        return _refusal(message.prompt.token_ids, self._core.info) or message

    def _remaining(self, timeout_s: float | None) -> float | None:
        """Remaining time of a limit that began when the request was submitted."""
        return None if timeout_s is None else max(0.0, timeout_s - (time.perf_counter() - self.submitted_at))

    # -------------------------------------------------------------- from the core

    def on_output(self, output: RequestOutput) -> None:
        """Process an output. No exception of a callback, not even SystemExit, may reach the thread that calls this."""
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

    # -------------------------------------------------------------- the end

    def expire(self) -> None:
        """Fail the request if it is still being preprocessed when its deadline passes."""
        if self._preprocessed_at is None:
            message = "the request did not start within its time limit"
            self.end_early("failed", Failure("preprocessing", message, "timeout"))
            self.prompt.cancel()

    def end_early(self, reason: FinishReason, failure: Failure | None = None) -> None:
        """End a request that the core does not know."""
        self.on_output(RequestOutput(request_id=self.id, finish_reason=reason, failure=failure))

    def _set_ended(self) -> None:
        self._has_ended = True
        self._on_end(self.id)


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
