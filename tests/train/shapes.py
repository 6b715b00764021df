"""Model shapes and micro-batches that memory plans are tested with."""

from dataclasses import replace

from saccade.model.initialize import named_size
from saccade.train.dry_run import MicroBatchSize

LARGE = named_size("7b")
THIN = replace(
    LARGE,
    vision=replace(LARGE.vision, num_layers=2, full_attention_layers=(1,)),
    language=replace(LARGE.language, num_layers=8),
)
"""Layers of the 7B shape, but few: a dry run takes a tenth of a second."""
UNIFORM = MicroBatchSize(tokens=16384, patches=36864, loss_tokens=16383)
