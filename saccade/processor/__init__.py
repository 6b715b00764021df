"""Conversations with images in, packed tensors out: the same function for training and for serving.

    from saccade.processor import Processor
    processor = Processor.load("checkpoint/")
    inputs = processor([conversation, ...])          # -> ModelInputs

Read `processor.py` first (the steps in order), then `conversation.py` (what counts as text and what as a control token),
`image.py` (from bytes to patches), `positions.py` and `inputs.py` (the packed row).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from saccade.processor.image import MediaLimits as MediaLimits
    from saccade.processor.inputs import ModelInputs as ModelInputs
    from saccade.processor.processor import Processor as Processor
    from saccade.processor.text_stream import TextStream as TextStream

_DOOR = {"Processor": "processor", "ModelInputs": "inputs", "MediaLimits": "image", "TextStream": "text_stream"}


def __getattr__(name: str) -> object:
    """Resolve the door's names on first use, so that importing one pure module loads no torch."""
    if name not in _DOOR:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_DOOR[name]}"), name)
