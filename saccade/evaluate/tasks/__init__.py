"""Tasks: how examples are asked and how answers are scored. One file each; `TASKS` has them by name."""

from __future__ import annotations

from saccade.errors import ConfigError
from saccade.evaluate.tasks.captioning import Captioning
from saccade.evaluate.tasks.multiple_choice import MultipleChoice
from saccade.evaluate.tasks.perplexity import Perplexity
from saccade.evaluate.tasks.question_answering import QuestionAnswering
from saccade.evaluate.tasks.retrieval import Retrieval
from saccade.evaluate.tasks.task import Task
from saccade.evaluate.tasks.yes_no import YesNo

TASKS: dict[str, Task] = {
    "captioning": Captioning(),
    "vqa": QuestionAnswering("vqa_accuracy", "exact_match"),
    "docvqa": QuestionAnswering("anls", "exact_match"),
    "chartqa": QuestionAnswering("relaxed_accuracy", "exact_match"),
    "multiple_choice": MultipleChoice(),
    "pope": YesNo(),
    "nlvr": YesNo(),
    "retrieval": Retrieval(by="likelihood"),
    "embedding_retrieval": Retrieval(by="embedding"),
    "perplexity": Perplexity(),
}


def task_named(name: str) -> Task:
    """The task of a name."""
    if name not in TASKS:
        raise ConfigError(f"no task is called {name!r}. Tasks: {', '.join(TASKS)}")
    return TASKS[name]
