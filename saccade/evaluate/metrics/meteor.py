"""METEOR of captions (Denkowski and Lavie, 2014) where its program is at hand: `meteor-1.5.jar` with its data folder, and Java.

The program aligns a caption with its references by words, stems, synonyms and paraphrases and prints what matched; the score of one
caption or of a whole set is computed here from those counts, with the program's parameters for English.

    F * (1 - 0.6 * fragmentation ^ 0.2),  F = P R / (0.85 P + 0.15 R),  P and R over weighted matches
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from saccade.errors import ConfigError
from saccade.evaluate.statistics import Floats

_ALPHA, _BETA, _GAMMA, _DELTA = 0.85, 0.2, 0.6, 0.75
_MODULE_WEIGHTS = np.array([1.0, 0.6, 0.8, 0.6])
"""Of exact words, stems, synonyms, paraphrases."""
_NUM_COUNTS = 23
_CHUNKS, _MATCHES, _REFERENCE_MATCHES = 20, 21, 22


def check_meteor(jar: Path) -> None:
    """Refuse a missing program before anything is asked."""
    if shutil.which("java") is None:
        raise ConfigError("METEOR needs Java, and there is no java command. Install it, or leave out --meteor-jar")
    if not jar.is_file() or not (jar.parent / "data").is_dir():
        raise ConfigError(f"{jar}: METEOR needs meteor-1.5.jar with its data folder beside it. Check --meteor-jar")


def meteor_counts(
    captions: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]], jar: Path
) -> list[list[float]]:
    """What the program counts for each caption: lengths, matches of each kind, chunks; 23 numbers to sum over a set."""
    lines = [
        " ||| ".join(["SCORE", *(" ".join(reference) for reference in of_image), " ".join(caption)])
        for caption, of_image in zip(captions, references, strict=True)
    ]
    command = ["java", "-Xmx2G", "-jar", jar.name, "-", "-", "-stdio", "-l", "en", "-norm"]
    ended = subprocess.run(  # noqa: S603 - the program that was named
        command, cwd=jar.parent, input="\n".join(lines) + "\n", capture_output=True, text=True, check=False
    )
    counts = [[float(number) for number in line.split()] for line in ended.stdout.splitlines()]
    if len(counts) != len(lines) or any(len(line) != _NUM_COUNTS for line in counts):
        raise ConfigError(f"{jar} gave {len(counts)} lines for {len(lines)} captions: {ended.stderr.strip()[-300:]}")
    return [_without_perfect_chunks(line) for line in counts]


def _without_perfect_chunks(counts: list[float]) -> list[float]:
    """A caption that is its reference word by word is not fragmented: its one chunk does not count."""
    is_perfect = counts[_CHUNKS] == 1 and counts[_MATCHES] == counts[0] and counts[_REFERENCE_MATCHES] == counts[1]
    return [*counts[:_CHUNKS], 0.0, *counts[_MATCHES:]] if is_perfect else counts


def meteor(counts: Floats) -> Floats:
    """METEOR of summed counts [..., 23]."""
    lengths, function_words = counts[..., 0:2], counts[..., 2:4]
    matches = counts[..., 4:20].reshape(
        *counts.shape[:-1], 4, 4
    )  # kind of match; content or function words of caption, reference
    content, function = matches[..., 0:2], matches[..., 2:4]
    weighted = np.einsum("...km,k->...m", _DELTA * content + (1 - _DELTA) * function, _MODULE_WEIGHTS)
    total = _DELTA * (lengths - function_words) + (1 - _DELTA) * function_words
    precision, recall = np.moveaxis(_divide(weighted, total), -1, 0)
    harmonic = _divide(precision * recall, _ALPHA * precision + (1 - _ALPHA) * recall)
    fragmentation = _divide(counts[..., _CHUNKS], (counts[..., _MATCHES] + counts[..., _REFERENCE_MATCHES]) / 2)
    score: Floats = harmonic * (1 - _GAMMA * fragmentation**_BETA)
    return score


def _divide(numerator: Floats, denominator: Floats) -> Floats:
    quotient: Floats = np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator != 0)
    return quotient
