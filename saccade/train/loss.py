"""Labels of a packed sequence, and the module that FSDP or DDP wraps: a model with the objective of its stage.

Legend: T tokens, D decoder width, S sources, K metrics.

Token t predicts token t + 1 if that is a loss token of the same conversation. What is optimized is up to the objective
(`objectives/`); its loss is divided by the normaliser of the whole step, so micro-batches and ranks are simply summed.

Sharded ranks run collectives in every block, so all of them must run the same blocks: a micro-batch without images
encodes a dummy image, and a rank without data runs an empty micro-batch. Both contribute zeros.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.model.config import VisionConfig
from saccade.model.vlm import VLM
from saccade.processor.inputs import IGNORED as IGNORED
from saccade.processor.inputs import ModelInputs
from saccade.processor.inputs import count_labels as count_labels
from saccade.processor.inputs import next_token_labels as next_token_labels
from saccade.train.objectives.cross_entropy import CrossEntropy
from saccade.train.objectives.objective import Labelled, Objective

_LOGITS_CHUNK = 1024
"""Tokens whose logits are computed at once; those of a whole packed sequence would be gigabytes."""


def labels_by_source(inputs: ModelInputs, labels: Tensor, sources: Sequence[int], num_sources: int) -> list[Tensor]:
    """[T] for each of `num_sources`: the labels of that source, given the source of each conversation. On the CPU."""
    if num_sources <= 1:
        return [labels] * num_sources
    of_token = torch.from_numpy(np.repeat(np.array(sources), inputs.cu_seqlens.diff().numpy()))
    return [labels.masked_fill(of_token != source, IGNORED) for source in range(num_sources)]


def empty_micro_batch(config: VisionConfig) -> ModelInputs:
    """Inputs without loss tokens, for a rank without data. Two tokens: torch.compile specializes on a length of one."""
    grey = (0.5,) * config.in_channels
    return ModelInputs.empty(patch_dim=config.patch_dim, pixel_mean=grey, pixel_std=grey, num_tokens=2)


class ModelWithLoss(nn.Module):
    """The model and its loss: one call per micro-batch, so FSDP or DDP sees one forward and one backward."""

    def __init__(self, model: VLM, objective: Objective | None = None) -> None:
        """`objective` (default: cross entropy) is no submodule: its frozen models are neither sharded nor saved."""
        super().__init__()
        self.model = model
        self.objective = CrossEntropy() if objective is None else objective
        self.encode_dummy_image = True
        """Whether micro-batches without images run a dummy image through the vision tower."""

    def forward(
        self,
        inputs: ModelInputs,
        labels: Tensor,
        count: Tensor,
        num_loss_tokens: int,
        by_source: Sequence[tuple[Tensor, int]] = (),
        targets: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (loss of the micro-batch, fp32 sums [S + K]).

        The sums are the cross entropy of each source in `by_source`, then the objective's metrics.

        `count` is the normaliser of the step, a scalar on the device. The sums by source cost one more pass of the head
        in total, without gradients: their labels partition `labels`, and tokens without a label are dropped before the
        matmul. `targets` are what the objective's reader has read.
        """
        hidden_TD = self._hidden_states(inputs)
        return self.loss_of(hidden_TD, inputs, labels, count, num_loss_tokens, by_source, targets)

    def loss_of(
        self,
        hidden_TD: Tensor,
        inputs: ModelInputs,
        labels: Tensor,
        count: Tensor,
        num_loss_tokens: int,
        by_source: Sequence[tuple[Tensor, int]] = (),
        targets: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`forward` from the hidden states on."""
        batch = Labelled(inputs, labels, num_loss_tokens, self.encode_dummy_image, targets or {})
        found = self.objective.loss(self.model, hidden_TD, batch, count)
        with torch.no_grad():
            sums = [
                self.model.head.cross_entropy(hidden_TD.detach(), part, count=1.0, num_labels=num_labels)
                for part, num_labels in by_source
            ]
        loss = found.total
        sums += [found.metrics[name].float() for name in self.objective.metric_names]
        return loss, torch.stack(sums) if sums else loss.new_zeros(0)

    @torch.no_grad()
    def score(self, inputs: ModelInputs, labels: Tensor) -> Tensor:
        """Return fp64 [3]: loss summed over the loss tokens, number of correct predictions, number of loss tokens."""
        return self.score_of(self._hidden_states(inputs), labels)

    def score_of(self, hidden_TD: Tensor, labels: Tensor) -> Tensor:
        """`score` from the hidden states on."""
        total = torch.zeros(3, dtype=torch.float64, device=labels.device)
        for index in torch.split((labels != IGNORED).nonzero()[:, 0], _LOGITS_CHUNK):
            logits_CV = self.model.head(hidden_TD[index]).float()
            loss = F.cross_entropy(logits_CV, labels[index], reduction="sum")
            correct = (logits_CV.argmax(1) == labels[index]).sum()
            total += torch.stack([loss.double(), correct.double(), total.new_tensor(len(index))])
        return total

    @torch.no_grad()
    def score_objective(
        self,
        inputs: ModelInputs,
        labels: Tensor,
        num_loss_tokens: int,
        targets: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """fp64 [2 + K]: the objective's units, its loss and its metrics, summed over the micro-batch."""
        return self.score_objective_of(self._hidden_states(inputs), inputs, labels, num_loss_tokens, targets)

    def score_objective_of(
        self,
        hidden_TD: Tensor,
        inputs: ModelInputs,
        labels: Tensor,
        num_loss_tokens: int,
        targets: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """`score_objective` from the hidden states on."""
        batch = Labelled(inputs, labels, num_loss_tokens, self.encode_dummy_image, targets or {})
        one = torch.ones((), device=labels.device)
        found = self.objective.loss(self.model, hidden_TD, batch, one)
        units = one * self.objective.num_units(inputs, num_loss_tokens)
        return torch.stack(
            [units, found.total, *(found.metrics[name] for name in self.objective.metric_names)]
        ).double()

    def _hidden_states(self, inputs: ModelInputs) -> Tensor:
        return self.model.hidden_states(inputs, encode_dummy_image=self.encode_dummy_image)
