"""The engine's tokens equal those of plain generation, however requests are chunked, cached, preempted or drafted."""

import dataclasses
import itertools
import random

import pytest
from engine.tiny import make_core, plain, request_of, run_all, training_inputs
from model.hugging_face import SHAPES, make_checkpoint

from saccade.engine.config import EngineConfig
from saccade.engine.core.messages import AddRequest
from saccade.engine.device.results import StepHandle
from saccade.engine.device.step_inputs import covers, declared_sizes
from saccade.engine.sampling_params import SamplingParams
from saccade.model import load_model


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
        max_encoder_patches=rng.choice([16, 64, 512]),
        encoder_cache_tokens=rng.choice([64, 256, 2048]),
        encoder_cache=rng.random() < 0.5,
        prefix_cache=rng.random() < 0.5,
        max_draft_tokens=rng.choice([0, 0, 2, 5]),
    )


@pytest.mark.parametrize("seed", [0, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, *range(3, 20)))])
def test_ten_random_requests_of_a_random_configuration_get_the_tokens_of_plain_generation(folder, seed):
    prompts, expected = plain(folder, seed % 2, 40, 16)
    rng = random.Random(seed)
    chosen = rng.sample(range(40), 10)
    core = make_core(folder, settings(seed))
    requests = [
        (
            request_of(f"r{i}", prompts[i], SamplingParams(max_tokens=len(expected[i])), priority=rng.randint(-1, 1)),
            prompts[i],
        )
        for i in chosen
    ]
    outputs = run_all(core, requests, at_once=rng.choice([1, 3, None]))
    assert [collected.token_ids for collected in outputs] == [expected[i] for i in chosen]


class EagerGraphs:
    """CUDA graphs on a CPU: steps are rounded up and padded as for a capture, and run eagerly.

    Every other step runs as the size that covers its own.
    """

    num_late_captures = num_eager_runs = 0

    def __init__(self, runner):
        self._runner, self._covers = runner, covers(declared_sizes(runner.config.max_requests))
        self.num_steps = self.num_covered = 0

    def fitting(self, size):
        self.num_steps += 1
        cover = self._covers.get(size, size) if self.num_steps % 2 else size
        self.num_covered += cover != size
        return cover

    def capture_next(self):
        return False

    def run(self, size):
        [logits] = self._runner.forward_pass.run_captured(size)
        return logits


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_steps_padded_to_a_captured_size_give_the_same_tokens(folder, seed):
    prompts, expected = plain(folder, 0, 40, 16)
    core = make_core(folder, settings(seed))
    core._runner.forward_pass.graphs = graphs = EagerGraphs(core._runner)
    chosen = range(seed * 8, seed * 8 + 8)
    requests = [
        (request_of(f"r{i}", prompts[i], SamplingParams(max_tokens=len(expected[i]))), prompts[i]) for i in chosen
    ]
    assert [outputs.token_ids for outputs in run_all(core, requests, at_once=3)] == [expected[i] for i in chosen]
    assert graphs.num_covered > 0


def test_requests_that_arrive_while_a_step_runs_get_their_tokens(folder, monkeypatch):
    """A step takes a while, as on a GPU; requests arrive one by one during the step."""
    prompts, expected = plain(folder, 0, 40, 16)
    chosen = [i for i, prompt in enumerate(prompts) if prompt.images][:12]
    core = make_core(folder, EngineConfig(num_pages=200, max_length=512))
    waiting = [
        (request_of(f"r{i}", prompts[i], SamplingParams(max_tokens=len(expected[i]))), prompts[i]) for i in chosen
    ]
    collected: dict[str, list[int]] = {request.id: [] for request, _ in waiting}
    polls, calls = iter(itertools.cycle([False, True])), itertools.count()
    monkeypatch.setattr(StepHandle, "is_done", property(lambda self: next(polls)))
    monkeypatch.setattr("saccade.engine.core.loop._POLLED", 1e6)

    def handle_one() -> None:
        if waiting:
            request, prompt = waiting.pop()
            assert core.handle(AddRequest(request=request, prompt=prompt)) == []

    while core.has_work or waiting:
        if not core.has_work:
            handle_one()
        for output in core.step(lambda: handle_one() if next(calls) % 4 == 0 else None):
            collected[output.request_id] += output.token_ids
    assert [collected[f"r{i}"] for i in chosen] == [expected[i] for i in chosen]
    assert next(calls) > 0, "requests arrived while steps ran"
    core.check()


def test_log_probabilities_equal_those_of_the_training_forward(folder):
    prompts, _ = plain(folder, 0, 40, 16)
    config = EngineConfig(num_pages=400, page_size=8, max_length=550, max_requests=4, max_step_tokens=64)
    sampling = SamplingParams(max_tokens=10, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    requests = [(request_of(f"r{i}", prompt, sampling), prompt) for i, prompt in enumerate(prompts[:8])]
    model = load_model(folder, device="cpu").requires_grad_(False)
    for (_, prompt), outputs in zip(requests, run_all(make_core(folder, config), requests), strict=True):
        expected = model(training_inputs(prompt, outputs.token_ids)).log_softmax(-1)
        tokens = [*prompt.token_ids, *outputs.token_ids]
        entries = [*outputs.prompt_logprobs, *outputs.logprobs]
        assert len(entries) == len(tokens) - 1
        for number, entry in enumerate(entries):
            assert entry.token_id == tokens[number + 1]
            assert entry.logprob == pytest.approx(float(expected[number, entry.token_id]), abs=1e-4)
            best = expected[number].topk(len(entry.top))
            assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(folder):
    prompts, _ = plain(folder, 0, 40, 16)
    config = EngineConfig(num_pages=100, page_size=16, max_length=550, max_requests=8, max_step_tokens=64)
    sampling = SamplingParams(max_tokens=12, temperature=1.0, top_p=0.95, seed=7)
    alone = [
        run_all(make_core(folder, config), [(request_of("r", prompts[i], sampling), prompts[i])])[0] for i in (0, 1)
    ]
    crowd = [(request_of(f"r{i}", prompt, sampling), prompt) for i, prompt in enumerate(prompts[:10])]
    together = run_all(make_core(folder, config), crowd)
    assert [outputs.token_ids for outputs in together[:2]] == [outputs.token_ids for outputs in alone]
    drafting = dataclasses.replace(config, max_draft_tokens=4)
    drafted = run_all(
        make_core(folder, drafting), [(request_of(f"d{i}", p, sampling), p) for i, p in enumerate(prompts[:2])]
    )
    assert [outputs.token_ids for outputs in drafted] == [outputs.token_ids for outputs in alone]
