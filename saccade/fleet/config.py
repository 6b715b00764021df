"""FLEET.toml: the state a fleet should have. `saccade fleet check` reads it; docs/fleet-keys.md lists every key.

    config = load_config(FleetConfig, Path("examples/fleet.toml"))

The file names no secret: API keys and store credentials come from files or from the environment.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from saccade.engine.config import EngineConfig
from saccade.errors import ConfigError
from saccade.fleet.costs import CostModel
from saccade.fleet.experiments import Experiment
from saccade.fleet.objectives import Objective, check_measurable
from saccade.fleet.probes import Probe
from saccade.fleet.rollout import RolloutPolicy
from saccade.fleet.scaling import ScalingPolicy
from saccade.serve.config import ServeConfig

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_SINGLE_SERVER_KEYS = ("model_name", "admin_port", "max_restarts", "restart_backoff_s")
"""Keys of `ServeConfig` that have no meaning in a fleet: models name themselves, and replicas are restarted by Ray."""
_TRAFFIC_ERROR = 1e-6
"""Percent by which traffic may miss 100, so that thirds can be written."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Bounds of one group of equal replicas."""

    min_replicas: int = 1
    """Replicas that always run. Engines and encoders: 0 lets the pool scale to zero."""
    max_replicas: int = 1
    """Replicas that run at most."""
    cpus_per_replica: float = 1.0
    """CPU cores that a replica reserves."""
    scaling: ScalingPolicy = field(default_factory=ScalingPolicy)
    """When replicas are added and removed."""

    def __post_init__(self) -> None:
        _check_replicas(self.min_replicas, self.max_replicas)
        _check_amount("cpus_per_replica", self.cpus_per_replica)


@dataclass(frozen=True, kw_only=True)
class EncoderPool:
    """Bounds of the replicas that run the vision encoder alone."""

    min_replicas: int = 0
    """Replicas that always run."""
    max_replicas: int = 1
    """Replicas that run at most."""
    cpus_per_replica: float = 1.0
    """CPU cores that a replica reserves."""
    gpus_per_replica: float = 1.0
    """GPUs that a replica reserves, 0 to 1; a fraction shares a GPU."""
    scaling: ScalingPolicy = field(default_factory=ScalingPolicy)
    """When replicas are added and removed."""

    def __post_init__(self) -> None:
        _check_replicas(self.min_replicas, self.max_replicas)
        _check_amount("cpus_per_replica", self.cpus_per_replica)
        _check_gpus(self.gpus_per_replica)


@dataclass(frozen=True, kw_only=True)
class VersionConfig:
    """One version of a model: a checkpoint with adapters and engine settings."""

    name: str
    """Name of the version, unique within its model."""
    checkpoint: str
    """Checkpoint folder, as the machines of the engines see it, or ORG/NAME of the Hugging Face Hub."""
    traffic: float
    """Percent of the model's requests. The versions of a model sum to 100; an update ramps to the new shares.
    A version with 0 runs if an experiment uses it."""
    adapters: dict[str, str] = field(default_factory=dict)
    """LoRA adapters: the name in requests = the adapter's folder."""
    gpus_per_replica: float = 1.0
    """GPUs that an engine replica reserves: 0 on a CPU, `engine.tensor_parallel_size`, or a fraction to share one."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Settings of the engine."""
    costs: CostModel | None = None
    """Measured times of an engine, for `saccade fleet simulate`. None: those of an 8B model on an H200."""

    def __post_init__(self) -> None:
        _check_name("version", self.name)
        for adapter in self.adapters:
            _check_name("adapter", adapter)
        if not self.checkpoint:
            raise ConfigError(f"version {self.name!r} has an empty checkpoint. Name a folder, or ORG/NAME")
        if not 0 <= self.traffic <= 100:
            raise ConfigError(f"traffic of version {self.name!r} is {self.traffic:g}; use percent from 0 to 100")
        if len(self.adapters) > self.engine.max_adapters:
            remedy = f"Set engine.max_adapters to {len(self.adapters)} or more"
            raise ConfigError(
                f"version {self.name!r} has {len(self.adapters)} adapters, and its engine {self.engine.max_adapters} "
                f"adapter slots. {remedy}"
            )
        _check_gpus(self.gpus_per_replica, self.engine.tensor_parallel_size)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One model: its versions, and the replicas that run them."""

    name: str
    """Name of the model in requests."""
    versions: tuple[VersionConfig, ...]
    """Versions of the model."""
    engines: Pool = field(default_factory=Pool)
    """Engine replicas of all versions together. A version with traffic has at least one while the pool is not empty."""
    encoders: EncoderPool | None = None
    """Replicas that encode images for the engines. None: engines encode their own images."""
    probes: tuple[Probe, ...] = ()
    """Questions that a new version answers correctly before it gets traffic."""
    objectives: tuple[Objective, ...] = ()
    """Promises about every version. A new one that breaks any of them is rolled back."""
    rollout: RolloutPolicy = field(default_factory=RolloutPolicy)
    """How a new version replaces the running one."""
    experiments: tuple[Experiment, ...] = ()
    """Comparisons of versions. A user takes part in the first one that has them, and else follows the traffic."""

    def __post_init__(self) -> None:
        _check_name("model", self.name)
        _check_distinct(f"versions of model {self.name!r}", (version.name for version in self.versions))
        _check_distinct(f"probes of model {self.name!r}", (probe.name for probe in self.probes))
        self._check_traffic()
        check_measurable(self.objectives, num_probes=len(self.probes), min_requests=self.rollout.min_requests)
        self._check_experiments()
        if (count := len(self.live_versions) + len(self.experiment_versions)) > self.engines.max_replicas:
            raise ConfigError(
                f"model {self.name!r} has {count} versions with traffic or in experiments, and "
                f"engines.max_replicas is {self.engines.max_replicas}. Raise it, or give fewer versions traffic"
            )

    @property
    def live_versions(self) -> tuple[VersionConfig, ...]:
        """Versions that get traffic."""
        return tuple(version for version in self.versions if version.traffic > 0)

    @property
    def experiment_versions(self) -> tuple[VersionConfig, ...]:
        """Versions without traffic that run for experiments alone."""
        used = {name for one in self.experiments for name in one.versions}
        return tuple(version for version in self.versions if not version.traffic and version.name in used)

    def only_with(self, versions: tuple[VersionConfig, ...]) -> ModelConfig:
        """The model with other versions and without experiments, as an operator goes back to them."""
        return replace(self, versions=versions, experiments=())

    def _check_experiments(self) -> None:
        names, has_users = [version.name for version in self.versions], True
        _check_distinct(f"experiments of model {self.name!r}", (one.name for one in self.experiments))
        for one in self.experiments:
            _check_name("experiment", one.name)
            if unknown := sorted(one.versions - set(names)):
                raise ConfigError(
                    f"experiment {one.name!r} has version {unknown[0]!r}, and model {self.name!r} has "
                    f"{', '.join(names)}. Add the version, or name one of these"
                )
            if not has_users:
                raise ConfigError(f"experiment {one.name!r} has no users: one before it has all. Lower its share")
            has_users = one.share < 1

    def _check_traffic(self) -> None:
        total = sum(version.traffic for version in self.versions)
        if abs(total - 100) > _TRAFFIC_ERROR:
            parts = ", ".join(f"{version.name} {version.traffic:g}" for version in self.versions) or "no versions"
            raise ConfigError(f"traffic of model {self.name!r} sums to {total:g} ({parts}). Make it 100")


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """The whole fleet."""

    name: str
    """Name of the fleet on its cluster."""
    models: tuple[ModelConfig, ...]
    """Models that the fleet serves."""
    state: str = "fleet-state"
    """Folder, or fsspec URL, of the desired state and the log of decisions."""
    address: str | None = None
    """Address of a Ray cluster. None: a local Ray on this machine."""
    front: Pool = field(default_factory=Pool)
    """Replicas that accept HTTP requests."""
    server: ServeConfig = field(default_factory=ServeConfig)
    """Address, access and limits of the fronts, together."""

    def __post_init__(self) -> None:
        _check_name("fleet", self.name)
        if not self.models:
            raise ConfigError("the fleet has no models. Add a [[models]] section")
        _check_distinct("models and adapters", self.served_names)
        if self.front.min_replicas < 1:
            raise ConfigError("front.min_replicas is 0: nothing would accept requests. Use 1 or more")
        for key in _SINGLE_SERVER_KEYS:
            if getattr(self.server, key) != getattr(ServeConfig, key):
                raise ConfigError(f"server.{key} applies to a single server, not to a fleet. Remove it")
        self._check_workers()

    def _check_workers(self) -> None:
        """Files of clients are decoded in sandboxed processes, never in an engine's own."""
        for model in self.models:
            for version in model.versions:
                if version.engine.num_workers == 0:
                    raise ConfigError(
                        f"version {version.name!r} of model {model.name!r} has engine.num_workers 0: images of clients "
                        "are decoded in worker processes. Use 1 or more, or leave it out"
                    )

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names that requests may ask for: models, and the adapters of any of their versions."""
        adapters = {(model.name, name) for model in self.models for one in model.versions for name in one.adapters}
        return (*(model.name for model in self.models), *sorted(name for _, name in adapters))

    def resources(self) -> tuple[Resources, Resources]:
        """CPUs and GPUs that the smallest and the largest form of the fleet reserve, without updates."""
        return self._resources(is_largest=False), self._resources(is_largest=True)

    def _resources(self, *, is_largest: bool) -> Resources:
        def count(pool: Pool | EncoderPool) -> int:
            return pool.max_replicas if is_largest else pool.min_replicas

        cpus, gpus = count(self.front) * self.front.cpus_per_replica, 0.0
        for model in self.models:
            running = (*model.live_versions, *model.experiment_versions)
            live = sorted((version.gpus_per_replica for version in running), reverse=is_largest)
            num_engines = max(count(model.engines), len(live) if count(model.engines) else 0)
            cpus += num_engines * model.engines.cpus_per_replica
            # Every one of them has one replica; the others are counted as the version that reserves least, or most.
            gpus += sum(live) + (num_engines - len(live)) * live[0] if num_engines else 0.0
            if model.encoders is not None:
                cpus += count(model.encoders) * model.encoders.cpus_per_replica
                gpus += count(model.encoders) * model.encoders.gpus_per_replica
        return Resources(cpus=cpus, gpus=gpus)


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What replicas reserve on a cluster."""

    cpus: float
    """CPU cores."""
    gpus: float
    """GPUs."""


def _check_name(what: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{what} name {name!r}: use letters, digits and . _ - between them")


def _check_distinct(what: str, names: Iterable[str]) -> None:
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(f"{what}: the name {repeated[0]!r} is used twice. Rename one of them")


def _check_replicas(least: int, most: int) -> None:
    if least < 0 or most < 1:
        raise ConfigError(f"min_replicas is {least} and max_replicas {most}; use 0 or more, and 1 or more")
    if least > most:
        raise ConfigError(f"min_replicas is {least}, above max_replicas {most}. Raise max_replicas")


def _check_amount(name: str, value: float) -> None:
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{name} is {value:g}; use a number from 0")


def _check_gpus(count: float, num_ranks: int = 1) -> None:
    if num_ranks > 1 and count not in (0, num_ranks):
        raise ConfigError(
            f"gpus_per_replica is {count:g}, but engine.tensor_parallel_size is {num_ranks}. Use {num_ranks}, or 0 on "
            "a CPU"
        )
    if num_ranks == 1 and not 0 <= count <= 1:
        raise ConfigError(
            f"gpus_per_replica is {count:g}; an engine uses one GPU. Use 0, 1, or a fraction of one, or "
            "set engine.tensor_parallel_size"
        )
