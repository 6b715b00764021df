"""From image-text pairs to packed training rows: shards with an index, curation as a sidecar, an order that is pure arithmetic.

    from saccade.data import open_stream
    for batch in open_stream("shards/", checkpoint="model/", token_budget=16384): ...

`sample.py` says what a sample is, `shards.py` and `index.py` where it lies, `storage.py` how remote files are read. What comes next
is decided by `order.py`, `mixture.py`, `packing.py` and `plan.py`, plain arithmetic on integers; `collate.py` and `loader.py` carry
it out. `sources/`, `fetch.py` and `prepare.py` make shards, `curate/` judges their samples without rewriting them.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from saccade.data.loader import open_stream as open_stream

_DOOR = {"open_stream": "loader"}


def __getattr__(name: str) -> object:
    """Resolve the door's names on first use."""
    if name not in _DOOR:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_DOOR[name]}"), name)
