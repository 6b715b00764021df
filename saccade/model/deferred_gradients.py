"""Weight gradients of plain projections that are computed later than the gradients of their inputs.

    with deferrable():                      # around forward and backward
        loss = model(...)
        with deferred() as later:
            loss.backward()                 # gradients of activations, and of all other parameters
        later.compute()                     # gradients of weights

The stage before waits for gradients of activations only. So a pipeline computes those of weights while it would wait.
Until then the inputs and output gradients of the projections are kept.

Not for FSDP, which reduces the gradients of a block at the end of its backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_is_deferrable = False
_later: DeferredGradients | None = None
"""Where backward passes leave their products. No context variable: autograd has threads of its own on a GPU."""


class DeferredGradients:
    """Products that give the weight gradients of a backward pass."""

    def __init__(self) -> None:
        self._products: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, weight: Tensor, d_out: Tensor, x: Tensor) -> None:
        """Keep the operands of a gradient, [..., N] and [..., D], of a weight [N, D]."""
        self._products.append((weight, d_out, x))

    @torch.no_grad()
    def compute(self) -> None:
        """Add the gradients to those of the weights, in the dtype that autograd would use."""
        for weight, d_out, x in self._products:
            gradient = d_out.flatten(0, -2).T @ x.flatten(0, -2)
            if weight.grad is None:
                weight.grad = gradient.to(weight.grad_dtype or gradient.dtype)
            else:
                weight.grad += gradient
        self._products.clear()


@contextmanager
def deferrable() -> Iterator[None]:
    """Inside the `with` block forward passes are recorded in such a way that weight gradients can be deferred."""
    global _is_deferrable
    _is_deferrable = True
    try:
        yield
    finally:
        _is_deferrable = False


@contextmanager
def deferred() -> Iterator[DeferredGradients]:
    """Backward passes inside the `with` block leave the gradients of weights for later."""
    global _later
    _later = DeferredGradients()
    try:
        yield _later
    finally:
        _later = None


def can_defer(weight: Tensor) -> bool:
    """Whether the gradient of a weight can be deferred."""
    return _is_deferrable and weight.requires_grad and torch.is_grad_enabled()


def deferred_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W' + bias, whose weight gradient the backward pass leaves for later."""
    return _DeferredLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call, no-any-return]


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.parameter = weight  # a parameter, which outlives the graph
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        assert _later is not None, "the backward pass runs within `deferred`"
        wants_x, _, wants_bias = ctx.needs_input_grad
        _later.add(ctx.parameter, d_out, *ctx.saved_tensors)
        return d_out @ ctx.parameter if wants_x else None, None, d_out.flatten(0, -2).sum(0) if wants_bias else None
