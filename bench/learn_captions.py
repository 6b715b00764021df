"""Train a text model with a new vision tower on captioned photos; test it with matching and with shuffled photos.

    python -m bench.learn_captions --text SmolLM2-135M-Instruct.Q4_1.gguf --photos flickr8k/ --run runs/smol \\
        --steps 3000 --out captions.json
    python -m bench.learn_captions --score captions.json

`photos` holds WebDataset tars train-*.tar, val-*.tar and test-*.tar with json `captions`. After training, the exported
checkpoint with the lowest validation loss captions the test photos (greedy), once with the right photo and once with
another: the difference is what the model takes from the photo. `--score` computes CIDEr of both with bootstrap
intervals (needs pycocoevalcap).
"""

import argparse
import json
import random
import re
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from saccade.data.config import Source
from saccade.data.index import ShardIndex, open_index
from saccade.data.sample import TextRules, description, images
from saccade.log import set_up_logging
from saccade.model import generate, load_model
from saccade.model.initialize import initialize_from_text
from saccade.model.vlm import VLM
from saccade.processor import Processor
from saccade.processor.inputs import ModelInputs
from saccade.train.config import (
    CheckpointConfig,
    DataConfig,
    InitialModelConfig,
    LogConfig,
    StageConfig,
    TrainConfig,
)
from saccade.train.loss import count_labels, next_token_labels
from saccade.train.parameter_groups import OptimizerConfig
from saccade.train.schedule import ScheduleConfig
from saccade.train.stages import train

PROMPT = TextRules().caption_prompt


def recipe(run: Path, start: Path, photos: Path, steps: int, workers: int) -> TrainConfig:
    """One stage: a high learning rate for the new vision tower, a low one for the text model."""
    return TrainConfig(
        run=run,
        model=InitialModelConfig(folder=start),
        stages=(
            StageConfig(
                name="captions",
                data=DataConfig(
                    sources=(Source(path=str(photos / "train-*.tar"), name="photos"),),
                    max_seq_len=16384, max_patches=65536, packing_buffer_size=6000, num_workers=workers,
                ),
                steps=steps,
                optimizer=OptimizerConfig(
                    lr=3e-5, lrs={"vision": 4e-4, "projector": 1e-3}, weight_decay=0.1, beta2=0.98
                ),
                schedule=ScheduleConfig(kind="cosine", warmup_steps=min(200, steps // 5)),
            ),
        ),
        checkpoint=CheckpointConfig(every=10**6, export_every=max(1, steps // 6)),
        log=LogConfig(every=50),
    )  # fmt: skip


def load_samples(index: ShardIndex) -> list[tuple[bytes, list[str]]]:
    """Photo and captions of every sample."""
    samples = [
        index.read_sample(shard, row) for shard in range(len(index.shards)) for row in index.kept(shard).tolist()
    ]
    return [(images(sample)[0], list(description(sample)["captions"])) for sample in samples]


def ask(photo: bytes, answer: str | None = None) -> list[dict[str, Any]]:
    """The conversation of training, with or without its answer."""
    content = [{"type": "image", "image": photo}, {"type": "text", "text": PROMPT}]
    question = {"role": "user", "content": content}
    return [question] if answer is None else [question, {"role": "assistant", "content": answer}]


@torch.inference_mode()
def caption_losses(model: VLM, processor: Processor, pairs: list[tuple[bytes, str]]) -> list[float]:
    """Loss per loss token of each pair of photo and caption."""
    losses = []
    for begin in range(0, len(pairs), 64):
        for photo, caption in pairs[begin : begin + 64]:
            inputs = processor([ask(photo, caption)])
            losses.append(_loss(model, inputs))
    return losses


def _loss(model: VLM, inputs: ModelInputs) -> float:
    labels, moved = next_token_labels(inputs), inputs.to(model.device)
    hidden = model.hidden_states(moved)
    learned = count_labels(labels)
    loss = model.head.cross_entropy(hidden, labels.to(hidden.device), count=float(learned), num_labels=learned)
    return float(loss)


def describe(model: VLM, processor: Processor, photos: list[bytes]) -> list[str]:
    """A greedy caption of each photo."""
    said = []
    for begin in range(0, len(photos), 250):
        inputs = processor([ask(photo) for photo in photos[begin : begin + 250]], add_generation_prompt=True)
        answers = generate(model, inputs, max_new_tokens=30, eos_ids=processor.eos_ids)
        said += [processor.decode(answer).strip() for answer in answers]
    return said


def interval(values: list[float], rounds: int = 1000) -> tuple[float, float]:
    """95 % bootstrap interval of the mean."""
    rng = random.Random(0)
    means = sorted(statistics.mean(rng.choices(values, k=len(values))) for _ in range(rounds))
    return means[round(0.025 * rounds)], means[round(0.975 * rounds) - 1]


def learn(options: argparse.Namespace) -> None:
    """Make, train, choose, describe."""
    set_up_logging()
    start = options.run.with_name(options.run.name + "-start")
    if not start.exists():
        initialize_from_text(start, options.text, "90m")
    val, test = (load_samples(open_index(options.photos / f"{part}-*.tar")) for part in ("val", "test"))
    begin = time.perf_counter()
    train(recipe(options.run, start, options.photos, options.steps, options.workers))
    seconds = time.perf_counter() - begin
    processor, best = Processor.load(start), (float("inf"), Path())
    for folder in sorted((options.run / "checkpoints").iterdir()):
        model = load_model(folder, dtype="bf16")
        loss = statistics.mean(
            caption_losses(model, processor, [(photo, said[0]) for photo, said in val[: options.validation]])
        )
        print(f"{folder.name}: validation loss {loss:.4f}", flush=True)
        best = min(best, (loss, folder))
    model = load_model(best[1], dtype="bf16")
    shuffled = [photo for photo, _ in test[7:] + test[:7]]
    own_losses = caption_losses(model, processor, [(photo, said[0]) for photo, said in test])
    other_losses = caption_losses(
        model, processor, [(photo, said[0]) for photo, (_, said) in zip(shuffled, test, strict=True)]
    )
    result = {
        "checkpoint": best[1].name, "training_s": seconds, "val_loss": best[0],
        "test_loss": statistics.mean(own_losses), "test_loss_interval": interval(own_losses),
        "test_loss_shuffled": statistics.mean(other_losses), "test_loss_shuffled_interval": interval(other_losses),
        "gain_interval": interval([b - a for a, b in zip(own_losses, other_losses, strict=True)]),
    }  # fmt: skip
    print(json.dumps(result, indent=1), flush=True)
    result |= {
        "own": describe(model, processor, [photo for photo, _ in test]),
        "shuffled": describe(model, processor, shuffled),
        "references": [said for _, said in test],
    }
    options.out.write_text(json.dumps(result))


def score(file: Path) -> None:
    """CIDEr of both sets of captions, each against the references of the photo it should describe."""
    from pycocoevalcap.cider.cider import Cider

    said = json.loads(file.read_text())
    references = {i: [_words(text) for text in texts] for i, texts in enumerate(said["references"])}
    values = {}
    for name in ("own", "shuffled"):
        mean, each = Cider().compute_score(references, {i: [_words(text)] for i, text in enumerate(said[name])})
        values[name] = list(map(float, each))
        low, high = interval(values[name])
        print(f"CIDEr, {name} photos: {mean:.3f} ({low:.3f} to {high:.3f})")
    low, high = interval([a - b for a, b in zip(values["own"], values["shuffled"], strict=True)])
    print(f"difference: {low:.3f} to {high:.3f}")
    for i in range(0, len(said["own"]), max(1, len(said["own"]) // 20))[:20]:
        print(f"  {said['own'][i]}\n      reference: {said['references'][i][0]}")


def _words(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def main() -> None:
    """Train and describe, or score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--photos", type=Path)
    parser.add_argument("--run", type=Path, default=Path("runs/captions"))
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--validation", type=int, default=200, help="validation photos that choose the checkpoint")
    parser.add_argument("--out", type=Path, default=Path("captions.json"))
    parser.add_argument("--score", type=Path)
    options = parser.parse_args()
    score(options.score) if options.score else learn(options)


if __name__ == "__main__":
    main()
