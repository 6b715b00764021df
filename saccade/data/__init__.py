"""From image-text pairs to packed training rows: shards with an index, curation as a sidecar, an order that is pure arithmetic.

    from saccade.data import open_stream
    for batch in open_stream("shards/", checkpoint="model/", max_seq_len=16384): ...

`sample.py` says what a sample is, `shards.py` and `index.py` where it lies, `storage.py` how remote files are read. What comes next
is decided by `order.py`, `packing.py` and `batch_sampler.py`, plain arithmetic on integers; `collate.py` and `loader.py` carry
it out. `sources/`, `fetch.py` and `prepare.py` make shards, `curate/` judges their samples without rewriting them.
"""

from typing import TYPE_CHECKING

from saccade.lazy import lazy_exports

if TYPE_CHECKING:
    from saccade.data.loader import Source as Source
    from saccade.data.loader import open_stream as open_stream

__getattr__ = lazy_exports(__name__, {"Source": "loader", "open_stream": "loader"})
