"""From image-text pairs to packed training batches: tar shards with an index, curation next to it, an order that is pure arithmetic.

    from saccade.data import Source, open_stream
    for batch in open_stream("shards/", checkpoint="model/", max_seq_len=16384): ...

Start reading at `loader.py`. `sample.py` defines a sample; `shards.py`, `tar.py` and `storage.py` read and write tars, local or remote;
`index.py` knows where each sample is (`index_builder.py` builds it), `lengths.py` how long. `order.py`, `packing.py` and `batch_sampler.py` decide what comes next, as plain
arithmetic on integers; `collate.py` and `workers.py` build the packed sequences. `readers/`, `download.py` and `prepare.py` make shards
from other formats, `curate/` decides which samples to keep without rewriting them.
"""

from typing import TYPE_CHECKING

from saccade.imports import lazy_exports

if TYPE_CHECKING:
    from saccade.data.config import Source as Source
    from saccade.data.config import StreamConfig as StreamConfig
    from saccade.data.loader import open_stream as open_stream

__getattr__ = lazy_exports(__name__, {"Source": "config", "StreamConfig": "config", "open_stream": "loader"})
