"""Held-out loss and sample answers while training. A probe looks and leaves everything as it was: weights, random numbers, data.

    held-out shards -> packed rows, as training's -> sums over all ranks -> val_loss, val_accuracy
    the first of their samples -> greedy answers by the main rank -> samples.jsonl, answers_right

The loss is the mean over the learned tokens of all rows; accuracy is the share of them whose likeliest token is the right one;
answers_right is the share of generated answers that equal the sample's own. Answers need the whole model on one rank: they are left
out where it is sharded.
"""

import base64
import contextlib
import io
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.distributed.fsdp import FSDPModule

from saccade.data.index import open_index
from saccade.data.loader import Source, Stream, open_stream
from saccade.data.sample import Sample, TextRules, conversations, images
from saccade.errors import DataError, UserError
from saccade.model.generation import generate
from saccade.processor import Processor
from saccade.processor.inputs import ModelInputs
from saccade.train.config import SourceConfig, StageConfig, TrainConfig
from saccade.train.feed import Feed
from saccade.train.loss import TrainedModel
from saccade.train.trackers import JsonLines
from saccade.train.trainer import Probe
from saccade.world import World

logger = logging.getLogger(__name__)

INDEXING_PATIENCE_S = 86400.0
"""How long ranks wait for the main one to index and measure the held-out shards, which is done once for each folder."""
ANSWERED_AT_ONCE = 32
"""Prompts in one row."""
THUMBNAIL_SIDE = 160
"""Longest side of a picture in samples.jsonl, in pixels."""


def together(*probes: Probe | None) -> Probe | None:
    """Several probes as one; None where there is none."""
    there = [probe for probe in probes if probe is not None]

    def probe(trained: TrainedModel, step: int) -> Mapping[str, float]:
        return {name: score for one in there for name, score in one(trained, step).items()}

    return probe if there else None


def held_out_probe(config: TrainConfig, stage: StageConfig, world: World, *, step: int) -> "HeldOut | None":
    """The probe that `config.probe` asks for, going on after `step`; None where it names no shards. Every rank must ask."""
    return HeldOut(config, stage, world, step) if config.probe.sources else None


class HeldOut:
    """Scores held-out samples; every rank calls it with its model."""

    def __init__(self, config: TrainConfig, stage: StageConfig, world: World, step: int) -> None:
        self._config, self._probe, self._data, self._world = config, config.probe, stage.data, world
        self._num_answers = config.probe.num_generations
        if world.is_main:  # it may have to build the index, and is to write
            self._open().close()
            self._samples = JsonLines(config.run / "samples.jsonl", step)
        world.barrier(patience_s=INDEXING_PATIENCE_S)

    def __call__(self, trained: TrainedModel, step: int) -> dict[str, float]:
        """val_loss and val_accuracy, the same on every rank; on the main one also answers_right."""
        with random_numbers_kept(self._world.device):
            scores = self._score(trained)
            if isinstance(trained, FSDPModule):
                trained.reshard()  # without a backward pass its outermost parameters would stay gathered
                self._say_why_no_answers()
            elif self._world.is_main and self._num_answers:
                scores |= self._answer(trained, step)
        return scores

    # -------------------------------------------------------------- loss

    def _open(self) -> Stream:
        """The held-out rows from their beginning, the same at every call. Made in this process: they are few."""
        sources = self._probe.sources
        num_samples = int(sum(open_index(source.path).kept_sizes.sum() for source in sources))
        return open_stream(
            [Source(path=source.path, rules=source.rules, name=source.name) for source in sources],
            checkpoint=self._config.model.folder,
            max_seq_len=self._data.token_budget,
            max_patches=self._data.patch_budget,
            global_batch_size=self._world.size,
            num_samples=min(self._probe.num_samples, num_samples),
            rank=self._world.rank,
            num_ranks=self._world.size,
            resize=self._data.resize,
            num_workers=0,
            max_bad_share=self._data.max_bad_share,
        )

    def _score(self, trained: TrainedModel) -> dict[str, float]:
        total = torch.zeros(3, dtype=torch.float64, device=self._world.device)
        with self._open() as stream:
            feed = Feed(stream, trained.model.config, (), self._world.device)
            while (rows := feed.next(with_sources=False)) is not None:
                for row in rows.on_device:
                    total += trained.score(row.inputs, row.labels)
        loss, right, learned = self._world.all_sum(total).tolist()
        if not learned:
            raise DataError("the probe's sources hold nothing to be predicted. Name other shards, or raise num_samples")
        return {"val_loss": loss / learned, "val_accuracy": right / learned}

    # -------------------------------------------------------------- answers

    def _say_why_no_answers(self) -> None:
        if self._world.is_main and self._num_answers:
            logger.warning(
                "the model is sharded: sample answers are left out. Set probe.num_generations = 0, or use ddp"
            )
        self._num_answers = 0

    def _answer(self, trained: TrainedModel, step: int) -> dict[str, float]:
        """Answer the first samples greedily and write the answers down."""
        processor = Processor.load(self._config.model.folder, resize=self._data.resize)
        asked = list(islice(_first_questions(self._probe.sources, processor), self._num_answers))
        num_right = 0
        for start in range(0, len(asked), ANSWERED_AT_ONCE):
            questions = asked[start : start + ANSWERED_AT_ONCE]
            inputs = ModelInputs.pack([question.inputs for question in questions])
            answers = generate(
                trained.model, inputs, max_new_tokens=self._probe.max_new_tokens, eos_ids=processor.eos_ids
            )
            for question, answer in zip(questions, answers, strict=True):
                text = processor.decode([token for token in answer if token not in processor.eos_ids])
                num_right += text.strip() == question.reference.strip()
                self._samples.log({"step": step, "answer": text} | question.record())
        return {"answers_right": num_right / len(asked)} if asked else {}


class _Question(NamedTuple):
    """A held-out conversation up to its last answer, and that answer."""

    inputs: ModelInputs
    prompt: str
    reference: str
    picture: bytes | None

    def record(self) -> dict[str, str]:
        """For samples.jsonl."""
        shown = {"prompt": self.prompt, "reference": self.reference}
        return shown if self.picture is None else shown | {"image": thumbnail(self.picture)}


def _first_questions(sources: Sequence[SourceConfig], processor: Processor) -> Iterator[_Question]:
    """The samples of all sources in their order; unusable ones are passed over, and named where the loss meets them."""
    for source in sources:
        index = open_index(source.path)
        for shard in range(len(index.shards)):
            for row in index.kept(shard):
                try:
                    question = _question(index.read_sample(shard, int(row)), source.rules, processor)
                except UserError:
                    continue
                yield question


def _question(sample: Sample, rules: TextRules, processor: Processor) -> _Question:
    talk, pictures = conversations(sample, rules)[0], images(sample)
    last = max(number for number, message in enumerate(talk) if message["role"] == "assistant")
    inputs = processor.preprocess(talk[:last], add_generation_prompt=True)
    return _Question(inputs, _text(talk[last - 1]), _text(talk[last]), pictures[0] if pictures else None)


def _text(message: Mapping[str, Any]) -> str:
    """What is said in a message, without its pictures."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def thumbnail(picture: bytes) -> str:
    """The picture, small, as a data URL."""
    file = io.BytesIO()
    with Image.open(io.BytesIO(picture)) as opened:
        small = ImageOps.exif_transpose(opened).convert("RGB")
        small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
        small.save(file, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


@contextlib.contextmanager
def random_numbers_kept(device: torch.device) -> Iterator[None]:
    """What is drawn inside is as if it had not been drawn."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    random.setstate(python)
    np.random.set_state(numpy)
