"""Projections on quantized weights, as a checkpoint folder stores them: for inference.

Legend: T tokens, D inputs, N outputs, Z scales per output.

    Linear8bit   int8 or float8_e4m3fn weights; activations in the same 8 bits, quantized by the kernel of the norm or
                 the gated activation before the product, if there is one (`kernels/linear_w8a8.py`)
    Linear4bit   int4 weights in groups; 16-bit activations; for one or two tokens norm and activation run in the kernel
                 of the product (`kernels/linear_w4a16.py`)

There is no dequantized copy: a weight takes the bytes of its tensors on disk. Layers that read the same input are
merged like plain ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.errors import CheckpointError
from saccade.kernels.dequantize_int4 import interleave_int4, pack_int4, unpack_int4
from saccade.kernels.quantize_activation import quantize_activation, quantize_activation_reference, round_to
from saccade.kernels.rms_norm import add_rms_norm_quant, rms_norm_quant
from saccade.kernels.small_linear_w4a16 import (
    Weight4bit,
    norm_gated_linear_w4a16,
    norm_linear_w4a16,
    small_linear_w4a16,
)
from saccade.kernels.small_matmul_w8a8 import small_matmul_w8a8
from saccade.kernels.swiglu import swiglu, swiglu_quant
from saccade.model.linear import ALIGNMENT, Linear, Projection
from saccade.model.normed_sum import Input, NormedSum
from saccade.model.quantization import QuantizationConfig, StoredScheme

_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_INPUTS = 128
"""The 4-bit kernels read whole blocks of inputs."""


class QuantizedLinear(Projection):
    """The base of both forms: loading, merging, no gradients."""

    scheme: StoredScheme

    def __init__(self, in_features: int, out_features: int, *, padding: tuple[int, int], bias: bool) -> None:
        """`padding`: outputs and inputs that are in memory alone (see `Linear`)."""
        super().__init__(in_features, out_features)
        self._stored = (out_features - padding[0], in_features - padding[1])
        self.bias = nn.Parameter(torch.empty(out_features, device="meta"), requires_grad=False) if bias else None

    @property
    def stored_shape(self) -> tuple[int, int]:
        """See `Projection`."""
        return self._stored

    def of_size(self, out_features: int, in_features: int, *, of_inputs: bool = False) -> Self:
        """See `Projection`."""
        assert self.bias is None or not of_inputs, "a bias is added once, not by every rank"
        is_padded = self.out_features > self._stored[0], self.in_features > self._stored[1]
        sizes = out_features, in_features
        padding = [-size % ALIGNMENT if padded else 0 for size, padded in zip(sizes, is_padded, strict=True)]
        form: Any = type(self)
        found: Self = form(
            in_features + padding[1], out_features + padding[0], self.scheme, padding=(padding[0], padding[1]),
            bias=self.bias is not None,
        )  # fmt: skip
        return found

    def checkpoint_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor on disk."""
        return {} if self.bias is None else {"bias": self._stored[:1]}

    def load_tensor(self, name: str, tensor: Tensor, dtype: torch.dtype | None) -> None:
        """Take one tensor of the checkpoint. Only the bias becomes `dtype`; 8-bit scales become fp32."""
        if name == "bias" and dtype is not None:
            tensor = tensor.to(dtype)
        setattr(self, name, nn.Parameter(self._in_memory(name, tensor), requires_grad=False))

    def _in_memory(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor as the kernels read it, with padding."""
        raise NotImplementedError

    def _pad(self, tensor: Tensor, num_columns: int, *, value: float = 0.0) -> Tensor:
        """[stored outputs, columns] or [stored outputs], padded to all outputs and `num_columns`."""
        missing_rows = self.out_features - len(tensor)
        columns = (0, num_columns - tensor.shape[1]) if tensor.dim() == 2 else ()
        return F.pad(tensor, (*columns, 0, missing_rows), value=value) if missing_rows or any(columns) else tensor

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self | None:
        """See `Projection`."""
        first = parts[0]
        if any(part.scheme != first.scheme or (part.bias is None) != (first.bias is None) for part in parts):
            return None
        whole = cls._like(parts)
        if whole is not None:
            whole.take_rows(parts)
        return whole

    @classmethod
    def _like(cls, parts: Sequence[Self]) -> Self | None:
        raise NotImplementedError


class Linear8bit(QuantizedLinear):
    """int8 or fp8 weights and activations (W8A8)."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        scheme: StoredScheme,
        *,
        padding: tuple[int, int] = (0, 0),
        bias: bool = True,
    ) -> None:
        super().__init__(in_features, out_features, padding=padding, bias=bias)
        self.scheme, self.dtype = scheme, _DTYPES[scheme.form]
        with torch.device("meta"):
            # fp8 is held as int8: `module.to(dtype)` must not convert it.
            self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=torch.int8), requires_grad=False)
            self.weight_scale = nn.Parameter(torch.empty(out_features, 1), requires_grad=False)
            self.input_scale = self.input_zero_point = None
            self.offset: nn.Parameter | None = None
            if scheme.has_input_scale:
                self.input_scale = nn.Parameter(torch.empty(1), requires_grad=False)
            if scheme.has_input_zero_point:
                self.input_zero_point = nn.Parameter(torch.empty(1, dtype=torch.int8), requires_grad=False)

    def checkpoint_shapes(self) -> dict[str, tuple[int, ...]]:
        """See `QuantizedLinear`."""
        scale = (1,) if self.scheme.has_tensor_scale else (self._stored[0], 1)
        shapes: dict[str, tuple[int, ...]] = {"weight": self._stored, "weight_scale": scale}
        if self.scheme.has_input_scale:
            shapes["input_scale"] = (1,)
        if self.scheme.has_input_zero_point:
            shapes["input_zero_point"] = (1,)
        return shapes | super().checkpoint_shapes()

    def load_tensor(self, name: str, tensor: Tensor, dtype: torch.dtype | None) -> None:
        """See `QuantizedLinear`. With a zero point, the last tensor completes the offset."""
        super().load_tensor(name, tensor, dtype)
        if self.scheme.has_input_zero_point:
            own = [parameter for name, parameter in self.named_parameters() if name != "offset"]
            if not any(parameter.is_meta for parameter in own):
                self.offset = nn.Parameter(self._compute_offset(), requires_grad=False)

    @torch.no_grad()
    def _compute_offset(self) -> Tensor:
        """[N] fp32: the bias minus what the zero point z adds to every output.

        x is stored as x8 = round(x / s) + z, so s w_scale sum(x8 w) is too large by s z w_scale sum(w), the same for
        all tokens.
        """
        assert self.input_scale is not None, "a zero point comes with a scale"
        assert self.input_zero_point is not None, "only zero points have an offset"
        sums_N = self.weight.sum(1, dtype=torch.int32).float() * self.weight_scale.float().squeeze(1)
        offset_N = -self.input_scale * self.input_zero_point.float() * sums_N
        return offset_N if self.bias is None else offset_N + self.bias.float()

    def _in_memory(self, name: str, tensor: Tensor) -> Tensor:
        if name == "input_scale":
            return tensor.reshape(1).float()
        if name == "input_zero_point":
            return tensor.reshape(1).to(torch.int8)
        if name == "weight_scale":
            scale_N1 = tensor.float().reshape(-1, 1).expand(self._stored[0], 1).contiguous()
            return self._pad(scale_N1, 1)
        if name == "weight":
            if tensor.dtype != self.dtype:
                raise CheckpointError(f"a weight of {self.scheme.form} is stored as {tensor.dtype}")
            return self._pad(tensor.view(torch.int8), self.in_features)
        return self._pad(tensor, 0)

    def linear(self, x: Tensor) -> Tensor:
        """See `Projection`."""
        x_TD = x.flatten(0, -2)
        out_TN = self._matmul(*self._quantize(x_TD), x.dtype)
        return out_TN.view(*x.shape[:-1], self.out_features)

    def forward(self, x: Input) -> Tensor:
        """See `Projection`. The kernel of the norm quantizes what it normalises."""
        if not isinstance(x, NormedSum) or self.input_scale is not None:
            return super().forward(x)
        if x.residual_TD is None:
            quantized, scale_T = rms_norm_quant(x.x_TD, x.weight_D, x.eps, self.dtype)
        else:
            quantized, scale_T, x.total = add_rms_norm_quant(x.x_TD, x.residual_TD, x.weight_D, x.eps, self.dtype)
        return self._matmul(quantized, scale_T, x.x_TD.dtype)

    def gated(self, gate: Tensor, up: Tensor, *, saves_activation: bool = False) -> Tensor:
        """See `Projection`."""
        if self.input_scale is not None or self.maximum is not None:
            return super().gated(gate, up, saves_activation=saves_activation)
        quantized, scale_T = swiglu_quant(gate.flatten(0, -2), up.flatten(0, -2), self.dtype)
        return self._matmul(quantized, scale_T, gate.dtype).view(*gate.shape[:-1], self.out_features)

    def _quantize(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        if self.input_scale is None:
            if self.maximum is None:
                return quantize_activation(x_TD, self.dtype)
            return quantize_activation_reference(x_TD, self.dtype, self.maximum)
        scaled = x_TD.float() / self.input_scale
        if self.input_zero_point is not None:
            scaled = scaled + self.input_zero_point
        return round_to(scaled, self.dtype), self.input_scale.repeat(len(x_TD))

    def _matmul(self, x8_TD: Tensor, x_scale_T: Tensor, dtype: torch.dtype) -> Tensor:
        weight_ND, bias_N = self.weight.view(self.dtype), self.bias if self.offset is None else self.offset
        return small_matmul_w8a8(x8_TD, x_scale_T, weight_ND, self.weight_scale, bias_N, out_dtype=dtype)

    @classmethod
    def _like(cls, parts: Sequence[Self]) -> Self | None:
        if not _are_equal(parts, "input_scale") or not _are_equal(parts, "input_zero_point"):
            return None
        outputs = sum(part.out_features for part in parts)
        whole = cls(parts[0].in_features, outputs, parts[0].scheme, bias=parts[0].bias is not None)
        if parts[0].offset is not None:
            whole.offset = nn.Parameter(torch.empty(outputs, device="meta"), requires_grad=False)
        return whole


def _are_equal(parts: Sequence[QuantizedLinear], name: str) -> bool:
    """Whether a tensor is equal in all parts, which would share it, or missing in all."""
    tensors = [getattr(part, name) for part in parts]
    return tensors[0] is None or all(torch.equal(tensor, tensors[0]) for tensor in tensors)


class Linear4bit(QuantizedLinear):
    """int4 weights in groups of inputs, 16-bit activations (W4A16)."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        scheme: StoredScheme,
        *,
        padding: tuple[int, int] = (0, 0),
        bias: bool = True,
    ) -> None:
        super().__init__(in_features, out_features, padding=padding, bias=bias)
        self.scheme = scheme
        self._num_inputs = -(-in_features // _INPUTS) * _INPUTS
        """Inputs with the padding of the kernels."""
        self._group = scheme.group_size or self._num_inputs
        if self._group % _INPUTS and self._group not in (16, 32, 64):
            raise CheckpointError(
                f"config.json: quantization_config: groups of {self._group} inputs are not supported; 16, 32, 64 "
                f"and multiples of {_INPUTS} are"
            )
        if scheme.group_size is not None and (self._num_inputs % self._group or self._stored[1] % self._group):
            raise CheckpointError(
                f"config.json: quantization_config: {self._stored[1]} inputs of a layer are no whole groups of "
                f"{self._group}; keep it in 16 bits"
            )
        num_scales = self._num_inputs // self._group
        with torch.device("meta"):
            words = torch.empty(out_features, self._num_inputs // 8, dtype=torch.int32)
            self.weight_packed = nn.Parameter(words, requires_grad=False)
            self.weight_scale = nn.Parameter(torch.empty(out_features, num_scales), requires_grad=False)
            # In memory it is the order of the inputs in `weight_packed`; None: as they are.
            self.weight_g_idx = self.weight_zero_point = None
            if scheme.has_group_index:
                order = torch.empty(self._stored[1], dtype=torch.int32)
                self.weight_g_idx = nn.Parameter(order, requires_grad=False)
            if not scheme.is_symmetric:
                zeros = torch.empty(-(-out_features // 8), num_scales, dtype=torch.int32)
                self.weight_zero_point = nn.Parameter(zeros, requires_grad=False)
        self._is_reordered = False
        """Whether the stored groups of inputs are in another order than the inputs."""
        self._waiting: dict[str, Tensor] = {}
        """Tensors that are loaded together: the weight, and the groups of its inputs."""

    def of_size(self, out_features: int, in_features: int, *, of_inputs: bool = False) -> Self:
        """See `Projection`. Groups of inputs stay whole."""
        if of_inputs and self.scheme.group_size is not None and in_features % self._group:
            raise CheckpointError(
                f"{in_features} inputs of a tensor-parallel rank are no whole groups of {self._group} int4 weights. "
                "Use fewer ranks, or quantize with smaller groups"
            )
        return super().of_size(out_features, in_features, of_inputs=of_inputs)

    def checkpoint_shapes(self) -> dict[str, tuple[int, ...]]:
        """See `QuantizedLinear`."""
        outputs, inputs = self._stored
        num_scales = 1 if self.scheme.group_size is None else inputs // self._group
        if self.scheme.layout != "compressed-tensors":
            packed = (inputs, outputs // 8) if self.scheme.layout == "awq" else (inputs // 8, outputs)
            zeros, scales = (num_scales, outputs // 8), (num_scales, outputs)
            own: dict[str, tuple[int, ...]] = {
                "weight_packed": packed,
                "weight_zero_point": zeros,
                "weight_scale": scales,
            }
        else:
            own = {"weight_packed": (outputs, -(-inputs // 8)), "weight_scale": (outputs, num_scales)}
            if not self.scheme.is_symmetric:
                own["weight_zero_point"] = (-(-outputs // 8), num_scales)
        if self.scheme.has_group_index:
            own["weight_g_idx"] = (inputs,)
        return own | super().checkpoint_shapes()

    def load_tensor(self, name: str, tensor: Tensor, dtype: torch.dtype | None) -> None:
        """See `QuantizedLinear`. Inputs with stored groups are sorted by them, once both tensors are read."""
        if not self.scheme.has_group_index or name not in ("weight_packed", "weight_g_idx"):
            super().load_tensor(name, tensor, dtype)
            return
        self._waiting[name] = tensor
        if len(self._waiting) == 2:
            for one in ("weight_g_idx", "weight_packed"):
                super().load_tensor(one, self._waiting.pop(one), dtype)

    def _input_order(self, groups_D: Tensor) -> Tensor:
        """[D] int32: the inputs of the first group, then those of the second, and so on."""
        if self.shard is not None and self.shard.dim == 1:
            groups_D = groups_D - self.shard.start // self._group
        sizes = torch.bincount(groups_D.long().clamp_min(0), minlength=self._stored[1] // self._group)
        if int(groups_D.min()) < 0 or not bool((sizes == self._group).all()):
            if self.shard is not None and self.shard.dim == 1:
                raise CheckpointError(
                    "g_idx: groups of inputs in the order of desc_act (actorder) cannot be divided over "
                    "tensor-parallel ranks. Use one rank, or quantize without it"
                )
            raise CheckpointError(
                f"g_idx: the inputs of a layer do not form groups of {self._group}. Copy the checkpoint again, or "
                "quantize without desc_act"
            )
        order_D = torch.argsort(groups_D, stable=True).to(torch.int32)
        self._is_reordered = not bool((order_D.diff() == 1).all())
        return order_D

    def _in_memory(self, name: str, tensor: Tensor) -> Tensor:
        if name != "bias" and self.scheme.layout != "compressed-tensors":
            tensor = _from_transposed(name, tensor, self.scheme.layout)
        if name == "weight_g_idx":
            return self._input_order(tensor)
        if name == "weight_packed":
            values = unpack_int4(tensor, self._stored[1])
            if self.weight_g_idx is not None and self._is_reordered:
                values = values.index_select(1, self.weight_g_idx)
            return interleave_int4(pack_int4(self._pad(values, self._num_inputs)))
        if name == "weight_scale":
            return self._pad(tensor, self._num_inputs // self._group)
        if name == "weight_zero_point":
            values_NZ = unpack_int4(tensor.T, self._stored[0]).T
            return pack_int4(self._pad(values_NZ, self._num_inputs // self._group).T).T.contiguous()
        return self._pad(tensor, 0)

    def linear(self, x: Tensor) -> Tensor:
        """See `Projection`."""
        x_TD = x.flatten(0, -2)
        if self.weight_g_idx is not None and self._is_reordered:
            x_TD = x_TD.index_select(1, self.weight_g_idx)
        if self._num_inputs != x_TD.shape[1]:
            x_TD = F.pad(x_TD, (0, self._num_inputs - x_TD.shape[1]))
        return small_linear_w4a16(x_TD, self._weight()).view(*x.shape[:-1], self.out_features)

    def forward(self, x: Input) -> Tensor:
        """See `Projection`. The norm runs in the kernel of the product, for few tokens."""
        if not isinstance(x, NormedSum) or not self._reads_as_given:
            return super().forward(x)
        out, x.total = norm_linear_w4a16(x.x_TD, x.residual_TD, x.weight_D, x.eps, self._weight())
        return out

    def forward_gated(self, x: Input) -> Tensor | None:
        """See `Projection`. Norm and activation run in the kernel of the product, for one token."""
        if not isinstance(x, NormedSum) or not self._reads_as_given:
            return swiglu(*self.forward(x).chunk(2, dim=-1))
        out, x.total = norm_gated_linear_w4a16(x.x_TD, x.residual_TD, x.weight_D, x.eps, self._weight())
        return out

    @property
    def _reads_as_given(self) -> bool:
        """Whether the kernels take inputs without padding and in their own order."""
        return self._num_inputs == self.in_features and self.weight_g_idx is None

    def _weight(self) -> Weight4bit:
        return Weight4bit(self.weight_packed, self.weight_scale, self.weight_zero_point, self.bias)

    @classmethod
    def _like(cls, parts: Sequence[Self]) -> Self | None:
        if not parts[0].scheme.is_symmetric and any(part.out_features % 8 for part in parts):
            return None  # zero points of eight outputs share a word
        if not _are_equal(parts, "weight_g_idx"):
            return None
        outputs = sum(part.out_features for part in parts)
        whole = cls(parts[0].in_features, outputs, parts[0].scheme, bias=parts[0].bias is not None)
        whole._is_reordered = parts[0]._is_reordered
        return whole


_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the nibbles of outputs 0 to 7 are in a word of AutoAWQ."""


def _from_transposed(name: str, tensor: Tensor, layout: str) -> Tensor:
    """A tensor of AutoGPTQ or AutoAWQ, whose weights are [inputs, outputs], in the layout of compressed-tensors.

    Both pack zero points along the outputs, GPTQ packs values along the inputs. GPTQ's first version stores zero points
    less one.
    """
    if name == "weight_g_idx":
        return tensor
    if name == "weight_scale":
        return tensor.T.contiguous()
    if name == "weight_packed" and layout != "awq":
        return pack_int4(unpack_int4(tensor.T.contiguous(), 8 * len(tensor)))
    values = unpack_int4(tensor, 8 * tensor.shape[1])  # [inputs or groups, outputs]
    if layout == "awq":
        values = values.unflatten(1, (-1, 8))[..., list(_AWQ_ORDER)].flatten(1)  # type: ignore[no-untyped-call]
    if name == "weight_packed":
        return pack_int4(values.T.contiguous())
    if layout == "gptq":
        values = ((values + 8 + 1) & 15) - 8
    return pack_int4(values).T.contiguous()


def quantize_storage(model: nn.Module, config: QuantizationConfig, family: Any) -> None:
    """Replace the projections of a model on the meta device that are stored quantized. A tied head is plain."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for prefix, parent in list(model.named_modules()):
        for child, layer in list(parent.named_children()):
            if type(layer) is not Linear or id(layer.weight) in embeddings:
                continue
            scheme = config.scheme(_names(f"{prefix}.{child}" if prefix else child, family))
            if scheme is not None:
                setattr(parent, child, quantized_form(layer, scheme))


def quantized_form(layer: Linear, scheme: StoredScheme) -> QuantizedLinear:
    """An empty projection that stores the weight of a plain one by a scheme."""
    form = Linear4bit if scheme.form == "int4" else Linear8bit
    padding = (layer.num_padding_outputs, layer.num_padding_inputs)
    return form(layer.in_features, layer.out_features, scheme, padding=padding, bias=layer.bias is not None)


def _names(name: str, family: Any) -> list[str]:
    """All names that a configuration may use for a layer."""
    return [one.removesuffix(".weight") for one in family.all_names(f"{name}.weight")]
