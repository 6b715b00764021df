"""Plain generation: the cache changes nothing, sampling is seeded, endings are kept."""

import pytest
import torch
from model.hugging_face import CONVERSATIONS, SHAPES, make_checkpoint

from saccade.errors import ConfigError, RequestError
from saccade.model import generate, load_model
from saccade.model.generation import Sampling, _sample_token, stream
from saccade.processor import ModelInputs, Processor


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("hf") / "checkpoint", SHAPES[0])


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder, device="cpu").requires_grad_(False)


@pytest.fixture(scope="module")
def prompts(folder):
    return Processor.load(folder)(list(CONVERSATIONS.values()), add_generation_prompt=True)


def with_token(inputs: ModelInputs, token_id: int) -> ModelInputs:
    """A one-conversation row with one more text token at its end."""
    import dataclasses

    return dataclasses.replace(
        inputs,
        token_ids=torch.cat([inputs.token_ids, torch.tensor([token_id])]),
        positions=torch.cat([inputs.positions, inputs.positions[:, -1:] + 1], dim=1),
        loss_mask=torch.cat([inputs.loss_mask, torch.tensor([False])]),
        cu_seqlens=inputs.cu_seqlens + torch.tensor([0, 1], dtype=torch.int32),
        max_seqlen=inputs.max_seqlen + 1,
    )


def test_cached_generation_equals_recomputing_the_whole_row_each_time(model, folder):
    inputs = Processor.load(folder)([CONVERSATIONS["multi-image"]], add_generation_prompt=True)
    [tokens] = generate(model, inputs, max_new_tokens=6)
    for token in tokens:
        assert model(inputs)[-1].argmax() == token
        inputs = with_token(inputs, token)


def test_a_conversation_stops_at_its_end_token_and_the_others_go_on(model, prompts):
    free = generate(model, prompts, max_new_tokens=12)
    end = free[0][3]
    stopped = generate(model, prompts, max_new_tokens=12, eos_ids={end})
    for whole, cut in zip(free, stopped, strict=True):
        assert cut == (whole[: whole.index(end) + 1] if end in whole else whole)


def test_streamed_equals_not_streamed(model, prompts):
    steps = list(stream(model, prompts, max_new_tokens=5))
    assert [list(tokens) for tokens in zip(*steps, strict=True)] == generate(model, prompts, max_new_tokens=5)


def test_the_same_seed_draws_the_same_tokens_and_another_seed_others(model, prompts):
    def draw(seed):
        return generate(model, prompts, max_new_tokens=10, sampling=Sampling(temperature=1.0, top_p=0.95, seed=seed))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_a_conversation_draws_the_same_tokens_wherever_it_stands_in_the_row(model, folder):
    one, other = (
        Processor.load(folder)([CONVERSATIONS[name]], add_generation_prompt=True) for name in ("28x28", "multi-turn")
    )
    sampling = Sampling(temperature=1.0, seed=7)
    alone = generate(model, one, max_new_tokens=8, sampling=sampling)[0]
    assert generate(model, ModelInputs.pack([other, one]), max_new_tokens=8, sampling=sampling)[1] == alone


def test_a_prompt_beyond_the_models_positions_is_refused(model, prompts):
    with pytest.raises(RequestError, match="supports 32768"):
        generate(model, prompts, max_new_tokens=40000)


def test_a_cold_draw_or_a_single_candidate_is_greedy(model, prompts):
    greedy = generate(model, prompts, max_new_tokens=6)
    for sampling in (
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=1.0, top_p=1e-6),
        Sampling(temperature=1e-4),
    ):
        assert generate(model, prompts, max_new_tokens=6, sampling=sampling) == greedy


def test_samples_follow_the_probabilities(model, folder):
    """4000 first tokens of one prompt against the softmax of its logits; 40 of them through `generate`."""
    inputs = Processor.load(folder)([CONVERSATIONS["text-only"]], add_generation_prompt=True)
    logits = model(inputs)[-1]
    expected = logits.softmax(-1)
    each = [Sampling(temperature=1.0, seed=seed) for seed in range(4000)]
    draws = [_sample_token(logits, one, torch.Generator().manual_seed(one.seed)) for one in each]
    many = ModelInputs.pack([inputs] * 40)
    assert [[token] for token in draws[:40]] == generate(model, many, max_new_tokens=1, sampling=each[:40])
    counts = torch.bincount(torch.tensor(draws), minlength=expected.shape[0])
    frequent = expected > 0.005
    error = (counts / len(draws) - expected)[frequent].abs() / (expected[frequent] / len(draws)).sqrt()
    assert error.max() < 5, "no frequent token is five deviations off"


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}]
)
def test_impossible_sampling_is_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling(**wrong)
