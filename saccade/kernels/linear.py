"""Linear layers: weights may be prepacked for a CPU; products of many tokens need no workspace on a GPU.

Legend: T tokens, D inputs, N outputs.

    out = x W' + bias        x [T, D], W [N, D], bias [N], out [T, N], all of one dtype

`prepack` rewrites a weight once into the blocks that oneDNN's kernels read, an opaque tensor of the same shape and
size. Without it torch calls MKL for fp32, which packs the weight again on every call: 8 x 896 x 4864 reaches 48 GFLOP/s
on two cores (Zen 4), prepacked 210. A row's result does not depend on the number of rows, except for a single row of
some shapes.

On an NVIDIA GPU, without gradients and from `MIN_TOKENS` tokens on, the product is cuBLASLt's without a workspace
(`_cublaslt.py`): decode of 256 requests of the 3B shape takes 2.6 % less (H200). Few tokens need the workspace.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.kernels import launch
from saccade.kernels._cublaslt import ALIGNMENT, CublasLtError, cublaslt

MIN_TOKENS = 256
"""Tokens from which a product needs no workspace to be fast."""
_DTYPES = (torch.float32, torch.bfloat16)


def linear_reference(x: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """The formula above, for a plain weight."""
    return F.linear(x, weight_ND, bias_N)


def can_prepack(weight_ND: Tensor) -> bool:
    """Whether this torch has packed kernels for a weight."""
    has_kernels = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return weight_ND.is_cpu and weight_ND.dtype in _DTYPES and has_kernels


def prepack(weight_ND: Tensor) -> Tensor:
    """The weight in oneDNN's blocks, for `linear` only: its elements cannot be read, and it has no gradients."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_ND.detach().contiguous(), None)
    return packed


def linear(x: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x W' + bias, for a plain or prepacked weight."""
    if weight_ND.is_mkldnn:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_ND, bias_N, "none", [], "")
        return out
    if x.is_cuda and _can_run_without_workspace(x, weight_ND, bias_N):
        library = cublaslt(x.device)
        if library is not None:
            try:
                return library.linear(x, weight_ND, bias_N)
            except CublasLtError as error:
                launch.log_path(f"linear of {tuple(x.shape)} and {tuple(weight_ND.shape)} by torch: {error}")
    return F.linear(x, weight_ND, bias_N)


def _can_run_without_workspace(x: Tensor, weight_ND: Tensor, bias_N: Tensor | None) -> bool:
    """Whether cuBLASLt is called directly: for many tokens in 16 bits, on the current device, with aligned rows."""
    if (
        launch.is_differentiable()
        or x.dim() != 2
        or len(x) < MIN_TOKENS
        or x.dtype not in (torch.bfloat16, torch.float16)
    ):
        return False
    tensors = (x, weight_ND) if bias_N is None else (x, weight_ND, bias_N)
    is_aligned = all(
        one.dtype == x.dtype and one.stride(-1) == 1 and one.data_ptr() % ALIGNMENT == 0 for one in tensors
    )
    row_bytes = x.element_size() * x.stride(0), x.element_size() * x.shape[1], x.element_size() * len(weight_ND)
    is_current = x.device.index == torch.cuda.current_device()
    return is_aligned and is_current and weight_ND.is_contiguous() and all(size % ALIGNMENT == 0 for size in row_bytes)
