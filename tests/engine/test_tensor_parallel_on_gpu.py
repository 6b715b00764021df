"""Ranks on GPUs: two on one card, over its memory and over gloo, and NCCL in CUDA graphs with one rank."""

import contextlib
import datetime
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from engine import peers_alone
from engine.shared_ranks import SharedRanks, planted
from engine.tiny import make_core, plain, requests_of, run_all
from model.hugging_face import SHAPES, make_checkpoint

from saccade.engine.config import EngineConfig
from saccade.engine.core.loop import EngineCore
from saccade.engine.device import loading
from saccade.engine.device.loading import make_runner
from saccade.engine.device.rank_exchange import RankExchange
from saccade.engine.device.runner import PixelScale
from saccade.engine.device.startup import warm_up
from saccade.model import load_model
from saccade.model.shard import Shard
from saccade.processor import Processor

pytestmark = pytest.mark.gpu

CONFIG = EngineConfig(num_pages=400, max_length=1024, max_requests=16, max_step_tokens=128, encoder_cache_tokens=2048)
BF16_BOUND = 0.1
"""Difference of log-probabilities in bf16: sums over ranks are rounded in another order."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("ranks") / "checkpoint", SHAPES[1], dtype=torch.bfloat16)


def prompt_logprobs(found):
    return torch.tensor([entry.logprob for one in found for entry in one.prompt_logprobs])


@contextlib.contextmanager
def communicating(way):
    """Inside the `with` block the leader and the ranks that start communicate in some way."""
    if way == "captured":
        tests = str(Path(__file__).parents[1])
        program = f"import sys; sys.path.insert(0, {tests!r}); from engine import peers_alone; peers_alone.plant()"
        with planted(program), peers_alone.planted():
            yield
    elif way == "gloo":
        program = "from saccade.engine.device import loading; loading.open_peers = lambda *_: None"
        with planted(program), patch.object(loading, "open_peers", lambda *_: None):
            yield
    else:
        yield


@pytest.mark.parametrize("way", ["memory", "captured", "gloo"])
def test_two_ranks_on_one_card_have_the_log_probabilities_of_one(folder, way):
    """NCCL refuses two ranks on a card: small sums go through its memory (CUDA IPC), the rest eagerly over gloo.

    `captured`: decode communicates through the memory alone, in CUDA graphs.
    """
    config = EngineConfig(**(vars(CONFIG) | {"cuda_graphs": way == "captured"}))
    prompts, outputs = plain(folder, 3, 12, 12)
    requests = requests_of(prompts, outputs, prompt_logprobs=0)
    with communicating(way), SharedRanks(2, device="cuda:0") as ranks:
        core = ranks.core(folder, config)
        ours = run_all(core, requests, at_once=4)
        forward, peers = core._runner.forward_pass, ranks.exchange.peers
        assert (peers is None) == (way == "gloo")
        assert (forward.num_fallback_steps == 0) == (way != "gloo")
        if peers is not None:
            assert int(peers.uses[0]) > 10 * len(requests), "sums of one token and more"
            assert not int(peers.uses[-1]), "no rank was lost"
        if way == "captured":
            assert forward.graphs.num_captured == 5, "decode of 1, 2, 4, 8 and 16 requests"
        core.close()
        assert not ranks.deaths
    theirs = run_all(make_core(folder, config, device="cuda"), requests, at_once=4)
    assert not [one.last.failure for one in ours if one.last.failure]
    difference = (prompt_logprobs(ours) - prompt_logprobs(theirs)).abs()
    assert difference.max() < BF16_BOUND
    same = sum(one.token_ids == other.token_ids for one, other in zip(ours, theirs, strict=True))
    assert same >= len(requests) // 2, "greedy tokens differ only where two logits are equal up to rounding"


def test_collectives_of_nccl_run_in_cuda_graphs(folder):
    """With one rank every collective is the identity, so tokens are those without it."""
    dist.init_process_group(
        "nccl", store=dist.HashStore(), rank=0, world_size=1, timeout=datetime.timedelta(seconds=60),
        device_id=torch.device("cuda:0"),
    )  # fmt: skip
    try:
        processor = Processor.load(folder)
        pixels = PixelScale(mean=processor.images.mean, std=processor.images.std)
        prompts, outputs = plain(folder, 3, 12, 12)
        cores = []
        for exchange in (RankExchange(0, 1), None):
            model = load_model(folder, device="cuda:0").requires_grad_(False)
            if exchange is not None:
                model.head.shard = Shard(0, (0, model.config.language.vocab_size), 0)
            runner = make_runner(model, CONFIG, pixels=pixels, exchange=exchange)
            warm_up(runner)
            cores.append(EngineCore(runner))
        ours, theirs = (run_all(core, requests_of(prompts, outputs), at_once=4) for core in cores)
        assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
        graphs = cores[0]._runner.forward_pass.graphs
        assert graphs.num_captured > 20
        assert graphs.num_eager_runs == 0
        for core in cores:
            core.close()
    finally:
        dist.destroy_process_group()
