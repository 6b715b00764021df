"""The runner of a follower: it carries out the leader's commands, and decides nothing."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saccade.engine.core.step import Chunk, ImageToEncode
from saccade.engine.core.step_runner import DeviceError
from saccade.engine.device.failures import check_alive
from saccade.engine.device.image_runner import PassImage
from saccade.engine.device.runner import Runner
from saccade.engine.frames.connection import Connection
from saccade.engine.frames.prompts import decode_prompt
from saccade.engine.ranks.commands import images_from_plain, plan_from_plain
from saccade.engine.ranks.reports import Reports
from saccade.errors import CheckpointError
from saccade.model.adapters import Adapter

logger = logging.getLogger(__name__)


class FollowingRunner(Runner):
    """A runner that repeats the operations of the leader."""

    @torch.inference_mode()
    def follow(self, connection: Connection, rank: int, reports: Reports) -> None:
        """Carry out commands until the leader closes the connection or ends the engine."""
        self._rank = rank
        self._chunks: dict[int, Chunk] = {}  # of the last plan, by slot
        self._hidden_TD: Tensor | None = None  # of the last forward pass
        self._pass_images: dict[tuple[str, int], PassImage] = {}  # of the last pass, also of ended requests
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="saccade-adapters")
        self._read: dict[str, Future[Adapter]] = {}
        self._operations: dict[str, Callable[[Any], object]] = {
            "unregister": self.unregister,
            "plan": self._start_plan,
            "read_adapter": self._start_reading,
            "copy_pages": self.copy_pages,
            "run_chunks": self._run_slots,
            "run_head": self._run_rows,
            "start_pass": self._start_pass,
            "load_image": self._load_image,
            "run_parts": self.images.run_parts,
            "prepare_more": lambda _: self.prepare_more(),
            "set_adapter": self._set_adapter,
            "start_profile": lambda begun: Runner.start_profile(self, self._own(begun)),
            "stop_profile": lambda path: Runner.stop_profile(self, self._own(path)),
        }
        while True:
            try:
                (name, number, arguments), fds = connection.receive()
            except (EOFError, ConnectionError):
                return
            if name == "close":
                return
            has_failed = False
            try:
                self._do(name, arguments, fds)
            except DeviceError:
                raise
            except Exception as error:
                if not number:
                    raise
                check_alive(self.device, error)
                logger.warning("%s failed on rank %d: %r", name, rank, error, exc_info=error)
                has_failed = True
            finally:
                for fd in fds:
                    os.close(fd)
            if number:
                reports.report(rank, number, has_failed=has_failed)

    def _do(self, name: str, arguments: Any, fds: Sequence[int]) -> None:
        with self.on_stream():
            if name == "register":
                request, prompt = decode_prompt(arguments, fds)
                self.register(request, prompt, arguments["adapter_slot"])
            else:
                self._operations[name](arguments)

    # -------------------------------------------------------------- operations

    def _start_reading(self, folder: str) -> None:
        self._read[folder] = self._reader.submit(self.read_adapter, folder)

    def _start_plan(self, fields: tuple[Any, ...]) -> None:
        plan = plan_from_plain(fields)
        self._chunks = {chunk.slot: chunk for chunk in plan.chunks}
        self.start_slots(plan)

    def _run_slots(self, slots: Sequence[int]) -> None:
        """Run the chunks of these slots."""
        self._hidden_TD = self._run_chunks([self._chunks[slot] for slot in slots]).hidden

    def _run_rows(self, rows: Sequence[int]) -> None:
        assert self._hidden_TD is not None, "the last step had prompt log-probabilities"
        self.run_head(self._hidden_TD, slice(*rows))

    def _start_pass(self, arguments: tuple[Any, int]) -> None:
        plain, num_parts = arguments
        images = {(one.request_id, one.image_index): self._image(one) for one in images_from_plain(plain)}
        if not images.keys() <= self._pass_images.keys():  # otherwise some images of a pass that failed
            self._pass_images = images
        self.images.start_pass(list(images.values()), num_parts)

    def _load_image(self, fields: tuple[Any, ...]) -> None:
        planned = ImageToEncode(*fields)
        self.images.load_image(planned, self._requests[planned.request_id].prompt.images[planned.image_index])

    def _image(self, planned: ImageToEncode) -> PassImage:
        inputs = self._requests.get(planned.request_id)
        if inputs is None:  # it has ended since the pass began
            return self._pass_images[planned.request_id, planned.image_index]
        return PassImage(planned, inputs.prompt.images[planned.image_index])

    def _set_adapter(self, arguments: tuple[int, str, bytes]) -> None:
        slot, folder, digest = arguments
        reading = self._read.pop(folder, None)
        adapter = self.read_adapter(folder) if reading is None else reading.result()
        if adapter.digest != digest:
            raise CheckpointError(f"{folder}: it changed while it was read. Load it again")
        self.set_adapter(slot, adapter)

    def _own(self, path: str) -> Path:
        """This rank's file for one of the leader's."""
        return Path(path).with_suffix(f".rank{self._rank}{Path(path).suffix}")
