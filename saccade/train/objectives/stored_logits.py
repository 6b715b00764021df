"""Files with the k largest log-probabilities of a teacher for every loss token of a shard folder.

Legend: S loss tokens, K stored tokens of each, V vocabulary.

    index/logits-FINGERPRINT/00000.safetensors     next to the lengths of shard 00000.tar
        token_ids  int32 [S, K]   tokens with the largest probability, in descending order
        log_probs  fp32  [S, K]   log p of each, of the softmax over V at the temperature of the recipe
        log_rest   fp32  [S]      log of the probability of all other tokens together; -inf where there are none
        metadata   size and kept rows of the shard; for every conversation: key of its sample, digest of its tokens, its
                   rows; length of the shortest conversation that was too long to be computed

The fingerprint names the teacher's weights, the tokenizer, template and image settings, the rules that make
conversations, k and the temperature: logits of another teacher or another tokenizer are never read. A sample with
several captions has a conversation for each; the digest of its tokens finds the right one.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from saccade.data.index import ShardIndex
from saccade.data.index_files import parquet_name
from saccade.data.loader import Stream
from saccade.data.sample import TextRules
from saccade.errors import DataError
from saccade.files import atomic_write
from saccade.model.checkpoint_reader import tensor_files
from saccade.processor import Processor
from saccade.processor.inputs import IGNORED, ModelInputs
from saccade.train.objectives.config import DistillationConfig

TARGETS = ("token_ids", "log_probs", "log_rest")
_VERSION = 1
_BLOCK_BYTES = 2**20
_BLOCKS_PER_FILE = 16


@dataclass(frozen=True, kw_only=True)
class LogitsOf:
    """Settings that the stored logits of a stage depend on, except the source."""

    config: DistillationConfig
    """Teacher, k and temperature."""
    folder: Path
    """The trained model's: its processor makes the inputs of both models."""
    dtype: str
    """Compute dtype of the teacher."""

    def fingerprint(self, rules: TextRules, resize: str) -> str:
        """Names the logits of a source."""
        settings = (
            _VERSION, weights_digest(self.config.teacher), Processor.fingerprint(self.folder), rules, resize,
            self.dtype, self.config.top_k, self.config.temperature,
        )  # fmt: skip
        return hashlib.sha256(repr(settings).encode()).hexdigest()[:16]

    def file(self, index: ShardIndex, shard: int, rules: TextRules, resize: str) -> Path:
        """The file of a shard."""
        name = parquet_name(index.shards[shard]).removesuffix(".parquet")
        return index.folder / f"logits-{self.fingerprint(rules, resize)}" / f"{name}.safetensors"


@functools.lru_cache(maxsize=8)
def weights_digest(folder: Path) -> str:
    """Digest a checkpoint's config and 16 MiB of blocks spread over each weight file, so that a large one is quick."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(set(tensor_files(folder).values())):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as opened:
            for number in range(_BLOCKS_PER_FILE):
                opened.seek(max(0, size - _BLOCK_BYTES) * number // (_BLOCKS_PER_FILE - 1))
                digest.update(opened.read(_BLOCK_BYTES))
    return digest.hexdigest()


def tokens_digest(token_ids: Tensor) -> str:
    """Digest the tokens of a conversation."""
    return hashlib.blake2b(token_ids.to(torch.int64).numpy().tobytes(), digest_size=8).hexdigest()


# ------------------------------------------------------------------ writing


class Conversation(NamedTuple):
    """The stored logits of one conversation."""

    key: str
    digest: str
    targets: Mapping[str, Tensor]
    """Tensors named in `TARGETS`, one row per loss token, in order."""


def write_shard(
    file: Path,
    index: ShardIndex,
    shard: int,
    conversations: Sequence[Conversation],
    num_stored: int,
    too_long: int | None = None,
) -> None:
    """Write the logits of a shard. `too_long`: tokens of the shortest conversation that was left out."""
    empty = {
        "token_ids": torch.zeros(0, num_stored, dtype=torch.int32),
        "log_probs": torch.zeros(0, num_stored),
        "log_rest": torch.zeros(0),
    }
    tensors = {
        name: torch.cat([empty[name], *(one.targets[name] for one in conversations)]).contiguous() for name in TARGETS
    }
    starts = [0]
    for one in conversations:
        starts.append(starts[-1] + len(one.targets["log_rest"]))
    found = {f"{one.key} {one.digest}": bounds for one, bounds in zip(conversations, pairwise(starts), strict=True)}
    metadata = {"contents": _contents(index, shard), "rows": json.dumps(found), "too_long": json.dumps(too_long)}
    with atomic_write(file) as path:
        save_file(tensors, path, metadata=metadata)


def has_shard(file: Path, index: ShardIndex, shard: int, max_seq_len: int = 0) -> bool:
    """Whether the logits of a shard are there, of the samples it has now and of conversations up to `max_seq_len`."""
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
    except (OSError, SafetensorError):
        return False
    too_long = json.loads(metadata.get("too_long", "1"))
    return metadata.get("contents") == _contents(index, shard) and (too_long is None or too_long > max_seq_len)


def _contents(index: ShardIndex, shard: int) -> str:
    """Return a value that changes with the size of a shard, and with the samples that curation keeps."""
    kept = hashlib.sha256(index.kept(shard).tobytes()).hexdigest()[:16]
    return f"{index.entries[shard].num_bytes} {kept}"


# ------------------------------------------------------------------ reading


class LogitsReader:
    """Finds the stored logits of the samples of a stream."""

    def __init__(self, wanted: LogitsOf, stream: Stream) -> None:
        self._wanted, self._resize = wanted, stream.config.resize
        self._sources = {source.name: source for source in stream.sources}
        self._numbers = {name: _shard_numbers(source.index) for name, source in self._sources.items()}
        self._shard = functools.lru_cache(maxsize=64)(self._open_shard)

    def __call__(self, sample_ids: Sequence[str], inputs: ModelInputs, labels_T: Tensor) -> dict[str, Tensor]:
        """The stored tensors of the loss tokens of a packed sequence, in order. `sample_ids`: of each conversation."""
        bounds = inputs.cu_seqlens.tolist()
        parts: list[dict[str, Tensor]] = []
        for sample_id, (begin, end) in zip(sample_ids, pairwise(bounds), strict=True):
            found = self._rows(sample_id, tokens_digest(inputs.token_ids[begin:end]))
            num_labels = int((labels_T[begin:end] != IGNORED).sum())
            if len(found["log_rest"]) != num_labels:
                raise DataError(
                    f"{sample_id}: {len(found['log_rest'])} stored logits for {num_labels} loss tokens. {_REMEDY}"
                )
            parts.append(found)
        return {name: torch.cat([part[name] for part in parts]) for name in TARGETS}

    def _rows(self, sample_id: str, digest: str) -> dict[str, Tensor]:
        """An id is source/shard/key; shard and key may have folders."""
        source, *parts = sample_id.split("/")
        numbers = self._numbers[source]
        for end in range(1, len(parts)):
            shard, key = "/".join(parts[:end]), "/".join(parts[end:])
            if shard in numbers:
                rows, read = self._shard(source, numbers[shard])
                if (bounds := rows.get(f"{key} {digest}")) is not None:
                    return read(*bounds)
        raise DataError(f"{sample_id}: no stored logits of this conversation. {_REMEDY}")

    def _open_shard(
        self, source: str, number: int
    ) -> tuple[dict[str, list[int]], Callable[[int, int], dict[str, Tensor]]]:
        """Rows of the conversations of a shard, and a function that reads some."""
        index, rules = self._sources[source].index, self._sources[source].config.rules
        file = self._wanted.file(index, number, rules, self._resize)
        if not has_shard(file, index, number):
            raise DataError(f"{file}: no logits of the teacher for this shard. {_REMEDY}")
        opened: Any = safe_open(file, framework="pt")
        slices = {name: opened.get_slice(name) for name in TARGETS}
        return json.loads(opened.metadata()["rows"]), lambda begin, end: {n: s[begin:end] for n, s in slices.items()}


def _shard_numbers(index: ShardIndex) -> dict[str, int]:
    """The number of each shard by its name in sample ids."""
    return {name.removesuffix(".tar"): number for number, name in enumerate(index.shards)}


def missing_shards(wanted: LogitsOf, index: ShardIndex, rules: TextRules, resize: str, max_seq_len: int) -> list[int]:
    """Shards of a source without stored logits of every conversation up to `max_seq_len`."""
    files = [wanted.file(index, shard, rules, resize) for shard in range(len(index.shards))]
    return [shard for shard, file in enumerate(files) if not has_shard(file, index, shard, max_seq_len)]


_REMEDY = "Compute them first: saccade train RECIPE --teacher-logits"
