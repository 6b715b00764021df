"""Messages between fronts and the controller: a front sends a `FrontReport` every second and gets a `FleetView`.

    answer = controller.sync(report.to_bytes())
    view = FleetView.from_bytes(answer)

A message is msgpack of plain data with a version number before it. A message of another version is refused by one line,
and the front keeps the view that it has.

A front numbers its reports from 1 and sends a report again under its number until it is answered. The controller counts
a report once, and repeats what the lost answer had.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgpack

from saccade.config import decode, encode
from saccade.errors import ConfigError
from saccade.fleet.config import VersionConfig
from saccade.fleet.experiments import Experiment, shares_with
from saccade.fleet.objectives import Outcome
from saccade.fleet.split import Split
from saccade.serve.rate_limit import Consumption

MESSAGE_VERSION = 5
"""Version of both messages; increases when a field is added, removed or changes its meaning."""

_MAX_DECISIONS = 20
"""Decisions that a view has; the state folder has all of them."""
_MAX_REASON = 500
"""Characters of a reason in a view."""

VersionState = Literal["starting", "probing", "ready", "draining"]
"""Phase of a version. Only a `ready` one has users; a `draining` one ends the requests that it has."""


@dataclass(frozen=True, kw_only=True)
class FrontReport:
    """What happened at a front since its report before."""

    front: str
    """Id of the front's process, unique for all time."""
    number: int
    """Number of the report, from 1. A report that was not answered is sent again, unchanged, under its number."""
    url: str
    """Address at which the front accepts requests."""
    outcomes: Mapping[str, tuple[Outcome, ...]] = field(default_factory=dict)
    """How requests ended, by model."""
    consumption: Mapping[str, Consumption] = field(default_factory=dict)
    """What was taken from rate limits, by the SHA-256 of the API key."""
    poison: tuple[bytes, ...] = ()
    """Digests of requests that have killed engines and are to be refused everywhere."""

    def to_bytes(self) -> bytes:
        """The report as a message."""
        outcomes = {
            model: [(one.user, one.version, dict(one.values), one.experiment, one.variant) for one in ended]
            for model, ended in self.outcomes.items()
        }
        return _pack((self.front, self.number, self.url, outcomes, _plain_consumption(self.consumption), self.poison))

    @classmethod
    def from_bytes(cls, message: bytes) -> FrontReport:
        """Read a message; raises ConfigError for one of another version."""
        front, number, url, outcomes, consumption, poison = _unpack(message, 6)
        return cls(
            front=front, number=number, url=url,
            outcomes={
                model: tuple(
                    Outcome(user=user, version=version, values=values, experiment=experiment, variant=variant)
                    for user, version, values, experiment, variant in ended
                )
                for model, ended in outcomes.items()
            },
            consumption=_consumption(consumption), poison=tuple(poison),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class VersionView:
    """A version of a model that runs."""

    config: VersionConfig
    """Checkpoint, adapters and engine settings."""
    state: VersionState
    """Its phase."""
    num_encoders: int | None = None
    """Encoder replicas that serve. None: it has none."""


@dataclass(frozen=True, kw_only=True)
class ExperimentView:
    """An experiment of a model."""

    config: Experiment
    """Variants, and which users take part."""
    is_running: bool
    """Whether its users have their variants; else they follow the split."""


class Assignment(NamedTuple):
    """What a user has of a model."""

    version: str | None
    """Version; None: none is ready."""
    experiment: str | None = None
    """Experiment that the user takes part in; None: in none."""
    variant: str | None = None
    """Variant by which the user has the version; None: the version is by the split."""


@dataclass(frozen=True, kw_only=True)
class ModelView:
    """A model, the versions that run, and who gets which."""

    name: str
    """Name of the model in requests."""
    versions: tuple[VersionView, ...]
    """Versions that run or start, in the order of the file; earlier ones that drain are last."""
    split: Split
    """Versions that have users by their traffic."""
    experiments: tuple[ExperimentView, ...] = ()
    """Experiments of the file. A user takes part in the first one that has them."""

    @property
    def adapters(self) -> frozenset[str]:
        """Adapters of any version that is ready: names that requests may ask for."""
        return frozenset(name for one in self.versions if one.state == "ready" for name in one.config.adapters)

    @property
    def shares(self) -> dict[str, float]:
        """Share of all users that each version has, by experiments and by the split."""
        return shares_with(((one.config, one.is_running) for one in self.experiments), self.split.shares)

    def assign(self, user: str, able: Collection[str]) -> Assignment:
        """Return the version of a user, and the experiment by which it is. `able`: those that can answer now.

        An experiment counts only for requests that all its versions can answer: variants are compared by the same ones.
        """
        by_split = self.split.version_of(user)
        experiment = next((one for one in self.experiments if one.config.has(user)), None)
        if experiment is None:
            return Assignment(by_split)
        if not experiment.is_running or not experiment.config.versions <= set(able):
            return Assignment(by_split, experiment.config.name)
        variant = experiment.config.variant_of(user)
        return Assignment(variant.version, experiment.config.name, variant.name)


@dataclass(frozen=True, kw_only=True)
class DecisionView:
    """A decision of the controller, without its evidence."""

    number: int
    """Number of the decision, from 1."""
    time_s: float
    """When it was made, in seconds since 1970."""
    what: str
    """What happens, such as `ramping` or `rolled back`."""
    reason: str
    """Why."""
    model: str | None = None
    """Model that it is about; None: the whole fleet."""
    version: str | None = None
    """Version that it is about; None: the whole model."""
    share: float | None = None
    """Share of users that the version has from then on, if the decision is about that."""


def newest_decisions(decisions: Iterable[Mapping[str, Any]]) -> tuple[DecisionView, ...]:
    """The last ones of a driver's recent decisions, as a view has them."""
    return tuple(
        DecisionView(
            number=one["number"], time_s=one["time_s"], what=one["what"], reason=one["reason"][:_MAX_REASON],
            model=one["model"], version=one["version"], share=one["share"],
        )
        for one in list(decisions)[-_MAX_DECISIONS:]
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FleetView:
    """What a front needs to know of the fleet."""

    epoch: int
    """Epoch of the controller's lease. A front ignores a view with a smaller one than it has seen."""
    generation: int
    """Number of the desired state that the view follows."""
    models: tuple[ModelView, ...]
    """Models of the fleet."""
    num_fronts: int = 1
    """Fronts that are alive; each one has this part of limits that hold over all fronts together."""
    consumption: Mapping[str, Consumption] = field(default_factory=dict)
    """What other fronts took from rate limits since the last answer, by the SHA-256 of the API key."""
    poison: frozenset[bytes] = frozenset()
    """Digests of requests that are refused."""
    decisions: tuple[DecisionView, ...] = ()
    """The controller's newest decisions, oldest first. People read them; a front does not act on them."""
    reports: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """Results of experiments by model, as `ExperimentRun.report` has them. People read them too."""

    def to_bytes(self) -> bytes:
        """The view as a message."""
        models, decisions = [encode(one) for one in self.models], [encode(one) for one in self.decisions]
        consumption, poison = _plain_consumption(self.consumption), sorted(self.poison)
        return _pack(
            (self.epoch, self.generation, models, self.num_fronts, consumption, poison, decisions, dict(self.reports))
        )

    @classmethod
    def from_bytes(cls, message: bytes) -> FleetView:
        """Read a message; raises ConfigError for one of another version."""
        epoch, generation, models, num_fronts, consumption, poison, decisions, reports = _unpack(message, 8)
        return cls(
            epoch=epoch, generation=generation, models=tuple(decode(ModelView, one, "fleet view") for one in models),
            num_fronts=num_fronts, consumption=_consumption(consumption), poison=frozenset(poison),
            decisions=tuple(decode(DecisionView, one, "fleet view") for one in decisions), reports=reports,
        )  # fmt: skip


def _plain_consumption(consumption: Mapping[str, Consumption]) -> dict[str, tuple[int, int]]:
    return {key: (one.requests, one.tokens) for key, one in consumption.items()}


def _consumption(plain: Mapping[str, tuple[int, int]]) -> dict[str, Consumption]:
    return {key: Consumption(requests=requests, tokens=tokens) for key, (requests, tokens) in plain.items()}


def _pack(fields: tuple[Any, ...]) -> bytes:
    packed: bytes = msgpack.packb((MESSAGE_VERSION, *fields))
    return packed


def _unpack(message: bytes, num_fields: int) -> list[Any]:
    """Fields of a message of this version."""
    try:
        unpacked: list[Any] = msgpack.unpackb(message)
        version, *fields = unpacked
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ConfigError("this is no message between a front and a controller") from error
    if version != MESSAGE_VERSION:
        raise ConfigError(
            f"the fleet's messages have version {version}, and this process knows version {MESSAGE_VERSION}. "
            "Run the same version of Saccade everywhere: saccade fleet up"
        )
    if len(fields) != num_fields:
        raise ConfigError("this is no message between a front and a controller")
    return fields
