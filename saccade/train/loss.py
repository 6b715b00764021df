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
from saccade.model.config import VisionConfig
from saccade.model.vlm import VLM
from saccade.processor.inputs import ModelInputs

IGNORED = -100
"""The label of a token that learns nothing."""


def row_labels(inputs: ModelInputs) -> Tensor:
    """[T]: the token each one is to say next, or `IGNORED`."""
    labels = torch.full_like(inputs.token_ids, IGNORED)
    labels[:-1] = inputs.token_ids[1:].masked_fill(~inputs.loss_mask[1:], IGNORED)
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
    grey = (0.5,) * config.in_channels
    return ModelInputs.empty(patch_dim=config.patch_dim, pixel_mean=grey, pixel_std=grey, num_tokens=2)


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
        loss = linear_cross_entropy(hidden_TD, weight_VD, labels, count=count, num_labels=num_learned)
        with torch.no_grad():
            sums = [
                linear_cross_entropy(hidden_TD.detach(), weight_VD.detach(), part, count=1.0, num_labels=learned)
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
        return self.model.hidden_states(inputs, encode_dummy_image=self.always_sees)
