"""The engine's tokens are those of plain generation, however it is cut up, cached, preempted or guessed."""

import random

import pytest
from engine.tiny import make_core, plain, request_of, run_all
from model.hugging_face import SHAPES, make_checkpoint

from saccade.engine.config import EngineConfig
from saccade.engine.request import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("engine") / "checkpoint", SHAPES[0])


def settings(seed: int) -> EngineConfig:
    """Random sizes; small caches force preemption."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4, 8, 16, 32])
    return EngineConfig(
        page_size=page_size,
        num_pages=-(-rng.choice([560, 900, 4000]) // page_size),
        max_length=550,
        max_requests=rng.choice([1, 3, 8, 32]),
        max_step_tokens=rng.choice([1, 7, 16, 64, 200, 512]),
        max_step_patches=rng.choice([16, 64, 512]),
        image_pool_tokens=rng.choice([64, 256, 2048]),
        image_cache=rng.random() < 0.5,
        prefix_cache=rng.random() < 0.5,
        max_draft_tokens=rng.choice([0, 0, 2, 5]),
    )


@pytest.mark.parametrize("seed", range(20))
def test_two_hundred_random_requests_get_the_tokens_of_plain_generation(folder, seed):
    prompts, answers = plain(folder, seed % 4, 40, 16)
    rng = random.Random(seed)
    chosen = rng.sample(range(40), 10)
    core = make_core(folder, settings(seed))
    requests = [
        (
            request_of(f"r{i}", prompts[i], SamplingParams(max_tokens=len(answers[i])), priority=rng.randint(-1, 1)),
            prompts[i],
        )
        for i in chosen
    ]
    heard = run_all(core, requests, at_once=rng.choice([1, 3, None]))
    assert [collected.token_ids for collected in heard] == [answers[i] for i in chosen]
