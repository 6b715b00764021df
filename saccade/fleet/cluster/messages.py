"""Messages between fronts and engine replicas: msgpack of plain data with a version number before it.

A front connects to each replica (`replica_connection.py`, `replica_server.py`). The replica sends

    hello       first: what the replica is
    load        every second, and after each request of another front: its queues and what its caches got
    outputs     whenever there are any: those of all requests of this front, as the engine writes them
    need        number of an image or video of a request, whose data it does not have
    refused     a request that it cannot read

and the front sends `connect` with its id, `submit`, `media` in parts, `cancel` and `heartbeat`. The `address` of a
replica comes through Ray. An encoder replica sends its load with each image that it has encoded.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import msgpack

from saccade.engine.core.messages import CoreInfo
from saccade.errors import ConfigError
from saccade.fleet.costs import CostModel
from saccade.fleet.replicas import Image, Replica, ReplicaStatistics

CHANNEL_VERSION = 4
"""Version of these messages; increases when a field is added, removed or changes its meaning."""

Kind = Literal[
    "hello", "load", "outputs", "need", "refused", "connect", "submit", "media", "cancel", "heartbeat", "address",
    "encoder",
]  # fmt: skip
_KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What a replica is."""

    replica: Replica
    """Name, version, measured costs, cache sizes and adapters."""
    info: CoreInfo
    """Limits and sizes of its engine core."""

    def to_plain(self) -> dict[str, Any]:
        """The message as plain data."""
        replica = asdict(self.replica) | {"adapters": sorted(self.replica.adapters)}
        return {"replica": replica, "info": asdict(self.info)}

    @staticmethod
    def from_plain(plain: dict[str, Any]) -> Hello:
        """Inverse of `to_plain`."""
        fields = plain["replica"]
        costs, adapters = CostModel(**fields["costs"]), frozenset(fields["adapters"])
        return Hello(replica=Replica(**fields | {"costs": costs, "adapters": adapters}), info=CoreInfo(**plain["info"]))


def load_to_plain(load: ReplicaStatistics) -> dict[str, Any]:
    """Statistics of a replica as plain data."""
    return asdict(load) | {"images": [tuple(image) for image in load.images]}


def load_from_plain(plain: dict[str, Any]) -> ReplicaStatistics:
    """Inverse of `load_to_plain`."""
    images, costs = tuple(Image(*fields) for fields in plain["images"]), plain["costs"]
    costs = None if costs is None else CostModel(**costs)
    known = {name: tuple(plain[name]) for name in ("accepted", "prefixes")}
    return ReplicaStatistics(**plain | known | {"images": images, "costs": costs})


def pack(kind: Kind, content: Any) -> bytes:
    """A message of the channel."""
    packed: bytes = msgpack.packb((CHANNEL_VERSION, _KINDS.index(kind), content))
    return packed


def unpack(message: bytes) -> tuple[Kind, Any]:
    """Kind and content of a message; raises ConfigError for one of another version."""
    version, kind, content = msgpack.unpackb(message, strict_map_key=False)
    if version != CHANNEL_VERSION:
        raise ConfigError(
            f"a message between a front and a replica has version {version}, and this process knows version "
            f"{CHANNEL_VERSION}. Update fronts and engines to one version of Saccade: saccade fleet up"
        )
    return _KINDS[kind], content
