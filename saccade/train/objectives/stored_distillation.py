"""Distillation from stored logits: the teacher's k largest log-probabilities are read from disk.

Legend: S loss tokens, C rows of a chunk, D student width, V vocabulary, K stored tokens, t temperature.

With p of the teacher and q of the student at temperature t, A the k tokens with the largest p, and all other tokens
merged into one:

    KL_k = sum over i in A of p_i log(p_i / q_i)  +  p_rest log(p_rest / q_rest)
    p_rest = 1 - sum over i in A of p_i,  q_rest likewise
    loss = kl_weight * t^2 KL_k + (1 - kl_weight) * cross entropy

KL_k is at most the KL divergence over the whole vocabulary, and equal to it with k = V. The student must give the other
tokens as much probability as the teacher does, but may distribute it as it likes.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.data.loader import Stream
from saccade.model.vlm import VLM
from saccade.processor.inputs import IGNORED
from saccade.train.objectives.chunks import loss_rows, map_chunks
from saccade.train.objectives.objective import Labelled, LossTerms, Objective, ReadTargets
from saccade.train.objectives.stored_logits import TARGETS, LogitsOf, LogitsReader


class StoredDistillation(Objective):
    """KL divergence to the stored top-k log-probabilities of a teacher, mixed with cross entropy."""

    metric_names = ("kl", "cross_entropy")

    def __init__(self, stored: LogitsOf, *, vocab_size: int, label_smoothing: float = 0.0) -> None:
        """`vocab_size` counts the entries that both vocabularies have."""
        self._stored, self._vocab_size, self._label_smoothing = stored, vocab_size, label_smoothing

    def target_reader(self, stream: Stream) -> ReadTargets:
        """See `Objective`."""
        return LogitsReader(self._stored, stream)

    def loss(self, model: VLM, hidden_TD: Tensor, batch: Labelled, normalizer: Tensor) -> LossTerms:
        """See `Objective`."""
        config = self._stored.config
        rows_S, labels_S = loss_rows(batch.labels, batch.num_labels, IGNORED)
        targets = batch.targets or self._no_targets(batch)
        rows = [targets[name] for name in TARGETS]
        kl, cross_entropy = map_chunks(
            self._of_chunk(model), hidden_TD[rows_S], *rows, labels_S, vocab_size=model.head.whole_shape[0]
        ).sum(0)
        sums = {"kl": kl, "cross_entropy": cross_entropy}
        weights = {"kl": config.kl_weight, "cross_entropy": 1.0 - config.kl_weight}
        terms = {name: weights[name] * total / normalizer for name, total in sums.items()}
        return LossTerms(terms, {name: total.detach() for name, total in sums.items()})

    def _of_chunk(self, model: VLM) -> Callable[..., Tensor]:
        """Return both terms of C rows, [C, 2]."""
        V, temperature = self._vocab_size, self._stored.config.temperature

        def of_chunk(
            hidden_CD: Tensor, ids_CK: Tensor, log_p_CK: Tensor, log_rest_C: Tensor, labels_C: Tensor
        ) -> Tensor:
            logits_CV = model.head(hidden_CD).float()
            log_q_CV = F.log_softmax(logits_CV[:, :V] / temperature, dim=1)
            ids_CK = ids_CK.long()
            kl_C = (log_p_CK.exp() * (log_p_CK - log_q_CV.gather(1, ids_CK))).sum(1)
            if ids_CK.shape[1] < V:
                log_q_rest_C = log_q_CV.scatter(1, ids_CK, float("-inf")).logsumexp(1)
                kl_C = kl_C + log_rest_C.exp() * (log_rest_C - log_q_rest_C)
            losses_C = F.cross_entropy(logits_CV, labels_C, reduction="none", label_smoothing=self._label_smoothing)
            return torch.stack([kl_C * temperature**2, losses_C], dim=1)

        return of_chunk

    def _no_targets(self, batch: Labelled) -> Mapping[str, Tensor]:
        """Return the targets of a micro-batch without loss tokens, or of a dry run."""
        device = batch.labels.device
        assert batch.num_labels == 0 or device.type == "meta", "loss tokens come with stored logits"
        K = min(self._stored.config.top_k or 0, self._vocab_size)
        return {
            "token_ids": torch.zeros(batch.num_labels, K, dtype=torch.int32, device=device),
            "log_probs": torch.zeros(batch.num_labels, K, device=device),
            "log_rest": torch.zeros(batch.num_labels, device=device),
        }


def top_log_probs(logits_CV: Tensor, num_stored: int, temperature: float) -> dict[str, Tensor]:
    """Return the teacher's k largest log-probabilities and the log-probability of the rest, on the host."""
    log_p_CV = F.log_softmax(logits_CV.float() / temperature, dim=1)
    log_p_CK, ids_CK = log_p_CV.topk(num_stored, dim=1)
    rest_C = log_p_CV.scatter(1, ids_CK, float("-inf")).logsumexp(1)
    return {"token_ids": ids_CK.int().cpu(), "log_probs": log_p_CK.cpu(), "log_rest": rest_C.cpu()}
