"""Small real data for the tests of `data`: photo-like pictures, samples, folders of shards, and a very large index."""

import functools
import io
import json
import os
import tarfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from saccade.data.sample import Sample
from saccade.errors import ImageError
from saccade.processor.image import FORMATS

WORDS = [
    "a", "red", "blue", "small", "old", "wooden", "boat", "house", "cat", "street", "under", "over", "beside", "the",
    "bright", "sky", "river", "with", "two", "people",
]  # fmt: skip


@functools.lru_cache(maxsize=512)
def make_picture(width=96, height=64, seed=0):
    """Smooth shapes with fine grain on top: compresses about as a photo does."""
    random = np.random.default_rng(seed)
    shapes = Image.fromarray(random.integers(0, 256, (5, 7, 3), dtype=np.uint8))
    smooth = np.asarray(shapes.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    grain = random.integers(-12, 13, (height, width, 1), dtype=np.int16)
    return Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8))


def encode(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def with_orientation(orientation):
    """EXIF with a camera's orientation (1 to 8) and the tags that usually stand around it."""
    exif = Image.Exif()
    exif[0x010F], exif[0x0110] = "Maker", "Camera 1"
    exif[0x0112] = orientation
    exif[0x0132] = "2024:01:01 12:00:00"
    return exif


@functools.lru_cache(maxsize=512)
def make_jpeg(width=96, height=64, seed=0, *, quality=85, orientation=None):
    options = {} if orientation is None else {"exif": with_orientation(orientation)}
    return encode(make_picture(width, height, seed), "JPEG", quality=quality, **options)


@functools.lru_cache(maxsize=512)
def make_png(width=96, height=64, seed=0, *, orientation=None):
    options = {} if orientation is None else {"exif": with_orientation(orientation)}
    return encode(make_picture(width, height, seed), "PNG", compress_level=1, **options)


@functools.lru_cache(maxsize=512)
def make_webp(width=96, height=64, seed=0, *, orientation=None):
    options = {} if orientation is None else {"exif": with_orientation(orientation)}
    return encode(make_picture(width, height, seed), "WEBP", method=0, **options)


@functools.lru_cache(maxsize=512)
def make_tiff(width=96, height=64, seed=0, *, orientation=None):
    options = {} if orientation is None else {"exif": with_orientation(orientation)}
    return encode(make_picture(width, height, seed), "TIFF", compression="tiff_lzw", **options)


@functools.lru_cache(maxsize=512)
def make_avif(width=96, height=64, seed=0, *, orientation=None):
    options = {} if orientation is None else {"exif": with_orientation(orientation)}
    return encode(make_picture(width, height, seed), "AVIF", speed=10, **options)


MAKERS = [make_jpeg, make_png, make_webp, make_tiff, *([make_avif] if "AVIF" in FORMATS else [])]
"""Every format that has an orientation."""


def make_caption(seed=0, num_words=12):
    return " ".join(np.random.default_rng(seed).choice(WORDS, num_words))


def make_sample(key, *, seed=0, width=96, height=64, text=None, num_images=1, fields=None, members=None, source="made"):
    """A sample as img2dataset writes it: jpg (or 0.jpg, 1.jpg, ...), json, txt.

    `fields` go to the json, `members` replace all.
    """
    if members is None:
        names = ["jpg"] if num_images == 1 else [f"{number}.jpg" for number in range(num_images)]
        members = {name: make_jpeg(width, height, seed + number) for number, name in enumerate(names)}
        members["json"] = json.dumps({"key": key, "source": source, **(fields or {})}).encode()
        members["txt"] = (make_caption(seed) if text is None else text).encode()
    return Sample(key, source, dict(members))


def write_tar(path, files, format=tarfile.GNU_FORMAT):
    """A tar of (name, bytes) pairs, by Python's own tarfile."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as tar:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def write_samples(path, samples):
    """One shard of whole samples."""
    return write_tar(path, [(f"{s.key}.{name}", data) for s in samples for name, data in s.members.items()])


def make_shards(folder, num_shards=2, samples_per_shard=6, *, seed=0, sizes=((96, 64), (64, 96), (80, 80)), **options):
    """A folder 00000.tar, 00001.tar, ... of img2dataset samples with keys SSSSSNNNN; `options` go to `make_sample`."""
    folder = Path(folder)
    for shard in range(num_shards):
        samples = []
        for number in range(samples_per_shard):
            width, height = sizes[number % len(sizes)]
            each = seed + shard * samples_per_shard + number
            key = f"{shard:05d}{number:04d}"
            samples.append(make_sample(key, seed=each, width=width, height=height, **options))
        write_samples(folder / f"{shard:05d}.tar", samples)
    return folder


def write_synthetic_index(folder, num_shards=10_000, samples_per_shard=10_000, num_distinct=4):
    """The index of a folder too large to exist: a few Parquet files under many names, and their shards.json. No tars.

    Open it with `open_index(folder, check_files=False)`.
    """
    import pyarrow.parquet as pq

    from saccade.data.index_builder import build_index

    folder = Path(folder)
    small = make_shards(folder / "small", num_distinct, 8)
    build_index(small, num_workers=1)
    index = folder / "index"
    index.mkdir(parents=True)
    for number in range(num_distinct):
        table = pq.ParquetFile(small / "index" / f"{number:05d}.parquet").read()
        pq.write_table(table.take(np.arange(samples_per_shard) % len(table)), index / f"{number:05d}.parquet")
    for shard in range(num_distinct, num_shards):
        os.link(index / f"{shard % num_distinct:05d}.parquet", index / f"{shard:05d}.parquet")
    entry = {"bytes": 10**9, "num_samples": samples_per_shard, "num_errors": 0}
    entries = [{"name": f"{shard:05d}.tar", **entry} for shard in range(num_shards)]
    (index / "shards.json").write_text(json.dumps({"version": 1, "shards": entries}))
    return folder


def begin_of(index, shard, row):
    """Offset of a sample's first member in its shard."""
    return index.read(shard, ["offsets"])["offsets"][row][0].as_py()


def read_samples(index, shard, rows, *, verify=False):
    """Several samples of one shard, in the order of `rows`."""
    return [index.read_sample(shard, row, verify=verify) for row in rows]


# Measures live here, where other processes can import them.


def measure_words(sample):
    """Words of each line, and a hundredth of the image's bytes; keys that end in 3 are refused."""
    if sample.key.endswith("3"):
        raise ImageError("too tall")
    return [len(line.split()) for line in sample.members["txt"].decode().splitlines()], len(
        sample.members["jpg"]
    ) // 100


def slow_measure(sample):
    time.sleep(0.5)
    return [1], 1


def fatal_measure(sample):
    os._exit(3)
