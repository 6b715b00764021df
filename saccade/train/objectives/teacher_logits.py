"""Compute the logits of the teachers of a recipe once: `saccade train RECIPE --teacher-logits`.

    for every source of the stages that distil from stored logits, and of validation:
        shard -> conversations, all text variants -> packed sequences -> teacher -> top k of every loss token
              -> a file next to the index

Ranks divide the shards among themselves, and a shard whose file is there is skipped: a run that was killed continues at
the next shard.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from saccade.data.config import Source
from saccade.data.index import ShardIndex, open_index
from saccade.data.sample import training_conversations
from saccade.device import DTYPES
from saccade.errors import ConfigError, StorageError, UserError
from saccade.model import load_model
from saccade.model.vlm import VLM
from saccade.processor import Processor
from saccade.processor.inputs import IGNORED, ModelInputs, count_labels, next_token_labels
from saccade.train.config import TrainConfig
from saccade.train.objectives.build import check_objective, shared_vocabulary, stored_logits_of
from saccade.train.objectives.chunks import loss_rows, row_chunks
from saccade.train.objectives.stored_distillation import top_log_probs
from saccade.train.objectives.stored_logits import (
    TARGETS,
    Conversation,
    LogitsOf,
    missing_shards,
    tokens_digest,
    write_shard,
)
from saccade.train.stage_config import StageConfig
from saccade.world import World, open_world

logger = logging.getLogger(__name__)


def compute_teacher_logits(config: TrainConfig, *, device: str = "auto") -> list[str]:
    """Compute what the stages of a recipe read; returns a report for people."""
    stages = [one for one in config.stages if one.objective.distillation and one.objective.distillation.top_k]
    if not stages:
        raise ConfigError(
            "no stage distils from stored logits. Set stages.NAME.objective.distillation.top_k, such as 64"
        )
    lines = []
    with open_world(device) as world:
        for stage in stages:
            check_objective(stage.objective, config.model.folder)
            writer = _Writer.open(config, stage, world)
            for source in (*stage.data.sources, *config.validation.sources):
                num_shards, num_tokens = writer.write(source)
                lines.append(
                    f'stage "{stage.name}": {source.path}: {num_shards} shards, {num_tokens} loss tokens computed'
                )
    return lines


@dataclass(frozen=True)
class _Item:
    """A conversation that waits for the teacher."""

    key: str
    inputs: ModelInputs


@dataclass(frozen=True)
class _Writer:
    """The teacher of a stage."""

    stage: StageConfig
    wanted: LogitsOf
    teacher: VLM
    processor: Processor
    vocab_size: int
    world: World

    @staticmethod
    def open(config: TrainConfig, stage: StageConfig, world: World) -> _Writer:
        """Load the teacher."""
        distillation = stage.objective.distillation
        assert distillation is not None, "the stage distils"
        wanted = stored_logits_of(distillation, config.model.folder, config.model.dtype)
        teacher = load_model(distillation.teacher, device=world.device, dtype=DTYPES[wanted.dtype]).eval()
        processor = Processor.load(config.model.folder, resize=stage.data.resize)
        vocab_size = shared_vocabulary(distillation.teacher, config.model.folder)
        return _Writer(stage, wanted, teacher.requires_grad_(False), processor, vocab_size, world)

    @property
    def num_stored(self) -> int:
        """Number of teacher tokens that are stored for each loss token."""
        return min(self.wanted.config.top_k or 0, self.vocab_size)

    def write(self, source: Source) -> tuple[int, int]:
        """Compute the missing shards of a source; returns this rank's number of shards and loss tokens."""
        index = open_index(source.path, config=self.stage.data.storage)
        data = self.stage.data
        missing = missing_shards(self.wanted, index, source.rules, data.resize, data.max_seq_len)
        num_shards = num_tokens = 0
        for shard in self.world.share(missing):
            too_long: list[int] = []
            items = self._items(index, shard, source, too_long)
            conversations = [one for packed in self._packed(items) for one in self._compute(packed)]
            file = self.wanted.file(index, shard, source.rules, data.resize)
            write_shard(file, index, shard, conversations, self.num_stored, min(too_long, default=None))
            num_shards, num_tokens = num_shards + 1, num_tokens + sum(len(c.targets["log_rest"]) for c in conversations)
            logger.info("logits of %s: shard %d of %d", source.path, num_shards, len(missing))
        self.world.barrier(timeout_s=_TIMEOUT_S)
        return num_shards, num_tokens

    def _items(self, index: ShardIndex, shard: int, source: Source, too_long: list[int]) -> Iterator[_Item]:
        """The conversations of a shard that training will see. What is bad there is bad here.

        `too_long` gets the lengths of conversations that exceed the maximum length.
        """
        keys = index.read(shard, ["key"])["key"].to_pylist()
        for row in index.kept(shard).tolist():
            try:
                for [messages] in training_conversations(index.read_sample(shard, row), source.rules, pairs=False):
                    inputs = self.processor.preprocess(messages)
                    if inputs.num_tokens > self.stage.data.max_seq_len:
                        too_long.append(inputs.num_tokens)
                    else:
                        yield _Item(keys[row], inputs)
            except StorageError:
                raise
            except UserError as error:
                logger.debug("%s is left out: %s", keys[row], error)

    def _packed(self, items: Iterator[_Item]) -> Iterator[list[_Item]]:
        """Runs of conversations that fit into a packed sequence of the stage."""
        run: list[_Item] = []
        tokens = patches = 0
        for item in items:
            tokens, patches = tokens + item.inputs.num_tokens, patches + len(item.inputs.patches)
            if run and (tokens > self.stage.data.max_seq_len or patches > self.stage.data.max_patches):
                yield run
                run, tokens, patches = [], item.inputs.num_tokens, len(item.inputs.patches)
            run.append(item)
        if run:
            yield run

    @torch.no_grad()
    def _compute(self, items: Sequence[_Item]) -> Iterator[Conversation]:
        """The top k of every loss token of these conversations, from one forward pass."""
        inputs = ModelInputs.pack([item.inputs for item in items])
        labels_T = next_token_labels(inputs)
        device = self.world.device
        hidden_TD = self.teacher.hidden_states(inputs.to(device))
        rows_S, _ = loss_rows(labels_T.to(device), count_labels(labels_T), IGNORED)
        found = [
            top_log_probs(
                self.teacher.head(hidden_CD)[:, : self.vocab_size], self.num_stored, self.wanted.config.temperature
            )
            for hidden_CD in row_chunks(hidden_TD[rows_S], self.teacher.head.whole_shape[0])
        ]
        targets = {name: torch.cat([part[name] for part in found]) for name in TARGETS}
        begin = 0
        for item, (first, last) in zip(items, pairwise(inputs.cu_seqlens.tolist()), strict=True):
            end = begin + count_labels(labels_T[first:last])
            own = {name: tensor[begin:end] for name, tensor in targets.items()}
            yield Conversation(item.key, tokens_digest(item.inputs.token_ids), own)
            begin = end


_TIMEOUT_S = 24 * 3600.0
"""Ranks have shards of different sizes."""
