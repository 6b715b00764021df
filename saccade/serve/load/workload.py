"""The requests of a load: streamed chat completions about random words and an image.

The answer has `num_output` tokens, greedy. Images are `unique` (a new one for every request), `repeated` (one for all),
`mixed` (sizes are drawn from `SHAPES`, every fourth request has the image of an earlier one, every eighth none) or
`none`.
"""

import base64
import io
import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from PIL import Image

Images = Literal["unique", "repeated", "mixed", "none"]
SHAPES = ((1 / 3, 1 / 3), (1 / 2, 1 / 2), (1 / 2, 3 / 4), (2 / 3, 2 / 3), (2 / 3, 1), (1, 2 / 3), (1, 1))
"""Height and width of mixed images, as shares of the longest side."""
_WORDS = "red blue car tree left right over under the a is what how many see and".split()


@dataclass(frozen=True)
class Share:
    """Part `index` of `count` equal ones."""

    index: int
    count: int

    def part_of(self, total: int) -> int:
        """Return this part of a number."""
        return total // self.count + (self.index < total % self.count)


ALL = Share(0, 1)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The requests of one run."""

    num_requests: int = 64
    """Requests of a closed loop; an open loop has as many as arrive."""
    images: Images = "unique"
    """Images of the requests."""
    side: int = 336
    """Side of unique and repeated images, and longest side of mixed ones, in pixels."""
    num_words: int = 64
    """Words of each prompt."""
    num_output: int = 64
    """Tokens of each answer."""
    seed: int = 0
    """Seed of images and words."""
    ignore_eos: bool = True
    """Whether answers continue after the end of turn."""

    def bodies(self, model: str, share: Share = ALL) -> list[bytes]:
        """Return the JSON of the requests, or of a share of them."""
        numbers = range(share.index, self.num_requests, share.count)
        with ThreadPoolExecutor() as threads:
            return list(threads.map(lambda number: self.body(number, model), numbers))

    def body(self, number: int, model: str) -> bytes:
        """Return the JSON of one request."""
        rng = random.Random(f"{self.seed} {number}")  # noqa: S311  words of a prompt
        content: list[dict[str, Any]] = [{"type": "text", "text": " ".join(rng.choices(_WORDS, k=self.num_words))}]
        if (image := self._image(number)) is not None:
            content.insert(0, {"type": "image_url", "image_url": {"url": image}})
        fields: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self.num_output,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(fields | ({"ignore_eos": True} if self.ignore_eos else {})).encode()

    def _image(self, number: int) -> str | None:
        if self.images == "none" or (self.images == "mixed" and number % 8 == 7):
            return None
        if self.images == "mixed":
            number -= 3 if number % 4 == 3 else 0
            height, width = random.Random(f"{self.seed} shape {number}").choice(SHAPES)  # noqa: S311
            return data_url(round(height * self.side), round(width * self.side), f"{self.seed} {number}")
        return data_url(self.side, self.side, f"{self.seed} {0 if self.images == 'repeated' else number}")


def data_url(height: int, width: int, seed: str) -> str:
    """Return a JPEG of coarse and fine noise, with about as many bytes as a photograph of its size."""
    rng = np.random.default_rng(list(seed.encode()))
    coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    pixels = np.asarray(coarse, np.int16) + rng.integers(-12, 13, (height, width, 1), dtype=np.int16)
    file = io.BytesIO()
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
