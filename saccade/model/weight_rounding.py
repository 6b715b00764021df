"""Round weights to nearest on the grids of int8, fp8 and int4 that compressed-tensors defines, in plain PyTorch.

Legend: D inputs, N outputs, Z groups of G inputs that share a scale.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from saccade.kernels.dequantize_int4 import pack_int4


def largest_scales(groups_NZG: Tensor, lowest: int, highest: int, dtype: torch.dtype) -> Tensor:
    """[N, Z]: scales with which the largest weight of a group becomes half of the range."""
    largest_NZ = groups_NZG.float().abs().amax(2)
    return (largest_NZ / ((highest - lowest) / 2)).to(dtype).clamp_min(torch.finfo(dtype).tiny)


def group_scales(groups_NZG: Tensor, lowest: int, highest: int, dtype: torch.dtype) -> Tensor:
    """[N, Z]: scales for rounding groups of G weights to the integers `lowest` .. `highest`, in `dtype`.

    They are `largest_scales`, unless all weights of a group lie on a grid already (those exported by quantization-aware
    training): such a group keeps its scale, so that rounding twice is rounding once. The host waits for the device.
    """
    largest_NZ = groups_NZG.float().abs().amax(2)
    scale_NZ = largest_scales(groups_NZG, lowest, highest, dtype)
    if groups_NZG.is_meta or not _grid_scales(groups_NZG[:4], largest_NZ[:4], lowest, highest, dtype)[1].any():
        return scale_NZ  # either all weights of a layer are on a grid or none, so a few outputs are enough
    found_NZ, is_on_grid_NZ = _grid_scales(groups_NZG, largest_NZ, lowest, highest, dtype)
    return torch.where(is_on_grid_NZ, found_NZ, scale_NZ)


def _grid_scales(
    groups_NZG: Tensor, largest_NZ: Tensor, lowest: int, highest: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Scales with which rounding changes nothing, and whether a group has one.

    The largest weight is then `highest` or `lowest` scales, or as many as the largest of a grid with fewer bits. The
    products with a scale are rounded to `dtype`, so the quotient may be a neighbour of the scale.
    """
    bits, stored_NZG = torch.int32 if dtype == torch.float32 else torch.int16, groups_NZG.to(dtype)
    found_NZ, is_found_NZ = torch.ones_like(largest_NZ, dtype=dtype), torch.zeros_like(largest_NZ, dtype=torch.bool)
    levels = (highest, -lowest) if highest > 7 else (7, 8, 3, 4, 1, 2)
    for level in levels:
        near_NZ = (largest_NZ / level).to(dtype).clamp_min(torch.finfo(dtype).tiny)
        for step in (0, 1, -1):
            scale_NZ = (near_NZ.view(bits) + step).view(dtype)
            values_NZG = (groups_NZG.float() / scale_NZ.float().unsqueeze(2)).round().clamp(lowest, highest)
            is_exact_NZ = ((values_NZG * scale_NZ.float().unsqueeze(2)).to(dtype) == stored_NZG).all(2)
            is_new_NZ = is_exact_NZ & ~is_found_NZ & (largest_NZ > 0)
            found_NZ, is_found_NZ = torch.where(is_new_NZ, scale_NZ, found_NZ), is_found_NZ | is_new_NZ
    return found_NZ, is_found_NZ


def quantize_weight(weight_ND: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round to nearest with one scale per output: [N, D], and [N, 1] in the weight's dtype."""
    lowest, highest = (-128, 127) if dtype == torch.int8 else (-448, 448)
    if dtype == torch.int8:
        scale_N1 = group_scales(weight_ND.unsqueeze(1), lowest, highest, weight_ND.dtype)
    else:
        scale_N1 = (weight_ND.abs().amax(1, keepdim=True) / 448.0).clamp_min(torch.finfo(weight_ND.dtype).tiny)
    scaled = (weight_ND.float() / scale_N1.float()).clamp(lowest, highest)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale_N1


def quantize_weight_int4(
    weight_ND: Tensor, group_size: int, *, symmetric: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Round to nearest with one scale per group: `weight_packed`, `weight_scale`, `weight_zero_point`."""
    groups = weight_ND.float().reshape(len(weight_ND), -1, group_size)
    if symmetric:
        scale_NZ = group_scales(groups, -8, 7, weight_ND.dtype)
        zero_NZ = torch.zeros_like(scale_NZ)
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scale_NZ = (high - low) / 15
        zero_NZ = (-8 - low / scale_NZ.clamp_min(1e-12)).round().clamp(-8, 7)
    scale_NZ = scale_NZ.to(weight_ND.dtype).clamp_min(torch.finfo(weight_ND.dtype).tiny)
    values = (groups / scale_NZ.float().unsqueeze(2) + zero_NZ.unsqueeze(2)).round().clamp(-8, 7)
    zero_point = None if symmetric else pack_int4(zero_NZ.T).T.contiguous()
    return pack_int4(values.flatten(1)), scale_NZ, zero_point


def round_to_grid(
    weight_ND: Tensor,
    group_size: int | None,
    lowest: int,
    highest: int,
    maximum: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The weight rounded to nearest with `largest_scales`, in its own dtype, for int4 (-8 .. 7) or int8 (-128 .. 127).

    `group_size` None: one scale per output; `maximum` is then over the ranks that hold the other inputs. The host does
    not wait.
    """
    groups_NZG = weight_ND.reshape(len(weight_ND), -1, group_size or weight_ND.shape[1])
    scale_NZ1 = largest_scales(groups_NZG, lowest, highest, weight_ND.dtype).float().unsqueeze(2)
    if maximum is not None:  # of the scales, which grow with the largest weight
        scale_NZ1 = maximum(scale_NZ1)
    values_NZG = (groups_NZG.float() / scale_NZ1).round().clamp(lowest, highest)
    return (values_NZG * scale_NZ1).to(weight_ND.dtype).view(weight_ND.shape)
