"""Statistics of the rows that a projection reads, from which every method rounds its weight."""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS_KEPT = 256


class InputStatistics:
    """Sums over the rows that a projection reads."""

    def __init__(self, num_inputs: int, device: torch.device) -> None:
        self.gram_DD = torch.zeros(num_inputs, num_inputs, device=device)
        """X'X, rows weighted."""
        self.magnitude_D = torch.zeros(num_inputs, device=device)
        """Sum of |x|, rows weighted."""
        self.largest_D = torch.zeros(num_inputs, device=device)
        """Largest |x|."""
        self.lowest_D, self.highest_D = torch.zeros(num_inputs, device=device), torch.zeros(num_inputs, device=device)
        """Lowest and highest x, or 0."""
        self.num_rows = 0
        self.rows_TD = torch.zeros(0, num_inputs, device=device)
        """Some of the rows, spread over the batches."""

    @staticmethod
    def of_unit_inputs(num_inputs: int, device: torch.device) -> InputStatistics:
        """Statistics of inputs between -1 and 1, for a layer that the forward pass never runs."""
        statistics = InputStatistics(num_inputs, device)
        statistics.largest_D = statistics.largest_D + 1
        statistics.lowest_D = statistics.lowest_D - 1
        statistics.highest_D = statistics.highest_D + 1
        return statistics

    def add(self, x_TD: Tensor, weight_T: Tensor | None = None) -> None:
        """Take the rows of one batch in. `weight_T`: how much each counts."""
        x_TD = x_TD.detach().float()
        weighted_TD = x_TD if weight_T is None else x_TD * weight_T.sqrt().unsqueeze(1)
        self.gram_DD.addmm_(weighted_TD.T, weighted_TD)
        absolute_TD = x_TD.abs()
        self.magnitude_D += (absolute_TD if weight_T is None else absolute_TD * weight_T.unsqueeze(1)).sum(0)
        self.largest_D = torch.maximum(self.largest_D, absolute_TD.amax(0))
        self.lowest_D = torch.minimum(self.lowest_D, x_TD.amin(0))
        self.highest_D = torch.maximum(self.highest_D, x_TD.amax(0))
        self.num_rows += len(x_TD)
        kept = torch.cat([self.rows_TD, x_TD[:: max(1, len(x_TD) // 16)]])
        self.rows_TD = kept[:: -(-len(kept) // _ROWS_KEPT)] if len(kept) > _ROWS_KEPT else kept

    def scaled(self, scale_D: Tensor) -> InputStatistics:
        """Statistics of the rows divided by `scale_D`."""
        other = InputStatistics.__new__(InputStatistics)
        other.gram_DD = self.gram_DD / scale_D.unsqueeze(0) / scale_D.unsqueeze(1)
        other.magnitude_D, other.largest_D = self.magnitude_D / scale_D, self.largest_D / scale_D
        other.lowest_D, other.highest_D = self.lowest_D / scale_D, self.highest_D / scale_D
        other.num_rows, other.rows_TD = self.num_rows, self.rows_TD / scale_D
        return other
