"""Everything that ranks exchange in a step of few tokens goes through peer memory, so that CUDA graphs can capture it.

NCCL, which is captured otherwise, refuses two ranks on one card. Logits are gathered and tokens broadcast as sums of
which all ranks but one have zeros.
"""

import contextlib
from unittest.mock import patch

import torch

from saccade.engine.device import forward, loading, rank_exchange
from saccade.engine.device.rank_exchange import RankExchange

NUM_LOGITS, NUM_SLOTS = 1024, 128
"""At least the tokens of the vocabulary, and the slots of requests."""


def _open(open_peers):
    def open_all(exchange, width, dtype):
        exchange.of_tokens = open_peers(exchange, NUM_SLOTS, torch.float32)
        exchange.of_logits = open_peers(exchange, NUM_LOGITS, dtype)
        return open_peers(exchange, width, dtype)

    return open_all


def _broadcast(broadcast):
    def through_peers(self, tokens):
        if getattr(self, "of_tokens", None) is None:
            broadcast(self, tokens)
            return
        sums = tokens.float().view(1, -1) * (self.rank == 0)
        tokens.copy_(rank_exchange.peer_all_reduce(sums, self.of_tokens).view(-1))

    return through_peers


def _gather(gather):
    def through_peers(self, parts, own):
        width = own.shape[-1]
        wide = own.new_zeros(*own.shape[:-1], width * self.size)
        if getattr(self, "of_logits", None) is None or not self.of_logits.fit(wide):
            gather(self, parts, own)
            return
        wide[:, self.rank * width : (self.rank + 1) * width] = own
        rank_exchange.peer_all_reduce(wide, self.of_logits)
        for rank, part in enumerate(parts):
            part.copy_(wide[:, rank * width : (rank + 1) * width])

    return through_peers


@contextlib.contextmanager
def planted():
    """Inside the `with` block this process uses nothing else for such steps, and captures those of decode alone."""
    declared = forward.declared_sizes
    with (
        patch.object(loading, "open_peers", _open(loading.open_peers)),
        patch.object(RankExchange, "_broadcast", _broadcast(RankExchange._broadcast)),
        patch.object(RankExchange, "_gather", _gather(RankExchange._gather)),
        patch.object(forward, "declared_sizes", lambda *sizes: [one for one in declared(*sizes) if not one.num_chunks]),
    ):
        yield


_kept = contextlib.ExitStack()


def plant():
    """The same from now on, in a follower."""
    _kept.enter_context(planted())
