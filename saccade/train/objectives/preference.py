"""Preference optimization (DPO) on pairs of a chosen and a rejected conversation.

Legend: T tokens, S loss tokens, N conversations, P pairs.

    margin = beta * ((log p(chosen) - log p_ref(chosen)) - (log p(rejected) - log p_ref(rejected)))
    loss   = -(1 - e) log sigmoid(margin) - e log sigmoid(-margin)
             + cross_entropy_weight * mean cross entropy of the chosen tokens

a mean over the pairs of the step; log p sums over the loss tokens of a conversation, and e is `label_smoothing`. A
sample of the shards has both conversations (docs/formats.md); they stand next to each other in the packed sequence, so
one forward pass computes both.

The reference is the model at the start of the stage. Its log-probabilities are computed for each micro-batch without
gradients: by the model itself with its LoRA adapters switched off, if they are new, or by a frozen model, of which
every rank holds all.

Context ranks have different tokens of a conversation: log-probabilities are summed over them, then each computes the
same loss and counts its share of it.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.model.context_parallel import ContextInputs, conversation_of_token, sum_over_ranks
from saccade.model.vlm import VLM
from saccade.processor.inputs import IGNORED, ModelInputs
from saccade.train.objectives.chunks import log_probabilities, loss_rows
from saccade.train.objectives.config import PreferenceConfig
from saccade.train.objectives.objective import Labelled, LossTerms, Objective

Reference = Callable[[VLM, Labelled, Tensor], Tensor]
"""Computes the reference's log-probabilities of labels from the trained model, the batch and the labels' rows [S]."""


class PreferenceOptimization(Objective):
    """DPO: the margin between chosen and rejected grows, relative to a reference model."""

    metric_names = ("margin", "accuracy", "chosen", "rejected")
    """Mean margin; share of pairs with a margin above 0; mean log-probability ratios of both."""

    def __init__(self, config: PreferenceConfig, reference: Reference) -> None:
        self._config, self._reference = config, reference

    def num_units(self, inputs: ModelInputs, num_labels: int) -> float:
        """Pairs; an empty micro-batch is a single conversation and has none."""
        del num_labels
        return inputs.num_conversations // 2 * _share(inputs)

    def validated(self, inputs: ModelInputs, labels_T: Tensor) -> Tensor:
        """The labels of the chosen conversations; those of the rejected ones are ignored."""
        return labels_T.masked_fill(_conversation_of_token(inputs) % 2 == 1, IGNORED)

    def loss(self, model: VLM, hidden_TD: Tensor, batch: Labelled, normalizer: Tensor) -> LossTerms:
        """See `Objective`."""
        rows_S, labels_S = loss_rows(batch.labels, batch.num_labels, IGNORED)
        found_S = log_probabilities(model.head, hidden_TD[rows_S], labels_S)
        with torch.no_grad():
            reference_S = self._reference(model, batch, rows_S)
        owner_S = _conversation_of_token(batch.inputs)[rows_S]
        ratio_P2 = _pairs(found_S - reference_S, owner_S, batch.inputs)
        margin_P = self._config.beta * (ratio_P2[:, 0] - ratio_P2[:, 1])
        share = _share(batch.inputs)
        terms = {"preference": self._preference_loss(margin_P).sum() * share / normalizer}
        if self._config.cross_entropy_weight:
            total_P2 = _pairs(found_S, owner_S, batch.inputs)
            count_P2 = _pairs(torch.ones_like(found_S), owner_S, batch.inputs).clamp_min(1.0)
            mean_P = -total_P2[:, 0] / count_P2[:, 0]
            terms["cross_entropy"] = self._config.cross_entropy_weight * mean_P.sum() * share / normalizer
        metrics = _metrics(margin_P.detach(), ratio_P2.detach())
        return LossTerms(terms, {name: value * share for name, value in metrics.items()})

    def _preference_loss(self, margin_P: Tensor) -> Tensor:
        smoothing = self._config.label_smoothing
        return -(1 - smoothing) * F.logsigmoid(margin_P) - smoothing * F.logsigmoid(-margin_P)


def frozen_reference(reference: VLM) -> Reference:
    """Log-probabilities by a frozen model."""

    def of_labels(model: VLM, batch: Labelled, rows_S: Tensor) -> Tensor:
        del model
        hidden_TD = reference.hidden_states(batch.inputs)
        return log_probabilities(reference.head, hidden_TD[rows_S], batch.labels[rows_S])

    return of_labels


def _share(inputs: ModelInputs) -> float:
    """The share of a pair that counts here: the ranks that share its tokens compute the same loss."""
    return 1.0 / inputs.num_ranks if isinstance(inputs, ContextInputs) else 1.0


def _conversation_of_token(inputs: ModelInputs) -> Tensor:
    """[T]: number of the conversation each token belongs to."""
    if isinstance(inputs, ContextInputs):
        return inputs.conversation_of_token()
    return conversation_of_token(inputs.cu_seqlens, inputs.num_tokens)


def _pairs(values_S: Tensor, owner_S: Tensor, inputs: ModelInputs) -> Tensor:
    """[P, 2]: sums over the loss tokens of the chosen and the rejected conversation of each pair."""
    num_paired = inputs.num_conversations // 2 * 2
    sums_N = values_S.new_zeros(inputs.num_conversations).index_add(0, owner_S, values_S)
    sums_N = sum_over_ranks(sums_N, inputs)
    return sums_N[:num_paired].view(-1, 2)


def _metrics(margin_P: Tensor, ratio_P2: Tensor) -> dict[str, Tensor]:
    return {
        "margin": margin_P.sum(),
        "accuracy": (margin_P > 0).sum(),
        "chosen": ratio_P2[:, 0].sum(),
        "rejected": ratio_P2[:, 1].sum(),
    }
