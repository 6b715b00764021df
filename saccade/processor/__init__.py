"""Conversations with images to packed model inputs, for training and serving alike.

    from saccade.processor import Processor
    processor = Processor.load("checkpoint/")
    inputs = processor([conversation, ...])          # -> ModelInputs

Start with `processor.py` (the steps in order), then `conversation.py` (chat template; text and control tokens),
`image.py` and `video.py` (bytes to pixels), `patches.py` (pixels to patches), `positions.py` (M-RoPE) and `inputs.py`
(the packed result).
"""

from typing import TYPE_CHECKING

from saccade.imports import lazy_exports

if TYPE_CHECKING:
    from saccade.processor.image import MediaLimits as MediaLimits
    from saccade.processor.inputs import ModelInputs as ModelInputs
    from saccade.processor.processor import Processor as Processor
    from saccade.processor.text_stream import TextStream as TextStream

__getattr__ = lazy_exports(
    __name__, {"Processor": "processor", "ModelInputs": "inputs", "MediaLimits": "image", "TextStream": "text_stream"}
)
