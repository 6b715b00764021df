"""Compression of a checkpoint folder: quantize its projections, and write the format that other engines load.

    from saccade.compress import compress
    report = compress("checkpoint/", "out/", scheme="w4a16-gptq", calibration=["shards/"])

Start with `run.py`: load -> calibrate -> round -> save, one block of the model at a time. `scheme.py` says which
projection is stored how. `quantizers.py` rounds a weight (to nearest, GPTQ) and `scaling.py` scales its inputs (AWQ,
SmoothQuant), both from `input_statistics.py`. `calibration.py` draws samples from shard folders, and `block_runner.py`
runs them through the model block by block. `export.py` writes compressed-tensors, `kv_scales.py` measures keys and
values, `mixed_scheme.py` picks a scheme by `sensitivity.py`, and `verify.py` compares the result with the original.
"""

from typing import TYPE_CHECKING

from saccade.imports import lazy_exports

if TYPE_CHECKING:
    from saccade.compress.run import compress as compress
    from saccade.compress.scheme import Scheme as Scheme

__getattr__ = lazy_exports(__name__, {"compress": "run", "Scheme": "scheme"})
