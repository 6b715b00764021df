from itertools import pairwise

import pytest

from saccade.errors import ConfigError
from saccade.train.schedule import ScheduleConfig

KINDS = ["cosine", "linear", "wsd", "constant"]


def factors(num_steps, **settings):
    config = ScheduleConfig(**settings)
    config.check(num_steps)
    return [config.factor(step, num_steps) for step in range(num_steps)]


@pytest.mark.parametrize("kind", KINDS)
def test_warm_up_is_linear_and_ends_at_the_peak(kind):
    rates = factors(100, kind=kind, warmup_steps=10)
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10] == 1.0
    assert all(0.0 < rate <= 1.0 for rate in rates)


@pytest.mark.parametrize("kind", KINDS)
def test_the_rate_never_rises_after_warm_up(kind):
    rates = factors(57, kind=kind, warmup_steps=7)[7:]
    assert all(after <= before for before, after in pairwise(rates))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_steps", [57, 60])
def test_the_curve_is_the_same_by_steps_and_by_samples(kind, num_steps):
    config = ScheduleConfig(kind=kind, warmup_steps=7)
    by_samples = [
        config.factor_by_samples(step, 13 * step, 13 * min(step, 7), 13 * num_steps) for step in range(num_steps)
    ]
    assert by_samples == pytest.approx(factors(num_steps, kind=kind, warmup_steps=7))


def test_cosine_is_half_way_in_the_middle_and_ends_at_the_final_factor():
    config = ScheduleConfig(kind="cosine", warmup_steps=10, final_factor=0.2)
    assert config.factor(60, 110) == pytest.approx(0.6)
    assert config.factor(110, 110) == pytest.approx(0.2)
    assert config.factor(500, 110) == pytest.approx(0.2)


def test_linear_falls_in_a_straight_line():
    assert factors(4, kind="linear", final_factor=0.0) == pytest.approx([1.0, 0.75, 0.5, 0.25])


def test_wsd_holds_the_peak_until_the_decay():
    rates = factors(100, kind="wsd", warmup_steps=5, decay_steps=20, final_factor=0.0)
    assert set(rates[5:81]) == {1.0}
    assert rates[90] == pytest.approx(0.5)
    assert factors(100, kind="wsd")[89:91] == [1.0, 1.0], "a tenth of the run decays where no number is given"


def test_constant_stays():
    assert factors(5, kind="constant") == [1.0] * 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"final_factor": 1.5}, "between 0 and 1"),
        ({"kind": "cosine", "decay_steps": 5}, "would ignore it"),
        ({"kind": "wsd", "decay_steps": 0}, "1 or more"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        ScheduleConfig(**settings)


def test_a_run_too_short_for_its_schedule_is_refused():
    with pytest.raises(ConfigError, match="80 steps of warm-up and 30 of decay do not fit in 100"):
        ScheduleConfig(kind="wsd", warmup_steps=80, decay_steps=30).check(100)
    with pytest.raises(ConfigError, match="11 steps of warm-up do not fit in 10"):
        ScheduleConfig(warmup_steps=11).check(10)
    with pytest.raises(ConfigError, match="0 steps"):
        ScheduleConfig().check(0)
