"""A/B experiments: which users get which variant, and what the variants' outcomes say, at any time one looks.

    variants = (Variant(name="bf16", version="may"), Variant(name="int4", version="may-int4"))
    experiment = Experiment(name="quantized", variants=variants)
    variant = experiment.variant_of(user)
    results = Results(experiment)
    results.observe(user, variant.name, {"errors": 0.0, "tpot": 0.011})
    results.report()                      # plain data for status and page

Users are assigned by weighted rendezvous hashing with the experiment's name as salt: a user keeps the variant,
experiments are independent of each other, and a changed proportion moves only as many users as it must. Requests of one
user are alike, so the unit of every statistic is the user: a metric's mean is the mean over users of each user's mean.

Both tests may be looked at any time. The sample ratio is tested by an e-value of the counts of users, with a Dirichlet
prior around the proportions (Lindon and Malek, 2022); means are compared by asymptotic confidence sequences
(Waudby-Smith and others, 2021).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from saccade.errors import ConfigError
from saccade.fleet.comparison import position

_MIN_USERS = 100
"""Users of each variant before their means are compared."""
_MAX_USERS = 20_000
"""Users of an experiment that are remembered; further ones do not count. They are 3 MB of a snapshot."""
_PRIOR_USERS = 200.0
"""Weight of the prior of the sample ratio: more finds smaller deviations, later."""
_SAMPLE_RATIO_ALPHA = 0.001
"""Probability that the sample ratio is suspected by chance."""
_TUNED_FOR = 2000
"""Number of users at which intervals are nearly as narrow as possible."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One of the versions that an experiment compares."""

    name: str
    """Name of the variant."""
    version: str
    """Version of the model that its users get."""
    proportion: float = 1.0
    """Users in proportion to those of the other variants."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A comparison of variants; the first one is the control."""

    name: str
    """Name of the experiment. Another name assigns users again."""
    variants: tuple[Variant, ...]
    """Variants, the control first."""
    share: float = 1.0
    """Share of users who take part, above 0 and up to 1. The others follow the traffic of the versions."""
    metrics: tuple[Literal["errors", "refusals", "ttft", "tpot"], ...] = ("errors", "ttft", "tpot")
    """Metrics of outcomes that are compared."""
    false_verdicts: float = 0.05
    """Maximum probability of a verdict about variants that do not differ, over all metrics and variants together."""

    def __post_init__(self) -> None:
        names = [variant.name for variant in self.variants]
        if len(names) < 2 or len(set(names)) < len(names):
            raise ConfigError(f"experiment {self.name!r} has variants {names}. Use two or more, with distinct names")
        if any(not 0 < variant.proportion < math.inf for variant in self.variants):
            raise ConfigError(f"experiment {self.name!r}: proportions must be above 0. Remove a variant without users")
        if not 0 < self.share <= 1:
            raise ConfigError(f"experiment {self.name!r}: share is {self.share:g}. Use a share above 0 and up to 1")
        if not self.metrics or len(set(self.metrics)) < len(self.metrics):
            raise ConfigError(f"experiment {self.name!r} has metrics {list(self.metrics)}. Name distinct ones")
        if not 0 < self.false_verdicts < 1:
            raise ConfigError(f"false_verdicts is {self.false_verdicts:g}. Use a probability, such as 0.05")

    @property
    def versions(self) -> frozenset[str]:
        """Versions of the variants."""
        return frozenset(variant.version for variant in self.variants)

    def has(self, user: str) -> bool:
        """Whether a user takes part. A larger share adds users and removes none."""
        return position(user, self.name) < self.share

    def variant_of(self, user: str) -> Variant:
        """Variant of a user; requests without a user pass their own id."""

        def priority(variant: Variant) -> float:
            draw = position(user, f"{self.name}/{variant.name}")
            return variant.proportion / -math.log(draw) if draw > 0 else 0.0

        return max(self.variants, key=priority)

    def expected_share(self, variant: Variant) -> float:
        """Share of the experiment's users that a variant should have."""
        return variant.proportion / sum(one.proportion for one in self.variants)


def shares_with(experiments: Iterable[tuple[Experiment, bool]], split: Mapping[str, float]) -> dict[str, float]:
    """Share of all users that each version has, of experiments with whether they run, and of the versions' traffic.

    A user takes part in the first experiment that has them, and follows the traffic while it does not run.
    """
    shares, remaining, in_experiments = dict.fromkeys(split, 0.0), 1.0, 0.0
    for experiment, is_running in experiments:
        taken = remaining * experiment.share
        remaining -= taken
        if is_running:
            in_experiments += taken
            for variant in experiment.variants:
                share = taken * experiment.expected_share(variant)
                shares[variant.version] = shares.get(variant.version, 0.0) + share
    for version, share in split.items():
        shares[version] += (1 - in_experiments) * share
    return {version: share for version, share in shares.items() if share > 0}


class _UserMeans:
    """Mean and variance, over users, of each user's mean of a metric."""

    def __init__(self) -> None:
        self.users: dict[float, tuple[int, float]] = {}
        """{user: (number of values, their mean)}."""
        self._sum = self._sum_of_squares = 0.0

    def add(self, user: float, value: float) -> None:
        """Count one value of a user."""
        count, mean = self.users.get(user, (0, 0.0))
        new = mean + (value - mean) / (count + 1)
        self.users[user] = (count + 1, new)
        self._sum += new - mean
        self._sum_of_squares += new * new - mean * mean

    @property
    def mean(self) -> float | None:
        """Mean over users; None: no user has a value."""
        return self._sum / len(self.users) if self.users else None

    @property
    def squared_error(self) -> float:
        """Squared standard error of the mean."""
        count = len(self.users)
        return max(0.0, self._sum_of_squares - self._sum**2 / count) / count**2

    def to_plain(self) -> dict[str, Any]:
        """All state, as plain data."""
        users = [[user, count, mean] for user, (count, mean) in self.users.items()]
        return {"users": users, "sums": [self._sum, self._sum_of_squares]}

    def restore(self, plain: dict[str, Any]) -> None:
        """Continue from `to_plain()`."""
        self.users = {user: (count, mean) for user, count, mean in plain["users"]}
        self._sum, self._sum_of_squares = plain["sums"]


class Results:
    """Outcomes of an experiment so far."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self._shares = {variant.name: experiment.expected_share(variant) for variant in experiment.variants}
        self._users: dict[str, dict[float, None]] = {name: {} for name in self._shares}  # in order: a set has none
        self._num_requests = dict.fromkeys(self._shares, 0)
        self._means: dict[str, dict[str, _UserMeans]] = {
            name: {metric: _UserMeans() for metric in experiment.metrics} for name in self._shares
        }
        self._log_e_ratio = self._max_log_e_ratio = 0.0

    def observe(self, user: str, variant: str, values: Mapping[str, float]) -> None:
        """Count the outcome of one request; metrics that were not measured are absent."""
        key = position(user, self.experiment.name)
        self._num_requests[variant] += 1
        if key not in self._users[variant]:
            if sum(map(len, self._users.values())) >= _MAX_USERS:
                return
            self._test_ratio(variant)
            self._users[variant][key] = None
        for metric, means in self._means[variant].items():
            if (value := values.get(metric)) is not None:
                means.add(key, value)

    def report(self) -> dict[str, Any]:
        """Counts, metrics and verdicts, as plain data."""
        control, *others = self._shares
        pairs = [(name, metric) for name in others for metric in self.experiment.metrics]
        alpha = self.experiment.false_verdicts / len(pairs)
        return {
            "experiment": self.experiment.name,
            "sample_ratio": {"is_as_expected": self._has_expected_ratio, "log_e_value": self._max_log_e_ratio},
            "variants": {name: self._describe(name) for name in self._shares},
            "comparisons": [self._compare(metric, control, name, alpha) for name, metric in pairs],
        }

    def to_plain(self) -> dict[str, Any]:
        """All state as plain data, so that another controller can continue."""
        return {
            "users": {name: list(users) for name, users in self._users.items()},
            "num_requests": dict(self._num_requests),
            "means": {
                name: {metric: one.to_plain() for metric, one in means.items()} for name, means in self._means.items()
            },
            "log_e_ratio": [self._log_e_ratio, self._max_log_e_ratio],
        }

    def restore(self, plain: dict[str, Any]) -> None:
        """Continue from `to_plain()` of results of the same experiment."""
        self._users = {name: dict.fromkeys(users) for name, users in plain["users"].items()}
        self._num_requests = dict(plain["num_requests"])
        for name, means in self._means.items():
            for metric, one in means.items():
                one.restore(plain["means"][name][metric])
        self._log_e_ratio, self._max_log_e_ratio = plain["log_e_ratio"]

    def _test_ratio(self, variant: str) -> None:
        """Multiply the e-value by the likelihood ratio of a new user's variant: predicted from counts to expected."""
        share, counted = self._shares[variant], sum(map(len, self._users.values()))
        predicted = (_PRIOR_USERS * share + len(self._users[variant])) / (_PRIOR_USERS + counted)
        self._log_e_ratio += math.log(predicted / share)
        self._max_log_e_ratio = max(self._max_log_e_ratio, self._log_e_ratio)

    @property
    def _has_expected_ratio(self) -> bool:
        return self._max_log_e_ratio < -math.log(_SAMPLE_RATIO_ALPHA)

    def _describe(self, variant: str) -> dict[str, Any]:
        """Numbers of one variant."""
        means = {metric: one.mean for metric, one in self._means[variant].items()}
        return {
            "users": len(self._users[variant]), "expected_share": self._shares[variant],
            "requests": self._num_requests[variant], "means": means,
        }  # fmt: skip

    def _compare(self, metric: str, control: str, variant: str, alpha: float) -> dict[str, Any]:
        """Difference of a metric from the control, with an interval that holds at all times together."""
        ours, theirs = self._means[variant][metric], self._means[control][metric]
        found: dict[str, Any] = {"metric": metric, "variant": variant, "control": control}
        if min(len(ours.users), len(theirs.users)) < _MIN_USERS or ours.mean is None or theirs.mean is None:
            return found | {"verdict": f"fewer than {_MIN_USERS} users"}
        difference = ours.mean - theirs.mean
        num_users = len(ours.users) + len(theirs.users)
        radius = interval_radius(ours.squared_error + theirs.squared_error, num_users, alpha)
        low, high = difference - radius, difference + radius
        verdict = "higher" if low > 0 else "lower" if high < 0 else "no difference found"
        if not self._has_expected_ratio:
            verdict = "none: users are missing from a variant"
        return found | {"difference": difference, "low": low, "high": high, "verdict": verdict}


def interval_radius(squared_error: float, num_users: int, alpha: float) -> float:
    """Half the width of a confidence sequence: the interval is missed at any time with probability `alpha`."""
    scale = (-2 * math.log(alpha) + math.log(-2 * math.log(alpha) + 1)) / _TUNED_FOR
    seen = num_users * scale
    return math.sqrt(squared_error * 2 * (seen + 1) / seen * math.log(math.sqrt(seen + 1) / alpha))
