"""What the encoder will have encoded, from its speed."""

import pytest

from saccade.engine.encoder_progress import EncoderProgress


def test_nothing_is_promised_before_the_first_images_were_seen():
    progress = EncoderProgress()
    assert progress.num_patches(0.0, 100.0) == 0
    progress.start(0.0)
    assert progress.num_patches(5.0, 100.0) == 0


def test_the_speed_is_that_of_the_time_in_which_the_encoder_was_busy():
    progress = EncoderProgress()
    for begin in (0.0, 10.0, 50.0):  # idle in between
        progress.start(begin)
        progress.start(begin + 1.0)  # more images, behind the first
        progress.finish(100, num_left=300, now=begin + 1.0)
        progress.finish(300, num_left=0, now=begin + 4.0)
    assert progress.num_patches(60.0, 2.0) == pytest.approx(200, abs=1)


def test_patches_in_flight_count_from_when_the_encoder_began_them():
    progress = EncoderProgress()
    progress.start(0.0)
    progress.finish(100, num_left=0, now=1.0)
    progress.start(10.0)
    assert progress.num_patches(10.5, 1.0) == 150
    progress.finish(100, num_left=50, now=11.0)
    assert progress.num_patches(11.0, 1.0) == pytest.approx(100, abs=1)


def test_a_lasting_change_of_speed_is_followed():
    progress = EncoderProgress()
    for number in range(40):
        progress.start(10.0 * number)
        progress.finish(100 if number < 20 else 400, num_left=0, now=10.0 * number + 1.0)
    assert progress.num_patches(0.0, 1.0) == pytest.approx(400, rel=0.1)


def test_images_seen_at_once_give_no_division_by_zero():
    progress = EncoderProgress()
    progress.start(1.0)
    progress.finish(100, num_left=0, now=1.0)
    assert progress.num_patches(1.0, 1.0) == 0
