import time

import pytest
import torch

from saccade.kernels import launch, sampler
from saccade.kernels.sampler import (
    NON_FINITE,
    Destination,
    exponential_noise,
    most_likely,
    sample,
    sample_reference,
)

NEUTRAL = {"temperature": 1.0, "top_k": 10**6, "top_p": 1.0, "min_p": 0.0}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch, device):
    if device == "cpu":
        monkeypatch.setattr(sampler, "_TILE", 4096)


def parameters(num_requests, device, **values):
    """One tensor per parameter; a number stands for all requests."""
    chosen = NEUTRAL | {"seeds": torch.arange(num_requests), "positions": torch.zeros(num_requests)} | values
    dtypes = {"top_k": torch.int32, "seeds": torch.int64, "positions": torch.int64}
    names = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
    tensors = {name: torch.as_tensor(chosen[name]).to(dtypes.get(name, torch.float32)) for name in names}
    return [x.expand(num_requests).contiguous().to(device) for x in tensors.values()]


def random_parameters(num_requests, vocab_size, device):
    """Filters in random combinations, on and off."""

    def sometimes(value, off):
        return torch.where(torch.rand(num_requests) < 0.5, value, torch.tensor(off, dtype=value.dtype))

    return parameters(
        num_requests,
        device,
        temperature=sometimes(torch.rand(num_requests) * 2 + 0.1, 1.0) * (torch.rand(num_requests) > 0.1),
        top_k=sometimes(torch.randint(1, vocab_size + 2, (num_requests,)).double().sqrt().long() + 1, 10**6),
        top_p=sometimes(torch.rand(num_requests), 1.0),
        min_p=sometimes(torch.rand(num_requests) * 0.2, 0.0),
        seeds=torch.randint(-(2**62), 2**62, (num_requests,)),
        positions=torch.randint(0, 100_000, (num_requests,)),
    )


def run_triton(logits, chosen, **options):
    with launch.forced("triton"):
        return sample(logits, *chosen, **options)


@pytest.mark.parametrize("vocab_size", [1, 129, 5000])
@pytest.mark.parametrize("has_ties", [False, True], ids=["distinct", "ties"])
def test_tokens_equal_those_of_the_reference(vocab_size, has_ties, device, dtype):
    num_requests = 8 if device == "cpu" else 200
    logits = torch.randn(num_requests, vocab_size) * 3
    logits = ((logits * 2).round() / 2 if has_ties else logits).to(device, dtype)
    chosen = random_parameters(num_requests, vocab_size, device)
    actual = run_triton(logits, chosen, with_logprobs=True)
    expected = sample_reference(logits, *chosen, with_logprobs=True)
    assert (actual.token_ids < vocab_size).all()
    # A GPU's exp and log differ in the last bit, which decides one draw in a million.
    assert (actual.token_ids != expected.token_ids).sum() <= (device == "cuda")
    same = actual.token_ids == expected.token_ids
    torch.testing.assert_close(actual.logprobs[same], expected.logprobs[same], rtol=1e-4, atol=1e-4)


def test_temperature_zero_takes_the_first_of_the_most_likely(device, dtype):
    logits = torch.zeros(4, 5000, device=device, dtype=dtype)
    logits[0, 4999], logits[1, 17], logits[1, 4998], logits[2, 0] = 1, 2, 2, 3
    chosen = parameters(4, device, temperature=0.0, top_p=0.5, top_k=3)
    assert run_triton(logits, chosen).token_ids.tolist() == [4999, 17, 0, 0]


def test_each_filter_keeps_what_it_should(device):
    # Probabilities 0.4, 0.3, 0.2, 0.05, 0.05, in a shuffled order.
    order = torch.tensor([3, 0, 4, 2, 1])
    logits = torch.tensor([0.4, 0.3, 0.2, 0.05, 0.05])[order].log().to(device)
    rank = order.tolist()
    cases = {
        (("top_k", 1),): {0},
        (("top_k", 2),): {0, 1},
        (("top_k", 4),): {0, 1, 2, 3, 4},  # the last two are equally likely
        (("top_p", 0.35),): {0},
        (("top_p", 0.69),): {0, 1},
        (("top_p", 0.75),): {0, 1, 2},
        (("top_p", 0.0),): {0},
        (("min_p", 0.6),): {0, 1},
        (("min_p", 1.0),): {0},
        (("top_k", 2), ("top_p", 0.58)): {0, 1},  # 0.4 of 0.7 is 0.571
        (("top_k", 2), ("top_p", 0.56)): {0},
        (): {0, 1, 2, 3, 4},
    }
    num_draws = 64
    with launch.forced("triton" if device == "cuda" else "reference"):
        for settings, expected in cases.items():
            tokens = sample(logits.expand(num_draws, -1), *parameters(num_draws, device, **dict(settings))).token_ids
            drawn = {rank[token] for token in tokens.tolist()}
            assert drawn == expected, settings


def test_draws_follow_the_distribution(device):
    """Chi-square over 50 tokens: with 49 degrees of freedom it exceeds 100 once in 40000 runs."""
    vocab_size, num_draws = 50, 20_000
    logits = torch.randn(vocab_size, device=device)
    chosen = parameters(num_draws, device, temperature=0.8, positions=torch.arange(num_draws), seeds=5)
    with launch.forced("triton" if device == "cuda" else "reference"):
        if device == "cuda":
            tokens = sample(logits.expand(num_draws, -1).contiguous(), *chosen).token_ids
        else:  # row by row takes long: the same rule on all rows at once
            p = (logits / 0.8).softmax(0)
            tokens = (p / exponential_noise(chosen[4], chosen[5], vocab_size)).argmax(1)
    expected = (logits / 0.8).softmax(0) * num_draws
    observed = torch.bincount(tokens, minlength=vocab_size)
    assert ((observed - expected).square() / expected).sum() < 100


def test_noise_is_exponential_and_uncorrelated():
    noise = exponential_noise(torch.tensor([1, 2]), torch.tensor([7, 7]), 20_000)
    other = exponential_noise(torch.tensor([1]), torch.tensor([8]), 20_000)
    for x in (*noise, *other):
        assert abs(x.mean() - 1) < 0.04
        assert abs(x.var() - 1) < 0.08
        assert x.min() > 0
    for a, b in ((noise[0], noise[1]), (noise[0], other[0]), (noise[0][1024:], noise[0][:-1024])):
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 0.04


def test_philox_equals_the_published_vectors():
    """The known answers of Random123 for Philox4x32-10 (zeros; all ones needs words we keep zero)."""
    zero = torch.zeros(1, dtype=torch.int64)
    words = [int(x) for x in sampler._philox(zero, zero, zero)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_a_request_draws_the_same_alone_and_in_any_batch(device, dtype):
    logits = (torch.randn(9, 300) * 2).to(device, dtype)
    chosen = random_parameters(9, 300, device)
    together = run_triton(logits, chosen).token_ids
    order = torch.randperm(9)
    shuffled = run_triton(logits[order.to(device)], [x[order.to(device)] for x in chosen]).token_ids
    alone = [run_triton(logits[i : i + 1], [x[i : i + 1].clone() for x in chosen]).token_ids for i in (0, 4, 8)]
    assert torch.equal(together[order.to(device)], shuffled)
    assert torch.equal(torch.cat(alone), together[[0, 4, 8]])


def test_seed_and_position_change_the_draw(device):
    logits = torch.zeros(8, 1000, device=device)
    by_seed = run_triton(logits, parameters(8, device)).token_ids
    by_position = run_triton(logits, parameters(8, device, seeds=0, positions=torch.arange(8))).token_ids
    again = run_triton(logits, parameters(8, device)).token_ids
    assert len(set(by_seed.tolist())) > 5
    assert len(set(by_position.tolist())) > 5
    assert torch.equal(by_seed, again)


def test_rows_that_are_not_finite_give_no_token(device):
    infinite = float("inf")
    rows = torch.zeros(5, 20, device=device)
    rows[0] = float("nan")
    rows[1] = -infinite
    rows[2, 3] = infinite
    rows[3, :19] = -infinite
    rows[4, 7], rows[4, 8] = float("nan"), 30.0
    for settings in ({"temperature": 0.0}, {}, {"top_k": 5, "top_p": 0.9}):
        chosen = parameters(5, device, **settings)
        expected = [NON_FINITE, NON_FINITE, NON_FINITE, 19, NON_FINITE]
        assert run_triton(rows, chosen).token_ids.tolist() == expected, settings
        assert sample_reference(rows, *chosen).token_ids.tolist() == expected, settings


def sorted_draw(x, temperature, top_k, top_p, min_p, seed, position):
    """Draw one row by the definition, with a sort."""
    [noise] = exponential_noise(seed[None], position[None], len(x))
    values, mass = x.unique(return_inverse=True)
    kept = x >= x.sort(descending=True).values[min(max(int(top_k), 1), len(x)) - 1]
    p = torch.where(kept, ((x - x.max()) / temperature).exp(), 0.0)
    by_value = torch.zeros_like(values).index_add_(0, mass, p)
    more_likely = (by_value.flip(0).cumsum(0).flip(0) - by_value)[mass]
    if top_p < 1:
        kept = kept & ((more_likely < top_p * p.sum()) | (x == x.max()))
    kept = kept & ((x >= x.max() + temperature * min_p.log()) | (x == x.max()))
    return int(torch.where(kept, p / noise, -1.0).argmax())


@pytest.mark.parametrize("has_ties", [False, True], ids=["distinct", "ties"])
def test_the_reference_equals_a_sort_for_each_row(has_ties):
    """The reference sorts nothing and draws all rows at once."""
    torch.manual_seed(0)
    logits = torch.randn(300, 700) * 2
    logits = (logits * 2).round() / 2 if has_ties else logits
    chosen = random_parameters(300, 700, "cpu")
    tokens = sample_reference(logits, *chosen).token_ids.tolist()
    for row, token in enumerate(tokens):
        parameters_of_row = [x[row] for x in chosen]
        is_greedy = parameters_of_row[0] == 0
        assert token == (int(logits[row].argmax()) if is_greedy else sorted_draw(logits[row], *parameters_of_row))


@pytest.mark.parametrize("scale", [0.0, 1.0, 5.0], ids=["flat", "wide", "peaked"])
def test_top_p_on_a_cpu_takes_less_time_than_a_sort(scale):
    """Both draw rows of a real vocabulary in turns; the best process times are compared."""
    logits = torch.randn(4, 151_936) * scale
    chosen = parameters(4, "cpu", top_p=0.9)

    def seconds(run):
        start = time.process_time()
        run()
        return time.process_time() - start

    sampling, sorting = zip(
        *(
            (seconds(lambda: sample_reference(logits, *chosen)), seconds(lambda: torch.randn_like(logits).sort()))
            for _ in range(7)
        ),
        strict=True,
    )
    assert min(sampling) < min(sorting)


def test_strided_rows_are_read_in_place(device, dtype):
    wide = torch.randn(4, 600, device=device).to(dtype)
    chosen = random_parameters(4, 300, device)
    assert torch.equal(
        run_triton(wide[:, :300], chosen).token_ids, run_triton(wide[:, :300].contiguous(), chosen).token_ids
    )


def test_no_requests_give_no_tokens(device):
    assert run_triton(torch.zeros(0, 10, device=device), parameters(0, device)).token_ids.shape == (0,)


def test_what_does_not_fit_is_refused(device):
    with pytest.raises(ValueError, match="one value per row"):
        sample(torch.zeros(3, 10, device=device), *parameters(2, device))


def test_a_token_off_by_one_rank_is_noticed(device):
    """The comparison is of ids: swapping the two most likely tokens of a greedy row must show."""
    logits = torch.randn(8, 100, device=device)
    chosen = parameters(8, device, temperature=0.0)
    best, second = logits.topk(2).indices.T
    rows = torch.arange(8, device=device)
    swapped = logits.clone()
    swapped[rows, best], swapped[rows, second] = logits[rows, second], logits[rows, best]
    assert (run_triton(swapped, chosen).token_ids != sample_reference(logits, *chosen).token_ids).all()


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [151936, 151665, 32000])
def test_real_vocabularies_equal_the_reference(vocab_size):
    logits = (torch.randn(64, vocab_size, device="cuda") * 3).bfloat16()
    chosen = random_parameters(64, vocab_size, "cuda")
    actual, expected = run_triton(logits, chosen), sample_reference(logits, *chosen)
    assert (actual.token_ids != expected.token_ids).sum() <= 1


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_rows_beyond_two_to_the_31_elements_are_found():
    wide = torch.zeros(3, 2**30 + 8, dtype=torch.float16, device="cuda")
    wide[2, 99] = 5
    assert run_triton(wide[:, :1000], parameters(3, "cuda", temperature=0.0)).token_ids.tolist() == [0, 0, 99]


def test_a_temperature_next_to_nothing_takes_the_likeliest_token(device):
    """The inverse of a tiny temperature is infinite; a token outside the vocabulary would crash the next step."""
    logits = torch.randn(3, 1000, device=device)
    rows = len(logits)
    for top_k in (1, 1000):
        arguments = (
            torch.full((rows,), 1e-40, device=device),
            torch.full((rows,), top_k, dtype=torch.int32, device=device),
            torch.ones(rows, device=device),
            torch.zeros(rows, device=device),
            torch.arange(rows, device=device),
            torch.arange(rows, device=device),
        )
        for path in ("triton", "reference"):
            with launch.forced(path):
                assert sample(logits, *arguments).token_ids.tolist() == logits.argmax(1).tolist()


def destination_of(slots, device):
    """Rows of slots 0 to 5 and one of no slot, and memory of the host for their tokens."""
    host = torch.full((len(slots),), -7)
    return Destination(
        torch.full((7,), 99, device=device),
        torch.tensor(slots, dtype=torch.int32, device=device),
        host.pin_memory() if device == "cuda" else host,
    )


@pytest.mark.parametrize("vocab_size", [1, 129, 4096, 30011])
@pytest.mark.parametrize("is_tied", [False, True], ids=["distinct", "ties"])
def test_the_most_likely_tokens_are_those_of_the_reference(vocab_size, is_tied, device, dtype):
    logits = torch.randn(9, vocab_size)
    logits = (logits.round() if is_tied else logits).to(device, dtype)
    with launch.forced("triton"):
        actual = most_likely(logits)
    expected = [int((row == row.max()).nonzero()[0]) for row in logits]
    assert actual.tolist() == expected
    assert most_likely(logits.float().cpu()).tolist() == expected


@pytest.mark.parametrize("path", ["triton", "reference"])
def test_rows_without_a_finite_peak_are_marked_wherever_they_are_bad(path, device):
    logits = torch.randn(6, 20000, device=device)
    logits[1, 19999] = float("nan")
    logits[2, 3] = float("inf")
    logits[3] = float("-inf")
    logits[4, 1:] = float("-inf")
    with launch.forced(path):
        found = most_likely(logits).tolist()
    assert [token == NON_FINITE for token in found] == [False, True, True, True, False, False]
    assert found[4] == 0


@pytest.mark.parametrize("path", ["triton", "reference"])
@pytest.mark.parametrize("is_greedy", [True, False], ids=["greedy", "drawn"])
def test_tokens_reach_the_slots_and_the_host(path, is_greedy, device):
    logits = torch.randn(4, 5000, device=device)
    logits[2] = float("nan")
    destination = destination_of([5, 0, 3, 6], device)
    with launch.forced(path):
        if is_greedy:
            token_ids = most_likely(logits, destination)
        else:
            token_ids = sample(logits, *parameters(4, device), destination=destination).token_ids
    if device == "cuda":
        torch.cuda.synchronize()
    a, b, bad, d = token_ids.tolist()
    assert bad == NON_FINITE
    assert destination.last_tokens.tolist() == [b, 99, 99, 0, 99, a, d]
    assert destination.host.tolist() == [a, b, NON_FINITE, d]


def test_no_row_has_no_most_likely_token(device):
    with launch.forced("triton"):
        assert most_likely(torch.zeros(0, 10, device=device)).shape == (0,)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 2, 16, 64, 255, 300])
def test_most_likely_tokens_of_real_vocabularies(num_rows):
    logits = torch.randn(num_rows, 151936, device="cuda").bfloat16()
    expected = [int((row == row.max()).nonzero()[0]) for row in logits]
    assert most_likely(logits).tolist() == expected
