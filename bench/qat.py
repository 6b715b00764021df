"""Quantization-aware training against post-training quantization to four bits, where the latter loses most.

    saccade quickstart --no-serve --dir quick
    python -m bench.qat --quickstart quick

First the model is quantized after training: tower, projector, decoder and all of them, each by rounding to nearest,
GPTQ and AWQ. Post-training quantization loses most in the part whose best method is furthest from the original (KL
divergence on new held-out scenes). That part is then trained with rounded weights and compressed by rounding to
nearest. It learns from the original alone and sees no label: without rounding its gradient would be zero, so what it
gains is not further training. Every row is an int4 folder of `saccade compress`. The output ends with the statement
that must hold; exit status 1 if it does not. It takes about four minutes on one core.
"""

import argparse
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.recover import Setting, trained
from saccade.compress import compress
from saccade.compress.calibration import CalibrationConfig, load_batches
from saccade.compress.scheme import Rule, Scheme
from saccade.compress.verify import Fidelity, Reference
from saccade.data.scenes import scene_sample
from saccade.data.shards import ShardWriter
from saccade.log import set_up_logging
from saccade.model import load_model
from saccade.processor import Processor

PARTS = {
    "tower": ("vision",),
    "projector": ("projector",),
    "decoder": ("language",),
    "all": ("vision", "projector", "language"),
}
FIRST_SCENE = 100_000
"""Number of the first held-out scene; the quickstart has none of these.

Learning rate and steps were chosen on the quickstart's held-out scenes, which would therefore flatter training."""
METHODS = {"rtn": "to nearest", "gptq": "GPTQ", "awq": "AWQ"}


@dataclass
class Bench:
    """Where things are, and what the original says about held-out samples."""

    setting: Setting
    reference: Reference
    calibration: CalibrationConfig
    learning_rate: float
    seed: int
    rows: list[dict[str, Any]]

    def quantized(self, name: str, folder: Path, parts: tuple[str, ...], method: str) -> float:
        """Add the row of an int4 folder; returns its KL divergence."""
        out = self.setting.out / f"{name}-{'-'.join(parts)}-{method}".replace(" ", "-")
        rules = tuple(Rule(part=part, form="int4", method=method) for part in parts)
        compress(folder, out, scheme=Scheme(name=method, rules=rules), calibration=self.calibration, device="cpu")
        return self.measured(f"{name}, {METHODS[method]}", out)

    def measured(self, name: str, folder: Path) -> float:
        """Add the row of a folder; returns its KL divergence."""
        found: Fidelity = self.reference.compare(load_model(folder, device="cpu", dtype=torch.float32))
        self.rows.append({"name": name, "kl": found.kl, "loss": found.loss, "same_token": found.agreement})
        print(f"{name:<52}{found.kl:>10.2e}{found.loss:>10.4f}{found.agreement:>10.2%}", flush=True)
        return found.kl

    def trained(self, name: str, *settings: str) -> Path:
        """The original after some steps of distillation from itself."""
        vision_lr, projector_lr = 2 * self.learning_rate, 1.5 * self.learning_rate
        rates = [
            f"stages.distill.optimizer.lr={self.learning_rate}",
            f"stages.distill.optimizer.lrs={{vision={vision_lr}, projector={projector_lr}}}",
        ]
        kl = "stages.distill.objective.distillation.kl_weight=1.0"
        return trained(self.setting, name, self.setting.original, kl, f"seed={self.seed}", *rates, *settings)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quickstart", type=Path, required=True, help="folder of `saccade quickstart`")
    parser.add_argument("--out", type=Path, default=Path("qat"), help="folder of what is made; replaced")
    parser.add_argument("--steps", type=int, default=1200, help="training steps")
    parser.add_argument("--lr", type=float, default=3e-5, help="learning rate of the decoder")
    parser.add_argument("--seed", type=int, default=0, help="of training and of the choice of calibration samples")
    parser.add_argument("--num-held-out", type=int, default=600, help="new scenes to compare on")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    set_up_logging()
    torch.set_num_threads(1)
    shutil.rmtree(options.out, ignore_errors=True)
    bench = open_bench(options)
    print(f"{'int4':<52}{'KL':>10}{'loss':>10}{'same':>10}")
    bench.measured("original", bench.setting.original)
    best = {
        part: min(bench.quantized(part, bench.setting.original, PARTS[part], method) for method in METHODS)
        for part in PARTS
    }  # fmt: skip
    worst = max(best, key=lambda part: best[part])
    print(f"post-training quantization loses most with: {worst}")
    parts = json.dumps(PARTS[worst])
    aware = bench.trained("aware", "stages.distill.qat.form=int4", f"stages.distill.qat.parts={parts}")
    kl = bench.quantized(f"{worst}, quantization-aware training", aware, PARTS[worst], "rtn")
    holds = kl < best[worst]
    print(
        f"{'yes' if holds else 'NO':<4}quantization-aware training beats post-training quantization "
        "where that loses most"
    )
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": bench.rows, "worst": worst, "holds": holds}, indent=1) + "\n")
    sys.exit(not holds)


def open_bench(options: argparse.Namespace) -> Bench:
    """Load the original and its answers."""
    original = max((options.quickstart / "run" / "checkpoints").glob("step-*"))
    shards = options.quickstart / "shards"
    setting = Setting(original, shards, options.out, options.steps, captions=False)
    fresh = options.out / "fresh"
    with ShardWriter(fresh, max_samples=options.num_held_out) as writer:
        for number in range(FIRST_SCENE, FIRST_SCENE + options.num_held_out):
            writer.write(scene_sample(number, held_out=True))
    held_out = CalibrationConfig(shards=(str(fresh),), num_samples=options.num_held_out, max_tokens=1024)
    batches = load_batches(held_out, Processor.load(original), 2**30)
    reference = Reference(load_model(original, device="cpu", dtype=torch.float32), batches)
    calibration = CalibrationConfig(shards=(str(shards / "train"),), num_samples=128, seed=options.seed)
    return Bench(setting, reference, calibration, options.lr, options.seed, [])


if __name__ == "__main__":
    main()
