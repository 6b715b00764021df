"""The state folder of a fleet: what it should be, what its controller has decided, and what another one continues from.

    desired/000012.json                the fleet's file as generation 12, by the command that wrote it
    lease/000007.json, .heartbeat      who decides (lease.py)
    snapshot/000007.json               everything that a controller needs to continue, and what `status` prints
    decisions/00000031-000007.json     decision 31, by the controller of epoch 7, with its evidence

A generation is created exclusively, so of two commands that change the fleet at the same time one fails. The newest
epoch's snapshot counts; it has the newest decisions, and the number of the last one, which bounds the log. No object
holds a secret: the fleet's file names key files by their path.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from saccade.config import decode, encode
from saccade.errors import ConfigError, DataError
from saccade.fleet.config import FleetConfig
from saccade.fleet.lease import newest_epoch, number_of
from saccade.fleet.objects import Objects, open_objects

FORMAT = 1
"""Version of the objects; increases when a field changes its meaning."""


@dataclass(frozen=True, kw_only=True)
class Desired:
    """The fleet as it should be."""

    generation: int
    """Number of this state, from 1."""
    config: FleetConfig
    """The fleet's file."""
    command: str
    """Command that wrote it: up, update, rollback or down."""
    by: str
    """Process that wrote it."""
    time_s: float
    """Time when it was written."""
    at_once: tuple[str, ...] = ()
    """Models whose versions change at once, without a ramp: an operator rolls back."""

    @property
    def is_down(self) -> bool:
        """Whether the fleet should end."""
        return self.command == "down"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What a controller knew when it last wrote."""

    epoch: int
    """Epoch of the controller's lease."""
    time_s: float
    """Time of the snapshot."""
    content: dict[str, Any]
    """State of the driver, and what `status` prints, as plain data."""


class FleetState:
    """The state folder. Commands and fronts of any machine read it; only the holder of the lease writes snapshots."""

    def __init__(self, url: str) -> None:
        self.objects: Objects = open_objects(url)
        self._first_epoch_written: int | None = None

    # ------------------------------------------------------------------ the desired state

    def desired(self) -> Desired | None:
        """The newest generation; None: the fleet was never up."""
        number = self.newest_generation()
        return None if number is None else self._desired(number)

    def newest_generation(self) -> int | None:
        """Number of the newest generation; None: the fleet was never up."""
        numbers = [number for name in self.objects.names("desired") if (number := number_of(name)) is not None]
        return max(numbers, default=None)

    def change(
        self, config: FleetConfig, *, after: int | None, command: str, time_s: float, at_once: Sequence[str] = ()
    ) -> Desired:
        """Write the generation after the one that the caller has seen. ConfigError: another command was faster."""
        generation = (after or 0) + 1
        by = f"saccade fleet {command} (process {os.getpid()} on {socket.gethostname()})"
        desired = Desired(
            generation=generation, config=config, command=command, by=by, time_s=time_s, at_once=tuple(at_once)
        )
        content = {"id": secrets.token_hex(8), "desired": encode(desired)}
        if not self.objects.create(_desired_path(generation), _packed(content)):
            raise ConfigError(
                f"{self._desired(generation).by} has changed fleet {config.name} at the same time. "
                "Look at it with saccade fleet status, then run the command again"
            )
        return desired

    def _desired(self, number: int) -> Desired:
        plain = self._read(_desired_path(number))
        where = f"{self.objects.url}/{_desired_path(number)}"
        try:
            return decode(Desired, plain["desired"], where)
        except KeyError as error:
            raise self._damaged(_desired_path(number)) from error

    # ------------------------------------------------------------------ the controller's state

    def write_snapshot(self, epoch: int, content: dict[str, Any], time_s: float) -> None:
        """Write what a controller with this epoch knows. Those of earlier epochs are removed with the first one."""
        self.objects.write(_snapshot_path(epoch), _packed({"time_s": time_s, "content": content}))
        if self._first_epoch_written != epoch:
            self._first_epoch_written = epoch
            for name in self.objects.names("snapshot"):
                if (number := number_of(name)) is not None and number < epoch:
                    self.objects.remove(f"snapshot/{name}")

    def snapshot(self) -> Snapshot | None:
        """The snapshot of the newest epoch that has one."""
        newest = newest_epoch(self.objects) or 0
        numbers = [number for name in self.objects.names("snapshot") if (number := number_of(name)) is not None]
        epoch = max((number for number in numbers if number <= newest), default=None)
        if epoch is None:
            return None
        plain = self._read(_snapshot_path(epoch))
        content, time_s = plain.get("content"), plain.get("time_s")
        if not isinstance(content, dict) or not isinstance(time_s, int | float):
            raise self._damaged(_snapshot_path(epoch))
        return Snapshot(epoch=epoch, time_s=time_s, content=content)

    # ------------------------------------------------------------------ the log of decisions

    def log(self, epoch: int, decisions: Sequence[dict[str, Any]]) -> None:
        """Write decisions, each with its `number`. The snapshot has them already; writing them again is no change."""
        for decision in decisions:
            name = f"decisions/{decision['number']:08d}-{epoch:06d}.json"
            self.objects.write(name, _packed(decision), sync=False)

    def decisions(self, last: int) -> list[dict[str, Any]]:
        """All decisions up to the number that the snapshot says. Those that a replaced controller added do not count.

        A damaged one is named in its place.
        """
        newest: dict[int, str] = {}
        for name in self.objects.names("decisions"):  # sorted: a larger epoch replaces a smaller one
            number, dash, _ = name.partition("-")
            if dash and number.isascii() and number.isdigit() and int(number) <= last:
                newest[int(number)] = name
        found = []
        for counted, name in sorted(newest.items()):
            try:
                found.append(self._read(f"decisions/{name}"))
            except DataError:
                found.append({"number": counted, "what": "damaged", "reason": f"decisions/{name} cannot be read"})
        return found

    # ------------------------------------------------------------------ objects

    def _read(self, name: str) -> dict[str, Any]:
        content = self.objects.read(name)
        if content is None:
            raise DataError(f"{self.objects.url}/{name} has disappeared. Check who else uses the folder")
        try:
            plain = json.loads(content)
        except ValueError as error:
            raise self._damaged(name) from error
        if not isinstance(plain, dict):
            raise self._damaged(name)
        if plain.pop("format", None) != FORMAT:
            raise DataError(
                f"{self.objects.url}/{name} was written by another version of Saccade. Use that version, or another "
                "state folder"
            )
        return plain

    def _damaged(self, name: str) -> DataError:
        remedy = (
            "Write the fleet again: saccade fleet update FLEET.toml"
            if name.startswith("desired/")
            else "Remove it: the fleet starts as if it had never been up"
        )
        return DataError(f"{self.objects.url}/{name} is damaged. {remedy}")


def _packed(content: dict[str, Any]) -> bytes:
    return json.dumps({"format": FORMAT, **content}, ensure_ascii=False).encode()


def _desired_path(number: int) -> str:
    return f"desired/{number:06d}.json"


def _snapshot_path(epoch: int) -> str:
    return f"snapshot/{epoch:06d}.json"
