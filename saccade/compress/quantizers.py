"""Round weights to few bits: to nearest, on clipped groups (AWQ), or by GPTQ.

Legend: T tokens, N outputs, D inputs, Z groups of inputs that share a scale, G inputs of a group.

Every method is a function of a weight [N, D] in fp32 and of the statistics of its input. With X [T, D] the rows that a
projection reads, the error of a rounded weight W' is

    |X (W' - W)'|^2 = tr (W' - W) H (W' - W)',   H = X'X [D, D]

so that the Gram matrix H stands for all tokens, and no activations are kept. Scales are stored in the dtype of the
checkpoint, and weights are rounded with the stored scale: what is measured here is what an engine computes.

    rtn          scale = largest of a group / half the range, values to nearest
    gptq         columns one after another, most active first; columns that follow make up for what a column loses
    awq          groups are clipped if clipping lowers the error

AWQ and SmoothQuant scale the inputs first (`scaling.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from saccade.compress.input_statistics import InputStatistics
from saccade.compress.scheme import Rule
from saccade.errors import ConfigError, DataError
from saccade.kernels.dequantize_int4 import pack_int4
from saccade.kernels.quantize_activation import LARGEST
from saccade.model.quantization import StoredScheme, fitting_group
from saccade.model.weight_rounding import group_scales

_RANGES = {"int4": (-8, 7, 7.5), "int8": (-128, 127, 127.5), "fp8": (-448, 448, 448.0)}
"""Lowest and highest value, and what the largest weight of a group becomes, as compressed-tensors defines them."""
_CLIPS = tuple(1 - index / 20 for index in range(10))
_GPTQ_COLUMNS = 128


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight in few bits, as a checkpoint stores it."""

    scheme: StoredScheme
    values: Tensor
    """[N, D] int8 (also of 4 bits), or float8_e4m3fn."""
    scale: Tensor
    """[N, Z] in the dtype of the checkpoint."""
    zero_point: Tensor | None = None
    """[N, Z]: zero points of asymmetric weights."""
    input_scale: Tensor | None = None
    """[1] fp32: scale of activations that have one per layer."""
    input_zero_point: Tensor | None = None
    """[1] int8: their zero point, if they are asymmetric."""

    def dequantize(self) -> Tensor:
        """[N, D] in the dtype of the scales, as compressed-tensors decompresses it."""
        groups = self.values.float().unflatten(1, (self.scale.shape[1], -1))  # type: ignore[no-untyped-call]
        if self.zero_point is not None:
            groups = groups - self.zero_point.float().unsqueeze(2)
        weight_ND: Tensor = (groups * self.scale.float().unsqueeze(2)).flatten(1).to(self.scale.dtype)
        return weight_ND

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint, by the last part of their names."""
        if self.scheme.form != "int4":
            own = {"weight": self.values, "weight_scale": self.scale}
            inputs = {"input_scale": self.input_scale, "input_zero_point": self.input_zero_point}
            return own | {name: tensor for name, tensor in inputs.items() if tensor is not None}
        tensors = {
            "weight_packed": pack_int4(self.values),
            "weight_scale": self.scale,
            "weight_shape": torch.tensor(self.values.shape),
        }
        if self.zero_point is not None:
            tensors["weight_zero_point"] = pack_int4(self.zero_point.T).T.contiguous()
        return tensors


def stored_scheme(rule: Rule, num_inputs: int) -> StoredScheme:
    """How a projection with this many inputs is stored."""
    if rule.form == "int4":
        return StoredScheme("int4", fitting_group(num_inputs, rule.group_size or 128), rule.symmetric)
    assert rule.form != "keep", "kept projections are stored as they are"
    return StoredScheme(rule.form, has_input_scale=rule.static, has_input_zero_point=not rule.symmetric)


def quantize(weight_ND: Tensor, rule: Rule, statistics: InputStatistics | None, dtype: torch.dtype) -> QuantizedWeight:
    """Round a weight by the method of its rule. `dtype`: dtype of the scales."""
    quantized = _quantize_weight(weight_ND, rule, statistics, dtype)
    if not rule.static:
        return quantized
    if statistics is None:
        raise ConfigError(
            "a static scale of activations needs calibration that reaches the layer. Use samples with images"
        )
    if not rule.symmetric:
        scale, zero_point = asymmetric_range(statistics.lowest_D.min(), statistics.highest_D.max())
        return replace(quantized, input_scale=scale, input_zero_point=zero_point)
    largest = statistics.largest_D.max().clamp_min(1e-6) / LARGEST[quantized.values.dtype]
    return replace(quantized, input_scale=largest.reshape(1).float())


def asymmetric_range(lowest: Tensor, highest: Tensor) -> tuple[Tensor, Tensor]:
    """Scale [1] fp32 and zero point [1] int8: the lowest activation becomes -128, the highest 127, and 0 is exact."""
    scale = ((highest.clamp_min(0) - lowest.clamp_max(0)) / 255).clamp_min(1e-6).reshape(1).float()
    return scale, (-128 - lowest.clamp_max(0) / scale).round().clamp(-128, 127).to(torch.int8)


def _quantize_weight(
    weight_ND: Tensor, rule: Rule, statistics: InputStatistics | None, dtype: torch.dtype
) -> QuantizedWeight:
    scheme = stored_scheme(rule, weight_ND.shape[1])
    grid = Grid.of(weight_ND, scheme, dtype)
    if rule.method == "gptq" and statistics is not None:
        return grid.stored(gptq(weight_ND, grid, statistics.gram_DD))
    if rule.method == "awq" and statistics is not None:
        grid = grid.clipped(weight_ND, statistics)
    return grid.stored(grid.round(weight_ND))


def relative_error(
    weight_ND: Tensor, quantized: QuantizedWeight, statistics: InputStatistics, out_scale_N: Tensor | None = None
) -> float:
    """Error of the projection's output, |X (W' - W)'| / |X W'|, over the tokens of calibration.

    `out_scale_N`: what its outputs were multiplied with, which is undone here."""
    lost_ND = quantized.dequantize().float() - weight_ND
    if out_scale_N is not None:
        lost_ND, weight_ND = lost_ND / out_scale_N.unsqueeze(1), weight_ND / out_scale_N.unsqueeze(1)
    lost = output_energy(lost_ND, statistics.gram_DD)
    return float((lost / output_energy(weight_ND, statistics.gram_DD).clamp_min(1e-30)).clamp_min(0).sqrt())


def output_energy(weight_ND: Tensor, gram_DD: Tensor) -> Tensor:
    """Sum of squares of the outputs of a weight over the rows of a Gram matrix."""
    return ((weight_ND @ gram_DD) * weight_ND).sum()


# ------------------------------------------------------------------ the grid of values


@dataclass(frozen=True)
class Grid:
    """The values that the weights of each group can take."""

    scheme: StoredScheme
    scale: Tensor
    """[N, Z]."""
    zero_point: Tensor | None
    """[N, Z]; None: symmetric."""

    @staticmethod
    def of(weight_ND: Tensor, scheme: StoredScheme, dtype: torch.dtype, clip: float = 1.0) -> Grid:
        """Grid from the largest weights, scaled by `clip`.

        Groups that are on a grid already keep it (quantization-aware training)."""
        low, high, half_range = _RANGES[scheme.form]
        groups_NZG = _groups(weight_ND, scheme)
        tiny = torch.finfo(dtype).tiny
        if scheme.is_symmetric and clip == 1.0 and scheme.form != "fp8":
            return Grid(scheme, group_scales(groups_NZG, low, high, dtype), None)
        if scheme.is_symmetric:
            scale_NZ = (clip * groups_NZG.abs().amax(2) / half_range).to(dtype).clamp_min(tiny)
            return Grid(scheme, scale_NZ, None)
        lowest, highest = clip * groups_NZG.amin(2).clamp(max=0), clip * groups_NZG.amax(2).clamp(min=0)
        scale_NZ = ((highest - lowest) / (high - low)).to(dtype).clamp_min(tiny)
        zero_NZ = (low - lowest / scale_NZ.float()).round().clamp(low, high)
        return Grid(scheme, scale_NZ, zero_NZ.to(torch.int8))

    def round(self, weight_ND: Tensor) -> Tensor:
        """[N, D] values, to nearest."""
        low, high, _ = _RANGES[self.scheme.form]
        scaled = _groups(weight_ND, self.scheme) / self.scale.float().unsqueeze(2)
        if self.zero_point is not None:
            scaled = scaled + self.zero_point.float().unsqueeze(2)
        scaled = scaled.clamp(low, high).flatten(1)
        return scaled.to(torch.float8_e4m3fn) if self.scheme.form == "fp8" else scaled.round().to(torch.int8)

    def stored(self, values_ND: Tensor) -> QuantizedWeight:
        """The stored form of rounded values, with the scales of the grid."""
        return QuantizedWeight(self.scheme, values_ND, self.scale, self.zero_point)

    def clipped(self, weight_ND: Tensor, statistics: InputStatistics) -> Grid:
        """The grid with the clipping of each group that has the lowest error, groups taken alone.

        Not for GPTQ: it makes up for what clipping would gain, and on narrow calibration data loses by it.
        """
        gram_ZGG = _diagonal_blocks(statistics.gram_DD, self.scale.shape[1])
        best, lowest_NZ = self, torch.full_like(self.scale, torch.inf, dtype=torch.float32)
        for clip in _CLIPS:
            grid = Grid.of(weight_ND, self.scheme, self.scale.dtype, clip)
            lost_NZG = _groups(grid.stored(grid.round(weight_ND)).dequantize().float() - weight_ND, self.scheme)
            error_NZ = (torch.einsum("nzi,zij->nzj", lost_NZG, gram_ZGG) * lost_NZG).sum(2)
            best, lowest_NZ = _where(error_NZ < lowest_NZ, grid, best), torch.minimum(error_NZ, lowest_NZ)
        return best


def _where(is_new_NZ: Tensor, new: Grid, old: Grid) -> Grid:
    zero_NZ = (
        None
        if old.zero_point is None or new.zero_point is None
        else torch.where(is_new_NZ, new.zero_point, old.zero_point)
    )
    return Grid(old.scheme, torch.where(is_new_NZ, new.scale, old.scale), zero_NZ)


def _groups(weight_ND: Tensor, scheme: StoredScheme) -> Tensor:
    """[N, Z, G]."""
    return weight_ND.reshape(len(weight_ND), -1, scheme.group_size or weight_ND.shape[1])


def _diagonal_blocks(gram_DD: Tensor, num_groups: int) -> Tensor:
    """[Z, G, G]: the Gram matrix of each group."""
    size = len(gram_DD) // num_groups
    return torch.stack([gram_DD[i * size : (i + 1) * size, i * size : (i + 1) * size] for i in range(num_groups)])


# ------------------------------------------------------------------ GPTQ


def gptq(weight_ND: Tensor, grid: Grid, gram_DD: Tensor, damping: float = 0.01) -> Tensor:
    """[N, D] values of a grid by GPTQ, columns in the order of their activity.

    With H^-1 = U'U, U upper triangular: rounding column i loses e = (w_i - q_i) / U_ii, and later columns j are changed
    by -e U_ij. Groups stay where they are, so that the result is stored like any other. Columns are updated in panels:
    those of the panel at once, those after it by one product.
    """
    order_D = torch.argsort(gram_DD.diagonal(), descending=True)
    upper_DD = _inverse_factor(gram_DD[order_D][:, order_D], damping)
    group_of_D = torch.arange(len(order_D), device=order_D.device) // (len(order_D) // grid.scale.shape[1])
    scale_ND = grid.scale.float()[:, group_of_D[order_D]]
    rest_ND = weight_ND[:, order_D].clone()
    low, high, _ = _RANGES[grid.scheme.form]
    values_ND = torch.empty_like(rest_ND)
    for start in range(0, rest_ND.shape[1], _GPTQ_COLUMNS):
        panel = slice(start, min(start + _GPTQ_COLUMNS, rest_ND.shape[1]))
        panel_NC, factor_CC = rest_ND[:, panel], upper_DD[panel, panel]
        errors_NC = torch.empty_like(panel_NC)
        for c in range(panel_NC.shape[1]):
            scale_N = scale_ND[:, start + c]
            value_N = (panel_NC[:, c] / scale_N).round().clamp(low, high)
            errors_NC[:, c] = (panel_NC[:, c] - value_N * scale_N) / factor_CC[c, c]
            panel_NC[:, c + 1 :].addr_(errors_NC[:, c], factor_CC[c, c + 1 :], alpha=-1)
            values_ND[:, start + c] = value_N
        rest_ND[:, panel.stop :].addmm_(errors_NC, upper_DD[panel, panel.stop :], alpha=-1)
    return values_ND[:, torch.argsort(order_D)].to(torch.int8)


def _inverse_factor(gram_DD: Tensor, damping: float) -> Tensor:
    """U, upper triangular, with (H + damping * mean of the diagonal)^-1 = U'U.

    Damping is raised until the factor exists."""
    diagonal_D = gram_DD.diagonal()
    mean = diagonal_D.mean().clamp_min(1e-20)
    while damping < 1e6:
        damped_DD = gram_DD + torch.diag_embed(torch.where(diagonal_D > 0, damping * mean, mean))
        lower_DD, failed = torch.linalg.cholesky_ex(damped_DD)
        if not failed:
            upper_DD: Tensor
            upper_DD, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower_DD), upper=True)
            if not failed and upper_DD.isfinite().all():
                return upper_DD
        damping *= 10
    raise DataError("calibration: activations are not finite. Check the checkpoint with saccade evaluate first")
