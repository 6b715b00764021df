"""Projections that read the same input, made one matrix product each: for a model that only answers.

Queries, keys and values become `qkv_proj`, gate and up `gate_up_proj`. Fewer and larger products run nearer to the limit of the
machine. The separate weights are given up one layer at a time, so that no more than one layer is held twice. On a CPU weights are
also laid out anew.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

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
    embedding = model.language.embed_tokens.weight  # by rows, as it is read
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight is not embedding and _is_for_mkl(module.weight):
            module.weight = nn.Parameter(_by_columns(module.weight), requires_grad=False)


def _is_for_mkl(weight: Tensor) -> bool:
    """Other number formats are another library's business."""
    return weight.is_cpu and weight.dtype == torch.float32


def _by_columns(weight_ND: Tensor) -> Tensor:
    """The same matrix, laid out in memory by columns: as MKL multiplies a few rows fastest (8 rows twice, 16 rows a quarter)."""
    return weight_ND.t().contiguous().t()


def _merged(layers: Sequence[nn.Linear]) -> nn.Linear:
    """One layer whose outputs are those of `layers` behind one another."""
    with torch.device("meta"):
        merged = nn.Linear(
            layers[0].in_features, sum(layer.out_features for layer in layers), layers[0].bias is not None
        )
    merged.weight = nn.Parameter(torch.cat([layer.weight for layer in layers]), requires_grad=False)
    if layers[0].bias is not None:
        merged.bias = nn.Parameter(torch.cat([layer.bias for layer in layers]), requires_grad=False)
    return merged
