"""Time of an engine's work as linear functions of a request's size. An engine measures its own coefficients."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.engine.core.statistics import Statistics


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Coefficients of one replica."""

    patch_s: float
    """Seconds of the vision encoder per patch."""
    token_s: float
    """Seconds of the decoder per prompt token that is not cached."""
    request_s: float
    """Seconds of a request that depend on neither."""
    step_s: float
    """Seconds of a decode step of one request."""
    step_request_s: float
    """Seconds by which each further request makes a decode step longer."""
    target_step_s: float
    """Seconds of a step that computes prompts while requests decode; a step takes at least three times as long as
    one without prompts."""

    def work_s(self, patches: int, tokens: int) -> float:
        """Seconds until the first token on an idle engine, for patches and tokens that are not cached."""
        return self.request_s + patches * self.patch_s + tokens * self.token_s

    def decode_step_s(self, num_running: int) -> float:
        """Seconds of a step in which `num_running` requests decode and no prompt is computed."""
        return self.step_s + self.step_request_s * max(0, num_running - 1)

    def mixed_step_s(self, num_running: int) -> float:
        """Seconds of a step that computes prompts too."""
        return max(self.target_step_s, 3 * self.decode_step_s(num_running))

    def prompt_share(self, num_running: int) -> float:
        """Share of the engine's time that prompts and images get while `num_running` requests decode."""
        return 1 - self.decode_step_s(num_running) / self.mixed_step_s(num_running) if num_running else 1.0


def measured_costs(statistics: Statistics, target_step_ms: float | None, assumed: CostModel) -> CostModel:
    """The coefficients that an engine has measured; those that it has not are assumed."""
    if not statistics.step_s:
        return assumed
    token_s, step_s = statistics.token_s, statistics.step_s
    return CostModel(
        patch_s=statistics.patch_s or assumed.patch_s * token_s / assumed.token_s,
        token_s=token_s,
        request_s=step_s,
        step_s=step_s,
        step_request_s=token_s,
        target_step_s=(target_step_ms or 0.0) / 1e3,
    )


H200_8B = CostModel(
    patch_s=2.9e-6, token_s=28e-6, request_s=3.2e-3, step_s=4.08e-3, step_request_s=21e-6, target_step_s=13e-3
)  # fmt: skip
"""An 8B model on one H200; docs/results/fleet.md derives each coefficient."""
