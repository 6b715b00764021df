"""Quantization-aware training: which projections round their weights, and what is exported.

The rounded parts are those of the scheme that the checkpoint is meant for, so that `saccade compress --scheme
w4a16-rtn` (int4) or `int8-rtn` of an exported folder changes no weight. Embedding, head, norms and biases stay as they
are. `model/fake_quantized_linear.py` rounds.
"""

import torch
from torch import nn

from saccade.model.fake_quantized_linear import FakeQuantizedLinear
from saccade.model.linear import Linear
from saccade.model.vlm import VLM
from saccade.train.stage_config import QuantizationAwareConfig


def add_fake_quantization(model: VLM, config: QuantizationAwareConfig, dtype: torch.dtype) -> None:
    """Replace the projections of the parts that `config` names. `dtype`: compute dtype."""
    for name, module in list(model.named_modules()):
        if type(module) is Linear and name.partition(".")[0] in config.rounded_parts:
            parent, _, child = name.rpartition(".")
            layer = FakeQuantizedLinear(
                module, form=config.form, group_size=config.group_size, bits=config.bits, dtype=dtype
            )
            setattr(model.get_submodule(parent), child, layer)


def fake_quantized_layers(model: nn.Module) -> dict[str, FakeQuantizedLinear]:
    """The layers that round their weights, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, FakeQuantizedLinear)}
