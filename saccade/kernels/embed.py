# mypy: allow-untyped-decorators
"""Input rows of a step: embeddings of its tokens, or features of its images.

Legend: T tokens, V vocabulary, D width, N request slots, M image features.

    token    = last_tokens[slot]     if the token is the one sampled last in a slot, which only the device may know
               token_ids[t]          else
    row[t]   = features[index][:D]   if the token has features of an image
               embedding[token]      else

One kernel replaces six, which take 12 us before the first layer of a decode step (H200); it takes 2.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels import launch
from saccade.kernels.launch import tl, triton

_BLOCK = 2048
"""Columns per program."""


class StepTokens(NamedTuple):
    """The tokens of a step."""

    token_ids: Tensor
    """[T] int32: those that the host knows."""
    last_token_slots: Tensor
    """[T] int32: the slot whose last token this is; N or more: no slot, `token_ids` has the token."""
    last_tokens: Tensor
    """[N + 1] int64."""


class ImageRows(NamedTuple):
    """Features of images, and the tokens that have them."""

    features: Tensor
    """[M, F], of which the first D columns belong to the embedding."""
    rows: Tensor
    """[T] int32: row of the token's features; M - 1 or more: it has none. (The last row belongs to no image.)"""


def embed_reference(tokens: StepTokens, embedding_VD: Tensor, images: ImageRows | None = None) -> Tensor:
    """[T, D]: the formula above, in plain PyTorch."""
    rows_TD = torch.nn.functional.embedding(token_ids_of(tokens), embedding_VD)
    return rows_TD if images is None else insert_features(rows_TD, images)


def token_ids_of(tokens: StepTokens) -> Tensor:
    """[T] int64: the tokens of a step."""
    is_last = tokens.last_token_slots < len(tokens.last_tokens) - 1
    return torch.where(is_last, tokens.last_tokens[tokens.last_token_slots], tokens.token_ids)


def insert_features(rows_TD: Tensor, images: ImageRows) -> Tensor:
    """[T, D]: the rows, or the features of tokens that have some."""
    has_features = images.rows < len(images.features) - 1
    found_TD = images.features[:, : rows_TD.shape[1]].index_select(0, images.rows)
    return torch.where(has_features[:, None], found_TD, rows_TD)


@triton.jit
def _embed_kernel(
    token_ids: tl.tensor,
    last_token_slots: tl.tensor,
    last_tokens: tl.tensor,
    embedding: tl.tensor,
    features: tl.tensor,
    feature_index: tl.tensor,
    out: tl.tensor,
    num_slots: tl.tensor,
    num_features: tl.tensor,
    feature_stride: tl.tensor,
    D: tl.constexpr,
    HAS_IMAGES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK columns of one token."""
    t = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(last_token_slots + t)
    is_last = slot < num_slots
    token = tl.load(token_ids + t).to(tl.int64)
    token = tl.where(is_last, tl.load(last_tokens + tl.where(is_last, slot, 0)), token)
    row = embedding + token * D
    if HAS_IMAGES:
        index = tl.load(feature_index + t).to(tl.int64)
        if index < num_features:
            row = features + index * feature_stride
    tl.store(out + t.to(tl.int64) * D + d, tl.load(row + d, mask=d < D), mask=d < D)


def embed(tokens: StepTokens, embedding_VD: Tensor, images: ImageRows | None = None) -> Tensor:
    """[T, D]: input of the first layer, see the top of this file. For inference: it has no backward."""
    is_alike = images is None or images.features.dtype == embedding_VD.dtype
    paths = launch.available_paths(embedding_VD, "triton") if is_alike and embedding_VD.is_contiguous() else ()
    if launch.choose_path("embed", *paths) != "triton":
        return embed_reference(tokens, embedding_VD, images)
    T, D = len(tokens.token_ids), embedding_VD.shape[1]
    out = embedding_VD.new_empty(T, D)
    features, index = images or (embedding_VD, tokens.token_ids)
    if T:
        _embed_kernel[(T, triton.cdiv(D, _BLOCK))](
            *tokens, embedding_VD, features, index, out, len(tokens.last_tokens) - 1, len(features) - 1,
            features.stride(0), D=D, HAS_IMAGES=images is not None, BLOCK=min(_BLOCK, triton.next_power_of_2(D)),
            num_warps=4,
        )  # fmt: skip
    return out
