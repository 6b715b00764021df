"""The weights of a compressed folder."""

from safetensors.torch import load_file

from saccade.kernels.dequantize_int4 import unpack_int4


def dequantized(folder):
    """Each quantized weight in the dtype of its scales, by the name of the plain one."""
    tensors, found = load_file(folder / "model.safetensors"), {}
    for name, scale in tensors.items():
        if not name.endswith(".weight_scale"):
            continue
        prefix = name.removesuffix("_scale")
        if (packed := tensors.get(f"{prefix}_packed")) is not None:
            values = unpack_int4(packed, int(tensors[f"{prefix}_shape"][1])).float()
        else:
            values = tensors[prefix].float()
        groups = values.unflatten(1, (scale.shape[1], -1)) * scale.float().unsqueeze(2)
        found[prefix] = groups.flatten(1).to(scale.dtype)
    return found
