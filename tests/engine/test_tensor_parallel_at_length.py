"""The comparisons of `test_tensor_parallel.py` on four ranks, more than there are key/value heads, and many more."""

import pytest
import torch
from engine import mixed_requests
from engine.shared_ranks import SharedRanks
from engine.test_tensor_parallel import FAMILIES, check_family, mixed_round
from model.hugging_face import make_checkpoint

pytestmark = pytest.mark.slow


def test_tokens_of_every_family_on_four_ranks_are_those_of_one_rank(tmp_path):
    torch.set_num_threads(1)
    with SharedRanks(4) as four:
        for number, shape in enumerate(FAMILIES):
            folder = make_checkpoint(tmp_path / shape.name, shape)
            for seed in range(3):
                check_family(four, folder, seed=10 * number + seed)
        assert not four.deaths


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", mixed_requests.FAMILIES)
def test_many_mixed_requests_give_the_results_of_one_rank(tmp_path, family, size):
    torch.set_num_threads(1)
    with SharedRanks(size) as ranks:
        events = mixed_round(ranks, tmp_path, family, range(6), 30)
    assert events["preemptions"]
    assert events["accepted drafts"]
