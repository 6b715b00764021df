"""A front's link to the controller: once a second a report, answered by the view that the front follows."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping

from saccade.errors import ConfigError
from saccade.fleet.cluster.patience import within
from saccade.fleet.cluster.view import FleetView, FrontReport
from saccade.fleet.objectives import Outcome
from saccade.serve.rate_limit import Consumption

logger = logging.getLogger(__name__)

_REPORT_EVERY_S = 1.0
_TIMEOUT_S = 5.0
_MAX_OUTCOMES = 20_000
"""Outcomes of a model that are kept while the controller does not answer."""


class ControllerLink:
    """Sends reports in order, each until it is answered. While the controller is away the front keeps its view."""

    def __init__(
        self, front: str, url: str, sync: Callable[[bytes], Awaitable[bytes]], on_view: Callable[[FleetView], None], *,
        take_consumption: Callable[[], Mapping[str, Consumption]], take_poison: Callable[[], tuple[bytes, ...]],
    ) -> None:  # fmt: skip
        """`sync` sends a report to the controller and returns its answer."""
        self._front, self._url, self._sync, self._on_view = front, url, sync, on_view
        self._take_consumption, self._take_poison = take_consumption, take_poison
        self._outcomes: dict[str, list[Outcome]] = defaultdict(list)
        self._number = 0
        self._unanswered: FrontReport | None = None
        self._is_away = False

    def observe(self, model: str, outcome: Outcome) -> None:
        """Add how a request ended to the next report."""
        if len(outcomes := self._outcomes[model]) < _MAX_OUTCOMES:
            outcomes.append(outcome)

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            await self._report()
            await asyncio.sleep(_REPORT_EVERY_S)

    async def _report(self) -> None:
        report = self._unanswered = self._unanswered or self._next_report()
        try:
            answer = await within(_TIMEOUT_S, self._sync(report.to_bytes()))
            view = FleetView.from_bytes(answer)
        except ConfigError as error:
            self._note_absence(str(error))
            return
        except Exception as error:
            self._note_absence(f"no answer: {type(error).__name__}")
            return
        self._unanswered = None
        if self._is_away:
            logger.warning("the controller is back")
            self._is_away = False
        try:
            self._on_view(view)
        except Exception:  # the next view is followed again
            logger.exception("a view of the controller cannot be followed")

    def _next_report(self) -> FrontReport:
        self._number += 1
        outcomes, self._outcomes = self._outcomes, defaultdict(list)
        return FrontReport(
            front=self._front, number=self._number, url=self._url,
            outcomes={model: tuple(ended) for model, ended in outcomes.items()},
            consumption=self._take_consumption(), poison=self._take_poison(),
        )  # fmt: skip

    def _note_absence(self, reason: str) -> None:
        """Log once that the controller is away."""
        if not self._is_away:
            logger.warning("the controller is away (%s): versions and traffic stay as they are", reason)
            self._is_away = True
