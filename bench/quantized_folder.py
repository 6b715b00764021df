"""Write a quantized copy of a checkpoint folder in the layout of compressed-tensors, rounded to nearest, to be measured.

    python -m bench.quantized_folder CHECKPOINT OUT --form int8|fp8|int4 [--group-size 128]
    python -m bench.serve --checkpoint OUT --workload latency text

The decoder's layers are quantized; vision tower, projector and head stay as they are. Quality is not the point: there is no calibration.
"""

import argparse
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saccade.kernels.quant_linear import quantize_weight, quantize_weight_int4
from saccade.model.families import family_of
from saccade.model.weights import CheckpointWriter, read_tensors, tensor_files
from saccade.processor.folder import read_config

DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
FORMATS = {"int8": "int-quantized", "fp8": "float-quantized", "int4": "pack-quantized"}


def quantization_config(form: str, group_size: int) -> dict[str, Any]:
    """The entry of `config.json`."""
    kind = "float" if form == "fp8" else "int"
    weights: dict[str, Any] = {"num_bits": 8, "type": kind, "strategy": "channel", "symmetric": True, "dynamic": False}
    inputs: dict[str, Any] | None = {
        "num_bits": 8,
        "type": kind,
        "strategy": "token",
        "symmetric": True,
        "dynamic": True,
    }
    if form == "int4":
        weights |= {"num_bits": 4, "strategy": "group", "group_size": group_size}
        inputs = None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": FORMATS[form]}
    return {
        "quant_method": "compressed-tensors",
        "format": FORMATS[form],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*visual.*"],
    }


def quantized(name: str, weight: Tensor, form: str, group_size: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors that store a weight."""
    stem = name.removesuffix(".weight")
    if form == "int4":
        packed, scale, _ = quantize_weight_int4(weight, group_size)
        yield f"{stem}.weight_packed", packed
        yield f"{stem}.weight_scale", scale
        yield f"{stem}.weight_shape", torch.tensor(weight.shape)
    else:
        values, scale = quantize_weight(weight, DTYPES[form])
        yield name, values
        yield f"{stem}.weight_scale", scale


def write(source: Path, out: Path, form: str, group_size: int) -> None:
    """The whole folder."""
    family, files = family_of(source), tensor_files(source)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with CheckpointWriter(out) as writer:
        writer.write_json(
            "config.json", read_config(source) | {"quantization_config": quantization_config(form, group_size)}
        )
        for file in source.iterdir():
            if file.name != "config.json" and "safetensors" not in file.name:
                writer.copy(file)
        for name, tensor in read_tensors(files, files, device):
            ours = family.name_in_model(name) or name
            if ours.startswith("language.layers.") and tensor.dim() == 2:
                for part_name, part in quantized(name, tensor, form, group_size):
                    writer.add(part_name, part)
            else:
                writer.add(name, tensor)


def main() -> None:
    """Write it and print its size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--form", choices=list(FORMATS), required=True)
    parser.add_argument("--group-size", type=int, default=128)
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    write(options.checkpoint, options.out, options.form, options.group_size)
    size = sum(file.stat().st_size for file in options.out.glob("*.safetensors"))
    print(f"{options.form}: {size / 2**30:.2f} GiB in {options.out}")


if __name__ == "__main__":
    main()
