"""Validation while training: loss and generated samples on held-out data.

It changes no weights, random state or data position.

    held-out shards -> packed sequences, as in training -> sums over all ranks -> loss, accuracy
    their first samples -> greedy generation on the main rank -> samples.jsonl, exact_match

`loss` is the mean cross entropy over all loss tokens, `accuracy` the fraction of them whose most probable token is
correct, `exact_match` the fraction of generated outputs equal to the reference. If another objective is optimized, its
loss and metrics are in `objective_*`, from a second pass over the data; for preference pairs, loss and accuracy are
those of the chosen conversations. Generation needs the full model on one rank: it is skipped for sharded models.
"""

import contextlib
import logging
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from saccade.data.index import open_index
from saccade.data.loader import Stream
from saccade.data.sample import Sample, TextRules, conversations, images
from saccade.errors import DataError, UserError
from saccade.model.generation import stream as generate_stream
from saccade.processor import Processor
from saccade.processor.inputs import ModelInputs
from saccade.report.page import thumbnail
from saccade.train.batches import BatchIterator, open_validation_stream
from saccade.train.config import TrainConfig
from saccade.train.context_batches import context_group
from saccade.train.due_tasks import Validate
from saccade.train.loss import ModelWithLoss
from saccade.train.stage_config import StageConfig
from saccade.train.trackers import JsonLines
from saccade.world import World

logger = logging.getLogger(__name__)

INDEX_TIMEOUT_S = 86400.0
"""How long ranks wait for the main rank to index and measure the held-out shards, once per folder."""
GENERATION_BATCH_SIZE = 32
"""Prompts that are generated together."""
THUMBNAIL_SIDE = 160
"""Longest side of an image in samples.jsonl, in pixels."""


def combine(*validators: Validate | None, device: torch.device) -> Validate | None:
    """Several validation functions as one, which changes no random state; None if there are none."""
    given = [one for one in validators if one is not None]

    def validate(model: ModelWithLoss, step: int) -> Mapping[str, float] | None:
        scores: dict[str, float] = {}
        with preserve_random_state(device):
            for one in given:
                if (found := one(model, step)) is None:
                    return None
                scores |= found
        return scores

    return validate if given else None


def held_out_validation(
    config: TrainConfig, stage: StageConfig, world: World, *, step: int, stop_requested: threading.Event
) -> "HeldOutValidation | None":
    """Build `config.validation` on every rank; None without sources. `step` is the last one validated."""
    return HeldOutValidation(config, stage, world, step, stop_requested) if config.validation.sources else None


class HeldOutValidation:
    """Scores held-out samples; every rank calls it with its model."""

    def __init__(
        self, config: TrainConfig, stage: StageConfig, world: World, step: int, stop_requested: threading.Event
    ) -> None:
        self._config, self._validation, self._stage, self._world = config, config.validation, stage, world
        self._stop_requested, self._context = stop_requested, context_group(world)
        self._num_generations = config.validation.num_generations
        if world.is_main:  # builds the index if needed, and writes the generations
            self._open_stream().close()
            self._samples = JsonLines(config.run / "samples.jsonl", step)
        world.barrier(timeout_s=INDEX_TIMEOUT_S)

    def __call__(self, model: ModelWithLoss, step: int) -> dict[str, float] | None:
        """loss and accuracy, the same on every rank, and exact_match on the main rank; None if a stop was requested."""
        scores = self._score(model)
        dims, is_balanced = self._world.dims, self._config.parallel.balance_images and self._world.num_loss_ranks > 1
        if isinstance(model, FSDPModule) or dims.pipeline > 1 or dims.tensor > 1 or is_balanced:
            self._skip_generations()
        elif scores is not None and self._world.is_main and self._num_generations:
            scores |= self._generate(model, step)
        return None if self._world.any(self._stop_requested.is_set()) else scores

    # -------------------------------------------------------------- loss

    def _open_stream(self) -> Stream:
        """The held-out packed sequences from their start, the same at every call."""
        validation, world = self._config.validation, self._world
        return open_validation_stream(
            self._config,
            self._stage,
            sources=validation.sources,
            num_samples=validation.num_samples,
            rank=world.data_rank,
            num_ranks=world.num_data_ranks,
            context=self._context,
        )

    def _score(self, model: ModelWithLoss) -> dict[str, float] | None:
        """Return None if a stop was requested on any rank, after the current batch."""
        objective = model.objective
        names = ("loss", *objective.metric_names) if objective.metric_names else ()
        total = torch.zeros(3, dtype=torch.float64, device=self._world.device)
        of_objective = torch.zeros(1 + len(names), dtype=torch.float64, device=self._world.device)
        with self._open_stream() as stream:
            batches = BatchIterator(stream, model.model.config, (), self._world.device, model.objective, self._context)
            while (batch := batches.next(with_sources=False)) is not None:
                for one in batch.on_device:
                    total += model.score(one.inputs, objective.validated(one.inputs, one.labels))
                    if names:
                        of_objective += model.score_objective(one.inputs, one.labels, one.num_loss_tokens, one.targets)
                if self._world.any(self._stop_requested.is_set()):
                    return None
        loss, correct, count = self._world.all_sum(total * self._world.counts_loss).tolist()
        if not count:
            raise DataError(
                "validation.sources have no loss tokens. Name other shards, or raise validation.num_samples"
            )
        scores = {"loss": loss / count, "accuracy": correct / count}
        num_units, *sums = self._world.all_sum(of_objective * self._world.counts_loss).tolist()
        return scores | {
            f"objective_{name}": value / max(1.0, num_units) for name, value in zip(names, sums, strict=True)
        }

    # -------------------------------------------------------------- generation

    def _skip_generations(self) -> None:
        if self._world.is_main and self._num_generations:
            logger.warning(
                "generation is skipped: the model is sharded, or its images are (balance_images). Set "
                "validation.num_generations = 0, or use ddp"
            )
        self._num_generations = 0

    def _generate(self, model: ModelWithLoss, step: int) -> dict[str, float]:
        """Generate greedily for the first samples and write the outputs to samples.jsonl."""
        processor = Processor.load(self._config.model.folder, resize=self._stage.data.resize)
        prompts = list(islice(self._prompts(processor), self._num_generations))
        num_correct = 0
        for start in range(0, len(prompts), GENERATION_BATCH_SIZE):
            group = prompts[start : start + GENERATION_BATCH_SIZE]
            outputs = self._generate_group(model, group, processor)
            if self._stop_requested.is_set():
                return {}
            for prompt, token_ids in zip(group, outputs, strict=True):
                text = processor.decode([token for token in token_ids if token not in processor.eos_ids])
                num_correct += text.strip() == prompt.reference.strip()
                self._samples.log({"step": step, "output": text} | prompt.record())
        return {"exact_match": num_correct / len(prompts)} if prompts else {}

    def _generate_group(
        self, model: ModelWithLoss, group: Sequence["_Prompt"], processor: Processor
    ) -> list[list[int]]:
        """New tokens of each prompt; cut short by a stop request."""
        inputs = ModelInputs.pack([prompt.inputs for prompt in group])
        outputs: list[list[int]] = [[] for _ in group]
        for tokens in generate_stream(
            model.model, inputs, max_new_tokens=self._validation.max_new_tokens, eos_ids=processor.eos_ids
        ):
            for output, token in zip(outputs, tokens, strict=True):
                if token is not None:
                    output.append(token)
            if self._stop_requested.is_set():
                break
        return outputs

    def _prompts(self, processor: Processor) -> Iterator["_Prompt"]:
        """The samples of all sources in order; bad samples are skipped here and reported when the loss is computed."""
        for source in self._validation.sources:
            index = open_index(source.path, config=self._stage.data.storage)
            for shard in range(len(index.shards)):
                for row in index.kept(shard):
                    try:
                        prompt = _prompt(index.read_sample(shard, int(row)), source.rules, processor)
                    except UserError:
                        continue
                    yield prompt


class _Prompt(NamedTuple):
    """A held-out conversation up to its last assistant message, and that message."""

    inputs: ModelInputs
    prompt: str
    reference: str
    image: bytes | None

    def record(self) -> dict[str, str]:
        """Describe a generation for samples.jsonl."""
        texts = {"prompt": self.prompt, "reference": self.reference}
        return texts if self.image is None else texts | {"image": thumbnail(self.image, THUMBNAIL_SIDE)}


def _prompt(sample: Sample, rules: TextRules, processor: Processor) -> _Prompt:
    conversation, pictures = conversations(sample, rules)[0], images(sample)
    last = max(number for number, message in enumerate(conversation) if message["role"] == "assistant")
    inputs = processor.preprocess(conversation[:last], add_generation_prompt=True)
    return _Prompt(inputs, _text(conversation[last - 1]), _text(conversation[last]), pictures[0] if pictures else None)


def _text(message: Mapping[str, Any]) -> str:
    """The text of a message without its images."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


@contextlib.contextmanager
def preserve_random_state(device: torch.device) -> Iterator[None]:
    """Restore all random generators at the end."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    random.setstate(python)
    np.random.set_state(numpy)
