"""Run every serving kernel once at small, awkward sizes, and compare each result with its reference.

    compute-sanitizer --tool memcheck python -m bench.kernels.sanitize_serving

Memory is allocated exactly (without rounding by the caching allocator), so that an access past the end of a tensor is
an error.
"""

import os

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch

from saccade.kernels import launch, sampler
from saccade.kernels.dequantize_int4 import interleave_int4
from saccade.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from saccade.kernels.linear_w4a16 import linear_w4a16, linear_w4a16_reference
from saccade.kernels.linear_w8a8 import linear_w8a8, linear_w8a8_reference
from saccade.kernels.paged_attention import (
    QUANTIZED_MAX,
    paged_attention,
    paged_attention_reference,
    write_pages,
    write_pages_reference,
)
from saccade.model.weight_rounding import quantize_weight, quantize_weight_int4

DEVICE, DTYPE = "cuda", torch.bfloat16


def check(name: str, actual: torch.Tensor, expected: torch.Tensor, bound: float = 2e-2) -> None:
    """Print the relative RMS error; stop if it is not small."""
    actual, expected = actual.double(), expected.double()
    error = ((actual - expected).square().mean() / expected.square().mean().clamp_min(1e-30)).sqrt().item()
    print(f"{name:<48} {error:.1e}", flush=True)
    assert error <= bound, name


def pages(cache_dtype: torch.dtype, new: list[int], context: list[int], head_dim: int, page_size: int) -> None:
    """Tokens into pages, then attention over them."""
    heads, kv_heads, num_requests = 7, 1, len(new)
    width = max(-(-length // page_size) for length in context)
    table = torch.randperm(num_requests * width, device=DEVICE).view(num_requests, width).int()
    shape = (num_requests * width, kv_heads, page_size, head_dim)
    is_quantized = cache_dtype in QUANTIZED_MAX
    cache = [torch.zeros(shape, device=DEVICE).to(cache_dtype) for _ in range(2)]
    scales = [torch.zeros(shape[:3], device=DEVICE) for _ in range(2)] if is_quantized else [None, None]
    twin = [x if x is None else x.clone() for x in (*cache, *scales)]
    for request, length in enumerate(context):
        q, k, v = (torch.randn(length, n, head_dim, device=DEVICE).to(DTYPE) for n in (heads, kv_heads, kv_heads))
        angles = torch.rand(length, head_dim // 2, device=DEVICE)
        where = torch.arange(length, device=DEVICE)
        slots = table[request].long()[where // page_size] * page_size + where % page_size
        for write, target in ((write_pages, [*cache, *scales]), (write_pages_reference, twin)):
            write(q.clone(), k.clone(), v.clone(), (angles.cos(), angles.sin()), slots, *target)
    name = f"{str(cache_dtype)[6:]} d{head_dim} page {page_size}"
    check(f"write_pages {name}", cache[0].float(), twin[0].float(), 5e-2)
    q = torch.randn(sum(new), heads, head_dim, device=DEVICE).to(DTYPE)
    starts = torch.tensor([0, *new], device=DEVICE).cumsum(0).int()
    arguments = (q, *cache, table, starts, torch.tensor(context, device=DEVICE).int())
    options = {"max_seqlen_q": max(new), "key_scales_NGP": scales[0], "value_scales_NGP": scales[1]}
    kind = "decode" if max(new) == 1 else "mixed"
    check(
        f"paged_attention {kind} {name}",
        paged_attention(*arguments, **options),
        paged_attention_reference(*arguments, **options),
    )


def losses() -> None:
    """Loss and gradients: an odd vocabulary, ignored labels, several chunks, a cap."""
    hidden = torch.randn(129, 64, device=DEVICE).to(DTYPE).requires_grad_()
    weight = (torch.randn(1001, 64, device=DEVICE) * 0.2).to(DTYPE).requires_grad_()
    labels = torch.randint(1001, (129,), device=DEVICE)
    labels[::3] = -100
    for options in ({}, {"softcap": 5.0, "z_loss": 0.1, "max_bytes": 1001 * 2 * 40}):
        results = []
        for run in (linear_cross_entropy, linear_cross_entropy_reference):
            loss = run(hidden, weight, labels, count=86.0, **options)
            results.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
        for name, actual, expected in zip(("loss", "d_hidden", "d_weight"), *results, strict=True):
            check(f"linear_cross_entropy {name}", actual, expected)


def linears() -> None:
    """Every tile of the tables, odd outputs, inputs that no tile divides."""
    for num_tokens in (1, 17, 33, 65, 129):
        for bits in (torch.int8, torch.float8_e4m3fn):
            x = torch.randn(num_tokens, 304, device=DEVICE).to(DTYPE)
            weight = torch.randn(131, 304, device=DEVICE).to(DTYPE)
            arguments = (x, *quantize_weight(weight, bits))
            name = f"linear_w8a8 {str(bits)[6:]} {num_tokens} tokens"
            check(name, linear_w8a8(*arguments), linear_w8a8_reference(*arguments))
        x = torch.randn(num_tokens, 640, device=DEVICE).to(DTYPE)
        weight = torch.randn(131, 640, device=DEVICE).to(DTYPE)
        packed, scale, zero = quantize_weight_int4(weight, 64, symmetric=False)
        arguments = (x, interleave_int4(packed), scale, zero)
        expected = linear_w4a16_reference(*arguments)
        for path in ("triton", "library"):
            with launch.forced(path):
                check(f"linear_w4a16 {path} {num_tokens} tokens", linear_w4a16(*arguments), expected)


def tokens() -> None:
    """Greedy and with every filter, a vocabulary that no tile divides."""
    num_requests, vocab_size = 5, 10007
    logits = (torch.randn(num_requests, vocab_size, device=DEVICE) * 3).to(DTYPE)
    parameters = (
        torch.tensor([0.0, 1.0, 0.7, 1.3, 1.0], device=DEVICE),
        torch.tensor([1, vocab_size, 20, 500, 3], dtype=torch.int32, device=DEVICE),
        torch.tensor([1.0, 1.0, 0.9, 0.5, 1.0], device=DEVICE),
        torch.tensor([0.0, 0.0, 0.0, 0.1, 0.0], device=DEVICE),
        torch.arange(num_requests, device=DEVICE),
        torch.arange(num_requests, device=DEVICE),
    )
    actual = sampler.sample(logits, *parameters, with_logprobs=True)
    expected = sampler.sample_reference(logits, *parameters, with_logprobs=True)
    check("sample token ids", actual.token_ids, expected.token_ids, 1e-9)
    check("sample logprobs", actual.logprobs, expected.logprobs, 1e-4)


def main() -> None:
    """Run all kernels."""
    torch.manual_seed(0)
    for cache_dtype in (DTYPE, torch.float8_e4m3fn, torch.int8):
        pages(cache_dtype, [1, 1, 1], [5, 700, 129], 80, 16)
        pages(cache_dtype, [3, 1, 40], [5, 70, 129], 128, 1)
    losses()
    linears()
    tokens()
    torch.cuda.synchronize()
    print("all right")


if __name__ == "__main__":
    main()
