"""Token dropout: the model reads random tokens in place of some of the answer, and still predicts the original ones.

So it cannot rely on the preceding words alone and has to look at the image. Control tokens and images are never
replaced. Random numbers are a function of the stream's seed, the sample and the epoch, as those of augmentation.
"""

from __future__ import annotations

import random

from saccade.processor.inputs import ModelInputs
from saccade.processor.tokenizer import Tokenizer


class TokenDropout:
    """Draws the tokens to replace, each with the same probability, and their replacements from the whole vocabulary."""

    def __init__(self, probability: float, tokenizer: Tokenizer) -> None:
        self._probability, self._tokenizer, self._vocab_size = probability, tokenizer, tokenizer.vocab_size

    def draw(self, inputs: ModelInputs, rng: random.Random) -> dict[int, int]:
        """The token that replaces each replaced one, by its index in `inputs`."""
        answers = inputs.loss_mask.nonzero()[:, 0].tolist()
        token_ids = inputs.token_ids.tolist()
        texts = [index for index in answers if not self._tokenizer.is_control(token_ids[index])]
        return {index: self._random_token(rng) for index in texts if rng.random() < self._probability}

    def _random_token(self, rng: random.Random) -> int:
        """A token that text can have: no control token, no id without a token."""
        while True:
            token_id = rng.randrange(self._vocab_size)
            if self._tokenizer.token_bytes(token_id) is not None:
                return token_id
