"""Exponential moving average (EMA) of the trained weights.

    average += (1 - decay) * (weight - average)        after every optimizer step, in fp32

The first updates use a lower decay, min(decay, (1 + n) / (10 + n)) after n updates, so that the start is soon
forgotten. Averages are where the fp32 masters are and are sharded like them: no communication. They cost 4 bytes per
trained parameter.
"""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from saccade.train.dtensor import dtensor_like, local_tensor


class WeightAverage:
    """The average of some weights, which are plain tensors or DTensors."""

    def __init__(self, weights: Mapping[str, Tensor], decay: float) -> None:
        """Starts as a copy of `weights`, fp32 tensors by parameter name."""
        self._decay = decay
        self.tensors = {
            name: dtensor_like(weight, local_tensor(weight.detach()).clone()) for name, weight in weights.items()
        }
        """The averages by parameter name, sharded like the weights."""
        self.num_updates = torch.tensor(0)
        """Scalar on the CPU, saved with the averages."""

    @torch.no_grad()
    def restart(self, weights: Mapping[str, Tensor]) -> None:
        """Start again from these weights."""
        for name, average in self.tensors.items():
            local_tensor(average).copy_(local_tensor(weights[name]))
        self.num_updates.zero_()

    @torch.no_grad()
    def update(self, weights: Mapping[str, Tensor]) -> None:
        """Average in the weights after an optimizer step. No host sync."""
        num_updates = int(self.num_updates)
        decay = min(self._decay, (1 + num_updates) / (10 + num_updates))
        averages = [local_tensor(average) for average in self.tensors.values()]
        torch._foreach_lerp_(averages, [local_tensor(weights[name]) for name in self.tensors], 1 - decay)
        self.num_updates.fill_(num_updates + 1)

    @contextlib.contextmanager
    @torch.no_grad()
    def in_place_of(self, parameters: Mapping[str, Tensor]) -> Iterator[None]:
        """Write the averages into the model's parameters; at the end these have their own values again, bit for bit."""
        targets = {name: local_tensor(parameters[name].detach()) for name in self.tensors}
        originals = {name: target.clone() for name, target in targets.items()}
        try:
            for name, target in targets.items():
                target.copy_(local_tensor(self.tensors[name]))
            yield
        finally:
            for name, target in targets.items():
                target.copy_(originals[name])
