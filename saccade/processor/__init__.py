"""Conversations with images in, packed tensors out: the same function for training and for serving.

    from saccade.processor import Processor
    processor = Processor.load("checkpoint/")
    inputs = processor([conversation, ...])          # -> ModelInputs

Read `processor.py` first (the steps in order), then `conversation.py` (what counts as text and what as a control token),
`image.py` (from bytes to patches), `positions.py` and `inputs.py` (the packed row).
"""

from typing import TYPE_CHECKING

from saccade.lazy import lazy_exports

if TYPE_CHECKING:
    from saccade.processor.image import MediaLimits as MediaLimits
    from saccade.processor.inputs import ModelInputs as ModelInputs
    from saccade.processor.processor import Processor as Processor
    from saccade.processor.text_stream import TextStream as TextStream

__getattr__ = lazy_exports(
    __name__, {"Processor": "processor", "ModelInputs": "inputs", "MediaLimits": "image", "TextStream": "text_stream"}
)
