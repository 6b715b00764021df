"""Readers of what people have: tars, loose files, lists of links, Parquet with images, COCO, VQA, conversations.

    for item in read_source(parse_source("coco:captions_val2017.json", images=Path("val2017"))): ...   # Sample or Skipped

Start in `kinds.py`; `source.py` says what a source and an item are; each other module reads one kind.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from saccade.data.sources.kinds import open_source as open_source
    from saccade.data.sources.kinds import parse_source as parse_source
    from saccade.data.sources.kinds import read_source as read_source

_DOOR = {"open_source": "kinds", "parse_source": "kinds", "read_source": "kinds"}


def __getattr__(name: str) -> object:
    """Resolve the door's names on first use."""
    if name not in _DOOR:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_DOOR[name]}"), name)
