"""Readers of evaluation data: published formats, plain jsonl and shard folders, each from local files.

    examples = read_examples(DataSpec(path="chartqa/test"))

`detect.py` finds the format of a path; every other module reads one format. `reader.py` has what they share.
`published.py` reads benchmarks by name, as their tasks describe them.
"""

from typing import TYPE_CHECKING

from saccade.imports import lazy_exports

if TYPE_CHECKING:
    from saccade.evaluate.readers.detect import read_examples as read_examples
    from saccade.evaluate.readers.reader import DataSpec as DataSpec

__getattr__ = lazy_exports(__name__, {"read_examples": "detect", "DataSpec": "reader"})
