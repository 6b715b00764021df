"""From image-text pairs to packed training batches.

    from saccade.data import open_stream
    for batch in open_stream("shards/", checkpoint="model/", max_seq_len=16384): ...

Start reading at `loader.py`: `open_stream` takes `Source`s and a `StreamConfig` (`config.py`). The modules by purpose:

    a sample      sample.py; shards.py, tar.py, storage.py (tars, local or remote)
    an index      index.py reads it, index_builder.py builds it; lengths.py and decisions.py add to it
    the order     order.py, packing.py, batch_sampler.py: arithmetic on integers, without torch and I/O
    a sequence    sources.py, collate.py, workers.py, augment.py, token_dropout.py
    other data    readers/, download.py, prepare.py make shards; curate/ decides which samples are kept
"""

from typing import TYPE_CHECKING

from saccade.imports import lazy_exports

if TYPE_CHECKING:
    from saccade.data.config import Source as Source
    from saccade.data.config import StreamConfig as StreamConfig
    from saccade.data.loader import open_stream as open_stream

__getattr__ = lazy_exports(__name__, {"Source": "config", "StreamConfig": "config", "open_stream": "loader"})
