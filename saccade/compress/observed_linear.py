"""A projection that keeps statistics of the rows it reads, for calibration."""

from __future__ import annotations

from torch import Tensor, nn

from saccade.compress.input_statistics import InputStatistics
from saccade.model.linear import Linear, Projection


class Observer:
    """The statistics of projections; those that read the same tensor share them."""

    def __init__(self) -> None:
        self.statistics: dict[str, InputStatistics] = {}
        self.weight_T: Tensor | None = None
        """How much each row of the present batch counts."""
        self._last: tuple[Tensor, str] | None = None

    def add(self, name: str, x: Tensor, num_inputs: int) -> None:
        """Take in the rows that a projection reads. Padding inputs do not count."""
        if self._last is not None and self._last[0] is x and name not in self.statistics:
            self.statistics[name] = self.statistics[self._last[1]]
        if self._last is not None and self._last[0] is x and self.statistics[name] is self.statistics[self._last[1]]:
            return
        if name not in self.statistics:
            self.statistics[name] = InputStatistics(num_inputs, x.device)
        self.statistics[name].add(x.flatten(0, -2)[:, :num_inputs], self.weight_T)
        self._last = (x, name)

    def forget_tensors(self) -> None:
        """Forget the rows of a batch that has ended: their memory may be reused for another tensor."""
        self._last = None


class ObservedLinear(Projection):
    """A plain projection that is observed."""

    def __init__(self, name: str, layer: Linear, observer: Observer) -> None:
        super().__init__(layer.in_features, layer.out_features)
        self.layer, self._name, self._observer = layer, name, observer

    def linear(self, x: Tensor) -> Tensor:
        """See `Projection`."""
        self._observer.add(self._name, x, self.layer.stored_shape[1])
        return self.layer.linear(x)


def replace_projection(model: nn.Module, name: str, projection: Projection) -> None:
    """Set the projection of this name."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, projection)
