"""A toy dataset that trains in minutes on a laptop: images of one coloured shape, with a question about it.

    draw a shape -> ask for its colour or its shape -> one sample

Every image depends on its number and the seed alone, so a held-out set is another range of numbers.
"""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

from PIL import Image, ImageDraw

from saccade.data.sample import Sample
from saccade.data.shards import ShardWriter
from saccade.errors import DataError

COLOURS = {
    "red": (214, 39, 40), "green": (44, 160, 44), "blue": (31, 90, 200), "yellow": (240, 210, 20),
    "purple": (128, 50, 160), "orange": (255, 127, 14), "pink": (250, 130, 190), "black": (15, 15, 15),
}  # fmt: skip
SHAPES = ("bar", "cross", "ring", "square")
QUESTIONS = {"colour": "What colour is it?", "shape": "What shape is it?"}
BACKGROUND = (235, 235, 235)
SIDE = 84
"""Side of an image in pixels: 36 patches, 9 tokens."""


def write_toy_shards(folder: str | Path, *, first: int, count: int, seed: int = 0, side: int = SIDE) -> None:
    """Write the samples `first` .. `first + count` into shards of 2000, in a folder that has none yet."""
    if any(Path(folder).glob("*.tar")):
        raise DataError(f"{folder} contains shards already: samples would be duplicated. Remove it, or choose another")
    with ShardWriter(folder, max_samples=2000) as writer:
        for number in range(first, first + count):
            writer.write(toy_sample(number, seed=seed, side=side))


def toy_sample(number: int, *, seed: int = 0, side: int = SIDE) -> Sample:
    """One image, one question, a one-word answer."""
    rng = random.Random(f"{seed}/{number}")  # noqa: S311 - not a secret
    colour, shape, kind = rng.choice(sorted(COLOURS)), rng.choice(SHAPES), rng.choice(sorted(QUESTIONS))
    answer = colour if kind == "colour" else shape
    description = {"questions": [{"question": QUESTIONS[kind], "answer": answer, "kind": kind}], "source": "toy"}
    members = {"png": _draw(shape, colour, rng, side), "json": json.dumps(description).encode()}
    return Sample(key=f"{number:08d}", source="toy", members=members)


def _draw(shape: str, colour: str, rng: random.Random, side: int) -> bytes:
    """Draw a shape of random size and shade, near the centre of a background of random shade."""
    picture = Image.new("RGB", (side, side), tuple(channel + rng.randint(-8, 8) for channel in BACKGROUND))
    radius = rng.randint(side // 4, side // 3)
    x, y = (side // 2 + rng.randint(-side // 8, side // 8) for _ in range(2))
    draw_shape(ImageDraw.Draw(picture), shape, colour, (x, y), radius, rng)
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def draw_shape(
    pen: ImageDraw.ImageDraw, shape: str, colour: str, centre: tuple[int, int], radius: int, rng: random.Random
) -> None:
    """Draw one shape in a random shade of its colour."""
    fill = tuple(max(0, min(255, c + rng.randint(-12, 12))) for c in COLOURS[colour])
    x, y = centre
    box, thin = (x - radius, y - radius, x + radius, y + radius), radius * 2 // 5
    if shape == "ring":
        pen.ellipse(box, outline=fill, width=radius // 2)
    elif shape == "square":
        pen.rectangle(box, fill=fill)
    else:
        pen.rectangle((x - radius, y - thin, x + radius, y + thin), fill=fill)
        if shape == "cross":
            pen.rectangle((x - thin, y - radius, x + thin, y + radius), fill=fill)
