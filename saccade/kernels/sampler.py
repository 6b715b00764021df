# mypy: allow-untyped-decorators
"""Sample the next token of every request on the GPU: temperature, top-k, top-p, min-p, a seed per request.

Legend: R requests, V vocabulary.

With temperature 0 the token is the most probable one (the lowest id among equals). Otherwise, in this order,
  temperature  p = softmax(logits / temperature)
  top_k        keep the k most probable tokens, and all as probable as the last; k >= V keeps all, below 1 means 1
  top_p        of these, keep a token if more probable ones sum to less than top_p of their probability; 1 keeps all
  min_p        keep those at least min_p times as probable as the most probable; 0 keeps all
(as in Hugging Face; the most probable token always stays) and the token is

    argmax over the kept v of  p[v] / noise(seed, position, v),     noise exponentially distributed,

which draws v with probability p[v] / (sum of the kept p): the Gumbel trick with one logarithm less. The noise is a pure
function (Philox4x32-10, a counter-based generator): the same seed and position give the same token, whatever else is in
the batch.

logits [R, V] in any float dtype; temperature, top_p, min_p [R] fp32; top_k [R] int32; seeds, positions [R] int64; token
ids [R] int64. `logprobs` [R] fp32, if asked for, is log softmax(logits)[token], without temperature or filters. A row
with NaN or +inf, or with no finite logit, gives token `NON_FINITE`; -inf is a masked token. Everything is computed in
fp32. Nothing is sorted: a row is read once for a greedy token, about four times with top-k or top-p, and only the first
time from memory.

If all requests are greedy, `most_likely` reads each row with several programs. Either kernel also stores the tokens for
the next step and for the host (`Destination`), so that only the next step follows it on the device.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels import launch
from saccade.kernels._sampler_row import draw, first_of_best, kth_largest, load_logits, mass, scan
from saccade.kernels.launch import tl, triton

NON_FINITE = -1
"""Token id of a row whose logits are not finite."""

_SPAN = 1024
"""One Philox call makes the noise of 4 tokens at this distance: token id v takes word v // 1024 % 4 of counter
v // 4096 * 1024 + v % 1024. It defines the noise: another value changes the tokens of a seed."""
_TILE, _WARPS = 8192, 16
"""Tokens per step and warps of the one program of a row; a multiple of 4 * _SPAN."""


_LEAST_TEMPERATURE = 1e-30
"""Lower temperatures count as this: their inverse would be infinite, and the score of the most likely token NaN."""

_LOGITS_AT_ONCE = 1 << 21
"""Logits the reference draws from at once, which bounds its temporary memory."""


_GREEDY_TILE = 2048
"""Logits a program of `most_likely` reads at once."""
_MAX_SPLITS = 64
"""Programs of `most_likely` per row."""
_PROGRAMS_PER_SM = 4
"""Programs of `most_likely` that fill the GPU."""


class Destination(NamedTuple):
    """Further places for sampled tokens. On the device `NON_FINITE` is stored as token 0, which has an embedding."""

    last_tokens: Tensor
    """[slots + 1] int64, on the device."""
    slots: Tensor
    """[R] int32: the element of `last_tokens` that the token of each row replaces; the last element has no slot."""
    host: Tensor
    """[R] int64, in pinned memory of the host: complete when the device has reached the end of the kernel."""


class Sampled(NamedTuple):
    """One token per request."""

    token_ids: Tensor
    logprobs: Tensor | None


def exponential_noise(seeds_R: Tensor, positions_R: Tensor, vocab_size: int) -> Tensor:
    """noise(seed, position, v) for every request and token id, fp32 [R, V]."""
    R, (num_whole, rest) = len(seeds_R), divmod(vocab_size, 4 * _SPAN)
    num_last = min(rest, _SPAN)
    counter = torch.arange(num_whole * _SPAN + num_last, device=seeds_R.device).expand(R, -1)
    position = positions_R.unsqueeze(1).expand_as(counter) & 0xFFFFFFFF
    words_R4C = torch.stack(_philox(seeds_R.unsqueeze(1), counter, position), 1)
    whole, last = torch.split(words_R4C, [num_whole * _SPAN, num_last], 2)
    whole = whole.reshape(R, 4, num_whole, _SPAN).transpose(1, 2)
    bits = torch.cat([whole.reshape(R, 4 * num_whole * _SPAN), last.reshape(R, 4 * num_last)[:, :rest]], 1)
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23  # in (0, 1), never 0 or 1
    return -torch.log(uniform)


def _philox(seed: Tensor, counter: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox4x32 on the counter (counter, position, 0, 0), each word an int64 holding 32 bits."""
    c0, c1, c2, c3 = counter, position, torch.zeros_like(counter), torch.zeros_like(counter)
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2  # wraps around as a 64-bit product; both halves are used
        c0, c2 = (b >> 32) & 0xFFFFFFFF ^ c1 ^ k0, (a >> 32) & 0xFFFFFFFF ^ c3 ^ k1
        c1, c3 = b & 0xFFFFFFFF, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def sample_reference(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
    *,
    with_logprobs: bool = False,
) -> Sampled:
    """The definition above. Nothing is sorted: see `_draw_reference`."""
    peaks_R, best_R = logits_RV.max(1)  # NaN, where there is one
    is_finite_R = peaks_R.isfinite()
    if not with_logprobs and not bool((temperature_R > 0).any()):
        return Sampled(torch.where(is_finite_R, best_R, NON_FINITE), None)
    x_RV = torch.where(is_finite_R.unsqueeze(1), logits_RV.float(), 0.0)
    token_ids = best_R.clone()
    drawn = (temperature_R > 0).nonzero()[:, 0]
    for rows in torch.split(drawn, max(1, _LOGITS_AT_ONCE // logits_RV.shape[1])):
        parameters = (x[rows] for x in (temperature_R, top_k_R, top_p_R, min_p_R, seeds_R, positions_R))
        token_ids[rows] = _draw_reference(x_RV[rows], *parameters)
    logprobs = x_RV.log_softmax(1).gather(1, token_ids.unsqueeze(1)).squeeze(1) if with_logprobs else None
    return Sampled(torch.where(is_finite_R, token_ids, NON_FINITE), logprobs)


def _draw_reference(
    x_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
) -> Tensor:
    """Draw a token per row, all rows at once.

    The first draw ignores top-p. If top-p drops the drawn token, it also drops all that are no more likely: they are
    masked, and the draw is repeated with the same noise. The result is the argmax over the kept tokens, without
    sorting.
    """
    V = x_RV.shape[1]
    peak = x_RV.amax(1, keepdim=True)
    temperature, top_p, min_p = (x.unsqueeze(1) for x in (temperature_R, top_p_R, min_p_R))
    p_RV = ((x_RV - peak) * (1 / temperature.clamp(min=_LEAST_TEMPERATURE))).exp_()
    k_R = top_k_R.clamp(1, V).long()
    has_k = k_R < V
    if bool(has_k.any()):
        k_R = torch.where(has_k, k_R, 1)
        least = x_RV.topk(int(k_R.max())).values.gather(1, k_R.unsqueeze(1) - 1)
        p_RV.masked_fill_((x_RV < least) & has_k.unsqueeze(1), 0.0)
    allowed = torch.where(top_p < 1, top_p * p_RV.sum(1, keepdim=True), float("inf"))
    score_RV = p_RV / exponential_noise(seeds_R, positions_R, V)
    score_RV.masked_fill_((p_RV == 0) & (x_RV < peak), -1.0)
    if bool((min_p > 0).any()):
        score_RV.masked_fill_((x_RV < torch.minimum(peak + temperature * min_p.log(), peak)), -1.0)
    while True:
        token = score_RV.argmax(1, keepdim=True)
        x = x_RV.gather(1, token)
        if not bool((top_p < 1).any()):
            break
        more_likely = p_RV.masked_fill(x_RV <= x, 0.0).sum(1, keepdim=True)
        is_dropped = (more_likely >= allowed) & (x < peak)
        if not bool(is_dropped.any()):
            break
        score_RV.masked_fill_((x_RV <= x) & is_dropped, -1.0)
    return token.squeeze(1)


@triton.jit
def _store_token(
    r: tl.tensor,
    token: tl.tensor,
    token_ids: tl.tensor,
    last_tokens: tl.tensor,
    slots: tl.tensor,
    host: tl.tensor,
    HAS_DESTINATION: tl.constexpr,
) -> None:
    """Store the token of row r."""
    token = token.to(tl.int64)
    tl.store(token_ids + r, token)
    if HAS_DESTINATION:
        tl.store(last_tokens + tl.load(slots + r), tl.maximum(token, 0))
        tl.store(host + r, token)


@triton.jit(do_not_specialize=["part"])
def _peaks_kernel(
    logits: tl.tensor,
    peaks: tl.tensor,
    tokens: tl.tensor,
    V: tl.tensor,
    stride: tl.tensor,
    part: tl.tensor,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """The largest logit (+inf if one is NaN) of `part` tokens of a row, and its token."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    r = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    first = tl.program_id(1) * part
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_token = tl.full([TILE], 2147483647, tl.int32)
    for start in tl.range(first, tl.minimum(first + part, V), TILE, num_stages=3):
        token = start + lane
        x = load_logits(logits + r * stride, token, V)
        x = tl.where(x == x, x, float("inf"))
        best_token = tl.where(x > best, token, best_token)
        best = tl.maximum(best, x)
    peak, token = first_of_best(best, best_token)
    tl.store(peaks + r * tl.num_programs(1) + tl.program_id(1), peak)
    tl.store(tokens + r * tl.num_programs(1) + tl.program_id(1), token)


@triton.jit(do_not_specialize=["num_splits"])
def _most_likely_kernel(
    peaks: tl.tensor,
    tokens: tl.tensor,
    token_ids: tl.tensor,
    last_tokens: tl.tensor,
    slots: tl.tensor,
    host: tl.tensor,
    num_splits: tl.tensor,
    HAS_DESTINATION: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """The token of one row, from the peaks of its parts."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    r = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    best = tl.load(peaks + r * num_splits + split, mask=split < num_splits, other=float("-inf"))
    token = tl.load(tokens + r * num_splits + split, mask=split < num_splits, other=2147483647)
    peak, chosen = first_of_best(best, token)
    is_finite = (peak > float("-inf")) & (peak < float("inf"))
    chosen = tl.where(is_finite, chosen, -1)  # NON_FINITE
    _store_token(r, chosen, token_ids, last_tokens, slots, host, HAS_DESTINATION)


@triton.jit
def _sample_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    token_ids: tl.tensor,
    last_tokens: tl.tensor,
    slots: tl.tensor,
    host: tl.tensor,
    logprobs: tl.tensor,
    V: tl.tensor,
    stride: tl.tensor,
    HAS_DESTINATION: tl.constexpr,
    WITH_LOGPROBS: tl.constexpr,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One request."""
    r = tl.program_id(0).to(tl.int64)
    row = logits + r * stride
    peak, token, least, lanes = scan(row, V, TILE)
    is_finite = (peak > float("-inf")) & (peak < float("inf"))
    token = tl.where(is_finite, token, -1)  # NON_FINITE
    x = peak
    temperature = tl.load(temperatures + r)
    if (temperature > 0) & is_finite:
        inverse_temperature = 1 / tl.maximum(temperature, 1.0e-30)  # _LEAST_TEMPERATURE
        k = tl.maximum(tl.load(top_ks + r), 1)
        top_p = tl.load(top_ps + r)
        low = least
        if k < V:
            low = kth_largest(row, V, k, least, peak, lanes, TILE)
        allowed = float("inf")
        if top_p < 1:
            allowed = top_p * mass(row, V, peak, inverse_temperature, low, False, TILE)
        min_p = tl.load(min_ps + r)
        if min_p > 0:
            low = tl.minimum(tl.maximum(low, peak + temperature * tl.log(min_p)), peak)
        # The first draw ignores top_p. If top_p drops the drawn token, it also drops all that are no more likely: they
        # are barred, and the next draw has the same noise. The result is the argmax over the kept tokens.
        barred = float("-inf")
        seed = tl.load(seeds + r)
        position = tl.load(positions + r).to(tl.int32)
        is_dropped = 1
        while is_dropped > 0:
            token, x = draw(row, V, peak, inverse_temperature, low, barred, seed, position, SPAN, TILE)
            barred = x
            is_dropped = 0
            if (top_p < 1) & (x < peak):
                more_likely = mass(row, V, peak, inverse_temperature, x, True, TILE)
                is_dropped = (more_likely >= allowed).to(tl.int32)
    _store_token(r, token, token_ids, last_tokens, slots, host, HAS_DESTINATION)
    if WITH_LOGPROBS:
        tl.store(logprobs + r, x - peak - tl.log(mass(row, V, peak, 1.0, float("-inf"), True, TILE)))


def _sample_triton(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
    destination: Destination | None,
    *,
    with_logprobs: bool = False,
) -> Sampled:
    R, V = logits_RV.shape
    token_ids = torch.empty(R, dtype=torch.int64, device=logits_RV.device)
    logprobs = torch.empty(R, dtype=torch.float32, device=logits_RV.device) if with_logprobs else None
    if R:
        _sample_kernel[(R,)](
            logits_RV, temperature_R, top_k_R, top_p_R, min_p_R, seeds_R, positions_R, token_ids,
            *(destination or (token_ids,) * 3), token_ids if logprobs is None else logprobs, V, logits_RV.stride(0),
            HAS_DESTINATION=destination is not None, WITH_LOGPROBS=with_logprobs, SPAN=_SPAN, TILE=_TILE,
            num_warps=_WARPS,
        )  # fmt: skip
    return Sampled(token_ids, logprobs)


def _most_likely_triton(logits_RV: Tensor, destination: Destination | None) -> Tensor:
    (R, V), device = logits_RV.shape, logits_RV.device
    token_ids = torch.empty(R, dtype=torch.int64, device=device)
    if not R:
        return token_ids
    most_splits = min(_MAX_SPLITS, triton.cdiv(_PROGRAMS_PER_SM * launch.num_sms(device), R))
    part = triton.cdiv(triton.cdiv(V, most_splits), _GREEDY_TILE) * _GREEDY_TILE
    num_splits = triton.cdiv(V, part)
    peaks = torch.empty(R, num_splits, dtype=torch.float32, device=device)
    tokens = torch.empty(R, num_splits, dtype=torch.int32, device=device)
    overlap = launch.overlap_options(device)
    _peaks_kernel[(R, num_splits)](
        logits_RV, peaks, tokens, V, logits_RV.stride(0), part, TILE=_GREEDY_TILE, num_warps=8, **overlap
    )  # fmt: skip
    _most_likely_kernel[(R,)](
        peaks, tokens, token_ids, *(destination or (token_ids,) * 3), num_splits,
        HAS_DESTINATION=destination is not None, SPLITS=_MAX_SPLITS, num_warps=1, **overlap,
    )  # fmt: skip
    return token_ids


def store(token_ids_R: Tensor, destination: Destination | None) -> None:
    """Store sampled tokens, as the kernels do."""
    if destination is not None:
        destination.last_tokens[destination.slots.long()] = token_ids_R.clamp(min=0)
        destination.host.copy_(token_ids_R, non_blocking=True)


def most_likely(logits_RV: Tensor, destination: Destination | None = None) -> Tensor:
    """[R]: the token of `sample` with temperature 0 for all requests. Does not synchronise."""
    if launch.choose_path("most_likely", *launch.available_paths(logits_RV, "triton")) == "triton":
        return _most_likely_triton(logits_RV, destination)
    peaks_R, best_R = logits_RV.max(1)
    token_ids = torch.where(peaks_R.isfinite(), best_R, NON_FINITE)
    store(token_ids, destination)
    return token_ids


def sample(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
    *,
    with_logprobs: bool = False,
    destination: Destination | None = None,
) -> Sampled:
    """Draw the next token of every request, see the top of this file. Does not synchronise."""
    parameters = (temperature_R, top_k_R, top_p_R, min_p_R, seeds_R, positions_R)
    if any(x.shape != (len(logits_RV),) or not x.is_contiguous() for x in parameters) or logits_RV.stride(1) != 1:
        raise ValueError(
            f"sample: logits {tuple(logits_RV.shape)} need one value per row of each parameter, not "
            f"{[tuple(x.shape) for x in parameters]}, and contiguous rows"
        )
    if launch.choose_path("sample", *launch.available_paths(logits_RV, "triton")) == "triton":
        return _sample_triton(logits_RV, *parameters, destination, with_logprobs=with_logprobs)
    sampled = sample_reference(logits_RV, *parameters, with_logprobs=with_logprobs)
    store(sampled.token_ids, destination)
    return sampled
