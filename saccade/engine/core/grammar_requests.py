"""Requests with a grammar: each waits until its grammar is compiled, then its tokens are sampled with masks.

The masks of a step are computed as soon as the tokens before it are read, during the forward pass whose logits they
mask. If that takes too long and other requests decode, requests with a grammar skip a step, during which their masks
are computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future

from saccade.engine.core.grammar.grammars import Grammars
from saccade.engine.core.grammar.masks import GrammarMasks, NextMasks
from saccade.engine.core.grammar.state import GrammarState
from saccade.engine.core.messages import AddRequest, GrammarCompiled
from saccade.engine.core.request_state import RequestState
from saccade.engine.core.step import StepPlan, StepResult
from saccade.engine.request import Failure, RequestOutput
from saccade.errors import UserError

logger = logging.getLogger(__name__)

_LONG_MASKS = 0.1
"""Share of a step's time above which computing masks delays the step: meanwhile the host also plans, launches and sends
outputs."""

Find = Callable[[str], RequestState | None]


class GrammarRequests:
    """Grammars of open requests."""

    def __init__(
        self, grammars: Grammars | None, post: Callable[[GrammarCompiled], None], clock: Callable[[], float]
    ) -> None:
        """`grammars`: None without structured output. `post` sends a message to the core from any thread."""
        self._grammars, self._post = grammars, post
        self._masks = None if grammars is None else NextMasks(grammars, clock)
        self.compiling: dict[str, tuple[AddRequest, Future[GrammarState]]] = {}
        """Requests whose grammar is being compiled, by id. The scheduler does not have them yet."""
        self.states: dict[str, GrammarState] = {}
        """Grammars of the requests that the scheduler has, by id."""

    # ---- compile

    def compile(self, message: AddRequest) -> Failure | None:
        """Start compiling a request's grammar in another thread. Returns the failure if it cannot be compiled."""
        request, structured = message.request, message.request.sampling.structured
        if self._grammars is None or structured is None:
            return Failure("waiting", "structured output is not available here", "invalid_request")
        compiled = self._grammars.compile(structured)
        self.compiling[request.id] = message, compiled
        compiled.add_done_callback(lambda _: self._post(GrammarCompiled(request_id=request.id)))
        return None

    def cancel(self, request_id: str) -> bool:
        """Stop compiling a request's grammar. False: it is not being compiled."""
        _, compiled = self.compiling.pop(request_id, (None, None))
        if compiled is None:
            return False
        compiled.cancel()
        return True

    def take_compiled(self, request_id: str) -> tuple[AddRequest, Failure | None] | None:
        """The request, and the failure if its grammar could not be compiled. None: it was cancelled.

        The grammar is advanced by the output tokens that are known already.
        """
        message, compiled = self.compiling.pop(request_id, (None, None))
        if message is None or compiled is None:
            return None
        try:
            state = self.states[request_id] = compiled.result()
        except UserError as error:
            return message, Failure("waiting", str(error), "invalid_request")
        except Exception as error:
            logger.warning("request %s: its grammar could not be compiled: %r", request_id, error, exc_info=error)
            return message, Failure("waiting", "the grammar could not be compiled")
        if not state.accept(message.request.output_ids):
            return message, Failure("waiting", f"output_ids cannot be continued: {state.error}", "invalid_request")
        return message, None

    # ---- masks of a step; the loop skips these while no request has a grammar

    def sampled_by(self, plan: StepPlan) -> list[str]:
        """Open requests with a grammar for which the step samples a token."""
        return [chunk.request_id for chunk in plan.chunks if chunk.samples and chunk.request_id in self.states]

    def are_masks_ready(self, plan: StepPlan) -> bool:
        """Whether the masks of a step are computed, so that it can be sampled at once."""
        return self._masks is None or self._masks.are_ready(self.sampled_by(plan))

    def take_masks(self, plan: StepPlan) -> GrammarMasks | None:
        """The masks that a step is sampled with. Waits until they are computed."""
        return None if self._masks is None else self._masks.take(self.sampled_by(plan))

    def start_masks(self, plans: Iterable[StepPlan], find: Find) -> None:
        """Start computing the masks of the next tokens of all requests with a grammar that these plans sample."""
        if self._masks is None:
            return
        names = [name for plan in plans for name in self.sampled_by(plan)]
        self._masks.start({name: self.states[name] for name in names if find(name) is not None})

    def deferred(self, step_s: float, num_decoding: int, find: Find) -> Collection[str]:
        """Requests that the next step leaves out while one of their tokens is not read.

        These are all requests with a grammar, if computing masks takes long compared with a step of `step_s` and some
        of the `num_decoding` requests have no grammar.
        """
        if self._masks is None or self._masks.last_duration_s < _LONG_MASKS * step_s:
            return ()
        states = [find(name) for name in self.states]
        num_with_grammar = sum([state is not None and state.is_decoding for state in states])
        return self.states.keys() if num_decoding > num_with_grammar else ()

    # ---- results

    def update(self, result: StepResult, outputs: Sequence[RequestOutput]) -> list[RequestOutput]:
        """Advance the grammars by the sampled tokens of a step. Returns its outputs, with failures of grammars."""
        outputs = [self._with_failure(output) for output in outputs]
        for given in result.chunks:
            if given.token_ids and (state := self.states.get(given.request_id)) is not None:
                state.accept(given.token_ids)
        return outputs

    def failed(self) -> list[tuple[str, Failure]]:
        """Requests that cannot continue because their grammar exceeded a limit."""
        return [
            (name, Failure("running", str(state.error), "invalid_request"))
            for name, state in self.states.items()
            if state.error
        ]

    def _with_failure(self, output: RequestOutput) -> RequestOutput:
        """The output, failed instead of stopped if its grammar has failed.

        A failed grammar allows only the end of the sequence, so its request would end as stopped.
        """
        state = self.states.get(output.request_id) if output.finish_reason == "stop" else None
        if state is None or state.error is None:
            return output
        return output._replace(finish_reason="failed", failure=Failure("running", state.error, "invalid_request"))

    def forget(self, request_id: str) -> None:
        """Drop the grammar of an ended request."""
        self.states.pop(request_id, None)
        if self._masks is not None:
            self._masks.forget(request_id)

    def close(self) -> None:
        """Stop threads and child processes."""
        if self._grammars is not None:
            self._grammars.close()
