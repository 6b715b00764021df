"""ScienceQA (Lu et al., 2022), the questions with an image: accuracy of the letter."""

from __future__ import annotations

from string import ascii_uppercase

from saccade.evaluate.example import Example
from saccade.evaluate.readers.published import LETTER, Published, Row
from saccade.evaluate.tasks.choice_benchmark import ChoiceBenchmark, with_choices


def _example(row: Row) -> Example:
    choices, hint = row.texts("choices"), row.text("hint")
    context = f"Context: {hint}\n" if hint else ""
    return Example(
        id=str(row.number),
        images=(row.image(),),
        question=context + with_choices(row.text("question"), choices),
        references=(ascii_uppercase[int(row["answer"])],),
        choices=choices,
        group=row.text("subject"),
    )


SCIENCEQA = ChoiceBenchmark(
    Published(
        hub="lmms-lab-encoder/ScienceQA",
        files=("ScienceQA-IMG/test-*.parquet",),
        example=_example,
        prompt=LETTER,
        max_tokens=16,
    )
)
