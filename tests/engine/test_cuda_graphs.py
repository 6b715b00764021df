"""Sizes of captured steps: few, large enough, within the buffers, and captured before the engine is ready."""

import itertools

import pytest
import torch

from saccade.engine.core.step import MAX_CHUNKS, MAX_DRAFTING, STEP_TOKENS
from saccade.engine.core.step_budget import prefill_with_decode
from saccade.engine.device import cuda_graphs
from saccade.engine.device.cuda_graphs import CudaGraphs
from saccade.engine.device.step_inputs import StepSize, covers, declared_sizes, largest_step, step_size


def decode_size(num_decode, max_requests=256):
    return step_size(
        num_decode=num_decode, num_tokens=0, num_chunks=0, num_samples=num_decode, max_requests=max_requests
    )


def mixed_size(num_decode, num_tokens, num_chunks=1, num_samples=None, max_requests=256):
    return step_size(
        num_decode=num_decode, num_tokens=num_tokens, num_chunks=num_chunks,
        num_samples=num_decode + num_chunks if num_samples is None else num_samples, max_requests=max_requests,
    )  # fmt: skip


@pytest.mark.parametrize("max_requests", [1, 3, 16, 100, 256, 1000, 1500])
@pytest.mark.parametrize("max_draft_tokens", [0, 1, 5, 7, 16])
def test_every_step_fits_its_size_and_the_largest_step(max_requests, max_draft_tokens):
    tokens, requests, samples = largest_step(4352, max_requests, max_draft_tokens)
    for count in range(1, max_requests + 1):
        size = decode_size(count, max_requests)
        assert count <= size.num_decode == size.num_requests == size.num_samples <= min(requests, samples)
        assert size.num_tokens == size.num_decode <= tokens
    chunks = {1, min(max_requests, MAX_CHUNKS)}
    for num_decode, num_chunks in itertools.product({0, 1, max_requests // 2, max_requests}, chunks):
        for num_tokens in (num_chunks, 17 * num_chunks, 640, 4096):
            num_samples = num_decode + min(num_tokens, num_chunks * (1 + max_draft_tokens))
            size = mixed_size(num_decode, num_tokens, num_chunks, num_samples, max_requests)
            if size is None:
                assert num_decode + num_tokens > STEP_TOKENS[-1]
                continue
            assert num_decode <= size.num_decode
            assert num_decode + num_tokens <= size.num_tokens <= tokens
            assert num_chunks <= size.num_chunks
            assert size.num_requests <= requests
            assert num_samples <= size.num_samples <= samples


def test_there_are_few_sizes():
    declared = list(declared_sizes(256))
    assert len(declared) == len(set(declared)) < 80
    used = {decode_size(count) for count in range(1, 257)}
    used |= {mixed_size(count, tokens) for tokens in range(1, 4000) for count in range(0, 257, 5)}
    assert used <= set(declared)


@pytest.mark.parametrize("max_requests", [1, 5, 16, 48, 200, 256])
def test_every_step_without_drafts_has_a_declared_size(max_requests):
    declared = set(declared_sizes(max_requests))
    for count in range(1, max_requests + 1):
        assert decode_size(count, max_requests) in declared
    for count, num_chunks in itertools.product(range(max_requests), (1, 7, MAX_CHUNKS)):
        for num_tokens in (num_chunks, 2 * num_chunks, 50 * num_chunks, 4096):
            assert mixed_size(count, num_tokens, num_chunks, max_requests=max_requests) in declared


@pytest.mark.parametrize(("max_requests", "drafts"), [(1, 0), (5, 0), (48, 7), (200, 0), (256, 7)])
def test_the_sizes_captured_first_cover_all_declared_ones(max_requests, drafts):
    declared = list(declared_sizes(max_requests, drafts))
    found = covers(declared)
    assert list(found) == declared
    for size, cover in found.items():
        assert found[cover] == cover, "it is captured at once"
        assert cover.num_chunks == size.num_chunks
        assert all(have >= want for have, want in zip(cover, size, strict=True))
        assert cover.padding_over(size) <= 40, "running as the cover costs next to nothing"
    assert len(set(found.values())) <= 45


def test_prefill_fills_a_captured_step_with_decode():
    assert prefill_with_decode(4096, 0) == 4096
    assert prefill_with_decode(700, 0) == 640
    assert prefill_with_decode(700, 100) == 668, "768 tokens in all"
    assert prefill_with_decode(20, 100) == 20, "no size is that close: padding"
    for budget, num_decode in itertools.product(range(1, 4097, 13), range(0, 257, 7)):
        assert 0 < prefill_with_decode(budget, num_decode) <= budget


def test_drafts_need_logits_of_sampled_tokens_only():
    _, _, without = largest_step(4352, 256, 0)
    _, _, samples = largest_step(4352, 256, 7)
    assert samples <= without + 32 * 8
    assert without <= 256 + 256


def test_large_steps_are_not_captured():
    assert mixed_size(4, STEP_TOKENS[-1] - 3) is None
    assert mixed_size(4, 64, num_chunks=MAX_CHUNKS + 1) is None


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
        yield torch.zeros(size.num_samples)

    def _capture(self, size):
        if size in self.failing:
            raise RuntimeError("out of memory")
        self.log.append(("capture", size))
        return cuda_graphs._Captured([FakeGraph(self.log, size)], torch.zeros(size.num_samples))


class PartGraph:
    """A graph whose `capture_end` fails if its capture has failed."""

    def __init__(self, log, fails):
        self.log, self.fails = log, fails

    def capture_end(self):
        self.log.append("end")
        if self.fails:
            raise RuntimeError("the capture was invalidated")

    def replay(self):
        self.log.append("replay")


@pytest.mark.parametrize("fails", [False, True])
def test_each_part_of_a_forward_is_a_graph_and_every_capture_is_ended(monkeypatch, fails):
    log = []

    def forward(size):
        yield None
        if fails:
            raise RuntimeError("out of memory")
        yield None
        yield torch.ones(size)

    graphs = CudaGraphs(forward)
    monkeypatch.setattr(graphs, "_begin_capture", lambda: log.append("begin") or PartGraph(log, fails))
    if fails:
        with pytest.raises(RuntimeError):
            graphs._capture(4)
        assert log.count("begin") == log.count("end")
        return
    graphs.capture(4)
    assert log == ["begin", "end"] * 3
    parts = graphs.run_parts(4)
    assert (next(parts), next(parts)) == (None, None)
    assert log[6:] == ["replay"] * 2
    assert len(next(parts)) == 4
    assert log[6:] == ["replay"] * 3


SIZES = [StepSize(n, n, 0, n) for n in range(1, 200)]


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


def test_a_postponed_size_runs_as_its_cover_until_it_is_captured():
    graphs = FakeGraphs()
    graphs.capture(SIZES[7])
    for size in SIZES[4:7]:
        graphs.postpone(size, SIZES[7], 8)
    assert graphs.fitting(SIZES[7]) == SIZES[7]
    for _ in range(3):
        assert graphs.fitting(SIZES[5]) == SIZES[7]
    assert graphs.capture_next()
    assert graphs.log[-1] == ("capture", SIZES[5]), "the one that has wasted most comes first"
    assert (graphs.fitting(SIZES[5]), graphs.fitting(SIZES[4])) == (SIZES[5], SIZES[7])
    assert graphs.num_late_captures == 0, "no step waited for it"
    while graphs.capture_next():
        pass
    assert [graphs.fitting(size) for size in SIZES[4:8]] == SIZES[4:8]


def test_a_postponed_size_is_captured_while_serving_once_its_padding_has_cost_as_much():
    graphs = FakeGraphs()
    graphs.capture(SIZES[7])
    graphs.postpone(SIZES[4], SIZES[7], 512)
    uses = [graphs.fitting(SIZES[4]) for _ in range(cuda_graphs._WASTE_BEFORE_CAPTURE // 512)]
    assert uses == [SIZES[7]] * (len(uses) - 1) + [SIZES[4]]
    assert graphs.num_late_captures == 1
    assert not graphs.capture_next()


def test_a_postponed_size_whose_capture_fails_runs_as_its_cover_for_good(caplog):
    graphs = FakeGraphs(failing={SIZES[4]})
    graphs.capture(SIZES[7])
    graphs.postpone(SIZES[4], SIZES[7], 512)
    assert graphs.capture_next()
    assert "it runs as" in caplog.text
    for _ in range(2 * cuda_graphs._WASTE_BEFORE_CAPTURE // 512):
        assert graphs.fitting(SIZES[4]) == SIZES[7]
    assert not graphs.capture_next()
    assert ("eager", SIZES[4]) not in graphs.log, "the inputs are those of another step"


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
    declared = set(declared_sizes(256, 7))
    for num_requests in range(1, MAX_DRAFTING + 1):
        assert mixed_size(0, 8 * num_requests, num_requests, num_samples=8 * num_requests) in declared
