"""Sizes of captured steps: few, large enough, and within the buffers."""

import itertools

import pytest
import torch

from saccade.engine.cuda_graphs import CudaGraphs, decode_size, largest_size, mixed_size


@pytest.mark.parametrize("max_requests", [1, 3, 16, 100, 256, 1000, 1500])
def test_every_step_fits_its_size_and_the_largest_size(max_requests):
    tokens, requests, samples = largest_size(8192, max_requests, 0)
    for count in range(1, max_requests + 1):
        size = decode_size(count, max_context=count, max_length=4096)
        assert count <= size.num_requests <= min(requests, samples)
        assert size.is_decode
    for count, num_tokens in itertools.product({1, max_requests // 2 or 1, max_requests}, (1, 17, 640, 2048)):
        size = mixed_size(num_tokens, count, count, samples, max_context=5000, max_length=4096)
        if size is not None:
            assert num_tokens <= size.num_tokens <= tokens
            assert count <= size.num_requests <= requests
            assert count <= size.num_samples <= samples
            assert size.max_context >= 5000
            assert not size.is_decode


def test_there_are_few_sizes():
    decode = {decode_size(count, longest, 32768) for count in range(1, 257) for longest in (1, 1000, 5000, 32768)}
    mixed = {
        mixed_size(tokens, count, count, 256, 900, 32768) for tokens in range(1, 2049) for count in range(1, 257, 5)
    }
    assert len(decode) <= 4 * 20
    assert len(mixed) <= 60


@pytest.mark.parametrize("max_draft_tokens", [1, 4, 16])
def test_drafts_need_logits_of_sampled_tokens_only(max_draft_tokens):
    max_requests = 256
    _, _, max_samples = largest_size(8192, max_requests, max_draft_tokens)
    assert max_samples <= max_requests * (1 + max_draft_tokens)
    for count in range(1, max_requests + 1, 15):
        num_samples = count * (1 + max_draft_tokens)
        size = mixed_size(min(num_samples, 2048), count, min(num_samples, 2048), max_samples, 900, 32768)
        assert min(num_samples, 2048) <= size.num_samples <= max_samples


def test_large_steps_are_not_captured():
    assert mixed_size(2049, 4, 4, 256, 100, 4096) is None


class FakeGraphs(CudaGraphs):
    """Records which sizes would be captured."""

    def _capture(self, size):
        self.attempts = [*getattr(self, "attempts", []), size]
        raise RuntimeError("there is no GPU")


def test_decode_is_captured_at_its_second_run_and_mixed_steps_after_some_more():
    graphs = FakeGraphs(lambda size: torch.zeros(size.num_samples), lambda size: size.num_eager_runs_before_capture)
    decode, mixed = decode_size(3, 100, 4096), mixed_size(600, 3, 3, 4, 600, 4096)
    graphs.run(decode)
    assert not hasattr(graphs, "attempts")
    graphs.run(decode)
    assert graphs.attempts == [decode]
    for _ in range(mixed.num_eager_runs_before_capture):
        graphs.run(mixed)
    assert graphs.attempts == [decode]
    assert len(graphs.run(mixed)) == mixed.num_samples
    assert graphs.attempts == [decode, mixed]
    graphs.run(mixed)
    assert graphs.attempts == [decode, mixed], "a failed capture is not retried"
