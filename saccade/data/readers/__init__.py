"""Readers of input data: tars, loose files, lists of URLs, Parquet with images, COCO, VQA, tables of captions or questions, conversations.

    for item in read_input(parse_input("coco:captions_val2017.json", images=Path("val2017"))): ...   # Sample, Skipped or Merged

Start in `inputs.py`; `reader.py` defines inputs and items; every other module reads one kind.
"""

from typing import TYPE_CHECKING

from saccade.imports import lazy_exports

if TYPE_CHECKING:
    from saccade.data.readers.inputs import open_input as open_input
    from saccade.data.readers.inputs import parse_input as parse_input
    from saccade.data.readers.inputs import read_input as read_input

__getattr__ = lazy_exports(__name__, {"open_input": "inputs", "parse_input": "inputs", "read_input": "inputs"})
