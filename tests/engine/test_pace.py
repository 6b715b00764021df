"""The pace against a simulated GPU: a fixed part, a part per token, noise, and surprises."""

import random
from statistics import mean

import pytest

from saccade.engine.pace import MIN_TOKENS, Pace


class Gpu:
    """Takes `fixed_ms` and `token_ms` per token, at least `least_ms` (reading the weights), give or take `noise`."""

    def __init__(self, *, fixed_ms=8.0, token_ms=0.02, least_ms=0.0, noise=0.05, seed=0):
        self.fixed_ms, self.token_ms, self.least_ms, self.noise = fixed_ms, token_ms, least_ms, noise
        self.random = random.Random(seed)

    def step_ms(self, num_tokens):
        exact = max(self.least_ms, self.fixed_ms + self.token_ms * num_tokens)
        return exact * max(0.1, self.random.gauss(1, self.noise))


def full_steps(pace, gpu, num_steps, num_answers=50):
    """Steps while prompts wait: each computes all it may. Their times."""
    times = []
    for _ in range(num_steps):
        num_prompt_tokens = pace.budget()
        times.append(gpu.step_ms(num_prompt_tokens + num_answers))
        pace.observe(times[-1], num_prompt_tokens, num_answers)
    return times


def answer_steps(pace, gpu, num_steps, num_answers=50):
    for _ in range(num_steps):
        pace.observe(gpu.step_ms(num_answers), 0, num_answers)


GPUS = {
    "plain": {},
    "noisy": {"noise": 0.2},
    "mostly fixed": {"fixed_ms": 35.0, "token_ms": 0.005},
    "nothing fixed": {"fixed_ms": 0.0},
    "few tokens cost nothing": {"fixed_ms": 2.0, "least_ms": 20.0},
}


@pytest.mark.parametrize("kind", GPUS)
@pytest.mark.parametrize("factor", [3.0, 1 / 3])
@pytest.mark.parametrize("seed", range(3))
def test_steps_with_prompts_take_about_the_wished_time_also_after_the_gpu_changes(kind, factor, seed):
    pace, gpu = Pace(50.0, 100_000), Gpu(**GPUS[kind], seed=seed)
    full_steps(pace, gpu, 30)
    assert mean(full_steps(pace, gpu, 100)) == pytest.approx(50, rel=0.2)
    gpu.token_ms *= factor
    full_steps(pace, gpu, 30)
    assert mean(full_steps(pace, gpu, 100)) == pytest.approx(50, rel=0.2)


def test_most_steps_keep_to_the_time_not_only_their_mean():
    pace, gpu = Pace(50.0, 100_000), Gpu()
    full_steps(pace, gpu, 30)
    times = full_steps(pace, gpu, 200)
    assert sum(40 < time < 60 for time in times) > 0.95 * len(times)


def test_more_answers_leave_less_room_for_prompts_at_once():
    pace, gpu = Pace(50.0, 100_000), Gpu(token_ms=0.05)
    full_steps(pace, gpu, 50, num_answers=20)
    times = [full_steps(pace, gpu, 50, num_answers=num)[1:] for num in (200, 20, 200)]
    assert all(mean(some) == pytest.approx(50, rel=0.1) for some in times)


def test_after_a_long_time_without_prompts_the_first_ones_keep_to_the_time():
    pace, gpu = Pace(50.0, 100_000), Gpu()
    full_steps(pace, gpu, 50)
    answer_steps(pace, gpu, 2000)
    assert mean(full_steps(pace, gpu, 3)) == pytest.approx(50, rel=0.2)


def test_prompts_now_and_then_are_enough_to_learn_from():
    pace, gpu, times = Pace(50.0, 100_000), Gpu(), []
    for token_ms in (0.02, 0.06):
        gpu.token_ms = token_ms
        times.clear()
        for _ in range(40):
            answer_steps(pace, gpu, 9)
            times += full_steps(pace, gpu, 1)
        assert mean(times[20:]) == pytest.approx(50, rel=0.2)


def test_an_odd_step_changes_little():
    pace, gpu = Pace(50.0, 100_000), Gpu(noise=0.02)
    full_steps(pace, gpu, 50)
    before = pace.budget()
    pace.observe(20_000.0, before, 50)
    assert pace.budget() > 0.8 * before
    assert mean(full_steps(pace, gpu, 20)) == pytest.approx(50, rel=0.2)


def test_a_first_step_that_compiles_is_soon_made_up_for():
    pace, gpu = Pace(50.0, 100_000), Gpu()
    pace.observe(30_000.0, pace.budget(), 0)
    full_steps(pace, gpu, 40)
    assert mean(full_steps(pace, gpu, 20)) == pytest.approx(50, rel=0.2)


def test_a_budget_at_most_doubles_and_only_once_it_was_used():
    pace = Pace(1000.0, 100_000)
    before = pace.budget()
    for _ in range(20):
        pace.observe(5.0, 3, 10)
    assert pace.budget() == before
    for _ in range(5):
        before = pace.budget()
        pace.observe(5.0, before, 10)
        assert before <= pace.budget() <= 2 * before


def test_prompts_progress_however_slow_steps_are():
    pace, gpu = Pace(10.0, 100_000), Gpu(fixed_ms=30.0)
    full_steps(pace, gpu, 50)
    assert pace.budget() == MIN_TOKENS
    gpu.fixed_ms = 2.0
    full_steps(pace, gpu, 60)
    assert mean(full_steps(pace, gpu, 20)) == pytest.approx(10, rel=0.2)


@pytest.mark.parametrize("max_tokens", [1, 8, 2000])
def test_the_budget_stays_within_what_a_step_can_hold(max_tokens):
    pace, gpu = Pace(1000.0, max_tokens), Gpu()
    full_steps(pace, gpu, 50)
    assert pace.budget() == max_tokens


def test_without_a_wished_time_there_is_no_bound():
    pace = Pace(None, 8192)
    assert pace.budget() is None
    pace.observe(1000.0, 8192, 5)
    assert pace.budget() is None


def test_steps_without_tokens_do_no_harm():
    pace, gpu = Pace(50.0, 100_000), Gpu()
    for _ in range(20):
        pace.observe(0.0, 0, 0)
    full_steps(pace, gpu, 60)
    assert mean(full_steps(pace, gpu, 20)) == pytest.approx(50, rel=0.2)
