"""Sizes of captured steps: few, large enough, within the buffers, and captured before the engine is ready."""

import itertools

import pytest
import torch

from saccade.engine import cuda_graphs
from saccade.engine.cuda_graphs import (
    MAX_CHUNKS,
    MAX_DRAFTING,
    PREFILL_TOKENS,
    CudaGraphs,
    StepSize,
    declared_sizes,
    decode_beside_prefill,
    largest_step,
    step_size,
)


def decode_size(num_decode, max_context, max_length=4096):
    return step_size(
        num_decode=num_decode, num_tokens=0, num_chunks=0, num_samples=0, max_context=max_context, max_length=max_length
    )


def mixed_size(num_decode, num_tokens, num_chunks=1, num_samples=1, max_context=900, max_length=4096):
    return step_size(
        num_decode=num_decode, num_tokens=num_tokens, num_chunks=num_chunks, num_samples=num_samples,
        max_context=max_context, max_length=max_length,
    )  # fmt: skip


@pytest.mark.parametrize("max_requests", [1, 3, 16, 100, 256, 1000, 1500])
@pytest.mark.parametrize("max_draft_tokens", [0, 1, 5, 7, 16])
def test_every_step_fits_its_size_and_the_largest_step(max_requests, max_draft_tokens):
    tokens, requests, samples = largest_step(4352, max_requests, max_draft_tokens)
    for count in range(1, max_requests + 1):
        size = decode_size(count, max_context=count)
        assert count <= size.num_decode == size.num_requests == size.num_samples <= min(requests, samples)
    chunks = {1, min(max_requests, MAX_CHUNKS)}
    for num_decode, num_chunks in itertools.product({0, 1, max_requests // 2, max_requests}, chunks):
        for num_tokens in (num_chunks, 17 * num_chunks, 640, 4096):
            num_samples = min(num_tokens, num_chunks * (1 + max_draft_tokens))
            size = mixed_size(num_decode, num_tokens, num_chunks, num_samples, max_context=5000)
            if size is None:
                assert num_decode > 256
                continue
            assert num_decode <= size.num_decode
            assert num_tokens <= size.num_prefill_tokens
            assert num_chunks <= size.num_prefill_requests
            assert num_samples <= size.num_prefill_samples
            assert size.max_context >= 5000
            assert size.num_tokens <= tokens
            assert size.num_requests <= requests
            assert size.num_samples <= samples


def test_there_are_few_sizes():
    decode = {decode_size(count, longest, 32768) for count in range(1, 257) for longest in (1, 1000, 5000, 32768)}
    mixed = {mixed_size(count, tokens, max_length=32768) for tokens in range(1, 4097) for count in range(0, 257, 5)}
    assert len(decode) <= 4 * 20
    assert len(mixed) <= 8 * len(PREFILL_TOKENS)


@pytest.mark.parametrize("max_requests", [1, 5, 16, 48, 200, 256])
@pytest.mark.parametrize("max_length", [512, 4096, 32768])
def test_steps_of_usual_contexts_have_a_declared_size(max_requests, max_length):
    declared = set(declared_sizes(max_requests, max_length))
    assert len(declared) == len(list(declared_sizes(max_requests, max_length)))
    for count in range(1, max_requests + 1):
        assert decode_size(count, max_length // 2, max_length) in declared
        assert decode_size(count, max_length, max_length) in declared
    for count in range(max_requests):
        for num_prompt_tokens in (1, 2, 16, 50, 700, 4096):
            decode = decode_beside_prefill(count, 1)
            num_tokens = min(num_prompt_tokens + count - decode, 4096)
            assert mixed_size(decode, num_tokens, max_context=min(900, max_length), max_length=max_length) in declared


def test_a_few_decode_requests_beyond_a_captured_number_are_chunks():
    for num_decode, num_chunks in itertools.product(range(257), (1, 16, MAX_CHUNKS)):
        kept = decode_beside_prefill(num_decode, num_chunks)
        assert 0 <= kept <= num_decode
        assert kept == num_decode or num_decode - kept + num_chunks <= MAX_CHUNKS
    assert decode_beside_prefill(66, 1) == 64
    assert decode_beside_prefill(66, MAX_CHUNKS) == 66
    assert decode_beside_prefill(80, 1) == 80


def test_drafts_need_logits_of_sampled_tokens_only():
    _, _, without = largest_step(4352, 256, 0)
    _, _, samples = largest_step(4352, 256, 7)
    assert samples <= without + 32 * 8
    assert without <= 256 + 256


def test_large_steps_are_not_captured():
    assert mixed_size(4, 4097) is None
    assert mixed_size(4, 64, num_chunks=MAX_CHUNKS + 1) is None
    assert mixed_size(257, 64) is None


class FakeGraph:
    def __init__(self, log, size):
        self.replay = lambda: log.append(("replay", size))


class FakeGraphs(CudaGraphs):
    """Records what would be run and captured; captures of some sizes fail."""

    def __init__(self, failing=()):
        self.log, self.failing = [], failing
        super().__init__(self._run)

    def _run(self, size):
        self.log.append(("eager", size))
        return torch.zeros(size.num_samples)

    def _capture(self, size):
        if size in self.failing:
            raise RuntimeError("out of memory")
        self.log.append(("capture", size))
        return FakeGraph(self.log, size), torch.zeros(size.num_samples)


SIZES = [StepSize(n, 0, 0, 0, 2048) for n in range(1, 200)]


def test_a_declared_size_is_replayed_and_another_is_captured_at_its_first_run():
    graphs = FakeGraphs()
    graphs.capture(SIZES[0])
    for _ in range(2):
        assert len(graphs.run(SIZES[0])) == SIZES[0].num_samples
    assert graphs.log == [("capture", SIZES[0]), ("replay", SIZES[0]), ("replay", SIZES[0])]
    assert graphs.num_late_captures == 0
    graphs.log.clear()
    graphs.run(SIZES[4])
    graphs.run(SIZES[4])
    assert graphs.log == [("eager", SIZES[4]), ("capture", SIZES[4]), ("replay", SIZES[4]), ("replay", SIZES[4])]
    assert (graphs.num_late_captures, graphs.num_captured, graphs.num_eager_runs) == (1, 2, 0)


def test_late_sizes_do_not_crowd_out_declared_ones_and_the_least_recently_used_is_dropped(caplog):
    graphs = FakeGraphs()
    graphs.capture(SIZES[0])
    most = cuda_graphs._MAX_LATE_GRAPHS
    for size in SIZES[1 : most + 1]:
        graphs.run(size)
    graphs.run(SIZES[1])
    graphs.run(SIZES[most + 1])
    graphs.log.clear()
    for size in (SIZES[0], SIZES[1], SIZES[most + 1]):
        graphs.run(size)
    assert [kind for kind, _ in graphs.log] == ["replay"] * 3
    graphs.log.clear()
    graphs.run(SIZES[2])
    assert ("capture", SIZES[2]) in graphs.log
    assert graphs.num_captured == 1 + most


def test_a_size_whose_capture_fails_runs_eagerly_from_then_on_and_is_counted(caplog):
    graphs = FakeGraphs(failing={SIZES[3], SIZES[7]})
    graphs.capture(SIZES[3])
    assert "runs eagerly" in caplog.text
    caplog.clear()
    for _ in range(3):
        assert len(graphs.run(SIZES[3])) == SIZES[3].num_samples
    assert graphs.num_eager_runs == 3
    assert caplog.text == "", "a failed capture is not retried"
    graphs.run(SIZES[7])
    graphs.run(SIZES[7])
    assert graphs.num_eager_runs == 5
    assert (graphs.num_captured, graphs.num_late_captures) == (0, 0)


def test_drafts_of_few_requests_are_declared():
    declared = set(declared_sizes(256, 8192, 7))
    for num_requests in range(1, MAX_DRAFTING + 1):
        num_tokens = 8 * num_requests
        size = step_size(
            num_decode=0,
            num_tokens=num_tokens,
            num_chunks=num_requests,
            num_samples=num_tokens,
            max_context=900,
            max_length=8192,
        )
        assert size in declared
