"""What pruning and rounding cost the quickstart's model, and what distillation and training with rounding give back.

    saccade quickstart --no-serve --dir quick
    python -m bench.recover --quickstart quick [--captions]

The table has the held-out cross entropy of the model; of the model pruned to 70 % of its parameters; and of the pruned
model after `recipes/distill.toml`, and after the same number of steps of plain cross entropy. Then it has the model
with weights of 4, 3 and 2 bits: rounded to nearest, and after quantization-aware training with the model itself as
teacher. An exported folder is compressed to int4 first, and measured in that form. `--captions` adds CIDEr of generated
captions. On one core it takes about five minutes, without captions.
"""

import argparse
import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from saccade.compress import compress
from saccade.compress.calibration import CalibrationConfig, load_batches
from saccade.compress.importance import mean_loss
from saccade.compress.pruning import PruningConfig, prune
from saccade.config import load_config
from saccade.log import set_up_logging
from saccade.model import load_model, save_model
from saccade.model.fake_quantized_linear import round_weight
from saccade.model.linear import Linear
from saccade.model.quantization import fitting_group
from saccade.processor import Processor
from saccade.train import TrainConfig, train

RECIPE = Path(__file__).parents[1] / "recipes" / "distill.toml"
GROUP_SIZE = 128


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where things are, and how long is trained."""

    original: Path
    shards: Path
    out: Path
    steps: int
    captions: bool


def main() -> None:
    """Measure everything and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quickstart", type=Path, required=True, help="folder of `saccade quickstart`")
    parser.add_argument("--out", type=Path, default=Path("recover"), help="folder of what is made; replaced")
    parser.add_argument("--steps", type=int, default=300, help="training steps of each recovery")
    parser.add_argument("--captions", action="store_true", help="generate captions, too")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    set_up_logging()
    torch.set_num_threads(1)
    shutil.rmtree(options.out, ignore_errors=True)
    original = max((options.quickstart / "run" / "checkpoints").glob("step-*"))
    setting = Setting(original, options.quickstart / "shards", options.out, options.steps, options.captions)
    rows = [*pruning_rows(setting), *rounding_rows(setting)]
    for row in rows:
        print(
            "  ".join(f"{name} {value:.4f}" if isinstance(value, float) else str(value) for name, value in row.items())
        )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


def pruning_rows(setting: Setting) -> list[dict[str, Any]]:
    """The model, pruned, and recovered with and without its teacher."""
    pruned = setting.out / "pruned"
    samples = CalibrationConfig(shards=(str(setting.shards / "train"),), max_tokens=1024)
    report = prune(setting.original, pruned, config=PruningConfig(keep=0.7), calibration=samples, device="cpu")
    share = report.parameters_after / report.parameters_before
    distilled = trained(setting, "distilled", pruned)
    plain = trained(setting, "cross-entropy", pruned, "stages.distill.objective.distillation.kl_weight=0.0")
    rows = [
        measured(setting, "original", setting.original),
        measured(setting, f"pruned to {share:.0%}", pruned),
        measured(setting, f"pruned, {setting.steps} steps of distillation", distilled),
        measured(setting, f"pruned, {setting.steps} steps of cross entropy", plain),
    ]
    lost = rows[1]["loss"] - rows[0]["loss"]
    for row in rows[2:]:
        row["recovered"] = (rows[1]["loss"] - row["loss"]) / lost
    return rows


def rounding_rows(setting: Setting) -> list[dict[str, Any]]:
    """Fewer bits: round to nearest, and quantization-aware training stored as int4."""
    rows = []
    for bits in (4, 3, 2):
        rows.append(measured(setting, f"{bits} bits, round to nearest", rounded(setting, bits)))
        settings = ["stages.distill.qat.form=int4", f"stages.distill.qat.bits={bits}"]
        exported = trained(setting, f"qat-{bits}", setting.original, *settings)
        stored = setting.out / f"qat-{bits}-int4"
        compress(exported, stored, scheme="w4a16-rtn", device="cpu")
        row = measured(setting, f"{bits} bits, quantization-aware training", stored)
        row["plain_loss"] = measured(setting, "", exported, captions=False)["loss"]
        rows.append(row)
    return rows


def trained(setting: Setting, name: str, folder: Path, *settings: str) -> Path:
    """The exported checkpoint of a run of the recipe, at the size of the quickstart's model."""
    run = setting.out / name
    overrides = [
        f"run={run}", f"model.folder={folder}", "model.dtype=fp32", "checkpoint.export_dtype=fp32", "log.every=50",
        f"stages.distill.steps={setting.steps}", "stages.distill.schedule.warmup_steps=20",
        f"stages.distill.objective.distillation.teacher={setting.original}",
        f'stages.distill.data.sources=[{{path="{setting.shards / "train"}"}}]', "stages.distill.data.max_seq_len=1024",
        "stages.distill.data.max_patches=512", "stages.distill.data.num_workers=0",
        "stages.distill.optimizer.kind=muon", "stages.distill.optimizer.lr=1e-3",
        "stages.distill.optimizer.lrs={vision=2e-3, projector=1.5e-3}", "stages.distill.optimizer.weight_decay=0.01",
        f'validation.sources=[{{path="{setting.shards / "held-out"}"}}]', "validation.every=100000",
        "validation.num_generations=0",
    ]  # fmt: skip
    train(load_config(TrainConfig, RECIPE, [*overrides, *settings]), device="cpu")
    return max((run / "checkpoints").glob("step-*"))


def rounded(setting: Setting, bits: int) -> Path:
    """The model with weights of tower and decoder rounded to nearest, as a plain folder."""
    model, out = load_model(setting.original, device="cpu"), setting.out / f"rtn-{bits}"
    with torch.no_grad():
        for name, layer in model.named_modules():
            if type(layer) is Linear and name.startswith(("vision.", "language.")):
                inputs = layer.stored_shape[1]
                part = layer.weight[:, :inputs]
                part.copy_(round_weight(part, "int4", fitting_group(inputs, GROUP_SIZE), bits))
    save_model(model, out, like=setting.original)
    return out


def measured(setting: Setting, name: str, folder: Path, *, captions: bool = True) -> dict[str, Any]:
    """Held-out loss of a folder, and CIDEr of its captions."""
    samples = CalibrationConfig(shards=(str(setting.shards / "held-out"),), num_samples=1000, max_tokens=1024)
    processor = Processor.load(folder)
    batches = load_batches(samples, processor, 2**30)
    row = {"name": name, "loss": mean_loss(load_model(folder, device="cpu", dtype=torch.float32), batches)}
    if captions and setting.captions:
        row["cider"] = cider(setting, folder)
    return row


def cider(setting: Setting, folder: Path) -> float:
    """CIDEr of greedy captions of the held-out images."""
    results = setting.out / "results" / folder.parent.parent.name / folder.name
    command = [
        sys.executable, "-m", "saccade", "evaluate", str(folder), "--tasks", "captioning",
        "--data", str(setting.shards / "held-out"), "-o", str(results),
        "--no-contamination", "--device", "cpu", "--json",
    ]  # fmt: skip
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    [found] = json.loads(shown)["results"].values()
    return found["tasks"]["captioning"]["metrics"]["cider"]["value"]


if __name__ == "__main__":
    main()
