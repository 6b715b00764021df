"""Adapters chosen per token on the layers of a 3B decoder: 8 adapters of rank 16 and 64 among the tokens of a step.

It is compared with x A' of all adapters given by the product before (`low given`; for gate and up with the activation,
and `swiglu` alone), and with one adapter for all tokens in two plain products.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.kernels.timing import Row, Work, compare, graph_ms, main, through
from saccade.kernels.grouped_lora import TokenGroups, add_lora, group_tokens, grouped_lora, lora_swiglu
from saccade.kernels.swiglu import swiglu

LAYERS = {
    "qkv": (2048, (2048, 256, 256)),
    "o": (2048, (2048,)),
    "gate up": (2048, (11008, 11008)),
    "down": (11008, (2048,)),
}
NUM_ADAPTERS = 8


def rows() -> Iterator[Row]:
    """Decode of 1, 64 and 256 requests, and a prefill of 4096 tokens."""
    for rank in (16, 64):
        for name, (num_inputs, sizes) in LAYERS.items():
            new = {"device": "cuda", "dtype": torch.bfloat16}
            lora_A = torch.randn(NUM_ADAPTERS, len(sizes), rank, num_inputs, **new)
            lora_B = torch.randn(NUM_ADAPTERS, sum(sizes), rank, **new)
            scale = torch.ones(NUM_ADAPTERS, device="cuda")
            for num_tokens in (1, 64, 256, 4096):
                x, y = torch.randn(num_tokens, num_inputs, **new), torch.randn(num_tokens, sum(sizes), **new)
                slot = torch.arange(num_tokens, device="cuda") * NUM_ADAPTERS // max(NUM_ADAPTERS, num_tokens)
                groups = group_tokens((slot % NUM_ADAPTERS + 1).int(), NUM_ADAPTERS)

                def one_adapter(x: Tensor, y: Tensor, lora_A: Tensor = lora_A, lora_B: Tensor = lora_B) -> Tensor:
                    return torch.addmm(y, x @ lora_A[0, 0].T, lora_B[0].T)

                def grouped(
                    x: Tensor, y: Tensor, lora_A: Tensor = lora_A, lora_B: Tensor = lora_B,
                    groups: TokenGroups = groups, scale: Tensor = scale, sizes: tuple[int, ...] = sizes,
                ) -> Tensor:  # fmt: skip
                    return through("triton", grouped_lora)(y, x, lora_A, lora_B, scale, groups, sizes)

                low = torch.randn(num_tokens, lora_A[:, :, :, 0].numel(), **new)

                def low_given(
                    x: Tensor, y: Tensor, low: Tensor = low, lora_B: Tensor = lora_B, groups: TokenGroups = groups,
                    scale: Tensor = scale, sizes: tuple[int, ...] = sizes,
                ) -> Tensor:  # fmt: skip
                    if len(sizes) == 2:
                        return through("triton", lora_swiglu)(y, low, lora_B, scale, groups)
                    return through("triton", add_lora)(y, low, lora_B, scale, groups, sizes)

                def activation(x: Tensor, y: Tensor) -> Tensor:
                    return swiglu(*y.chunk(2, dim=1))

                used = min(num_tokens, NUM_ADAPTERS) / NUM_ADAPTERS
                work = Work(int(used * (lora_A.nbytes + lora_B.nbytes)) + x.nbytes + 2 * y.nbytes)
                shape = f"{name} {num_tokens} x {num_inputs} -> {sum(sizes)}, rank {rank}"
                paths = {"triton": grouped, "low given": low_given, "one adapter, torch": one_adapter}
                if len(sizes) == 2:
                    paths["swiglu alone"] = activation
                yield from compare("grouped_lora", shape, paths, (x, y), work, clock=graph_ms)


if __name__ == "__main__":
    main(rows)
