"""Sizes of recorded steps: few, large enough, and within the buffers."""

import itertools

import pytest
import torch

from saccade.engine.graphs import Graphs, answers_size, mixed_size, most_places


@pytest.mark.parametrize("max_requests", [1, 3, 16, 100, 256, 1000, 1500])
def test_every_step_fits_its_size_and_the_largest_places(max_requests):
    tokens, requests = most_places(8192, max_requests)
    for count in range(1, max_requests + 1):
        size = answers_size(count, longest=count, max_length=4096)
        assert count <= size.num_requests <= requests
        assert size.is_answers
    for count, num_tokens in itertools.product({1, max_requests // 2 or 1, max_requests}, (1, 17, 640, 2048)):
        size = mixed_size(num_tokens, count, count, longest=5000, max_length=4096)
        if size is not None:
            assert num_tokens <= size.num_tokens <= tokens
            assert count <= size.num_requests <= requests
            assert size.num_samples >= count
            assert size.max_context >= 5000
            assert not size.is_answers


def test_there_are_few_sizes():
    answers = {answers_size(count, longest, 32768) for count in range(1, 257) for longest in (1, 1000, 5000, 32768)}
    mixed = {mixed_size(tokens, count, count, 900, 32768) for tokens in range(1, 2049) for count in range(1, 257, 5)}
    assert len(answers) <= 4 * 20
    assert len(mixed) <= 60


def test_large_steps_are_not_recorded():
    assert mixed_size(2049, 4, 4, 100, 4096) is None


class OnPaper(Graphs):
    """Notes what would be recorded."""

    def _capture(self, size):
        self.noted = [*getattr(self, "noted", []), size]
        raise RuntimeError("there is no GPU")


def test_answers_are_recorded_when_they_come_again_and_prompts_when_they_have_come_some_times():
    graphs = OnPaper(lambda size: torch.zeros(size.num_samples), lambda size: size.times_before)
    answers, mixed = answers_size(3, 100, 4096), mixed_size(600, 3, 3, 600, 4096)
    graphs.run(answers)
    assert not hasattr(graphs, "noted")
    graphs.run(answers)
    assert graphs.noted == [answers]
    for _ in range(mixed.times_before):
        graphs.run(mixed)
    assert graphs.noted == [answers]
    assert len(graphs.run(mixed)) == mixed.num_samples
    assert graphs.noted == [answers, mixed]
    graphs.run(mixed)
    assert graphs.noted == [answers, mixed], "what could not be recorded is not tried again"
