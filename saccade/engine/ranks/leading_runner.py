"""The runner of rank 0, the leader: whatever it does to its device, the followers do to theirs.

    Runner decides and samples -> an operation of LeadingRunner -> a command to the followers, and the same here
                                                                -> wait until all have launched it

An operation fails if it fails on any rank; then `Runner` isolates the failing request, and every rank runs the halves.
Inside an operation ranks wait for each other, so an operation that fails on one rank must not leave the others waiting:
see `DividedEncoder.run` and `ForwardPass`. Followers do not sample: every forward pass begins with a broadcast of the
leader's last tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor

from saccade.engine.core.grammar.masks import GrammarMasks
from saccade.engine.core.step import Chunk, EncodeResult, ImageToEncode, StepPlan
from saccade.engine.core.step_runner import DeviceCounters, RankCounters
from saccade.engine.device.divided_forward import DividedForwardPass
from saccade.engine.device.forward import Logits
from saccade.engine.device.image_runner import ImageRunner, PassImage
from saccade.engine.device.results import StepHandle
from saccade.engine.device.runner import Runner, StepForward
from saccade.engine.frames.prompts import encode_prompt
from saccade.engine.frames.shared_images import SharedImages
from saccade.engine.prompt import PromptImage, TokenPrompt
from saccade.engine.ranks.commands import plan_to_plain
from saccade.engine.request import Request
from saccade.model.adapters import Adapter

logger = logging.getLogger(__name__)

T = TypeVar("T")


class RankError(RuntimeError):
    """An operation failed on some rank. Its log has the reason."""


class Followers(Protocol):
    """The other ranks."""

    def note(self, name: str, arguments: Any, fds: Sequence[int] = ()) -> None:
        """Send a command that is not reported to all. DeviceError: one of them is gone."""

    def command(self, name: str, arguments: Any, fds: Sequence[int] = ()) -> int:
        """Send a command to all; returns its number. DeviceError: one of them is gone."""

    def wait(self, number: int) -> list[int]:
        """Wait until all have finished a command; returns those that failed. DeviceError: one is gone, or hangs."""

    def watch(self, step: StepHandle) -> None:
        """End the engine if this step takes too long."""

    def counters(self) -> tuple[RankCounters, ...]:
        """Memory and waiting times of all ranks, the leader's too."""

    def close(self) -> None:
        """End them."""


class LeadingRunner(Runner):
    """A runner whose operations the followers repeat, from `lead` on."""

    _followers: Followers | None = None
    _unsent_plan: StepPlan | None = None

    def lead(self, followers: Followers) -> None:
        """Start sending commands. Until now all ranks have done the same by themselves."""
        assert isinstance(self.images, LeadingImages), "a leading runner has leading images"
        self._followers = followers
        self._shared, self._adapter_folders = SharedImages(), dict[bytes, str]()
        self.images.everywhere = self._everywhere

    def _send(self, name: str, arguments: Any, fds: Sequence[int] = ()) -> None:
        """Send a command that is not reported."""
        if self._followers is not None:
            self._followers.note(name, arguments, fds)

    def _everywhere(self, name: str, arguments: Any, operation: Callable[[], T], fds: Sequence[int] = ()) -> T:
        """Do an operation on every rank. RankError: it failed on a follower."""
        followers = self._followers
        if followers is None:
            return operation()
        self._send_plan()
        number = followers.command(name, arguments, fds)
        try:
            result = operation()
        finally:
            failed = followers.wait(number)
        if failed:
            raise RankError(f"{name} failed on rank {', '.join(map(str, failed))}")
        return result

    # -------------------------------------------------------------- requests and adapters

    def register(self, request: Request, prompt: TokenPrompt, adapter_slot: int | None = None) -> None:
        """See `Runner`."""
        if self._followers is None:
            super().register(request, prompt, adapter_slot)
            return
        segments, places = self._shared.share(prompt.images)
        fields = encode_prompt(request, prompt, places) | {"adapter_slot": adapter_slot}
        fds = [segment.fd for segment in segments]
        if not fds:  # it cannot fail, so that the leader need not wait
            self._send("register", fields)
            super().register(request, prompt, adapter_slot)
            return
        self._everywhere("register", fields, lambda: Runner.register(self, request, prompt, adapter_slot), fds)

    def unregister(self, request_id: str) -> None:
        """See `Runner`."""
        self._send("unregister", request_id)
        super().unregister(request_id)

    def read_adapter(self, folder: str) -> Adapter:
        """See `Runner`. Followers read the folder at the same time."""
        self._send("read_adapter", folder)
        adapter = super().read_adapter(folder)
        self._adapter_folders[adapter.digest] = folder
        return adapter

    def set_adapter(self, slot: int, adapter: Adapter) -> None:
        """See `Runner`."""
        arguments = (slot, self._adapter_folders.get(adapter.digest), adapter.digest)
        self._everywhere("set_adapter", arguments, lambda: Runner.set_adapter(self, slot, adapter))

    # -------------------------------------------------------------- a step

    def start_slots(self, plan: StepPlan) -> None:
        """See `Runner`. Followers get the plan with the next command."""
        if self._followers is not None:
            self._send_plan()
            self._unsent_plan = plan
        super().start_slots(plan)

    def _send_plan(self) -> None:
        if self._unsent_plan is not None:
            plan, self._unsent_plan = self._unsent_plan, None
            self._send("plan", plan_to_plain(plan))

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """See `Runner`."""
        self._everywhere("copy_pages", copies, lambda: Runner.copy_pages(self, copies))

    def _run_chunks(self, chunks: Sequence[Chunk]) -> Logits:
        """See `Runner`."""
        slots = [chunk.slot for chunk in chunks]
        return self._everywhere("run_chunks", slots, lambda: Runner._run_chunks(self, chunks))

    def run_head(self, hidden_TD: Tensor, rows: slice) -> Tensor:
        """See `Runner`."""
        return self._everywhere("run_head", (rows.start, rows.stop), lambda: Runner.run_head(self, hidden_TD, rows))

    def sample(self, step: StepForward, masks: GrammarMasks | None = None) -> StepHandle:
        """See `Runner`."""
        handle = super().sample(step, masks)
        if self._followers is not None:
            self._followers.watch(handle)
        return handle

    def counters(self) -> DeviceCounters:
        """See `Runner`."""
        found, forward = super().counters(), self.forward_pass
        if self._followers is None:
            return found
        assert isinstance(forward, DividedForwardPass), "a leading runner has several ranks"
        return found._replace(ranks=self._followers.counters(), num_fallback_steps=forward.num_fallback_steps)

    def prepare_more(self) -> bool:
        """See `Runner`. All ranks capture the same sizes of a forward pass."""
        return self._everywhere("prepare_more", None, lambda: Runner.prepare_more(self))

    # -------------------------------------------------------------- profiles, end

    def start_profile(self, begun: Path) -> None:
        """See `Runner`. Every rank profiles itself."""
        self._everywhere("start_profile", str(begun), lambda: Runner.start_profile(self, begun))

    def stop_profile(self, path: Path) -> None:
        """See `Runner`. The traces of followers are next to that of the leader, `NAME.rank1.json` for example."""
        self._everywhere("stop_profile", str(path), lambda: Runner.stop_profile(self, path))

    def close(self) -> None:
        """See `Runner`."""
        followers = self._followers
        if followers is not None:
            followers.close()
        super().close()


class LeadingImages(ImageRunner):
    """The images of a leading runner."""

    everywhere: Callable[[str, Any, Callable[[], Any]], Any] | None = None
    """Does an operation on every rank. None: the followers do it by themselves."""

    def start_pass(self, images: Sequence[PassImage], num_parts: int) -> None:
        """See `ImageRunner`."""
        if self.everywhere is None:
            super().start_pass(images, num_parts)
            return
        arguments = ([one.planned for one in images], num_parts)
        self.everywhere("start_pass", arguments, lambda: ImageRunner.start_pass(self, images, num_parts))

    def load_image(self, planned: ImageToEncode, image: PromptImage) -> None:
        """See `ImageRunner`."""
        if self.everywhere is None:
            super().load_image(planned, image)
            return
        self.everywhere("load_image", planned, lambda: ImageRunner.load_image(self, planned, image))

    def run_parts(self, num_parts: int) -> tuple[EncodeResult, ...]:
        """See `ImageRunner`."""
        if self.everywhere is None:
            return super().run_parts(num_parts)
        results: tuple[EncodeResult, ...] = self.everywhere(
            "run_parts", num_parts, lambda: ImageRunner.run_parts(self, num_parts)
        )
        return results


LeadingRunner._image_runner = LeadingImages
