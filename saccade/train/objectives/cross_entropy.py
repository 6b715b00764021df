"""Cross entropy of the next token, with optional label smoothing. The head computes it without its logits."""

from torch import Tensor

from saccade.model.vlm import VLM
from saccade.train.objectives.objective import Labelled, LossTerms, Objective


class CrossEntropy(Objective):
    """Mean cross entropy over the loss tokens of a step."""

    def __init__(self, *, label_smoothing: float = 0.0) -> None:
        self._label_smoothing = label_smoothing

    def loss(self, model: VLM, hidden_TD: Tensor, batch: Labelled, normalizer: Tensor) -> LossTerms:
        """See `Objective`."""
        loss = model.head.cross_entropy(
            hidden_TD,
            batch.labels,
            count=normalizer,
            num_labels=batch.num_labels,
            label_smoothing=self._label_smoothing,
        )
        return LossTerms({"cross_entropy": loss})
