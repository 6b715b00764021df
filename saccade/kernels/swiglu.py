"""The gated activation of the feed-forward layers.

    y = silu(gate) * up,   silu(g) = g * sigmoid(g)

gate, up and y have one shape and dtype; any float dtype.
"""

import torch.nn.functional as F
from torch import Tensor


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """The formula above, in plain PyTorch."""
    return F.silu(gate) * up


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise."""
    return swiglu_reference(gate, up)
