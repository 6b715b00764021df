"""The plan of context parallelism: every token on one rank, no segment padded, attention balanced."""

import random

import numpy as np
import pytest

from saccade.data.context_plan import ContextShare, attended, plan_context


def pairs_of(share: ContextShare) -> int:
    """Pairs of tokens that attend to each other on this rank."""
    return sum(sum(range(piece.start - piece.segment + 1, piece.end - piece.segment + 1)) for piece in share.pieces)


def test_every_token_is_on_one_rank_with_all_its_keys():
    rng = random.Random(0)
    for _ in range(300):
        lengths = [rng.choice([1, 1, 2, 7, rng.randrange(1, 200)]) for _ in range(rng.randrange(1, 12))]
        num_ranks, block_size = rng.randrange(1, 9), rng.choice([1, 3, 8, 64])
        starts = np.concatenate([[0], np.cumsum(lengths)])
        shares = plan_context(lengths, num_ranks, block_size=block_size)
        tokens = np.concatenate([share.tokens for share in shares])
        assert sorted(tokens) == list(range(sum(lengths)))
        counts = [share.num_tokens for share in shares]
        blocks_per_rank = -(-sum(lengths) // (num_ranks * block_size))
        assert max(counts) - min(counts) <= blocks_per_rank
        assert max(counts) <= blocks_per_rank * block_size
        for share in shares:
            assert share.pieces == sorted(share.pieces)
            for piece in share.pieces:
                segment = np.searchsorted(starts, piece.start, "right") - 1
                assert piece.segment == starts[segment] <= piece.start < piece.end <= starts[segment + 1]
        assert sum(map(pairs_of, shares)) == attended(lengths).sum()


def test_a_window_limits_the_cost():
    assert attended([3, 5], window=1).tolist() == [1, 2, 2, 1, 2, 2, 2, 2]
    assert attended([]).tolist() == []


def log_normal_pack(mean: int, num_tokens: int, seed: int) -> list[int]:
    """Documents whose log-lengths have deviation 1, the last one cut at the end of the pack."""
    rng, lengths = np.random.default_rng(seed), []
    while sum(lengths) < num_tokens:
        length = int(rng.lognormal(np.log(mean) - 0.5, 1.0)) + 1
        lengths.append(min(length, num_tokens - sum(lengths)))
    return lengths


@pytest.mark.parametrize("mean", [1024, 4096, 16384, 65536])
def test_attention_of_packs_of_128k_tokens_is_balanced_over_8_ranks(mean):
    """At most 2 % more pairs on any rank than on average, and exactly equal numbers of tokens."""
    for seed in range(8):
        shares = plan_context(log_normal_pack(mean, 131072, seed), 8)
        pairs = [pairs_of(share) for share in shares]
        assert max(pairs) <= 1.02 * np.mean(pairs)
        assert {share.num_tokens for share in shares} == {16384}
