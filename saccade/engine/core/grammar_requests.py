"""Requests with a grammar: each waits until its grammar is compiled, then its tokens are sampled with masks.

The masks of a step are computed when the tokens before it are read, during the forward pass that is sampled with them. If that is too
short and other requests decode, the requests with a grammar are left out of a step, during which their masks are computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
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
"""Share of a step's time above which computing masks delays the step: the host also plans and launches the next one and passes on the
tokens of all requests."""

Find = Callable[[str], RequestState | None]


class GrammarRequests:
    """Grammars of open requests."""

    def __init__(
        self, grammars: Grammars | None, post: Callable[[GrammarCompiled], None], clock: Callable[[], float]
    ) -> None:
        """`grammars`: None if structured output is not available. `post` sends a message to the core from another thread."""
        self._grammars, self._post = grammars, post
        self._masks = None if grammars is None else NextMasks(grammars, clock)
        self._compiling: dict[str, tuple[AddRequest, Future[GrammarState]]] = {}
        self._states: dict[str, GrammarState] = {}

    # ---- compile

    @property
    def num_compiling(self) -> int:
        """Requests whose grammar is being compiled. The scheduler does not have them yet."""
        return len(self._compiling)

    @property
    def compiling(self) -> Collection[str]:
        """Ids of these requests."""
        return self._compiling.keys()

    def compile(self, message: AddRequest) -> Failure | None:
        """Compile the grammar of a request in another thread. Returns why it cannot be."""
        request, structured = message.request, message.request.sampling.structured
        if self._grammars is None or structured is None:
            return Failure("waiting", "structured output is not available here", "invalid_request")
        compiled = self._grammars.compile(structured)
        self._compiling[request.id] = message, compiled
        compiled.add_done_callback(lambda _: self._post(GrammarCompiled(request_id=request.id)))
        return None

    def cancel(self, request_id: str) -> bool:
        """Stop compiling the grammar of a request. False: it is not being compiled."""
        _, compiled = self._compiling.pop(request_id, (None, None))
        if compiled is None:
            return False
        compiled.cancel()
        return True

    def take_compiled(self, request_id: str) -> tuple[AddRequest, Failure | None] | None:
        """The request whose grammar is compiled, or why it failed. None: it was cancelled."""
        message, compiled = self._compiling.pop(request_id, (None, None))
        if message is None or compiled is None:
            return None
        try:
            self._states[request_id] = compiled.result()
        except UserError as error:
            return message, Failure("waiting", str(error), "invalid_request")
        except Exception as error:
            logger.warning("request %s: its grammar could not be compiled: %r", request_id, error, exc_info=error)
            return message, Failure("waiting", "the grammar could not be compiled")
        return message, None

    # ---- masks of a step

    def sampled_by(self, plan: StepPlan) -> list[str]:
        """Open requests with a grammar that a step samples a token of."""
        if not self._states:
            return []
        return [chunk.request_id for chunk in plan.chunks if chunk.samples and chunk.request_id in self._states]

    def are_masks_ready(self, plan: StepPlan) -> bool:
        """Whether a step can be sampled at once."""
        return self._masks is None or self._masks.are_ready(self.sampled_by(plan))

    def take_masks(self, plan: StepPlan) -> GrammarMasks | None:
        """The masks that a step is sampled with; waits for them."""
        return None if self._masks is None else self._masks.take(self.sampled_by(plan))

    def start_masks(self, plans: Iterable[StepPlan], find: Find) -> None:
        """Compute the next masks of the requests that these steps sample: of steps just read, and of one that waits for its masks."""
        if self._masks is None or not self._states:
            return
        names = [name for plan in plans for name in self.sampled_by(plan)]
        self._masks.start({name: self._states[name] for name in names if find(name) is not None})

    def deferred(self, step_s: float, num_decoding: int, find: Find) -> Collection[str]:
        """Requests to leave out of the next step while a token of theirs is not read: those with a grammar, if computing their masks
        takes long for a step of `step_s` and others of the `num_decoding` requests would wait."""
        if not self._states or self._masks is None or self._masks.last_duration_s < _LONG_MASKS * step_s:
            return ()
        states = [find(name) for name in self._states]
        num_with_grammar = sum([state is not None and state.is_decoding for state in states])
        return self._states.keys() if num_decoding > num_with_grammar else ()

    # ---- results

    def accept(self, result: StepResult) -> None:
        """Advance the grammars by the tokens of a step."""
        for given in result.chunks if self._states else ():
            if given.token_ids and (state := self._states.get(given.request_id)) is not None:
                state.accept(given.token_ids)

    def failed(self) -> list[tuple[str, Failure]]:
        """Requests that cannot continue, because their grammar exceeded a limit."""
        return [
            (name, Failure("running", str(state.error), "invalid_request"))
            for name, state in self._states.items()
            if state.error
        ]

    def with_failure(self, output: RequestOutput) -> RequestOutput:
        """A grammar that failed allows only the end of the sequence: an output that ends so has failed, not stopped."""
        state = self._states.get(output.request_id) if output.finish_reason == "stop" else None
        if state is None or state.error is None:
            return output
        return output._replace(finish_reason="failed", failure=Failure("running", state.error, "invalid_request"))

    def forget(self, request_id: str) -> None:
        """Drop the grammar of an ended request."""
        self._states.pop(request_id, None)
        if self._masks is not None:
            self._masks.forget(request_id)

    def close(self) -> None:
        """Stop threads and child processes."""
        if self._grammars is not None:
            self._grammars.close()
