"""Run each attention, norm, RoPE, SwiGLU and AdamW kernel once, at small odd sizes, for a memory checker.

compute-sanitizer --tool memcheck python -m bench.kernels.sanitize_pointwise_attention
"""

import torch

from saccade.kernels import launch
from saccade.kernels.adamw import Settings, adamw, adamw8bit, zero_moment
from saccade.kernels.attention import attention
from saccade.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_quant
from saccade.kernels.rope import rope
from saccade.kernels.swiglu import swiglu, swiglu_linear

ATTENTION = [
    # lengths, heads, key heads, head dim, causal, window
    ((64, 16, 1, 0, 37), 2, 2, 80, False, None),
    ((7, 3), 2, 2, 72, False, None),
    ((1, 129, 0, 300), 4, 2, 128, True, None),
    ((1, 129, 0, 300), 4, 2, 128, True, 100),
    ((200, 65), 2, 2, 80, False, None),
    ((200, 65), 2, 1, 64, True, None),
]


def _random(*size: int) -> torch.Tensor:
    return torch.randn(*size, device="cuda", dtype=torch.bfloat16).requires_grad_()


def _backward(*outputs: torch.Tensor) -> None:
    torch.autograd.backward(outputs, [torch.randn_like(y) for y in outputs])


def main() -> None:
    """Forward and backward of everything."""
    for lengths, num_heads, num_kv_heads, head_dim, causal, window in ATTENTION:
        cu_seqlens = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
        q, k, v = (_random(sum(lengths), n, head_dim) for n in (num_heads, num_kv_heads, num_kv_heads))
        bounds = {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths), "causal": causal, "window": window}
        _backward(attention(q, k, v, cu_seqlens, cu_seqlens, **bounds))
    for num_rows, dim in ((1, 2048), (7, 129), (129, 128)):
        x, residual, weight = _random(num_rows, dim), _random(num_rows, dim), _random(dim)
        _backward(rms_norm(x, weight, 1e-6))
        _backward(*add_rms_norm(x, residual, weight, 1e-6))
        for dtype in (torch.int8, torch.float8_e4m3fn):
            rms_norm_quant(x, weight, 1e-6, dtype)
        _backward(swiglu(x, residual))
        _backward(swiglu(*_random(num_rows, 2 * dim).chunk(2, dim=1)))
        _backward(swiglu_linear(x, residual, _random(24, dim), _random(24)))
    for num_tokens, num_heads, num_kv_heads, head_dim in ((1, 16, 2, 128), (7, 3, 1, 80), (129, 2, 2, 72)):
        q, k = _random(num_tokens, num_heads, head_dim), _random(num_tokens, num_kv_heads, head_dim)
        angles = torch.rand(num_tokens, head_dim // 2, device="cuda")
        table = angles.cos(), angles.sin()
        _backward(*rope(q, k, table))
    masters = [torch.randn(size, device="cuda") for size in ((7, 129), (1,), (3, 5, 257))]
    gradients, parameters = [x.bfloat16() for x in masters], [x.bfloat16() for x in masters]
    settings = Settings(1e-3, 0.9, 0.99, 1e-8, 0.1, step=1)
    adamw(gradients, masters, *([torch.zeros_like(x) for x in masters] for _ in range(2)), parameters, settings)
    moments = ([zero_moment(x, dtype) for x in masters] for dtype in (torch.int8, torch.uint8))
    adamw8bit(gradients, masters, *moments, parameters, settings)
    torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    with launch.forced("triton"):
        main()
