"""Evaluation: tasks with their metrics, on the engine or any OpenAI-compatible server, with intervals and a report.

    read examples -> ask the model -> append each answer to the results folder -> score -> report

Start reading at `run.py`. `example.py` and `readers/` define the examples, `tasks/` how they are asked and scored
(published benchmarks too), `metrics/` the scores, `model.py` the model that answers. `statistics.py` has the intervals,
`comparison.py` the differences between two results, `results.py` the results folder, `report.py`, `tables.py` and
`page.py` the reports.
"""

from typing import TYPE_CHECKING

from saccade.imports import lazy_exports

if TYPE_CHECKING:
    from saccade.evaluate.comparison import compare as compare
    from saccade.evaluate.model import Model as Model
    from saccade.evaluate.openai_client import OpenAIModel as OpenAIModel
    from saccade.evaluate.results import Results as Results
    from saccade.evaluate.run import EvaluationConfig as EvaluationConfig
    from saccade.evaluate.run import TaskConfig as TaskConfig
    from saccade.evaluate.run import evaluate as evaluate

__getattr__ = lazy_exports(
    __name__,
    {
        "evaluate": "run",
        "EvaluationConfig": "run",
        "TaskConfig": "run",
        "compare": "comparison",
        "Results": "results",
        "Model": "model",
        "OpenAIModel": "openai_client",
    },
)
