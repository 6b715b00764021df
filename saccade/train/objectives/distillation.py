"""Distillation: a student learns the next-token distribution of a frozen teacher.

Legend: T tokens, S loss tokens, C rows of a chunk, D student width, E teacher width, V vocabulary, t temperature.

    loss = kl_weight * t^2 KL(softmax(teacher / t) || softmax(student / t)) + (1 - kl_weight) * cross entropy
           + hidden_weight * |h - h'|^2 / |h'|^2

each a mean over the loss tokens of the step; h and h' are the last hidden states. Both heads run on chunks of rows
(`chunks.py`), so neither model's logits exist at once. The factor t^2 keeps the gradient's scale independent of the
temperature.

The teacher is a plain or quantized model for inference. It is neither sharded nor saved: every rank holds all of it, in
its compute dtype or quantized, and runs it without gradients on the packed sequence of its student. Where one
vocabulary is padded further than the other, the entries that both have are compared.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.model.vlm import VLM
from saccade.processor.inputs import IGNORED
from saccade.train.objectives.chunks import loss_rows, map_chunks
from saccade.train.objectives.config import DistillationConfig
from saccade.train.objectives.objective import Labelled, LossTerms, Objective


class Distillation(Objective):
    """KL divergence to a teacher, mixed with cross entropy."""

    def __init__(self, config: DistillationConfig, teacher: VLM, *, label_smoothing: float = 0.0) -> None:
        """`teacher` is frozen and on the device of training."""
        self._config, self._teacher, self._label_smoothing = config, teacher, label_smoothing
        self.metric_names = ("kl", "cross_entropy", *(["hidden"] if config.hidden_weight else []))

    def loss(self, model: VLM, hidden_TD: Tensor, batch: Labelled, normalizer: Tensor) -> LossTerms:
        """See `Objective`."""
        config = self._config
        with torch.no_grad():
            taught_TE = self._teacher.hidden_states(batch.inputs)
        rows_S, labels_S = loss_rows(batch.labels, batch.num_labels, IGNORED)
        hidden_SD, taught_SE = hidden_TD[rows_S], taught_TE[rows_S]
        sums = {}
        sums["kl"], sums["cross_entropy"] = self._compare(model, hidden_SD, taught_SE, labels_S)
        weights = {"kl": config.kl_weight, "cross_entropy": 1.0 - config.kl_weight}
        if config.hidden_weight:
            sums["hidden"], weights["hidden"] = _relative_distance(hidden_SD, taught_SE), config.hidden_weight
        terms = {name: weights[name] * total / normalizer for name, total in sums.items()}
        return LossTerms(terms, {name: total.detach() for name, total in sums.items()})

    def _compare(self, model: VLM, hidden_SD: Tensor, taught_SE: Tensor, labels_S: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of KL divergence and cross entropy over all rows, from one product of each head."""
        temperature, smoothing = self._config.temperature, self._label_smoothing
        head, teacher_head = model.head, self._teacher.head
        V = min(head.whole_shape[0], teacher_head.whole_shape[0])

        def of_chunk(hidden_CD: Tensor, taught_CE: Tensor, labels_C: Tensor) -> Tensor:
            with torch.no_grad():
                target_CV = F.log_softmax(teacher_head(taught_CE)[:, :V].float() / temperature, dim=1)
            logits_CV = head(hidden_CD).float()
            found_CV = F.log_softmax(logits_CV[:, :V] / temperature, dim=1)
            kl_C = F.kl_div(found_CV, target_CV, reduction="none", log_target=True).sum(1) * temperature**2
            losses_C = F.cross_entropy(logits_CV, labels_C, reduction="none", label_smoothing=smoothing)
            return torch.stack([kl_C, losses_C], dim=1)

        kl, cross_entropy = map_chunks(of_chunk, hidden_SD, taught_SE, labels_S, vocab_size=head.whole_shape[0]).sum(0)
        return kl, cross_entropy


def _relative_distance(hidden_SD: Tensor, taught_SD: Tensor) -> Tensor:
    """Sum over rows of the squared distance, relative to the mean square of the teacher's."""
    taught_SD = taught_SD.float()
    squares_S = (hidden_SD.float() - taught_SD).square().mean(1)
    return (squares_S / taught_SD.square().mean(1).clamp_min(1e-6)).sum()
