"""Write a compressed checkpoint folder as `compressed-tensors` defines it, for other engines too (docs/formats.md).

    projections and their schemes -> `quantization_config`: config groups with targets, ignored layers
    tensors of finished blocks + tensors that are kept -> the folder of the original, with other weights

Names are exact: every layer is listed as it is called on disk and in `transformers`. Regular expressions would be
shorter, but engines that rename modules translate plain names only. With one group its target is the class `Linear`,
and layers that are kept are ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from saccade.compress.kv_scales import kv_cache_scheme
from saccade.model.checkpoint_writer import CheckpointWriter
from saccade.model.families.family import Family
from saccade.model.quantization import KVCacheForm, StoredScheme
from saccade.model.weights import PROCESSOR_FILES, config_for_export

FORMATS = {"int8": "int-quantized", "fp8": "float-quantized", "int4": "pack-quantized"}


def names_elsewhere(name: str, family: Family, on_disk: Mapping[str, str]) -> list[str]:
    """The names of a projection in this folder, in published ones, and in `transformers`."""
    weight = f"{name}.weight"
    published = family.name_on_disk(weight)
    names = (on_disk.get(weight, published), published, family.name_in_transformers(weight))
    return list(dict.fromkeys(one.removesuffix(".weight") for one in names))


def quantization_config(
    schemes: Mapping[str, StoredScheme | None],
    family: Family,
    on_disk: Mapping[str, str],
    ordered: Collection[str] = (),
    kv_cache: KVCacheForm | None = None,
) -> dict[str, Any]:
    """The `quantization_config` of a model.

    `schemes`: how every projection is stored, by its name in the model; None: it is kept.
    `on_disk`: names in the folder, by name in the model.
    `ordered`: projections whose inputs GPTQ rounded in the order of their activity. Only projections with groups of
    inputs say so: compressed-tensors up to 0.15 refuses an order for layers with one scale per output.
    `kv_cache`: form of keys and values.
    """
    groups: dict[tuple[StoredScheme, bool], list[str]] = {}
    ignore: list[str] = []
    for name, scheme in schemes.items():
        names = names_elsewhere(name, family, on_disk)
        if scheme is None:
            ignore += names
        else:
            is_ordered = name in ordered and scheme.group_size is not None
            groups.setdefault((scheme, is_ordered), []).extend(names)
    formats = {FORMATS[scheme.form] for scheme, _ in groups}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None if kv_cache is None else kv_cache_scheme(kv_cache),
        "config_groups": {
            f"group_{number}": _group(scheme, names if len(groups) > 1 else ["Linear"], is_ordered=is_ordered)
            for number, ((scheme, is_ordered), names) in enumerate(groups.items())
        },
        "ignore": ignore,
    }


def _group(scheme: StoredScheme, targets: list[str], *, is_ordered: bool) -> dict[str, Any]:
    kind = "float" if scheme.form == "fp8" else "int"
    weights: dict[str, Any] = {
        "num_bits": 4 if scheme.form == "int4" else 8,
        "type": kind,
        "symmetric": scheme.is_symmetric,
        "strategy": "channel" if scheme.group_size is None else "group",
        "group_size": scheme.group_size,
        "dynamic": False,
        "actorder": "weight" if is_ordered else None,
    }
    is_static = scheme.has_input_scale
    inputs = {
        "num_bits": 8,
        "type": kind,
        "symmetric": not scheme.has_input_zero_point,
        "strategy": "tensor" if is_static else "token",
        "dynamic": not is_static,
    }
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": None if scheme.form == "int4" else inputs,
        "output_activations": None,
        "format": FORMATS[scheme.form],
    }


def write_folder(
    source: Path, out: Path, quantization: dict[str, Any], tensors: Iterable[tuple[str, Tensor]], num_bytes: int
) -> None:
    """Write the folder: config and processor files of the original, and these tensors by their names on disk."""
    with CheckpointWriter(out) as writer:
        writer.check_space(num_bytes)
        writer.write_json("config.json", config_for_export(source) | {"quantization_config": quantization})
        for name in PROCESSOR_FILES:
            if (source / name).is_file():
                writer.copy(source / name)
        for name, tensor in tensors:
            writer.add(name, tensor)
