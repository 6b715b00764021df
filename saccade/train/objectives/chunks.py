"""Loss terms that need logits, a chunk of rows at a time.

Legend: S loss tokens, C rows of a chunk, D decoder width, V vocabulary.

In forward, a chunk's logits live until its terms are computed; in backward they are computed again. So the head costs
four products instead of three, and memory is a few fp32 matrices of `CHUNK_BYTES`, for any length of the packed
sequence.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from saccade.kernels.linear_cross_entropy import labelled_rows
from saccade.model.linear import Projection

CHUNK_BYTES = 256 * 2**20
"""fp32 logits of a chunk."""


def loss_rows(labels_T: Tensor, num_labels: int, ignored: int) -> tuple[Tensor, Tensor]:
    """Index [S] and label [S] of every loss token. `num_labels` is S, so the host does not wait for the device."""
    return labelled_rows(labels_T, ignored, num_labels)


def row_chunks(rows: Tensor, vocab_size: int) -> tuple[Tensor, ...]:
    """Split rows into chunks whose logits are computed at once; no rows make one empty chunk."""
    return torch.split(rows, max(1, CHUNK_BYTES // (4 * vocab_size)))


def map_chunks(function: Callable[..., Tensor], *rows: Tensor, vocab_size: int) -> Tensor:
    """Apply `function`, which computes logits [C, vocab_size], to chunks of all `rows` ([S, ...] each); concatenate."""
    parts = zip(*(row_chunks(one, vocab_size) for one in rows), strict=True)
    if not torch.is_grad_enabled():
        return torch.cat([function(*part) for part in parts])
    found: list[Tensor] = [checkpoint(function, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    return torch.cat(found)


def log_probabilities(head: Projection, hidden_SD: Tensor, labels_S: Tensor) -> Tensor:
    """[S] fp32: log-probability of each label, without the logits of all rows at once."""

    def of_chunk(hidden_CD: Tensor, labels_C: Tensor) -> Tensor:
        logits_CV: Tensor = head(hidden_CD).float()
        return logits_CV.gather(1, labels_C.unsqueeze(1)).squeeze(1) - logits_CV.logsumexp(1)

    return map_chunks(of_chunk, hidden_SD, labels_S, vocab_size=head.whole_shape[0])
