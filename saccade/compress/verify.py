"""Compare a compressed model with the original on held-out samples: KL divergence of the next token, and perplexity.

Only tokens of assistant turns count: what the model is asked to say. The original's head and its hidden states at these
tokens are kept; its logits are computed again in chunks, so that no more than one chunk of full logits exists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.device import resolve_device
from saccade.errors import DataError
from saccade.model import load_model
from saccade.model.vlm import VLM
from saccade.processor.inputs import ModelInputs

_CHUNK = 512
"""Tokens whose logits are computed at once."""


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """How far a model is from the original."""

    kl: float
    """Mean KL divergence of the original's next-token distribution from the model's, in nats."""
    loss: float
    """Mean cross entropy of the samples' own tokens, in nats."""
    original_loss: float
    """The original's mean cross entropy."""
    agreement: float
    """Share of tokens where both have the same most probable next token."""
    num_tokens: int
    """Tokens that were compared."""

    @property
    def perplexity(self) -> float:
        """exp of the loss."""
        return math.exp(self.loss)

    @property
    def original_perplexity(self) -> float:
        """exp of the original's loss."""
        return math.exp(self.original_loss)

    @property
    def perplexity_increase(self) -> float:
        """Perplexity relative to the original's, minus one: what `--max-loss` bounds."""
        return math.exp(self.loss - self.original_loss) - 1

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        names = ("perplexity", "original_perplexity", "perplexity_increase")
        return asdict(self) | {name: getattr(self, name) for name in names}


def verify(
    original: Path, compressed: Path, batches: Sequence[ModelInputs], *, device: str | torch.device = "auto"
) -> tuple[Fidelity, tuple[int, int]]:
    """Compare two folders on samples; returns the bytes of both models in memory too."""
    place = resolve_device(device)
    model = load_model(original, device=place)
    reference, before = Reference(model, [batch.to(place) for batch in batches]), memory_bytes(model)
    del model
    model = load_model(compressed, device=place)
    return reference.compare(model), (before, memory_bytes(model))


class Reference:
    """The original's answers to samples: hidden states of the tokens that count."""

    @torch.no_grad()
    def __init__(self, model: VLM, batches: Sequence[ModelInputs]) -> None:
        self._batches = batches
        self._rows = [_labelled(batch) for batch in batches]
        self._labels = [
            batch.token_ids.index_select(0, rows + 1) for batch, rows in zip(batches, self._rows, strict=True)
        ]
        if not sum(map(len, self._rows)):
            raise DataError(
                "the samples have no assistant turns, so there is nothing to compare. Give conversations or captions"
            )
        self._head = model.head
        self._hidden = self._states(model)

    def _states(self, model: VLM) -> list[Tensor]:
        return [model.hidden_states(b).index_select(0, rows) for b, rows in zip(self._batches, self._rows, strict=True)]

    def compare(self, model: VLM) -> Fidelity:
        """Compare a model with the original."""
        measures_T4 = self._measures(model)
        kl, original_loss, loss, agreement = measures_T4.mean(0).tolist()
        return Fidelity(kl=kl, loss=loss, original_loss=original_loss, agreement=agreement, num_tokens=len(measures_T4))

    def kl_by_conversation(self, model: VLM) -> Tensor:
        """[C, 2]: the sum of KL divergences and the number of tokens of each conversation."""
        kl_T, ids, num_conversations = self._measures(model)[:, 0], [], 0
        for batch, rows in zip(self._batches, self._rows, strict=True):
            ids.append(num_conversations + torch.bucketize(rows, batch.cu_seqlens[1:], right=True).cpu())
            num_conversations += batch.num_conversations
        sums_C2 = torch.zeros(num_conversations, 2, dtype=torch.float64)
        return sums_C2.index_add_(0, torch.cat(ids), torch.stack([kl_T, torch.ones_like(kl_T)], dim=1))

    @torch.no_grad()
    def _measures(self, model: VLM) -> Tensor:
        """[T, 4] fp64, by token: KL divergence, loss of the original, loss, equal choice of the next token."""
        found = []
        for theirs, ours, labels in zip(self._hidden, self._states(model), self._labels, strict=True):
            for start in range(0, len(labels), _CHUNK):
                part = slice(start, start + _CHUNK)
                logs = _log_probs(self._head, theirs[part]), _log_probs(model.head, ours[part])
                found.append(_measure(*logs, labels[part]))
        return torch.cat(found)


def _labelled(inputs: ModelInputs) -> Tensor:
    """Tokens whose next token is one of an assistant's turn in the same conversation."""
    is_labelled = inputs.loss_mask.roll(-1)
    is_labelled[inputs.cu_seqlens[1:].long() - 1] = False
    return is_labelled.nonzero().squeeze(1)


def _log_probs(head: nn.Module, hidden_TD: Tensor) -> Tensor:
    return F.log_softmax(head(hidden_TD).float(), dim=-1)


def _measure(theirs_TV: Tensor, ours_TV: Tensor, labels_T: Tensor) -> Tensor:
    """[T, 4]: KL, loss of the original, loss, equal choice."""
    kl_T = (theirs_TV.exp() * (theirs_TV - ours_TV)).sum(1)
    losses = [F.nll_loss(one, labels_T, reduction="none") for one in (theirs_TV, ours_TV)]
    is_equal_T = theirs_TV.argmax(1) == ours_TV.argmax(1)
    return torch.stack([kl_T, *losses, is_equal_T.float()], dim=1).double().cpu()


def memory_bytes(model: nn.Module) -> int:
    """Bytes of a model's weights in memory; what is shared counts once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in model.parameters()}
    return sum(storages.values())
