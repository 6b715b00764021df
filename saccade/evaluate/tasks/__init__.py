"""Tasks: how examples are asked and how answers are scored. One file each; `TASKS` has them by name.

A task with the name of a published benchmark (`Task.published`) reads it in its published layout, and asks and scores
as published.
"""

from __future__ import annotations

from saccade.errors import ConfigError
from saccade.evaluate.tasks.ai2d import AI2D
from saccade.evaluate.tasks.captioning import Captioning
from saccade.evaluate.tasks.chartqa import CHARTQA
from saccade.evaluate.tasks.docvqa import DOCVQA, INFOVQA
from saccade.evaluate.tasks.mmbench import MMBENCH
from saccade.evaluate.tasks.mme import MME_TEST
from saccade.evaluate.tasks.mmmu import MMMU_VALIDATION
from saccade.evaluate.tasks.mmstar import MMSTAR
from saccade.evaluate.tasks.multiple_choice import MultipleChoice
from saccade.evaluate.tasks.ocrbench import OCRBENCH
from saccade.evaluate.tasks.perplexity import Perplexity
from saccade.evaluate.tasks.pope import POPE
from saccade.evaluate.tasks.question_answering import QuestionAnswering
from saccade.evaluate.tasks.realworldqa import REALWORLDQA
from saccade.evaluate.tasks.retrieval import Retrieval
from saccade.evaluate.tasks.scienceqa import SCIENCEQA
from saccade.evaluate.tasks.task import Task
from saccade.evaluate.tasks.vqa import TEXTVQA, VQAV2
from saccade.evaluate.tasks.yes_no import YesNo

TASKS: dict[str, Task] = {
    "captioning": Captioning(),
    "vqa": QuestionAnswering("vqa_accuracy", "exact_match"),
    "vqav2": VQAV2,
    "textvqa": TEXTVQA,
    "docvqa": DOCVQA,
    "infovqa": INFOVQA,
    "chartqa": CHARTQA,
    "ocrbench": OCRBENCH,
    "multiple_choice": MultipleChoice(),
    "mmmu": MMMU_VALIDATION,
    "mmbench": MMBENCH,
    "mmstar": MMSTAR,
    "ai2d": AI2D,
    "scienceqa": SCIENCEQA,
    "realworldqa": REALWORLDQA,
    "mme": MME_TEST,
    "pope": POPE,
    "nlvr": YesNo(),
    "retrieval": Retrieval(by="likelihood"),
    "embedding_retrieval": Retrieval(by="embedding"),
    "perplexity": Perplexity(),
}


def task_named(name: str) -> Task:
    """Return the task of a name."""
    if name not in TASKS:
        raise ConfigError(f"no task is called {name!r}. Tasks: {', '.join(TASKS)}")
    return TASKS[name]
