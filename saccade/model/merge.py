"""Merge projections that read the same input into one matrix product each, for inference.

Q, K and V become `qkv_proj`, gate and up `gate_up_proj`: fewer and larger products. The separate weights are freed layer by layer,
so that at most one layer is held twice. On a CPU weights are also prepacked (`kernels/linear.py`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from saccade.kernels.linear import can_prepack, linear, prepack
from saccade.model.language import SelfAttention
from saccade.model.layers import FeedForward
from saccade.model.vlm import VLM


@torch.no_grad()
def merge_projections(model: VLM) -> None:
    """Merge in place. The model can no longer be trained or saved."""
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.qkv_proj = _merged([module.q_proj, module.k_proj, module.v_proj])
            del module.q_proj, module.k_proj, module.v_proj
        elif isinstance(module, FeedForward):
            module.gate_up_proj = _merged([module.gate_proj, module.up_proj])
            del module.gate_proj, module.up_proj
    model.language.is_merged = True
    _prepack_layers(model)


class PrepackedLinear(nn.Module):
    """An inference-only linear layer whose weight is prepacked."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(prepack(layer.weight), requires_grad=False)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        return linear(x, self.weight, self.bias)


def _prepack_layers(model: VLM) -> None:
    """Replace the linear layers that can be prepacked. A tied head becomes a copy of the embedding, which is looked up by row."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear and can_prepack(layer.weight):
                setattr(parent, name, PrepackedLinear(layer))


def _merged(layers: Sequence[nn.Linear]) -> nn.Linear:
    """One layer with the concatenated outputs of `layers`."""
    with torch.device("meta"):
        merged = nn.Linear(
            layers[0].in_features, sum(layer.out_features for layer in layers), layers[0].bias is not None
        )
    merged.weight = nn.Parameter(torch.cat([layer.weight for layer in layers]), requires_grad=False)
    if layers[0].bias is not None:
        merged.bias = nn.Parameter(torch.cat([layer.bias for layer in layers]), requires_grad=False)
    return merged
