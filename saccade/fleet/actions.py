"""What the driver of a fleet sees, and what it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from saccade.fleet.bounds import Bounds
from saccade.fleet.config import FleetConfig, ModelConfig, VersionConfig
from saccade.fleet.probes import Probe

# ------------------------------------------------------------------ what the driver sees


@dataclass(frozen=True, kw_only=True)
class AppHealth:
    """An application on the cluster: the engines of one version, or the fronts."""

    num_ready: int = 0
    """Replicas that serve."""
    num_starting: int = 0
    """Replicas that start, or wait for resources."""
    encoders: tuple[int, int] | None = None
    """Encoder replicas that serve, and those that start. None: there is no pool of encoders."""
    failure: str | None = None
    """Why the application cannot run; None: it runs or starts."""
    is_deleting: bool = False
    """Whether its replicas end."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """The cluster at one time."""

    time_s: float
    """Time of the observation, in seconds since 1970."""
    engines: Mapping[tuple[str, str], AppHealth] = field(default_factory=dict)
    """Applications of engines by model and version. An absent one does not exist."""
    front: AppHealth | None = None
    """The application of the fronts; None: there is none."""
    probes_in_flight: frozenset[tuple[str, str, str]] = frozenset()
    """Probes that are being answered, by model, version and name."""


# ------------------------------------------------------------------ what it asks for


@dataclass(frozen=True, kw_only=True)
class DeployEngines:
    """Create the application of a version, or change its bounds."""

    model: ModelConfig
    """Model, with the resources of its replicas."""
    version: VersionConfig
    """Version to deploy."""
    bounds: Bounds
    """Fewest and most replicas."""


@dataclass(frozen=True, kw_only=True)
class DeleteEngines:
    """Delete the application of a version. Its replicas end the requests that they have."""

    model: str
    """Name of the model."""
    version: str
    """Name of the version."""


@dataclass(frozen=True, kw_only=True)
class DeployFronts:
    """Create the application of the fronts, or change it."""

    fleet: FleetConfig
    """The fleet."""


@dataclass(frozen=True, kw_only=True)
class DeleteFronts:
    """Delete the application of the fronts. They end the requests that they have."""


@dataclass(frozen=True, kw_only=True)
class AskProbe:
    """Ask a version a probe."""

    model: str
    """Name of the model."""
    version: str
    """Name of the version."""
    probe: Probe
    """The question."""


Action = DeployEngines | DeleteEngines | DeployFronts | DeleteFronts | AskProbe
