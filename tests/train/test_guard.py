"""What counts as a bad step, and what follows: plain decisions."""

import math
import random

import pytest

from saccade.errors import ConfigError
from saccade.train.guard import Action, Guard
from saccade.train.run_config import GuardConfig


def warmed(config: GuardConfig, *, mean: float = 2.0, spread: float = 0.05, num_steps: int = 40) -> Guard:
    guard, rng = Guard(config), random.Random(0)
    for _ in range(num_steps):
        assert guard.check(rng.gauss(mean, spread), 1.0).action is Action.ACCEPT
    return guard


@pytest.mark.parametrize(
    ("loss", "norm", "words"),
    [
        (math.nan, 1.0, "the loss is nan"),
        (math.inf, 1.0, "the loss is inf"),
        (2.0, math.nan, "the gradient norm is nan"),
        (2.0, math.inf, "the gradient norm is inf"),
        (9.0, 1.0, "the loss 9 is a spike: above"),
        (2.0, 150.0, "the gradient norm 150 is above max_grad_norm 100"),
    ],
)
def test_a_bad_step_is_skipped_with_its_reason(loss, norm, words):
    decision = warmed(GuardConfig(max_grad_norm=100.0)).check(loss, norm)
    assert decision.action is Action.SKIP
    assert decision.reason.startswith(words)


def test_the_first_steps_are_never_a_spike_but_nan_is_detected():
    guard = Guard(GuardConfig(min_history=16))
    assert guard.check(12.0, 1.0).action is Action.ACCEPT
    assert guard.check(1200.0, 1.0).action is Action.ACCEPT
    assert guard.check(math.nan, 1.0).action is Action.SKIP


def test_a_quiet_window_does_not_make_a_small_rise_a_spike():
    guard = warmed(GuardConfig(), spread=0.0)
    assert guard.check(2.15, 1.0).action is Action.ACCEPT
    assert guard.check(2.5, 1.0).action is Action.SKIP


def test_a_factor_of_the_mean_can_be_the_limit():
    config = GuardConfig(spike_sigmas=math.inf, spike_factor=1.5)
    assert warmed(config).limit == pytest.approx(3.0, rel=0.02)
    assert warmed(GuardConfig(spike_sigmas=math.inf)).limit == math.inf
    assert warmed(GuardConfig(spike_sigmas=math.inf), spread=0.0).limit == math.inf


def test_skipped_losses_do_not_move_the_window():
    guard = warmed(GuardConfig(max_skips=100))
    limit = guard.limit
    for _ in range(50):
        assert guard.check(50.0, 1.0).action is Action.SKIP
    assert guard.limit == limit


def test_consecutive_bad_steps_roll_back_and_finally_give_up():
    guard = warmed(GuardConfig(max_skips=3, max_rollbacks=2))
    actions = [guard.check(math.nan, 1.0).action for _ in range(9)]
    one_round = [Action.SKIP, Action.SKIP]
    assert actions == [*one_round, Action.ROLL_BACK, *one_round, Action.ROLL_BACK, *one_round, Action.GIVE_UP]


def test_a_good_step_resets_the_count():
    guard = warmed(GuardConfig(max_skips=2, max_rollbacks=0))
    for _ in range(20):
        assert guard.check(math.nan, 1.0).action is Action.SKIP
        assert guard.check(2.0, 1.0).action is Action.ACCEPT


def test_a_restored_guard_decides_like_the_original():
    config, rng = GuardConfig(window=8, min_history=4, max_skips=2, max_rollbacks=5), random.Random(1)
    guard = Guard(config)
    for _ in range(300):
        restored = Guard(config)
        restored.load_state_dict(guard.state_dict())
        loss = rng.choice([rng.gauss(2, 0.1), 40.0, math.nan]) if rng.random() < 0.3 else rng.gauss(2, 0.1)
        decision = guard.check(loss, 1.0)
        assert restored.check(loss, 1.0) == decision
        assert restored.state_dict() == guard.state_dict()
        if decision.action is Action.GIVE_UP:
            guard = Guard(config)


@pytest.mark.parametrize("setting", [{"window": 0}, {"max_skips": 0}, {"max_rollbacks": -1}, {"hang_timeout_s": 0.0}])
def test_invalid_settings_are_refused(setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        GuardConfig(**setting)
