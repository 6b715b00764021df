"""The sampler against a reference for single requests, and against Hugging Face's repetition penalty."""

import dataclasses
import random
from collections import Counter

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from saccade.engine.device.sampler import Sampler, penalty_bytes
from saccade.engine.request import Request
from saccade.engine.sampling_params import SamplingParams
from saccade.errors import RequestError
from saccade.kernels.sampler import Destination, sample_reference

VOCAB = 37
CPU = torch.device("cpu")
EVERYTHING = SamplingParams(
    temperature=0.9,
    top_k=20,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias={3: 2.5, 36: -100.0, 0: 1.0},
    min_tokens=4,
    logprobs=3,
)


class Sampled:
    """A request and its tokens."""

    def __init__(self, request):
        self.id, self.request, self.sampling, self.stop_ids = request.id, request, request.sampling, request.stop_ids
        self.token_ids = list(request.token_ids)

    @property
    def output_token_ids(self):
        return self.token_ids[self.request.num_prompt_tokens :]


def make_request(name="a", prompt=(1, 2, 3, 2), stop_ids=(5, 6), seed=0, **params):
    sampling = params.pop("sampling", None) or SamplingParams(**params)
    return Sampled(
        Request(id=name, token_ids=tuple(prompt), sampling=sampling, stop_ids=frozenset(stop_ids), seed=seed)
    )


def start(sampler, slot, sampled, seed=0):
    """Put a request into a slot, with its output tokens."""
    request = dataclasses.replace(sampled.request, seed=seed)
    sampler.set_request(slot, request, sampled.output_token_ids)


def logits_of(name, position, dtype=torch.float32):
    """Logits as a function of the request and the position only."""
    generator = torch.Generator().manual_seed(1000 * sum(name.encode()) + position)
    return (torch.randn(VOCAB, generator=generator) * 3).to(dtype)


def adjusted_reference(logits, request):
    """Bias, penalties and bans of one request."""
    params, x = request.sampling, logits.float().clone()
    for token_id, bias in params.logit_bias.items():
        x[token_id] += bias
    penalize = RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))
    x = penalize(torch.tensor([request.token_ids]), x.unsqueeze(0))[0]
    for token_id, count in Counter(request.output_token_ids).items():
        x[token_id] = (
            x[token_id] - torch.tensor(params.frequency_penalty) * count - torch.tensor(params.presence_penalty)
        )
    if len(request.output_token_ids) < params.min_tokens:
        for token_id in request.stop_ids:
            x[token_id] = float("-inf")
    return x


def next_token_reference(logits, request, seed):
    params = request.sampling
    numbers = (params.temperature, params.top_k or VOCAB, params.top_p, params.min_p, seed, len(request.token_ids))
    adjusted = adjusted_reference(logits, request).unsqueeze(0)
    return sample_reference(adjusted, *(torch.tensor([n]) for n in numbers)).token_ids.item()


def output_reference(request, seed, num_tokens, dtype=torch.float32):
    request = make_request(request.id, request.token_ids, stop_ids=request.stop_ids, sampling=request.sampling)
    for _ in range(num_tokens):
        logits = logits_of(request.id, len(request.token_ids), dtype)
        request.token_ids.append(next_token_reference(logits, request, seed))
    return request.output_token_ids


def step(sampler, requests, logits=None, dtype=torch.float32):
    """Sample one token for each (slot, request)."""
    if logits is None:
        logits = torch.stack([logits_of(request.id, len(request.token_ids), dtype) for _, request in requests])
    columns = [(slot, len(request.token_ids)) for slot, request in requests]
    sampled = sampler.sample(logits, *(np.array(column, np.int64) for column in zip(*columns, strict=True)))
    sampler.commit()
    for (_, request), token_id in zip(requests, sampled.token_ids.tolist(), strict=True):
        request.token_ids.append(token_id)
    return sampled


def random_params(rng):
    def sometimes(value, otherwise):
        return value if rng.random() < 0.5 else otherwise

    return SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.5]),
        top_k=sometimes(rng.randint(1, 50), None),
        top_p=sometimes(rng.uniform(0.3, 1), 1.0),
        min_p=sometimes(rng.uniform(0, 0.2), 0.0),
        repetition_penalty=sometimes(rng.uniform(0.5, 2), 1.0),
        presence_penalty=sometimes(rng.uniform(-2, 2), 0.0),
        frequency_penalty=sometimes(rng.uniform(-2, 2), 0.0),
        logit_bias=sometimes({rng.randrange(VOCAB): rng.uniform(-20, 20) for _ in range(3)}, {}),
        min_tokens=sometimes(rng.randint(1, 6), 0),
        logprobs=sometimes(rng.randint(0, 3), None),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_request_gets_the_tokens_it_would_get_alone(dtype):
    """Twelve requests in four slots: they start and end at any time, in any order, and are preempted."""
    rng, sampler = random.Random(7), Sampler(vocab_size=VOCAB, num_slots=4, device=CPU)
    num_tokens = 8
    waiting = [
        make_request(f"r{n}", rng.choices(range(VOCAB), k=rng.randint(1, 9)), sampling=random_params(rng))
        for n in range(12)
    ]
    everyone, running = {request.id: request for request in waiting}, {}
    expected = {request.id: output_reference(request, ord(request.id[1]), num_tokens, dtype) for request in waiting}
    while waiting or running:
        for slot in range(4):
            if slot not in running and waiting and rng.random() < 0.7:
                running[slot] = waiting.pop(0)
                start(sampler, slot, running[slot], ord(running[slot].id[1]))
        samples = rng.sample(sorted(running.items()), k=len(running))
        if samples:
            step(sampler, samples, dtype=dtype)
        for slot, request in samples:
            is_done = len(request.output_token_ids) == num_tokens
            if is_done or rng.random() < 0.1:
                del running[slot]
                waiting += [] if is_done else [request]
    assert {name: request.output_token_ids for name, request in everyone.items()} == expected


def test_a_plain_request_is_not_affected_by_one_with_all_options():
    alone, together = make_request("plain", temperature=1.0), make_request("plain", temperature=1.0)
    busy, sampler = make_request("busy", sampling=EVERYTHING), Sampler(vocab_size=VOCAB, num_slots=3, device=CPU)
    other = Sampler(vocab_size=VOCAB, num_slots=1, device=CPU)
    start(sampler, 2, together, 11)
    start(sampler, 0, busy, 12)
    start(other, 0, alone, 11)
    for _ in range(10):
        step(sampler, [(0, busy), (2, together)], dtype=torch.bfloat16)
        step(other, [(0, alone)], dtype=torch.bfloat16)
    assert alone.output_token_ids == together.output_token_ids


def test_a_slot_keeps_nothing_of_its_previous_request():
    used, fresh = (Sampler(vocab_size=VOCAB, num_slots=1, device=CPU) for _ in range(2))
    before = make_request("before", prompt=range(20), sampling=EVERYTHING)
    start(used, 0, before, 1)
    for _ in range(5):
        step(used, [(0, before)])
    for params in (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, presence_penalty=1.0), EVERYTHING):
        requests = [make_request("after", sampling=params) for _ in range(2)]
        for sampler, request in zip((used, fresh), requests, strict=True):
            start(sampler, 0, request, 2)
            for _ in range(8):
                sampled = step(sampler, [(0, request)])
            assert (sampled.logprobs is None) == (params.logprobs is None)
        assert requests[0].output_token_ids == requests[1].output_token_ids


def test_samples_after_draft_tokens_equal_those_of_single_steps():
    params = SamplingParams(temperature=0.8, min_tokens=3, logit_bias={4: 3.0}, logprobs=2)
    expected = output_reference(make_request(sampling=params), 5, 5)
    request, sampler = make_request(sampling=params), Sampler(vocab_size=VOCAB, num_slots=2, device=CPU)
    start(sampler, 1, request, 5)
    positions = len(request.token_ids) + np.arange(5)
    logits = torch.stack([logits_of(request.id, int(position)) for position in positions])
    sampled = sampler.sample(logits, np.full(5, 1), positions)
    assert sampled.token_ids.tolist() == expected


def test_a_request_with_penalties_cannot_have_two_samples():
    request, sampler = make_request(presence_penalty=1.0), Sampler(vocab_size=VOCAB, num_slots=1, device=CPU)
    start(sampler, 0, request, 5)
    with pytest.raises(AssertionError, match="one sample"):
        sampler.sample(torch.zeros(2, VOCAB), np.zeros(2, np.int64), np.arange(2))


def test_a_step_that_failed_before_its_commit_leaves_nothing_to_the_next_one():
    """A step that fails is run again in halves, with the same last tokens and counts as before."""
    sampler = Sampler(vocab_size=VOCAB, num_slots=2, device=CPU)
    for slot, request in enumerate((make_request(frequency_penalty=1.0, logprobs=1), make_request("b"))):
        start(sampler, slot, request)
    last_tokens = torch.tensor([VOCAB, VOCAB, 0])
    logits = torch.stack([logits_of(name, 4) for name in "ab"])

    def sample(*slots):
        destination = Destination(last_tokens, torch.tensor(slots), torch.zeros(len(slots), dtype=torch.int64))
        columns = np.array([slots, [4] * len(slots)], np.int64)
        return sampler.sample(logits[list(slots)], *columns, destination=destination).token_ids.tolist()

    sample(0, 1)  # then it fails
    [token_id] = sample(1)
    sampler.commit()
    assert last_tokens[:2].tolist() == [VOCAB, token_id]
    assert not sampler._num_output_RV.any()


def test_a_slot_without_a_request_cannot_be_sampled():
    sampler = Sampler(vocab_size=VOCAB, num_slots=2, device=CPU)
    start(sampler, 0, make_request(), 0)
    with pytest.raises(AssertionError, match=r"slots \[1\]"):
        sampler.sample(torch.zeros(1, VOCAB), np.ones(1, np.int64), np.zeros(1, np.int64))


def test_a_step_without_samples_returns_no_tokens():
    nothing = np.zeros(0, np.int64)
    sampled = Sampler(vocab_size=VOCAB, num_slots=2, device=CPU).sample(torch.zeros(0, VOCAB), nothing, nothing)
    assert sampled.token_ids.shape == (0,)
    assert sampled.logprobs is None


def test_stop_tokens_are_banned_before_min_tokens():
    request, sampler = make_request(min_tokens=2), Sampler(vocab_size=VOCAB, num_slots=1, device=CPU)
    start(sampler, 0, request, 0)
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6], logits[0, 9] = 9.0, 8.0, 1.0
    for _ in range(3):
        step(sampler, [(0, request)], logits.clone())
    assert request.output_token_ids == [9, 9, 5]


def test_an_end_of_turn_token_beyond_the_heads_vocabulary_needs_no_ban():
    request, sampler = (
        make_request(min_tokens=2, stop_ids=(VOCAB, 5)),
        Sampler(vocab_size=VOCAB, num_slots=1, device=CPU),
    )
    start(sampler, 0, request, 0)
    assert step(sampler, [(0, request)], torch.zeros(1, VOCAB)).token_ids.tolist() == [0]


def test_samples_follow_the_biased_distribution():
    """Chi-square with 36 degrees of freedom exceeds 90 once in 100 000 times."""
    num_draws, sampler = 4000, Sampler(vocab_size=VOCAB, num_slots=1, device=CPU)
    request = make_request(temperature=1.3, logit_bias={2: 1.0, 7: -1.0})
    start(sampler, 0, request, 3)
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    zeros = np.zeros(num_draws, np.int64)
    sampled = sampler.sample(logits.repeat(num_draws, 1), zeros, np.arange(num_draws))
    expected = (adjusted_reference(logits, request) / 1.3).softmax(0) * num_draws
    observed = torch.bincount(sampled.token_ids, minlength=VOCAB)
    assert ((observed - expected).square() / expected).sum() < 90


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_log_probabilities_are_those_of_the_raw_logits(dtype):
    sampler = Sampler(vocab_size=VOCAB, num_slots=4, device=CPU)
    asked = [None, 0, 2, 5]
    requests = [
        make_request(f"n{n}", temperature=0.5, logprobs=n, logit_bias={1: 9.0}, presence_penalty=1.0) for n in asked
    ]
    for slot, request in enumerate(requests):
        start(sampler, slot, request, slot)
    logits = torch.randn(4, VOCAB).to(dtype)
    raw = logits.float().log_softmax(-1)
    sampled = step(sampler, list(enumerate(requests)), logits)
    assert sampled.top_ids.shape == sampled.top_logprobs.shape == (4, 5)
    best = raw.topk(5)
    for index in (1, 2, 3):
        assert sampled.logprobs[index] == raw[index, sampled.token_ids[index]]
        k = asked[index]
        assert torch.equal(sampled.top_logprobs[index, :k], best.values[index, :k])
        assert torch.equal(raw[index, sampled.top_ids[index, :k]], best.values[index, :k])


def test_logprobs_zero_returns_those_of_the_sampled_token_only():
    request, sampler = make_request(logprobs=0), Sampler(vocab_size=VOCAB, num_slots=1, device=CPU)
    start(sampler, 0, request, 0)
    logits = torch.randn(1, VOCAB)
    sampled = step(sampler, [(0, request)], logits.clone())
    assert sampled.logprobs[0] == logits.log_softmax(-1).max()
    assert sampled.top_ids is sampled.top_logprobs is None


@pytest.mark.parametrize("num_rows", [0, 1, 64, 129])
def test_log_probabilities_of_given_tokens_equal_log_softmax(num_rows):
    logits, token_ids = torch.randn(num_rows, VOCAB) * 4, torch.randint(0, VOCAB, (num_rows,))
    own, top_ids, top = Sampler.logprobs_of(logits, token_ids, 4)
    expected = logits.log_softmax(-1)
    assert torch.equal(own, expected[torch.arange(num_rows), token_ids])
    assert torch.equal(top, expected.topk(4).values)
    assert torch.equal(expected.gather(1, top_ids), top)
    assert Sampler.logprobs_of(logits, token_ids, 0)[1:] == (None, None)
    assert Sampler.logprobs_of(logits, token_ids, 100)[1].shape == (num_rows, VOCAB)


def test_penalty_counts_are_allocated_on_first_use():
    sampler = Sampler(vocab_size=VOCAB, num_slots=3, device=CPU)
    start(sampler, 0, make_request(temperature=1.0, logit_bias={1: 1.0}, min_tokens=3), 0)
    assert sampler._num_output_RV is None
    start(sampler, 1, make_request(repetition_penalty=1.1), 0)
    tables = (sampler._num_output_RV, sampler._is_prompt_RV)
    assert sum(table.nbytes for table in tables) == penalty_bytes(3, VOCAB) == 3 * VOCAB * 5


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("logit_bias", {"logit_bias": {VOCAB: 1.0}}),
        ("stop_token_ids", {"stop_token_ids": (3, VOCAB)}),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused_by_name(field, params):
    with pytest.raises(RequestError, match=f"^{field} names token"):
        SamplingParams(**params).check_vocabulary(VOCAB)


def test_token_ids_of_the_vocabulary_are_accepted():
    SamplingParams(logit_bias={0: 1.0, VOCAB - 1: 1.0}, stop_token_ids=(0, VOCAB - 1)).check_vocabulary(VOCAB)


@pytest.mark.gpu
def test_the_sampler_never_synchronizes_and_samples_as_on_the_cpu():
    found = []
    for device in (torch.device("cuda"), CPU):
        sampler = Sampler(vocab_size=VOCAB, num_slots=4, device=device)
        all_params = [EVERYTHING, SamplingParams(temperature=1.0), EVERYTHING]
        requests = [make_request(f"r{n}", sampling=params) for n, params in enumerate(all_params)]
        slots, drawn = np.array([3, 0, 1]), []
        for number in range(8):
            positions = np.full(3, 4 + number)
            logits = torch.stack([logits_of(request.id, 4 + number, torch.bfloat16) for request in requests]).to(device)
            torch.cuda.set_sync_debug_mode("error" if number > 0 else "default")  # the first step compiles the kernel
            try:
                if number < 2:  # the first start allocates the counts
                    for slot, request in zip(slots.tolist(), requests, strict=True):
                        start(sampler, slot, request, slot)
                drawn.append(sampler.sample(logits, slots, positions))
                sampler.commit()
                sampler.logprobs_of(logits, drawn[-1].token_ids, 3)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        found.append(torch.stack([sampled.token_ids.cpu() for sampled in drawn]))
    assert torch.equal(*found)
