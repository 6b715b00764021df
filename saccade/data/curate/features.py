"""Measure everything that needs the samples' bytes, once, into a file next to the index.

    shard  ->  decode every image, read every text  ->  one row per sample  ->  index/features/NAME.parquet

Rules and thresholds read only these files, so changing a threshold costs seconds, not another pass over the pixels. A
file is written atomically: measuring may be stopped at any time and resumes shard by shard.

Shards are jobs (`jobs.py`), which Daft distributes over worker processes of this machine or of a Ray cluster; what is
done with a shard is plain numpy. (Daft decodes and hashes images too, but takes a truncated JPEG for a complete one
with a grey lower half, and does 627 photos of 224 pixels a second where reduced decoding does 3,000.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from saccade.data.curate.settings import DECODE_LIMITS
from saccade.data.curate.text_features import NUM_BANDS, minhash_bands, text_hash, text_statistics
from saccade.data.curate.thumbnails import SIDE, THUMBNAIL_BYTES, small_picture, thumbnails
from saccade.data.index import ShardIndex
from saccade.data.index_files import ShardEntry, ShardProgress, note_for, parquet_name
from saccade.data.jobs import Workers, run_jobs
from saccade.data.sample import Sample, TextRules, conversations, description, images
from saccade.data.storage import shown
from saccade.errors import DataError, ImageError

logger = logging.getLogger(__name__)

VERSION = 2
"""Version of the features; shards whose file has another version are measured again. Files of this version may have a
column `hashes`, which is not read."""
CONTENT_BYTES = 16
TEXT_BAND_BYTES = 4 * NUM_BANDS

SCHEMA = pa.schema(
    {
        "image_error": pa.string(),  # why an image of the sample cannot be decoded
        "contents": pa.list_(pa.binary(CONTENT_BYTES)),  # xxh3_128 of the bytes, of each image
        "thumbnails": pa.list_(pa.binary(THUMBNAIL_BYTES)),  # thumbnail, of each image
        "text_error": pa.string(),  # why the sample has no usable text
        "is_conversation": pa.bool_(),  # questions or messages, as opposed to captions
        "texts": pa.list_(pa.string()),  # captions, or the whole conversation
        "num_words": pa.list_(pa.int32()),  # this and the next three: `text_statistics` of each text
        "word_repetition": pa.list_(pa.float32()),
        "character_repetition": pa.list_(pa.float32()),
        "languages": pa.list_(pa.string()),
        "text_hash": pa.uint64(),  # hash of all texts together
        "text_bands": pa.binary(TEXT_BAND_BYTES),
        "score_names": pa.list_(pa.string()),  # numbers in the sample's json
        "scores": pa.list_(pa.float64()),
    }
)

_MAX_SCORES = 64  # per sample
_NO_PROMPTS = TextRules(caption_prompt="", text_prompt="")


# ------------------------------------------------------------------ one shard


def shard_features(index: ShardIndex, shard: int) -> pa.Table:
    """Measure the samples of one shard; those with an error in the index get an empty row."""
    index.prefetch(shard)
    rows: list[dict[str, Any]] = [dict.fromkeys(SCHEMA.names) for _ in range(int(index.sizes[shard]))]
    pictures: list[list[NDArray[np.uint8]]] = [[] for _ in rows]
    for row in np.flatnonzero(index.read(shard, ["error"])["error"].is_null().to_numpy()).tolist():
        sample = index.read_sample(shard, row)
        pictures[row] = _measure_images(sample, rows[row])
        _measure_text(sample, rows[row])
    _add_thumbnails(rows, pictures)
    _add_text_bands(rows)
    return pa.Table.from_pylist(rows, SCHEMA)


def _measure_images(sample: Sample, features: dict[str, Any]) -> list[NDArray[np.uint8]]:
    """The small images of a sample; empty if one cannot be decoded."""
    encoded = images(sample)
    try:
        pictures = [small_picture(data, DECODE_LIMITS) for data in encoded]
    except ImageError as error:
        features["image_error"] = str(error)
        return []
    features["contents"] = [xxhash.xxh3_128_digest(data) for data in encoded]
    return pictures


def _measure_text(sample: Sample, features: dict[str, Any]) -> None:
    try:
        variants = conversations(sample, _NO_PROMPTS)
        fields = description(sample)
    except DataError as error:
        features["text_error"] = str(error)
        return
    turns = [[_text_of(message) for message in variant if message["role"] != "system"] for variant in variants]
    texts = ["\n".join(filter(None, spoken)) for spoken in turns]
    measured = [text_statistics(text) for text in texts]
    scores = dict([(name, float(value)) for name, value in fields.items() if _is_number(value)][:_MAX_SCORES])
    features |= {
        "is_conversation": any(
            _text_of(message) for variant in variants for message in variant if message["role"] == "user"
        ),
        "texts": texts,
        "num_words": [each.num_words for each in measured],
        "word_repetition": [each.word_repetition for each in measured],
        "character_repetition": [each.character_repetition for each in measured],
        "languages": [each.language for each in measured],
        "text_hash": text_hash("\n".join(texts)),
        "score_names": list(scores),
        "scores": list(scores.values()),
    }


def _text_of(message: Mapping[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content).strip()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**64  # not NaN either


def _add_thumbnails(rows: list[dict[str, Any]], pictures: list[list[NDArray[np.uint8]]]) -> None:
    """Add the thumbnails of all images of the shard."""
    every = [picture for each in pictures for picture in each]
    thumbs = iter(thumbnails(np.stack(every) if every else np.zeros((0, SIDE, SIDE, 3), np.uint8)))
    for features, each in zip(rows, pictures, strict=True):
        features["thumbnails"] = [next(thumbs).tobytes() for _ in each]


def _add_text_bands(rows: list[dict[str, Any]]) -> None:
    """Add the MinHash bands of all texts of the shard."""
    read = [features for features in rows if features["texts"] is not None]
    bands = minhash_bands(["\n".join(features["texts"]) for features in read])
    for features, keys in zip(read, bands, strict=True):
        features["text_bands"] = keys.tobytes()


# ------------------------------------------------------------------ the files


def write_features(index: ShardIndex, shard: int) -> None:
    """Measure one shard and write its file."""
    entry = index.entries[shard]
    note = {"name": entry.name, "bytes": entry.num_bytes, "features": VERSION}
    index.location.write_table(_name(index, shard), shard_features(index, shard), note)


def is_measured(index: ShardIndex, shard: int) -> bool:
    """Whether the shard as indexed has features of this version."""
    return _version(_open(index, shard), index.entries[shard]) == VERSION


def unmeasured(index: ShardIndex) -> list[int]:
    """Shards without features; files on a URL count by their names, and are checked when they are read."""
    remote = index.location.remote_names("features")
    shards = [shard for shard, name in enumerate(index.shards) if parquet_name(name) not in remote]
    return [shard for shard in shards if _version(_local(index, shard), index.entries[shard]) != VERSION]


def read_features(index: ShardIndex, shard: int, columns: Sequence[str]) -> pa.Table:
    """Columns of one shard's features; rows as in the index."""
    where = f"{shown(index.location.written.url)}/{_name(index, shard)}"
    file = _open(index, shard)
    if file is None or _version(file, index.entries[shard]) != VERSION:
        raise DataError(
            f"{where}: missing, or not of this shard and version {VERSION}. Remove it and run saccade data curate "
            f"{shown(index.path)} again"
        )
    try:
        with pq.ParquetFile(file, memory_map=True) as opened:
            return opened.read(list(columns), use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{where}: cannot be read: {error}. Remove it and curate {shown(index.path)} again") from error


def _name(index: ShardIndex, shard: int) -> str:
    return f"features/{parquet_name(index.shards[shard])}"


def _open(index: ShardIndex, shard: int) -> Path | pa.Buffer | None:
    """The file, or its bytes from a URL: they are read once or twice, so no copy is kept. None if there is none."""
    if (local := _local(index, shard)) is not None:
        return local
    content = index.location.read_shipped(_name(index, shard))
    return pa.py_buffer(content) if content is not None else None


def _local(index: ShardIndex, shard: int) -> Path | None:
    """The file in the folder of the index; one that other machines do not see does not count for a shared index."""
    path = index.folder / _name(index, shard)
    return path if index.location.shared is None and path.exists() else None


def _version(file: Path | pa.Buffer | None, entry: ShardEntry) -> int | None:
    """Version of the features if the file was made for this shard as it is."""
    note = note_for(pa.BufferReader(file) if isinstance(file, pa.Buffer) else file, entry) if file is not None else None
    return note.get("features") if note is not None else None


def flat(column: pa.ChunkedArray) -> tuple[pa.Array, NDArray[np.int64]]:
    """The items of a list column, flattened, and the row of each."""
    lists = column.combine_chunks()
    lengths = lists.value_lengths().fill_null(0).to_numpy()
    return lists.flatten(), np.repeat(np.arange(len(lists)), lengths)


def as_bytes(items: pa.Array) -> NDArray[np.uint8]:
    """[items, width] of fixed-size binaries, none of them null."""
    width = items.type.byte_width
    whole = np.frombuffer(items.buffers()[1] or b"", np.uint8)
    return whole[items.offset * width : (items.offset + len(items)) * width].reshape(len(items), width)


# ------------------------------------------------------------------ all shards


@dataclass(frozen=True)
class Measured:
    """What a run has measured."""

    num_shards: int
    """Shards measured by this run; the others had features already."""
    quarantined: dict[str, str]
    """Shards without features, since measuring them ended a worker again and again; and how."""


def measure_features(
    index: ShardIndex,
    *,
    num_workers: int | None = None,
    ray_address: str | None = None,
    on_progress: Callable[[ShardProgress], None] | None = None,
) -> Measured:
    """Measure the shards that have no features yet.

    `num_workers` None is one process per core; with one, or without Daft, this process does the work itself. With
    `ray_address` the processes are those of that cluster, whose machines must see shards and index under the same
    paths or URLs. A shard that cannot be read does not keep the others from being measured; the error is raised at the
    end. A shard that ends its worker three times is quarantined.
    """
    missing = unmeasured(index)
    absent = set(missing)
    if missing:
        logger.info("%s: measuring %d of %d shards", shown(index.path), len(missing), len(index.shards))
    done = ShardProgress.of([e for shard, e in enumerate(index.entries) if shard not in absent], len(index.shards))
    workers = Workers(num_workers=num_workers, ray_address=ray_address)
    errors, quarantined = [], {}
    for outcome in run_jobs(_measure, None, [index.only([shard]) for shard in missing], workers):
        entry = outcome.job.entries[0]
        if outcome.has_crashed:
            quarantined[entry.name] = outcome.error or ""
            logger.warning("%s/%s is left out: %s", shown(index.path), entry.name, outcome.error)
        elif outcome.error is not None:
            errors.append(outcome.error)
        else:
            done = done.plus(entry)
            if on_progress:
                on_progress(done)
    if errors:
        others = f" ({len(errors) - 1} more shards failed)" if len(errors) > 1 else ""
        raise DataError(errors[0] + others)
    return Measured(len(missing) - len(quarantined), quarantined)


def _measure(_: None, index: ShardIndex) -> None:
    """Measure the one shard of this index, unless a worker that was lost has finished it."""
    if not is_measured(index, 0):
        write_features(index, 0)
