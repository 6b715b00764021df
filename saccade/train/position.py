"""The position of a run: what it has done and seen. Saved as JSON with every training state."""

from __future__ import annotations

from dataclasses import dataclass, field

from saccade.train.flops import Work


@dataclass
class Position:
    """Position of a run; saved as JSON next to the tensors."""

    stage: int = 0
    """Index of the stage."""
    step: int = 0
    """Steps of the run, skipped ones included."""
    stage_step: int = 0
    """Steps of the stage."""
    stage_samples: int = 0
    """Samples seen in the stage."""
    warmup_samples: int = 0
    """Samples seen in the warm-up steps of the stage."""
    samples: int = 0
    """Samples seen in the run."""
    tokens: int = 0
    """Tokens seen in the run."""
    is_stage_done: bool = False
    """Whether the stage has finished."""
    done: list[str] = field(default_factory=list)
    """Tasks (validation, export, evaluation) done after the last step; a resumed run does the others that are due."""
    data: dict[str, int | str] | None = None
    """State of the data stream; None at its start."""
    best_loss: float | None = None
    """Lowest validation loss of the run; None before the first validation."""

    def advance(self, work: Work, data: dict[str, int | str], *, is_warmup: bool) -> None:
        """Count one step."""
        self.step += 1
        self.stage_step += 1
        self.samples += int(work.samples)
        self.stage_samples += int(work.samples)
        if is_warmup:
            self.warmup_samples = self.stage_samples
        self.tokens += int(work.text_tokens + work.image_tokens)
        self.data = data
        self.done = []
