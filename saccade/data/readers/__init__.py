"""Readers of input data, which `data prepare` turns into shards.

    for item in read_input(parse_input("coco:captions_val2017.json", images=Path("val2017"))): ...

Each item is a `Sample`, `Skipped` or `Merged`. Start in `inputs.py`, which lists the kinds of inputs; `reader.py`
defines inputs and items, `json_files.py` reads records of JSON files, and every other module reads one kind.
"""

from typing import TYPE_CHECKING

from saccade.imports import lazy_exports

if TYPE_CHECKING:
    from saccade.data.readers.inputs import open_input as open_input
    from saccade.data.readers.inputs import parse_input as parse_input
    from saccade.data.readers.inputs import read_input as read_input

__getattr__ = lazy_exports(__name__, {"open_input": "inputs", "parse_input": "inputs", "read_input": "inputs"})
