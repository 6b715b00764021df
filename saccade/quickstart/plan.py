"""The steps of the quickstart as commands. Nothing is run here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NUM_SCENES = 6000
NUM_STEPS = 1000
_LONGEST_SIDE = 112
"""Real images are reduced to this for the tiny recipe: 64 patches each."""


@dataclass(frozen=True, kw_only=True)
class QuickstartConfig:
    """What the quickstart makes. A folder belongs to one such configuration."""

    folder: Path
    """Everything goes in here."""
    recipes: Path
    """Folder of the recipes."""
    data: Path | None = None
    """Shards, or images with captions; None draws scenes."""
    scenes: int = NUM_SCENES
    """Scenes to draw for training."""
    text_model: Path | None = None
    """A text model to build on, with the SmolLM2 recipe; None trains the tiny recipe from random weights."""
    steps: int = NUM_STEPS
    """Training steps of the tiny recipe."""
    seed: int = 0
    """Seed of scenes, initial weights and the order of samples."""
    device: str = "auto"
    """Of training, evaluation and the server."""

    @property
    def held_out_scenes(self) -> int:
        """Scenes to draw for evaluation: 150 beside 6000."""
        return max(12, self.scenes // 40)

    @property
    def raw(self) -> Path:
        """Scenes as files."""
        return self.folder / "raw"

    @property
    def everything(self) -> Path:
        """Shards of real data before they are split."""
        return self.folder / "shards" / "all"

    @property
    def training(self) -> Path:
        """Shards to train on."""
        return self.folder / "shards" / "train"

    @property
    def held_out(self) -> Path:
        """Shards to evaluate on."""
        return self.folder / "shards" / "held-out"

    @property
    def untrained(self) -> Path:
        """The initial checkpoint."""
        return self.folder / "untrained"

    @property
    def run(self) -> Path:
        """The training run."""
        return self.folder / "run"

    @property
    def results(self) -> Path:
        """Results of the evaluation."""
        return self.folder / "results"

    def settings(self) -> dict[str, Any]:
        """What the contents of the folder depend on, for comparison with a later start."""
        left_out = ("folder", "recipes", "device")
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in asdict(self).items()
            if name not in left_out
        }


def prepare_commands(config: QuickstartConfig) -> list[list[str]]:
    """Write shards, filter and deduplicate them.

    Rendered scenes differ in little but a shape and a colour: the search for near-duplicate images would take most of them for
    copies. It is off for scenes; identical files are dropped.
    """
    if config.data is None:
        pairs = ((config.raw / "train", config.training), (config.raw / "held-out", config.held_out))
        return [
            ["data", "prepare", str(source), "-o", str(out), "--set", "near_duplicate_images=false"]
            for source, out in pairs
        ]
    resize = [] if config.text_model is not None else ["--resize-longest", str(_LONGEST_SIDE)]
    return [["data", "prepare", str(config.data), "-o", str(config.everything), *resize]]


def init_command(config: QuickstartConfig) -> list[str]:
    """Make the initial checkpoint."""
    made = ["init", str(config.untrained), "--seed", str(config.seed)]
    if config.text_model is not None:
        return [*made, "--text", str(config.text_model), "--tower", "90m"]
    return [*made, "--size", "tiny", "--dtype", "fp32"]


def train_command(config: QuickstartConfig) -> list[str]:
    """Train the recipe on the shards."""
    name, stages = ("smollm2-vlm", ("align", "all")) if config.text_model is not None else ("tiny", ("learn",))
    settings = [
        f"run={config.run}",
        f"model.folder={config.untrained}",
        f"seed={config.seed}",
        f"checkpoint.every={max(1, config.steps // 5)}",
        f"validation.sources=[{{path='{config.held_out}'}}]",
    ]
    settings += [f"stages.{stage}.data.sources=[{{path='{config.training}'}}]" for stage in stages]
    if config.text_model is None:
        settings.append(f"stages.learn.steps={config.steps}")
        settings.append(f"stages.learn.schedule.warmup_steps={min(50, config.steps)}")
    words = ["train", str(config.recipes / f"{name}.toml"), "--device", config.device]
    return words + [word for setting in settings for word in ("--set", setting)]


def evaluate_command(config: QuickstartConfig, checkpoint: Path, tasks: list[str]) -> list[str]:
    """Evaluate on held-out data, beside the same model with other images and the untrained one."""
    words = ["evaluate", str(checkpoint), "--tasks", ",".join(tasks), "--data", str(config.held_out)]
    words += ["-o", str(config.results), "--shuffle-images", "--compare", str(config.untrained)]
    words += ["--name", "trained", "--device", config.device, "--seed", str(config.seed)]
    return words if config.data is not None else [*words, "--no-contamination"]


def serve_command(config: QuickstartConfig, checkpoint: Path, port: int) -> list[str]:
    """Serve the trained checkpoint."""
    return ["serve", str(checkpoint), "--port", str(port), "--model-name", "quickstart", "--device", config.device]
