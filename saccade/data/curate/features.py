"""Step one of curation: everything that needs the samples' bytes, measured once and kept beside the index.

    shard  ->  decode every image, read every text  ->  one row per sample  ->  index/features/NAME.parquet

Rules and thresholds come later and read only these files, so that a change of mind costs seconds, not another pass over the
pixels. A file appears whole or not at all: measuring may be stopped at any time and goes on shard by shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from saccade.data.curate.image_hash import (
    HASH_BYTES,
    THUMBNAIL_BYTES,
    perceptual_hashes,
    small_picture,
    thumbnails,
)
from saccade.data.curate.settings import DECODE_LIMITS
from saccade.data.curate.text_hash import NUM_BANDS, minhash_bands, text_hash
from saccade.data.curate.text_statistics import text_statistics
from saccade.data.index import ShardIndex
from saccade.data.indexing import parquet_name, read_note, write_table
from saccade.data.sample import Sample, TextRules, conversations, description, images
from saccade.errors import DataError, ImageError

VERSION = 1
"""Of what is measured; files of another version are measured again."""
CONTENT_BYTES = 16
TEXT_BAND_BYTES = 4 * NUM_BANDS

SCHEMA = pa.schema(
    {
        "image_error": pa.string(),  # why an image of the sample cannot be decoded
        "contents": pa.list_(pa.binary(CONTENT_BYTES)),  # of each image: xxh3_128 of its bytes,
        "hashes": pa.list_(pa.binary(HASH_BYTES)),  # its perceptual hash,
        "thumbnails": pa.list_(pa.binary(THUMBNAIL_BYTES)),  # and its thumbnail
        "text_error": pa.string(),  # why the sample cannot be learned from
        "is_conversation": pa.bool_(),  # questions or messages, as opposed to captions
        "texts": pa.list_(pa.string()),  # captions, or the whole conversation,
        "num_words": pa.list_(pa.int32()),  # and for each of them what text_statistics says
        "word_repetition": pa.list_(pa.float32()),
        "character_repetition": pa.list_(pa.float32()),
        "languages": pa.list_(pa.string()),
        "text_hash": pa.uint64(),  # of all texts together
        "text_bands": pa.binary(TEXT_BAND_BYTES),
        "score_names": pa.list_(pa.string()),  # numbers in the sample's json
        "scores": pa.list_(pa.float64()),
    }
)

_MAX_SCORES = 64  # of one sample
_NO_PROMPTS = TextRules(caption_prompt="", text_prompt="")


# ------------------------------------------------------------------ one shard


def shard_features(index: ShardIndex, shard: int) -> pa.Table:
    """Measure the samples of one shard; those the index calls unusable get an empty row."""
    index.prefetch(shard)
    rows: list[dict[str, Any]] = [dict.fromkeys(SCHEMA.names) for _ in range(int(index.sizes[shard]))]
    pictures: list[list[NDArray[np.uint8]]] = [[] for _ in rows]
    for row in np.flatnonzero(index.read(shard, ["error"])["error"].is_null().to_numpy()).tolist():
        sample = index.read_sample(shard, row)
        pictures[row] = _measure_images(sample, rows[row])
        _measure_text(sample, rows[row])
    _add_image_hashes(rows, pictures)
    _add_text_bands(rows)
    return pa.Table.from_pylist(rows, SCHEMA)


def _measure_images(sample: Sample, features: dict[str, Any]) -> list[NDArray[np.uint8]]:
    """The small pictures of a sample, none where one cannot be decoded."""
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
    turns = [[_said(message) for message in variant if message["role"] != "system"] for variant in variants]
    texts = ["\n".join(filter(None, said)) for said in turns]
    measured = [text_statistics(text) for text in texts]
    scores = dict([(name, float(value)) for name, value in fields.items() if _is_number(value)][:_MAX_SCORES])
    features |= {
        "is_conversation": any(
            _said(message) for variant in variants for message in variant if message["role"] == "user"
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


def _said(message: Mapping[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content).strip()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**64  # not NaN either


def _add_image_hashes(rows: list[dict[str, Any]], pictures: list[list[NDArray[np.uint8]]]) -> None:
    """Hashes and thumbnails of all pictures of the shard at once."""
    shown = [picture for each in pictures for picture in each]
    stacked = np.stack(shown) if shown else np.zeros((0, 32, 32, 3), np.uint8)
    hashes, thumbs = iter(perceptual_hashes(stacked)), iter(thumbnails(stacked))
    for features, each in zip(rows, pictures, strict=True):
        features["hashes"] = [next(hashes).tobytes() for _ in each]
        features["thumbnails"] = [next(thumbs).tobytes() for _ in each]


def _add_text_bands(rows: list[dict[str, Any]]) -> None:
    """MinHash of all texts of the shard at once."""
    read = [features for features in rows if features["texts"] is not None]
    bands = minhash_bands(["\n".join(features["texts"]) for features in read])
    for features, keys in zip(read, bands, strict=True):
        features["text_bands"] = keys.tobytes()


# ------------------------------------------------------------------ the files


def write_features(index: ShardIndex, shard: int) -> None:
    """Measure one shard and write its file."""
    entry = index.entries[shard]
    note = {"name": entry.name, "bytes": entry.num_bytes, "features": VERSION}
    write_table(_path(index, shard), shard_features(index, shard), note)


def is_measured(index: ShardIndex, shard: int) -> bool:
    """Whether the shard as it is now has features of this version."""
    note, entry = read_note(_path(index, shard)) or {}, index.entries[shard]
    return note.get("features") == VERSION and (note["bytes"], note["num_rows"]) == (entry.num_bytes, entry.num_samples)


def _path(index: ShardIndex, shard: int) -> Path:
    return index.folder / "features" / parquet_name(index.shards[shard])


def read_features(index: ShardIndex, shard: int, columns: Sequence[str]) -> pa.Table:
    """Columns of one shard's features, rows as in the index."""
    path = _path(index, shard)
    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            return file.read(list(columns), use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read: {error}. Remove it and curate {index.path} again") from error


def flat(column: pa.ChunkedArray) -> tuple[pa.Array, NDArray[np.int64]]:
    """The items of a list column one after another, and the row each belongs to."""
    lists = column.combine_chunks()
    lengths = lists.value_lengths().fill_null(0).to_numpy()
    return lists.flatten(), np.repeat(np.arange(len(lists)), lengths)


def as_bytes(items: pa.Array) -> NDArray[np.uint8]:
    """[items, width] of fixed-size binaries, none of them null."""
    width = items.type.byte_width
    whole = np.frombuffer(items.buffers()[1] or b"", np.uint8)
    return whole[items.offset * width : (items.offset + len(items)) * width].reshape(len(items), width)
