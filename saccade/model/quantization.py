"""The `quantization_config` of a checkpoint folder: how each layer is stored, in the `compressed-tensors` format.

    int8   `int-quantized`: weights with one scale per output or tensor, tokens quantized on the fly (W8A8)
    fp8    `float-quantized`: the same in float8_e4m3fn; activations may have one scale from calibration instead
    int4   `pack-quantized`: weights with one scale (and zero point) per output or group of inputs, 16-bit activations
           (W4A16)

Folders of AutoGPTQ and GPTQModel (`quant_method` gptq) and of AutoAWQ (awq) are read as int4 too: a layer with a
`qweight` is quantized.

A group of layers is named by its targets: the class `Linear`, names of layers, or regular expressions after `re:`;
layers of `ignore` are plain. Other settings of the format are refused by name.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from saccade.errors import CheckpointError

_FORMATS = {"int8": "int-quantized", "fp8": "float-quantized", "int4": "pack-quantized"}


KVCacheForm = Literal["fp8", "int8"]
GROUP_SIZES = (128, 64, 32)
"""Groups of int4 weights that other engines have kernels for."""


@dataclass(frozen=True)
class StoredScheme:
    """How a layer is stored."""

    form: Literal["int8", "fp8", "int4"]
    group_size: int | None = None
    """int4: inputs per scale. None: one scale per output."""
    is_symmetric: bool = True
    """int4: whether zero is stored as 0; otherwise a group has a zero point."""
    has_tensor_scale: bool = False
    """int8 and fp8: one weight scale for the layer instead of one per output."""
    has_input_scale: bool = False
    """int8 and fp8: activations have a scale from calibration, instead of one per token."""
    has_input_zero_point: bool = False
    """int8: they have a zero point from calibration as well (asymmetric)."""
    has_group_index: bool = False
    """int4: the group of every input is stored (GPTQ, with `desc_act`); otherwise a group is consecutive inputs."""
    layout: Literal["compressed-tensors", "gptq", "gptq_v2", "awq"] = "compressed-tensors"
    """int4: the packing of values and zero points, and the names of their tensors."""


def fitting_group(num_inputs: int, wanted: int) -> int | None:
    """The largest group size up to `wanted` that divides the inputs of a layer; None: one scale per output."""
    sizes = [wanted, *(size for size in GROUP_SIZES if size < wanted)]
    return next((size for size in sizes if num_inputs % size == 0), None)


@dataclass(frozen=True)
class QuantizationConfig:
    """The storage of every layer."""

    groups: tuple[tuple[tuple[str, ...], StoredScheme], ...]
    """Targets and scheme; the first match decides."""
    ignore: tuple[str, ...]
    """Layers that are plain."""
    kv_cache: KVCacheForm | None = None
    """8-bit form of keys and values that the folder is meant for; None: the dtype of the model."""

    def scheme(self, names: Sequence[str]) -> StoredScheme | None:
        """The scheme of a linear layer with these names (on disk, in `transformers`). None: it is plain."""
        if any(_matches(target, names) for target in self.ignore):
            return None
        for targets, scheme in self.groups:
            if any(target == "Linear" or _matches(target, names) for target in targets):
                return scheme
        return None


def _matches(target: str, names: Iterable[str]) -> bool:
    if target.startswith("re:"):
        return any(re.match(target[3:], name) for name in names)
    return target in names


def parse_quantization(raw: Mapping[str, Any], names: Iterable[str] = ()) -> QuantizationConfig | None:
    """Parse a `config.json`; None if its model is not quantized. Unsupported settings are refused.

    `names`: tensors on disk; they show which layers are quantized if the config does not (gptq, awq).
    """
    config = raw.get("quantization_config")
    if config is None:
        return None
    if isinstance(config, dict) and config.get("quant_method") in ("gptq", "awq"):
        names = tuple(names)
        layers = tuple(name.removesuffix(".qweight") for name in names if name.endswith(".qweight"))
        has_group_index = any(name.endswith(".g_idx") for name in names)
        return QuantizationConfig(((layers, _parse_transposed(config, has_group_index=has_group_index)),), ())
    if not isinstance(config, dict) or config.get("quant_method") != "compressed-tensors":
        method = config.get("quant_method") if isinstance(config, dict) else config
        raise _refused(f"quant_method {method!r}", "'compressed-tensors', 'gptq' and 'awq' are")
    for name in ("transform_config", "moe_sparsity_config"):
        if config.get(name):
            raise _refused(name)
    if (sparsity := config.get("sparsity_config")) and sparsity.get("format") != "dense":
        raise _refused("sparsity_config")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _refused(f"config_groups {groups!r}", "name the layers and their scheme")
    parsed = tuple(_parse_group(name, group, config.get("format")) for name, group in groups.items())
    return QuantizationConfig(parsed, _layer_names(config, "ignore"), kv_cache_form(raw))


def _layer_names(config: Mapping[str, Any], field: str) -> tuple[str, ...]:
    """Names of layers and classes, and regular expressions after `re:`."""
    names = config.get(field) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _refused(f"{field} {names!r}", "list names of layers")
    for name in names:
        try:
            re.compile(name[3:] if name.startswith("re:") else "")
        except re.error as error:
            raise _refused(f"{name!r} in {field}", f"it is no regular expression: {error}") from error
    return tuple(names)


def kv_cache_form(raw: Mapping[str, Any]) -> KVCacheForm | None:
    """The `kv_cache_scheme` of a `config.json`: 8 bits, symmetric. None: it has none.

    Its scales are not needed: the engine has a scale for every token and head, finer than one per layer.
    """
    config = raw.get("quantization_config")
    scheme = config.get("kv_cache_scheme") if isinstance(config, dict) else None
    if not scheme:
        return None
    forms: dict[Any, KVCacheForm] = {("float", 8): "fp8", ("int", 8): "int8"}
    if not isinstance(scheme, dict):
        raise _refused(f"kv_cache_scheme {scheme!r}")
    kind, is_symmetric = (scheme.get("type", "int"), scheme.get("num_bits", 8)), bool(scheme.get("symmetric", True))
    if kind not in forms or not is_symmetric:
        shown = f"{kind[1]} bits {kind[0]}{'' if is_symmetric else ', asymmetric'}"
        raise _refused(f"kv_cache_scheme of {shown}", "8 bits, float or int, symmetric are")
    return forms[kind]


def _parse_transposed(config: Mapping[str, Any], *, has_group_index: bool) -> StoredScheme:
    """The scheme of a folder of AutoGPTQ, GPTQModel or AutoAWQ."""
    method, bits = config["quant_method"], config.get("bits", config.get("w_bit"))
    size = config.get("group_size", config.get("q_group_size", 128))
    if bits != 4:
        raise _refused(f"{method} with {bits} bits", "4 bits are")
    stated = config.get("checkpoint_format" if method == "gptq" else "version", method if method == "gptq" else "gemm")
    layouts: dict[str, Literal["gptq", "gptq_v2", "awq"]] = {"gptq": "gptq", "gptq_v2": "gptq_v2", "gemm": "awq"}
    if str(stated).lower() not in layouts:
        raise _refused(f"{method} in the format {stated!r}", "gptq, gptq_v2 and gemm are")
    group_size, layout = None if size == -1 else size, layouts[str(stated).lower()]
    is_stored = has_group_index and group_size is not None
    return StoredScheme("int4", group_size, is_symmetric=False, has_group_index=is_stored, layout=layout)


def _parse_group(name: str, group: Any, default_format: Any) -> tuple[tuple[str, ...], StoredScheme]:
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise _refused(f"config group {name!r} without weights")
    if group.get("output_activations"):
        raise _refused(f"output_activations of {name!r}")
    if not isinstance(inputs := group.get("input_activations"), dict | None):
        raise _refused(f"input_activations {inputs!r} of {name!r}")
    scheme = _parse_scheme(name, group["weights"], inputs)
    stored = group.get("format") or default_format
    if stored not in (_FORMATS[scheme.form], "mixed-precision", "naive-quantized"):
        raise _refused(
            f"format {stored!r} of {name!r}", f"{scheme.form} layers are read from {_FORMATS[scheme.form]!r}"
        )
    return _layer_names(group, "targets"), scheme


def _parse_scheme(name: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> StoredScheme:
    kind, strategy = (weights.get("type", "int"), weights.get("num_bits")), weights.get("strategy")
    is_symmetric = bool(weights.get("symmetric", True))
    if kind == ("int", 4) and inputs is None and strategy in ("group", "channel"):
        size = weights.get("group_size") if strategy == "group" else None
        if not isinstance(size, int | None):
            raise _refused(f"group_size {size!r} of {name!r}", "it is a number of inputs")
        is_reordered = weights.get("actorder") in ("group", True) and size is not None
        return StoredScheme("int4", size, is_symmetric, has_group_index=is_reordered)
    if kind in (("int", 8), ("float", 8)) and inputs is not None and is_symmetric and strategy in ("channel", "tensor"):
        form: Literal["int8", "fp8"] = "int8" if kind[0] == "int" else "fp8"
        is_static = _is_static(name, kind, inputs)
        has_zero_point = is_static and not inputs.get("symmetric", True)
        return StoredScheme(
            form,
            has_tensor_scale=strategy == "tensor",
            has_input_scale=is_static,
            has_input_zero_point=has_zero_point,
        )
    shown = f"{kind[0]}{kind[1]} weights per {strategy}{'' if is_symmetric else ', asymmetric'}"
    activations = "16-bit activations" if inputs is None else f"{inputs.get('num_bits')}-bit activations"
    raise _refused(
        f"{shown} with {activations} ({name!r})", "int8 and fp8 with 8-bit activations, and int4 with 16-bit ones are"
    )


def _is_static(name: str, kind: tuple[str, int], inputs: Mapping[str, Any]) -> bool:
    """Whether activations have one scale from calibration; else every token has its own."""
    is_symmetric, strategy = bool(inputs.get("symmetric", True)), inputs.get("strategy")
    if (inputs.get("type", "int"), inputs.get("num_bits")) == kind:
        if inputs.get("dynamic") is True and strategy == "token" and is_symmetric:
            return False
        if inputs.get("dynamic") is False and strategy == "tensor" and (is_symmetric or kind[0] == "int"):
            return True
    symmetry = "" if is_symmetric else ", asymmetric"
    raise _refused(
        f"activations of {name!r}: {inputs.get('num_bits')} bits {inputs.get('type')} per {strategy}{symmetry}",
        "8 bits of the weights' type, symmetric per token (dynamic), or per tensor (static; int8 also asymmetric) are",
    )


def _refused(what: str, supported: str = "use a checkpoint without it") -> CheckpointError:
    return CheckpointError(f"config.json: quantization_config: {what} is not supported; {supported}")
