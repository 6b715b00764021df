"""The step budget against a simulated GPU: a fixed part, a part per token, noise, and outliers."""

import random
from statistics import mean

import pytest

from saccade.engine.core.step_budget import MIN_TOKENS, StepBudget


class Gpu:
    """A step takes `fixed_ms` plus `token_ms` per token, at least `least_ms` for the weights, with relative `noise`."""

    def __init__(self, *, fixed_ms=8.0, token_ms=0.02, least_ms=0.0, noise=0.05, seed=0):
        self.fixed_ms, self.token_ms, self.least_ms, self.noise = fixed_ms, token_ms, least_ms, noise
        self.random = random.Random(seed)

    def step_ms(self, num_tokens):
        exact = max(self.least_ms, self.fixed_ms + self.token_ms * num_tokens)
        return exact * max(0.1, self.random.gauss(1, self.noise))


def num_tokens(budget):
    """Prompt-token budget of a step without the encoder, while many prompts wait."""
    share = budget.share(1_000_000, part_ms=0.0, parts_left=0)
    return None if share is None else share.num_tokens


def full_steps(budget, gpu, num_steps, num_decode=50):
    """Times of steps that use their whole budget."""
    times = []
    for _ in range(num_steps):
        num_prompt_tokens = num_tokens(budget)
        times.append(gpu.step_ms(num_prompt_tokens + num_decode))
        budget.observe(times[-1], num_prompt_tokens, num_decode)
    return times


def decode_steps(budget, gpu, num_steps, num_decode=50):
    for _ in range(num_steps):
        budget.observe(gpu.step_ms(num_decode), 0, num_decode)


GPUS = {
    "plain": {},
    "noisy": {"noise": 0.2},
    "mostly fixed": {"fixed_ms": 35.0, "token_ms": 0.005},
    "nothing fixed": {"fixed_ms": 0.0},
    "few tokens are free": {"fixed_ms": 2.0, "least_ms": 20.0},
}


@pytest.mark.parametrize("kind", GPUS)
@pytest.mark.parametrize("factor", [3.0, 1 / 3])
@pytest.mark.parametrize("seed", range(3))
def test_steps_with_prompts_take_about_the_target_time_also_after_the_gpu_changes(kind, factor, seed):
    budget, gpu = StepBudget(50.0, 100_000), Gpu(**GPUS[kind], seed=seed)
    full_steps(budget, gpu, 30)
    assert mean(full_steps(budget, gpu, 100)) == pytest.approx(50, rel=0.2)
    gpu.token_ms *= factor
    full_steps(budget, gpu, 30)
    assert mean(full_steps(budget, gpu, 100)) == pytest.approx(50, rel=0.2)


def test_most_steps_meet_the_target_not_only_their_mean():
    budget, gpu = StepBudget(50.0, 100_000), Gpu()
    full_steps(budget, gpu, 30)
    times = full_steps(budget, gpu, 200)
    assert sum(40 < time < 60 for time in times) > 0.95 * len(times)


def test_more_decode_tokens_leave_fewer_prompt_tokens_at_once():
    budget, gpu = StepBudget(50.0, 100_000), Gpu(token_ms=0.05)
    full_steps(budget, gpu, 50, num_decode=20)
    times = [full_steps(budget, gpu, 50, num_decode=num)[1:] for num in (200, 20, 200)]
    assert all(mean(some) == pytest.approx(50, rel=0.1) for some in times)


def test_the_first_prompts_after_a_long_decode_phase_meet_the_target():
    budget, gpu = StepBudget(50.0, 100_000), Gpu()
    full_steps(budget, gpu, 50)
    decode_steps(budget, gpu, 2000)
    assert mean(full_steps(budget, gpu, 3)) == pytest.approx(50, rel=0.2)


def test_occasional_prompts_are_enough_to_fit():
    budget, gpu, times = StepBudget(50.0, 100_000), Gpu(), []
    for token_ms in (0.02, 0.06):
        gpu.token_ms = token_ms
        times.clear()
        for _ in range(40):
            decode_steps(budget, gpu, 9)
            times += full_steps(budget, gpu, 1)
        assert mean(times[20:]) == pytest.approx(50, rel=0.2)


def test_an_outlier_changes_the_budget_little():
    budget, gpu = StepBudget(50.0, 100_000), Gpu(noise=0.02)
    full_steps(budget, gpu, 50)
    before = num_tokens(budget)
    budget.observe(20_000.0, before, 50)
    assert num_tokens(budget) > 0.8 * before
    assert mean(full_steps(budget, gpu, 20)) == pytest.approx(50, rel=0.2)


def test_the_budget_recovers_from_a_first_step_that_compiles():
    budget, gpu = StepBudget(50.0, 100_000), Gpu()
    budget.observe(30_000.0, num_tokens(budget), 0)
    full_steps(budget, gpu, 40)
    assert mean(full_steps(budget, gpu, 20)) == pytest.approx(50, rel=0.2)


def test_a_budget_at_most_doubles_and_only_once_it_was_used():
    budget = StepBudget(1000.0, 100_000)
    before = num_tokens(budget)
    for _ in range(20):
        budget.observe(5.0, 3, 10)
    assert num_tokens(budget) == before
    for _ in range(5):
        before = num_tokens(budget)
        budget.observe(5.0, before, 10)
        assert before <= num_tokens(budget) <= 2 * before


def test_prompts_make_progress_however_slow_steps_are():
    budget, gpu = StepBudget(10.0, 100_000), Gpu(fixed_ms=30.0)
    full_steps(budget, gpu, 50)
    assert num_tokens(budget) == MIN_TOKENS
    gpu.fixed_ms = 2.0
    full_steps(budget, gpu, 60)
    assert mean(full_steps(budget, gpu, 20)) == pytest.approx(10, rel=0.2)


@pytest.mark.parametrize("max_tokens", [1, 8, 2000])
def test_the_budget_stays_within_the_maximum_step_tokens(max_tokens):
    budget, gpu = StepBudget(1000.0, max_tokens), Gpu()
    full_steps(budget, gpu, 50)
    assert num_tokens(budget) == max_tokens


def test_without_a_target_there_is_no_limit():
    budget = StepBudget(None, 8192)
    assert num_tokens(budget) is None
    budget.observe(1000.0, 8192, 5)
    assert num_tokens(budget) is None


def test_steps_without_tokens_do_no_harm():
    budget, gpu = StepBudget(50.0, 100_000), Gpu()
    for _ in range(20):
        budget.observe(0.0, 0, 0)
    full_steps(budget, gpu, 60)
    assert mean(full_steps(budget, gpu, 20)) == pytest.approx(50, rel=0.2)


@pytest.mark.parametrize("target_ms", [50.0, None])
def test_the_cost_of_a_token_is_its_share_of_the_step(target_ms):
    budget, gpu = StepBudget(target_ms, 100_000), Gpu(fixed_ms=10.0, token_ms=1.0)
    assert budget.token_cost(8) == 0.0
    for _ in range(20):
        budget.observe(gpu.step_ms(108), 100, 8)
        for _ in range(9):
            budget.observe(gpu.step_ms(8), 0, 8)
    for num_tokens, expected in ((1, 1 / 11), (8, 8 / 18), (90, 90 / 100)):
        assert budget.token_cost(num_tokens) == pytest.approx(expected, rel=0.15)


def test_the_encoder_gets_what_ready_prompts_leave():
    budget, gpu = StepBudget(50.0, 100_000), Gpu(noise=0.0)
    full_steps(budget, gpu, 60)
    decode_steps(budget, gpu, 60)
    fixed_ms = gpu.step_ms(50)
    for num_ready, part_ms, parts_left, expected in (
        (0, 10.0, 4, 4),
        (0, 10.0, 2, 2),
        (0, 15.0, 4, 2),
        (500, 10.0, 4, 3),
        (10_000, 10.0, 4, 0),
        (0, 60.0, 4, 1),
        (0, 0.0, 4, 4),
    ):
        share = budget.share(num_ready, part_ms=part_ms, parts_left=parts_left)
        assert share.encoder_parts == expected
        used_ms = fixed_ms + gpu.token_ms * share.num_tokens + expected * part_ms
        assert used_ms == pytest.approx(50, abs=2) or share.num_tokens == MIN_TOKENS


def test_a_backlog_makes_steps_longer_until_little_is_left():
    budget, gpu = StepBudget(50.0, 100_000), Gpu(noise=0.0)
    full_steps(budget, gpu, 60)
    usual = num_tokens(budget)
    for num_requests, encode_ms, is_backlog in (
        (9, 100.0, False), (2, 500.0, False), (9, 200.0, True), (9, 110.0, True), (9, 90.0, False), (9, 110.0, False)
    ):  # fmt: skip
        budget.observe_queue(num_requests, 100, encode_ms)
        assert budget.has_backlog == is_backlog
        assert (num_tokens(budget) > 2 * usual) == is_backlog
