# mypy: allow-untyped-decorators
"""Grammar masks on logits: tokens that may not come next get -inf, in place.

Legend: S rows of logits, V vocabulary, N masked rows, W = ceil(V / 32) words of a mask.

    logits[rows[n], v] = -inf   where bit v % 32 of mask[n, v // 32] is 0

logits_SV in any float dtype with contiguous rows, any distance apart; mask_NW int32, contiguous; rows_N int64, no row
twice. Rows that are not named keep their values. No backward. Bytes per masked row in bf16: 4 V + V / 8.
"""

import torch
from torch import Tensor

from saccade.kernels import launch
from saccade.kernels.launch import tl, triton


def apply_token_mask_reference(logits_SV: Tensor, mask_NW: Tensor, rows_N: Tensor) -> None:
    """The formula above, in plain PyTorch."""
    bits_NV = (mask_NW.unsqueeze(2) >> torch.arange(32, device=mask_NW.device) & 1).flatten(1)[:, : logits_SV.shape[1]]
    kept_NV = logits_SV.index_select(0, rows_N).masked_fill_(bits_NV == 0, float("-inf"))
    logits_SV.index_copy_(0, rows_N, kept_NV)


@triton.jit
def _mask_kernel(
    logits: tl.tensor,
    mask: tl.tensor,
    rows: tl.tensor,
    logits_stride: tl.int64,
    num_words: tl.int32,
    vocab_size: tl.int32,
    WORDS: tl.constexpr,
) -> None:
    """The tokens of WORDS words of one masked row."""
    n = tl.program_id(0).to(tl.int64)
    w = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    bit = tl.arange(0, 32)[None, :]
    v = w[:, None] * 32 + bit
    words = tl.load(mask + n * num_words + w, mask=w < num_words, other=0)
    is_allowed = (words[:, None] >> bit) & 1 != 0
    pointers = logits + tl.load(rows + n) * logits_stride + v
    # Whole vectors are read and written: storing -inf at the disallowed tokens alone took up to 5 times as long.
    kept = tl.where(is_allowed, tl.load(pointers, mask=v < vocab_size, other=0.0), float("-inf"))
    tl.store(pointers, kept, mask=v < vocab_size)


# Measured at 64 x 151936 bf16 (bench/kernels/token_mask.py --tune, H200): 7.9 us.
_WORDS, _NUM_WARPS = 64, 4


def _apply_triton(logits_SV: Tensor, mask_NW: Tensor, rows_N: Tensor) -> None:
    (num_rows, num_words), vocab_size = mask_NW.shape, logits_SV.shape[1]
    if num_rows:
        _mask_kernel[(num_rows, triton.cdiv(num_words, _WORDS))](
            *(logits_SV, mask_NW, rows_N, logits_SV.stride(0), num_words, vocab_size),
            WORDS=_WORDS,
            num_warps=_NUM_WARPS,
        )


def apply_token_mask(logits_SV: Tensor, mask_NW: Tensor, rows_N: Tensor) -> None:
    """Set the logits of disallowed tokens of `rows_N` to -inf, in place. Never waits for the GPU."""
    num_words = -(-logits_SV.shape[1] // 32)
    has_dtypes = (mask_NW.dtype, rows_N.dtype) == (torch.int32, torch.int64)
    has_shapes = rows_N.ndim == 1 and mask_NW.shape == (len(rows_N), num_words)
    is_contiguous = logits_SV.stride(1) == 1 and mask_NW.is_contiguous() and rows_N.is_contiguous()
    if not (has_dtypes and has_shapes and is_contiguous):
        raise ValueError(
            f"apply_token_mask: logits {tuple(logits_SV.shape)} need {num_words} int32 words per masked row and int64 "
            f"rows, not {mask_NW.dtype} {tuple(mask_NW.shape)} and {rows_N.dtype} {tuple(rows_N.shape)}; "
            "rows are contiguous"
        )
    path = launch.choose_path("apply_token_mask", *launch.available_paths(logits_SV, "triton"))
    (_apply_triton if path == "triton" else apply_token_mask_reference)(logits_SV, mask_NW, rows_N)
