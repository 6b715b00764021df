"""The interface between core and device: a `StepRunner` executes plans. `device/runner.py` implements it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from saccade.engine.config import EngineConfig
from saccade.engine.core.grammar.masks import GrammarMasks
from saccade.engine.core.step import StepPlan, StepResult
from saccade.engine.prompt import TokenPrompt
from saccade.engine.request import Request


class DeviceError(Exception):
    """The device failed: nothing can run on it until the process is restarted."""


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """Sizes of a runner that the core plans with."""

    max_length: int
    """Maximum tokens of prompt and output together."""
    vocab_size: int
    """Vocabulary size of the model."""
    num_pages: int
    """Pages of the KV cache."""
    max_draft_tokens: int
    """Maximum draft tokens per request and step."""
    max_pass_patches: int
    """Maximum patches of a vision encoder pass with several images."""
    is_cpu: bool
    """Whether the model runs on the CPU."""
    feature_bytes: int = 0
    """Bytes of the features of an image token, as the encoder cache has them."""


class RankCounters(NamedTuple):
    """One rank of a tensor-parallel engine."""

    num_bytes: int
    """Memory that it had allocated when it was ready."""
    wait_s: float
    """Seconds that rank 0 has waited for it, in total."""


class DeviceCounters(NamedTuple):
    """Counts, since the engine was ready, of events that delay steps."""

    num_late_captures: int
    num_late_compiles: int
    num_eager_steps: int
    ranks: tuple[RankCounters, ...] = ()
    """The ranks of a tensor-parallel engine."""
    num_fallback_steps: int = 0
    """Steps of several GPUs that cannot access each other's memory."""


class Adapter(Protocol):
    """A LoRA adapter that was read and checked."""

    @property
    def digest(self) -> bytes:
        """Hash of its matrices and settings."""


class StepHandle(Protocol):
    """A step whose forward pass and sampling are launched."""

    @property
    def is_done(self) -> bool:
        """Whether the device has completed the step, so that `read` does not wait."""

    def read(self) -> StepResult:
        """Wait for the step and return its result."""


class StepRunner(Protocol):
    """Executes plans in order. A step is two launches, `forward` and `sample`; neither waits for the device."""

    config: EngineConfig
    info: DeviceInfo

    def register(self, request: Request, prompt: TokenPrompt, adapter_slot: int | None = None) -> None:
        """Store the inputs of a request until `unregister`."""

    def unregister(self, request_id: str) -> None:
        """Drop the inputs of an ended request."""

    @property
    def num_registered(self) -> int:
        """Number of registered requests."""

    def forward(self, plan: StepPlan) -> Any:
        """Launch the encoder parts and the forward pass of a plan."""

    def sample(self, step: Any, masks: GrammarMasks | None = None) -> StepHandle:
        """Launch the sampling of a step that `forward` returned."""

    def encode_ms(self, num_patches: int) -> float:
        """Time of a vision encoder pass in ms. 0: unknown."""

    def read_adapter(self, folder: str) -> Adapter:
        """Read and check an adapter folder, on any thread."""

    def set_adapter(self, slot: int, adapter: Any) -> None:
        """Write an adapter into a slot, after the steps in flight."""

    def counters(self) -> DeviceCounters:
        """Counts of events that delayed steps."""

    def prepare_more(self) -> bool:
        """Do a further part of the start-up, for up to 50 ms, while there is no work. False: nothing is left to do."""

    def start_profile(self, begun: Path) -> None:
        """Profile this thread and the device; create the file `begun` once the profile has begun."""

    def stop_profile(self, path: Path) -> None:
        """End the profile and write its trace. No effect without one."""

    def close(self) -> None:
        """Free the device memory."""
