"""Edited copies of real photos: how many `curate` and `contamination` find, their false pairs, the cost of an image.

    python -m bench.data_duplicates photos/ [--num-copies 300]

The benchmark plants one copy of each edit for `--num-copies` photos. Curation and contamination see the photos and all
copies of one edit; a copy is found if it is matched with its own photo. A false pair is a match of two photos that are
no copies of each other, among all pairs of distinct photos; bursts of one scene count as false (`--show` prints them).
"""

from __future__ import annotations

import argparse
import io
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFont

from saccade.data.curate import CurationSettings, curate, find_contamination
from saccade.data.curate.features import shard_features
from saccade.data.index import open_index
from saccade.data.sample import Sample, images
from saccade.data.shards import ShardWriter

Edit = Callable[[Image.Image, np.random.Generator], Image.Image]


def crop(share: float, is_centred: bool) -> Edit:
    """Cut `share` of every side, or 2 * `share` of both lengths at a random position."""

    def edit(image: Image.Image, random: np.random.Generator) -> Image.Image:
        width, height = (round(side * (1 - 2 * share)) for side in image.size)
        rest = (image.width - width, image.height - height)
        left, top = (side // 2 if is_centred else int(random.integers(0, side + 1)) for side in rest)
        return image.crop((left, top, left + width, top + height))

    return edit


def overlay_text(image: Image.Image, random: np.random.Generator) -> Image.Image:
    """A line of white text near the lower edge."""
    image = image.copy()
    font = ImageFont.load_default(size=max(10, image.height // 14))
    ImageDraw.Draw(image).text((image.width * 0.05, image.height * 0.88), "(c) example.org photo", "white", font)
    return image


def overlay_logo(image: Image.Image, random: np.random.Generator) -> Image.Image:
    """A red square with a white disc in the lower right corner, a fifth of the shorter side."""
    image, side = image.copy(), min(image.size) // 5
    right, bottom = image.width - 8, image.height - 8
    draw = ImageDraw.Draw(image)
    draw.rectangle((right - side, bottom - side, right, bottom), (220, 30, 30))
    draw.ellipse((right - side + 8, bottom - side + 8, right - 8, bottom - 8), "white")
    return image


def resize(image: Image.Image, random: np.random.Generator) -> Image.Image:
    """Resize to 0.5-0.9 of the size."""
    scale = random.uniform(0.5, 0.9)
    return image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)


def brightness(factor: float) -> Edit:
    """All values times a factor."""
    return lambda image, random: ImageEnhance.Brightness(image).enhance(factor)


def mirror(image: Image.Image, random: np.random.Generator) -> Image.Image:
    """Left and right exchanged."""
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def turn(degrees: float) -> Edit:
    """Turned to the left; what a small turn leaves empty is cut off."""

    def edit(image: Image.Image, random: np.random.Generator) -> Image.Image:
        if degrees % 90 == 0:
            return image.rotate(degrees, expand=True)
        share = float(np.tan(np.radians(degrees))) / 2
        return crop(share, True)(image.rotate(degrees, Image.Resampling.BICUBIC), random)

    return edit


EDITS: dict[str, Edit] = {
    "resized": resize,
    "crop 1 % of each side": crop(0.01, True),
    "crop 1 %, off centre": crop(0.01, False),
    "crop 2.5 % of each side": crop(0.025, True),
    "crop 2.5 %, off centre": crop(0.025, False),
    "crop 5 % of each side": crop(0.05, True),
    "crop 5 %, off centre": crop(0.05, False),
    "mirrored": mirror,
    "brightness -10 %": brightness(0.9),
    "brightness -5 %": brightness(0.95),
    "brightness +5 %": brightness(1.05),
    "brightness +10 %": brightness(1.1),
    "grey": lambda image, random: image.convert("L").convert("RGB"),
    "text": overlay_text,
    "logo": overlay_logo,
    "mirrored, crop 2.5 %, resized": lambda image, random: resize(
        mirror(crop(0.0125, False)(image, random), random), random
    ),
    "turned by 90 degrees": turn(90),
    "turned by 180 degrees": turn(180),
    "turned by 90 degrees, crop 2.5 %": lambda image, random: turn(90)(crop(0.0125, False)(image, random), random),
    "turned by 1 degree": turn(1),
    "turned by 3 degrees": turn(3),
}
"""Every copy is encoded again as JPEG of quality 60-90."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", help="folder of tars with photos (jpg), no two of them copies")
    parser.add_argument("--num-copies", type=int, default=300)
    parser.add_argument("--show", action="store_true", help="print the false pairs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        photos = read_photos(arguments.shards)
        write(Path(folder) / "photos", {f"photo-{number}": data for number, data in enumerate(photos)})
        measure_cost(Path(folder) / "photos")
        measure_false_pairs(Path(folder) / "photos", arguments.show)
        random = np.random.default_rng(0)
        chosen = random.permutation(len(photos))[: arguments.num_copies].tolist()
        print(f"\n{'edit':32} curate  contamination   of {len(chosen)} copies")
        for name, edit in EDITS.items():
            copies = {f"copy-{number}": encode(edit(load(photos[number]), random), random) for number in chosen}
            found = [
                len(find(Path(folder), copies)) / len(chosen) for find in (found_by_curate, found_by_contamination)
            ]
            print(f"{name:32} {found[0]:6.1%}  {found[1]:13.1%}", flush=True)


def read_photos(folder: str) -> list[bytes]:
    """The images of all tars of a folder, exact duplicates once."""
    found: dict[bytes, None] = {}
    for path in sorted(Path(folder).glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.endswith(".jpg") and (file := tar.extractfile(member)) is not None:
                    found[file.read()] = None
    return list(found)


def load(data: bytes) -> Image.Image:
    """Decode a photo."""
    return Image.open(io.BytesIO(data)).convert("RGB")


def encode(image: Image.Image, random: np.random.Generator) -> bytes:
    """JPEG of quality 60-90."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=int(random.integers(60, 91)))
    return buffer.getvalue()


def write(folder: Path, pictures: dict[str, bytes]) -> None:
    """A shard folder with these images."""
    with ShardWriter(folder) as writer:
        for key, data in pictures.items():
            writer.write(Sample(key, "bench", {"jpg": data, "txt": f"a picture called {key}".encode()}))


def measure_cost(folder: Path) -> None:
    """Time of the features of one image, decoding included."""
    index = open_index(folder, num_workers=1)
    begin = time.perf_counter()
    num = sum(len(shard_features(index, shard)) for shard in range(len(index.shards)))
    print(f"features: {(time.perf_counter() - begin) / num * 1e3:.2f} ms per image, {num} images, one process")


def measure_false_pairs(folder: Path, is_shown: bool) -> None:
    """Matches among distinct photos: by curation, and between two halves by contamination."""
    begin = time.perf_counter()
    report = curate(folder, CurationSettings(near_duplicate_images=True), num_workers=1)
    num = report.num_samples
    print(
        f"curate: {report.dropped.get('near-duplicate image', 0)} false of {num * (num - 1) // 2:,} pairs, "
        f"{(time.perf_counter() - begin) / num * 1e3:.2f} ms per image with features"
    )
    index = open_index(folder)
    halves: tuple[dict[str, bytes], dict[str, bytes]] = ({}, {})
    for shard in range(len(index.shards)):
        for row in range(int(index.sizes[shard])):
            sample = index.read_sample(shard, row)
            halves[row % 2][sample.key] = images(sample)[0]
    for name, half in zip(("even", "odd"), halves, strict=True):
        write(folder.parent / name, half)
        curate(folder.parent / name, CurationSettings(near_duplicate_images=False), num_workers=1)
    begin = time.perf_counter()
    found = find_contamination(folder.parent / "even", folder.parent / "odd", num_workers=1)
    print(
        f"contamination: {len(found.matches)} false of {found.num_training * found.num_evaluation:,} pairs, "
        f"{(time.perf_counter() - begin) / found.num_training * 1e3:.2f} ms per training image after features"
    )
    for match in found.matches if is_shown else []:
        print(f"  {match.training} {match.evaluation}")


def found_by_curate(folder: Path, copies: dict[str, bytes]) -> set[str]:
    """Copies that are dropped for their photo, or their photo for them. Photos without a copy are left out."""
    index = open_index(folder / "photos")
    rows = {key: (shard, row) for shard in range(len(index.shards)) for row, key in enumerate(_keys(index, shard))}
    photos = {key.replace("copy", "photo") for key in copies}
    both = copies | {key: images(index.read_sample(*rows[key]))[0] for key in photos}
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), both)
        curate(name, CurationSettings(), num_workers=1)
        index = open_index(name)
        found = set()
        for shard in range(len(index.shards)):
            for key, decision in zip(_keys(index, shard), index.decisions(shard).to_pylist(), strict=True):
                if decision["repeats_shard"] is not None:
                    original = _keys(index, index.shards.index(decision["repeats_shard"]))[decision["repeats_row"]]
                    if key.partition("-")[2] == original.partition("-")[2]:
                        found.add(key.partition("-")[2])
        return found


def found_by_contamination(folder: Path, copies: dict[str, bytes]) -> set[str]:
    """Copies that are reported with their photo, among all photos."""
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), copies)
        report = find_contamination(name, folder / "photos", num_workers=1)
        return {
            match.training
            for match in report.matches
            if match.training.partition("-")[2] == match.evaluation.partition("-")[2]
        }


def _keys(index: object, shard: int) -> list[str]:
    return list(index.read(shard, ["key"])["key"].to_pylist())  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
