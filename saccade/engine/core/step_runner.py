"""What the core asks of the device: a `StepRunner` executes plans. `device/runner.py` is the real one."""

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
    """Tokens of prompt and output together."""
    vocab_size: int
    """Tokens the model knows."""
    num_pages: int
    """Pages of the KV cache."""
    max_draft_tokens: int
    """Draft tokens per request and step."""
    max_pass_patches: int
    """Patches of a pass of the vision encoder with several images."""
    is_cpu: bool
    """Whether the host computes the steps itself."""


class DeviceCounters(NamedTuple):
    """Events since the engine was ready that delay steps."""

    num_late_captures: int
    num_late_compiles: int
    num_eager_steps: int


class Adapter(Protocol):
    """A LoRA adapter that was read and checked."""

    @property
    def digest(self) -> bytes:
        """Hash of its matrices and settings."""


class StepHandle(Protocol):
    """A step in flight that is sampled."""

    @property
    def is_done(self) -> bool:
        """Whether reading it does not wait."""

    def read(self) -> StepResult:
        """Wait for the step and return its result."""


class StepRunner(Protocol):
    """Executes plans in order. A step is two launches, `forward` and `sample`; none of them waits for the device."""

    config: EngineConfig
    info: DeviceInfo

    def register(self, request: Request, prompt: TokenPrompt, adapter_slot: int | None = None) -> None:
        """Keep the inputs of a request."""

    def unregister(self, request_id: str) -> None:
        """Drop the inputs of an ended request."""

    @property
    def num_registered(self) -> int:
        """Registered requests."""

    def forward(self, plan: StepPlan) -> Any:
        """Launch the forward pass of a plan."""

    def sample(self, step: Any, masks: GrammarMasks | None = None) -> StepHandle:
        """Launch the sampling of a step that `forward` returned."""

    def encode_ms(self, num_patches: int) -> float:
        """Time of a pass of the vision encoder. 0: unknown."""

    def read_adapter(self, folder: str) -> Adapter:
        """Read and check an adapter folder, on any thread."""

    def set_adapter(self, slot: int, adapter: Any) -> None:
        """Fill a slot after the steps in flight."""

    def counters(self) -> DeviceCounters:
        """Events that delayed steps."""

    def start_profile(self, begun: Path) -> None:
        """Profile this thread and the device; create the file `begun` when it has begun."""

    def stop_profile(self, path: Path) -> None:
        """End the profile and write its trace. No effect without one."""

    def close(self) -> None:
        """Free the device memory."""
