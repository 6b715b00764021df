"""Connects the engine loop with prompt lookup: after each step it updates which requests draft."""

from __future__ import annotations

from collections.abc import Callable

from saccade.engine.core.prompt_lookup import WEIGHT, WEIGHT_ON_CPU, PromptLookup
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.core.statistics import Statistics
from saccade.engine.core.step import StepPlan, StepResult
from saccade.engine.core.step_sizes import MAX_DRAFTING


class Drafting:
    """Prompt lookup for the open requests. No effect if `max_draft_tokens` is 0."""

    def __init__(self, max_draft_tokens: int, *, is_cpu: bool) -> None:
        self._max_draft_tokens, self._is_cpu = max_draft_tokens, is_cpu
        self.lookup: PromptLookup | None = None
        """Proposes drafts to the planner. None: requests do not draft."""
        if max_draft_tokens:
            self.lookup = PromptLookup(weight=WEIGHT_ON_CPU if is_cpu else WEIGHT)

    def count_launch(self, plan: StepPlan, statistics: Statistics) -> None:
        """Count the drafts of a step that was launched."""
        if self.lookup is not None:
            statistics.num_draft_tokens += sum([len(chunk.drafts) for chunk in plan.chunks])

    def learn(
        self,
        plan: StepPlan,
        result: StepResult,
        scheduler: Scheduler,
        statistics: Statistics,
        token_cost: Callable[[int], float],
    ) -> None:
        """Count accepted drafts, and compare new tokens with predicted ones. `token_cost`: see `StepBudget`."""
        if self.lookup is None:
            return
        for chunk, given in zip(plan.chunks, result.chunks, strict=True):
            if chunk.drafts:
                statistics.num_accepted_draft_tokens += max(0, len(given.token_ids) - 1)
        if self._is_cpu:
            num_decoding = sum([chunk.reads_last_token for chunk in plan.chunks])
            self.lookup.set_cost(token_cost(num_decoding), self._max_draft_tokens)
        elif scheduler.num_running > MAX_DRAFTING:
            self.lookup.pause()
            return
        for chunk, given in zip(plan.chunks, result.chunks, strict=True):
            state = scheduler.find(chunk.request_id)
            if state is not None:
                self.lookup.observe(state, len(given.token_ids), len(chunk.drafts))

    def forget(self, request_id: str) -> None:
        """Drop the n-gram table of an ended request."""
        if self.lookup is not None:
            self.lookup.forget(request_id)
