"""Antialiased bicubic resize by torch's vectorised 8-bit kernel: a fifth of Pillow's time, with other rounding."""

import torch
from torch import Tensor

from saccade.processor.pillow_resize import Pixels, rows_first


def torch_resize(pixels: Pixels, height: int, width: int) -> Pixels:
    """Resize an image [height, width, channels] of 8 bits. Pixels are within 2/255 of Pillow's."""
    writable = pixels if pixels.flags.writeable else pixels.copy()  # torch warns about read-only memory
    # The batch dim comes first, so that torch recognises channels-last memory: 1.8 times as fast.
    x_1CHW = torch.from_numpy(writable)[None].permute(0, 3, 1, 2)
    old_height, old_width = pixels.shape[:2]
    if rows_first(old_height, old_width, height, width):  # as Pillow; torch itself never does
        x_1CHW = _interpolate(x_1CHW, height, old_width)
    return _interpolate(x_1CHW, height, width).permute(0, 2, 3, 1)[0].numpy()


def _interpolate(x_1CHW: Tensor, height: int, width: int) -> Tensor:
    return torch.nn.functional.interpolate(x_1CHW, (height, width), mode="bicubic", antialias=True)
