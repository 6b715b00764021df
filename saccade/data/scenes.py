"""Rendered scenes with captions and questions: a compositional toy dataset, deterministic and free of any licence.

    one or two coloured shapes -> a caption, or a question about each -> one sample

A scene depends on its number and the seed alone. Held-out scenes combine things that are never together in a training
scene: a model that remembers scenes instead of looking at their parts fails on them.
"""

from __future__ import annotations

import io
import json
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

from saccade.data.sample import Sample
from saccade.data.toy import BACKGROUND, COLOURS, SHAPES, draw_shape

WIDTH, HEIGHT = 112, 84
"""Pixels of a scene: 48 patches, 12 tokens."""
SHARE_OF_ONE = 0.3
"""Training scenes with one thing: easier to learn from."""
CAPTION_EVERY = 2
"""Every second sample has a caption, the others questions."""


@dataclass(frozen=True)
class Thing:
    """A coloured shape."""

    colour: str
    shape: str

    def __str__(self) -> str:
        return f"{self.colour} {self.shape}"


THINGS = tuple(Thing(colour, shape) for colour in COLOURS for shape in SHAPES)


def is_held_out(one: Thing, other: Thing) -> bool:
    """Whether two things are never together in a training scene: one in four combinations, in either order."""
    numbers = [[*COLOURS].index(thing.colour) + SHAPES.index(thing.shape) for thing in (one, other)]
    return sum(numbers) % 4 == 0


def scene_sample(number: int, *, seed: int = 0, held_out: bool = False) -> Sample:
    """The sample of a scene: a png with a txt caption, or with questions in json."""
    rng = random.Random(f"{seed}/{held_out}/{number}")  # noqa: S311 - not a secret
    things = choose_things(rng, held_out=held_out)
    members = {"png": render(things, rng)}
    if number % CAPTION_EVERY == 0:
        members["txt"] = caption(things).encode()
    else:
        members["json"] = json.dumps({"questions": questions(things, rng)}).encode()
    return Sample(key=f"{number:06d}", source="scenes", members=members)


def choose_things(rng: random.Random, *, held_out: bool) -> list[Thing]:
    """Two things of different colour and shape, so that each can be named by either; in training sometimes one."""
    first = rng.choice(THINGS)
    if not held_out and rng.random() < SHARE_OF_ONE:
        return [first]
    others = [one for one in THINGS if one.colour != first.colour and one.shape != first.shape]
    return [first, rng.choice([one for one in others if is_held_out(first, one) == held_out])]


def caption(things: list[Thing]) -> str:
    """Describe the scene, its objects in alphabetical order: "a blue ring and a red square"."""
    return " and ".join(sorted(f"{'an' if one.colour[0] in 'aeiou' else 'a'} {one}" for one in things))


def questions(things: list[Thing], rng: random.Random) -> list[dict[str, str]]:
    """One question about each thing, for its colour or its shape; no answer follows from the other question."""
    asked = []
    for thing in rng.sample(things, len(things)):
        if rng.random() < 0.5:
            asked.append(("colour", f"What colour is the {thing.shape}?", thing.colour))
        else:
            asked.append(("shape", f"What shape is {thing.colour}?", thing.shape))
    return [{"kind": kind, "question": question, "answer": answer} for kind, question, answer in asked]


def render(things: list[Thing], rng: random.Random) -> bytes:
    """A png of the scene: sizes, places and shades vary."""
    picture = Image.new("RGB", (WIDTH, HEIGHT), tuple(channel + rng.randint(-8, 8) for channel in BACKGROUND))
    pen, quarter = ImageDraw.Draw(picture), WIDTH // 4
    places = rng.sample((quarter, 3 * quarter), len(things))
    for thing, centre in zip(things, places, strict=True):
        radius = rng.randint(WIDTH // 6, WIDTH // 4 - 3)
        x, y = centre + rng.randint(-3, 3), HEIGHT // 2 + rng.randint(-HEIGHT // 8, HEIGHT // 8)
        draw_shape(pen, thing.shape, thing.colour, (x, y), radius, rng)
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()
