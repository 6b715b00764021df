"""AI2D (Kembhavi et al., 2016): questions about diagrams of school science; accuracy of the letter."""

from __future__ import annotations

from string import ascii_uppercase

from saccade.evaluate.example import Example
from saccade.evaluate.readers.published import LETTER, Published, Row
from saccade.evaluate.tasks.choice_benchmark import ChoiceBenchmark, with_choices


def _example(row: Row) -> Example:
    choices = row.texts("options")
    return Example(
        id=str(row.number),
        images=(row.image(),),
        question=with_choices(row.text("question"), choices),
        references=(ascii_uppercase[int(row["answer"])],),
        choices=choices,
    )


AI2D = ChoiceBenchmark(
    Published(
        hub="lmms-lab-encoder/ai2d", files=("data/test-*.parquet",), example=_example, prompt=LETTER, max_tokens=16
    )
)
