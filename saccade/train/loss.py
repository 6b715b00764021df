"""The loss of a packed row, and the one module the trainer calls.

Legend: T tokens, D decoder width, S sources.

Token t learns to say token t + 1, where that is to be learned and belongs to the same conversation. A row's loss is the sum over
its learned tokens divided by `count`, the learned tokens of the whole step: rows and ranks then only need adding up, however
unevenly the tokens lie on them.

Ranks of a sharded model meet in every block, so all of them run the same blocks: a row without images sends one blank image
through the tower, and a rank without a row runs an empty one. Both add zeros.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.kernels.linear_cross_entropy import linear_cross_entropy
from saccade.model.attention import PackedAttention
from saccade.model.config import VisionConfig
from saccade.model.vlm import VLM
from saccade.processor.inputs import ModelInputs, patch_segments

IGNORED = -100
"""The label of a token that learns nothing."""


def row_labels(inputs: ModelInputs) -> Tensor:
    """[T]: the token each one is to say next, or `IGNORED`."""
    labels = torch.full_like(inputs.token_ids, IGNORED)
    labels[:-1] = inputs.token_ids[1:].masked_fill(~inputs.is_learned[1:], IGNORED)
    labels[inputs.cu_seqlens[1:-1].long() - 1] = IGNORED  # the next token is another conversation's
    return labels


def source_labels(inputs: ModelInputs, labels: Tensor, sources: Sequence[int], num_sources: int) -> list[Tensor]:
    """The labels cut by source: [T] for each of `num_sources`, given the source of each conversation. On the CPU."""
    of_token = torch.tensor(sources, dtype=torch.int64).repeat_interleave(inputs.cu_seqlens.diff().long())
    return [labels.masked_fill(of_token != source, IGNORED) for source in range(num_sources)]


def num_labels(labels: Tensor) -> int:
    """How many tokens learn. On the CPU."""
    return int((labels != IGNORED).sum())


def empty_row(config: VisionConfig) -> ModelInputs:
    """A row that teaches nothing, for a rank that has none. Two tokens: a length of one is a case of its own to the compiler."""
    grids = torch.zeros(0, 3, dtype=torch.int64)
    return ModelInputs(
        token_ids=torch.zeros(2, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 2], dtype=torch.int32),
        positions=torch.zeros(3, 2, dtype=torch.int64),
        is_learned=torch.zeros(2, dtype=torch.bool),
        patches=torch.zeros(0, _patch_dim(config), dtype=torch.uint8),
        patch_cu_seqlens=patch_segments(grids),
        image_grids=grids,
        image_token_index=torch.zeros(0, dtype=torch.int64),
        pixel_mean=(0.5,) * config.in_channels,
        pixel_std=(0.5,) * config.in_channels,
        max_seqlen=2,
    )


def _patch_dim(config: VisionConfig) -> int:
    return config.in_channels * config.temporal_patch_size * config.patch_size**2


class TrainedModel(nn.Module):
    """The model with its loss: one call per row, so that whatever wraps it (FSDP, DDP) sees one forward and one backward."""

    def __init__(self, model: VLM) -> None:
        super().__init__()
        self.model = model
        self.always_sees = True
        """Whether rows without images send a blank one through the tower."""

    def forward(
        self,
        inputs: ModelInputs,
        labels: Tensor,
        count: Tensor,
        num_learned: int,
        by_source: Sequence[tuple[Tensor, int]] = (),
    ) -> tuple[Tensor, Tensor]:
        """(loss of the row, fp32 sums of the loss [S] over the labels of each source in `by_source`).

        `count` is a number on the device. The sums cost one more pass of the head in all, and no gradients: their labels are
        parts of `labels`, and tokens without a label are dropped before the matrix product.
        """
        hidden_TD = self._hidden_states(inputs)
        weight_VD = self.model.head.weight
        loss = linear_cross_entropy(hidden_TD, weight_VD, labels, count=count, num_learned=num_learned)
        with torch.no_grad():
            sums = [
                linear_cross_entropy(hidden_TD.detach(), weight_VD.detach(), part, count=1.0, num_learned=learned)
                for part, learned in by_source
            ]
        return loss, torch.stack(sums) if sums else loss.new_zeros(0)

    @torch.no_grad()
    def score(self, inputs: ModelInputs, labels: Tensor) -> Tensor:
        """fp64 [3]: the sum of the loss over the learned tokens, how many of them are predicted right, and how many there are."""
        hidden_TD = self._hidden_states(inputs)
        total = torch.zeros(3, dtype=torch.float64, device=labels.device)
        for rows in torch.split(
            (labels != IGNORED).nonzero()[:, 0], 1024
        ):  # the logits of a whole row would be gigabytes
            logits_CV = F.linear(hidden_TD[rows], self.model.head.weight).float()
            loss = F.cross_entropy(logits_CV, labels[rows], reduction="sum")
            right = (logits_CV.argmax(1) == labels[rows]).sum()
            total += torch.stack([loss.double(), right.double(), total.new_tensor(len(rows))])
        return total

    def _hidden_states(self, inputs: ModelInputs) -> Tensor:
        model = self.model
        x_TD = model.embed(inputs)
        if self.always_sees and inputs.image_grids.shape[0] == 0:
            x_TD = x_TD + 0.0 * self._blank_features(x_TD).sum()
        attend = PackedAttention(model.angles(inputs.positions), inputs.cu_seqlens, inputs.max_seqlen)
        return model.decode(x_TD, attend)

    def _blank_features(self, like: Tensor) -> Tensor:
        """[2, D]: what the tower makes of one grey image of two tokens (two for the compiler's sake, as above)."""
        config = self.model.config.vision
        grid = torch.tensor([[1, config.merge_size, 2 * config.merge_size]])
        pixels = torch.zeros(2 * config.patches_per_token, _patch_dim(config), device=like.device)
        return self.model.encode_images(pixels, grid).to(like.dtype)
