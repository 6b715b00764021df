"""Objectives: what a version of a model promises, and how one request or probe kept it.

    Objective(metric="errors", max_share=0.005, max_ratio=2.0)          at most 0.5 %, or twice the running version's
    Objective(metric="tpot", quantile=0.9, max_s=0.05)                  9 of 10 requests within 50 ms per token
    Objective(metric="tpot", quantile=0.9, max_ratio=1.2)               at most 20 % slower than the running version
    Objective(metric="probes", max_share=0.0)                           every probe is answered correctly

An objective with a maximum and a ratio is broken when both are exceeded: a load that slows every version breaks the
maximum, and is no reason to go back to the running version. While no user has the running version, the maximum alone
decides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from saccade.errors import ConfigError

LATENCIES = ("ttft", "tpot")
"""Metrics in seconds; the others are shares of requests or answers."""
_MIN_EXCEEDING = 5
"""Requests that must exceed a quantile, on average, in the fewest requests of a step."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one request of a version ended."""

    user: str
    """User by whom versions are assigned; of a request without a user, its own id."""
    version: str
    """Version that answered."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Metrics by name: `errors` and `refusals` are 0 or 1, `ttft` and `tpot` seconds. Others are absent."""
    experiment: str | None = None
    """Experiment that the user takes part in; None: in none."""
    variant: str | None = None
    """Variant by which the user has the version; None: the version is by the traffic of the versions."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """One promise about a version."""

    metric: Literal["errors", "refusals", "ttft", "tpot", "probes"]
    """Failed requests, requests refused for load, time to the first token, time per further token, wrong answers."""
    quantile: float | None = None
    """ttft and tpot: the quantile that counts, such as 0.9."""
    max_s: float | None = None
    """ttft and tpot: maximum of the quantile, in seconds."""
    max_share: float | None = None
    """errors, refusals and probes: maximum share of requests or answers."""
    max_ratio: float | None = None
    """Maximum ratio to the running version at the same time; 1.2 is 20 % worse. None: versions are not compared."""

    def __post_init__(self) -> None:
        self._check_fields()
        if self.is_latency and (self.quantile is None or not 0 < self.quantile < 1):
            raise ConfigError(
                f"objective {self.metric}: quantile is {self.quantile}. Use one between 0 and 1, such as 0.9"
            )
        if self.max_s is None and self.max_share is None and self.max_ratio is None:
            maximum = "max_s" if self.is_latency else "max_share"
            raise ConfigError(f"objective {self.name} promises nothing. Set {maximum} or max_ratio")
        if self.max_s is not None and self.max_s <= 0:
            raise ConfigError(f"objective {self.name}: max_s is {self.max_s:g}. Use seconds above 0")
        if self.max_share is not None and not 0 <= self.max_share < 1:
            raise ConfigError(f"objective {self.name}: max_share is {self.max_share:g}. Use a share from 0 up to 1")
        if self.max_ratio is not None and self.max_ratio < 1:
            raise ConfigError(f"objective {self.name}: max_ratio is {self.max_ratio:g}. Use 1 (equal) or more")

    @property
    def is_latency(self) -> bool:
        """Whether the metric is a time."""
        return self.metric in LATENCIES

    @property
    def name(self) -> str:
        """Name in decisions and logs, such as `tpot p90`."""
        return self.metric if self.quantile is None else f"{self.metric} p{100 * self.quantile:g}"

    @property
    def allowed_share(self) -> float | None:
        """Share of requests or answers that may exceed the maximum; None: there is no maximum."""
        if self.is_latency and self.quantile is not None:
            return None if self.max_s is None else 1 - self.quantile
        return self.max_share

    def exceeds_maximum(self, value: float) -> bool:
        """Whether the value of one request counts against the allowed share."""
        if self.is_latency:
            return self.max_s is not None and value > self.max_s
        return value > 0

    def _check_fields(self) -> None:
        """Refuse fields that say nothing about this metric."""
        other = {"max_share": self.max_share} if self.is_latency else {"quantile": self.quantile, "max_s": self.max_s}
        if self.metric == "probes":  # the running version does not answer them
            other["max_ratio"] = self.max_ratio
        if given := [name for name, value in other.items() if value is not None]:
            raise ConfigError(f"objective {self.metric} cannot be measured by {given[0]}. Remove it")


def check_measurable(objectives: Sequence[Objective], *, num_probes: int, min_requests: int) -> None:
    """Refuse objectives that a rollout could not measure with its probes and the fewest requests of a step."""
    kinds = [(one.name, one.max_s is None and one.max_share is None) for one in objectives]
    if repeated := [name for number, (name, kind) in enumerate(kinds) if (name, kind) in kinds[:number]]:
        raise ConfigError(f"two objectives are about {repeated[0]}. Remove one of them")
    for one in objectives:
        if one.metric == "probes" and not num_probes:
            raise ConfigError("objective probes cannot be measured: the model has no probes. Add [[models.probes]]")
        if one.quantile is not None and (1 - one.quantile) * min_requests < _MIN_EXCEEDING - 1e-9:
            needed = round(_MIN_EXCEEDING / (1 - one.quantile))
            raise ConfigError(
                f"objective {one.name} cannot be measured with {min_requests} requests per step. "
                f"Set rollout.min_requests to {needed} or more, or use a lower quantile"
            )
