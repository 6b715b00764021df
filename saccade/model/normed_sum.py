"""The input of projections: rows, or the norm of a sum of rows, which the kernel of a projection may compute."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels.launch import is_differentiable
from saccade.kernels.rms_norm import add_rms_norm, rms_norm


class NormedSum:
    """rms_norm(x + residual) as the input of projections, and the sum itself.

    With gradients both are computed at once. Without gradients the kernel of the first projection that reads them
    computes them.
    """

    def __init__(self, x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float) -> None:
        self.x_TD, self.residual_TD, self.weight_D, self.eps = x_TD, residual_TD, weight_D, eps
        self._normed_TD: Tensor | None = None
        self._total_TD: Tensor | None = x_TD if residual_TD is None else None
        if is_differentiable():
            self._compute()

    def _compute(self) -> Tensor:
        if self._normed_TD is None:
            if self.residual_TD is None:
                self._normed_TD = rms_norm(self.x_TD, self.weight_D, self.eps)
            else:
                self._normed_TD, self._total_TD = add_rms_norm(self.x_TD, self.residual_TD, self.weight_D, self.eps)
        return self._normed_TD

    @property
    def input(self) -> Tensor | NormedSum:
        """The input of projections: the norm if it is computed, else this object."""
        return self if self._normed_TD is None else self._normed_TD

    @property
    def normed(self) -> Tensor:
        """The norm."""
        return self._compute()

    @normed.setter
    def normed(self, normed_TD: Tensor) -> None:
        self._normed_TD = normed_TD

    @property
    def total(self) -> Tensor:
        """x + residual. After a projection has read the norm, it costs nothing."""
        if self._total_TD is None:
            self._compute()
        assert self._total_TD is not None, "the sum is computed with the norm"
        return self._total_TD

    @total.setter
    def total(self, total_TD: Tensor) -> None:
        self._total_TD = total_TD

    @property
    def is_cpu(self) -> bool:
        """Whether it is on the CPU."""
        return self.x_TD.is_cpu

    def __len__(self) -> int:
        return len(self.x_TD)

    def split(self, num_rows: int) -> list[NormedSum]:
        """Parts of up to `num_rows` rows."""
        xs = torch.split(self.x_TD, num_rows)
        residuals = [None] * len(xs) if self.residual_TD is None else torch.split(self.residual_TD, num_rows)
        return [NormedSum(x, residual, self.weight_D, self.eps) for x, residual in zip(xs, residuals, strict=True)]


Input = Tensor | NormedSum
"""The input of a projection: rows, or the norm of a sum of rows."""


def add_update(x_TD: Tensor, update_TD: Tensor) -> tuple[Tensor, Tensor | None]:
    """The residual stream x + update. Without gradients it stays a pair, which the kernel of the next norm adds up."""
    return (x_TD + update_TD, None) if is_differentiable() else (x_TD, update_TD)
