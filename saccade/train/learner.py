"""The model and its optimizer as one thing: it takes rows, moves, is saved and taken up again.

Rows of a step are added up in fp32, so that many small ones do not vanish beside their sum. fsdp does so by itself. Without
sharding, parameters of lower precision are given fp32 gradients for as long as a step has rows to come; the gradient of a step's
only row stays as it is. ddp averages over the ranks in the parameters' own format: there the sum is rounded before the last row
joins it.
"""

import torch
from torch import Tensor

from saccade.errors import CheckpointError
from saccade.train.checkpoint import SavedState, load_tensors, stored_names
from saccade.train.feed import Row
from saccade.train.optimizer import Optimizer, total_norm
from saccade.train.parallelize import Parallelized
from saccade.world import World


class Learner:
    """What learns in a stage."""

    def __init__(
        self, parallel: Parallelized, optimizer: Optimizer, world: World, *, reduce_each_row: bool = True
    ) -> None:
        self.parallel, self.optimizer, self._world = parallel, optimizer, world
        self._reduce_each_row = reduce_each_row
        self._parameters = dict(parallel.model.named_parameters())
        self.trained = {name for name, parameter in self._parameters.items() if parameter.requires_grad}
        """Parameters that this stage or one before has changed; the others are as in the folder the run began with."""
        is_sharded = parallel.strategy in ("fsdp", "hsdp")
        trained = [] if is_sharded else [self._parameters[name] for name in self.trained]
        self._summed = [parameter for parameter in trained if parameter.dtype != torch.float32]
        self._sums_in_fp32 = False
        self._has_rows = False

    # -------------------------------------------------------------- a step

    def backward(self, row: Row, count: Tensor, *, is_last_row: bool) -> tuple[Tensor, Tensor]:
        """Add a row's gradients; (its loss, its sums by source), on the device. `count`: learned tokens of the step."""
        self._choose_sums(is_last_row=is_last_row)
        self.parallel.sync_gradients(is_last_row=is_last_row, each_row=self._reduce_each_row)
        # FSDP and DDP average over the ranks where we want the sum, so every rank's loss is taken times their number.
        share = count / self._world.size
        loss, by_source = self.parallel.wrapped(row.inputs, row.labels, share, row.num_learned, row.by_source)
        loss.backward()
        return loss.detach() / self._world.size, by_source

    def _choose_sums(self, *, is_last_row: bool) -> None:
        """Gradients in fp32, or in the format of their parameters: see above."""
        is_averaged = is_last_row and self.parallel.strategy == "ddp"
        in_fp32 = (self._has_rows or not is_last_row) and not is_averaged
        self._has_rows = True
        if in_fp32 == self._sums_in_fp32:
            return
        self._sums_in_fp32 = in_fp32
        for parameter in self._summed:
            dtype = torch.float32 if in_fp32 else parameter.dtype
            gradient, parameter.grad = parameter.grad, None  # only a parameter without one may change the format
            parameter.grad_dtype = dtype
            parameter.grad = None if gradient is None else gradient.to(dtype)

    def grad_norm(self) -> Tensor:
        """Norm of all gradients, the same on every rank, on the device."""
        return total_norm(self._parameters.values()).to(self._world.device)

    def without_gradient(self) -> list[str]:
        """Parameters that should learn and were given no gradient."""
        return [
            name for name, parameter in self._parameters.items() if parameter.requires_grad and parameter.grad is None
        ]

    def step(self, lr_factor: float, grad_scale: float) -> None:
        """Move the parameters and drop the gradients."""
        self.optimizer.step(lr_factor, grad_scale)
        self._forget_rows()

    def drop_gradients(self) -> None:
        """Forget the gradients of a bad step."""
        self._forget_rows()
        self.parallel.forget_gradients()

    def _forget_rows(self) -> None:
        self.optimizer.zero_grad()
        self._has_rows = False

    # -------------------------------------------------------------- saved and loaded

    def weights(self) -> dict[str, Tensor]:
        """Every parameter at its best precision: the fp32 master where it has one."""
        masters = self.optimizer.masters
        return {name: masters.get(name, parameter.detach()) for name, parameter in self._parameters.items()}

    def tensors(self) -> dict[str, Tensor]:
        """All there is to save: changed parameters and the optimizer's state, by name. The originals, not copies."""
        weights = {f"parameter/{name}": tensor for name, tensor in self.weights().items() if name in self.trained}
        return weights | {name: tensor for moments in self._moments().values() for name, tensor in moments.items()}

    def _moments(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's state of each parameter, by the names it is saved under."""
        state = self.optimizer.state_dict()["state"]
        return {
            name: {f"optimizer/{name}/{key}": tensor for key, tensor in tensors.items()}
            for name, tensors in state.items()
        }

    def load_weights(self, state: SavedState) -> None:
        """Take over every parameter that the run had changed when the state was saved."""
        stored = {name.removeprefix("parameter/") for name in stored_names(state) if name.startswith("parameter/")}
        if unknown := sorted(stored - self._parameters.keys()):
            raise CheckpointError(
                f"{state.path}: {', '.join(unknown[:4])} are not in this model. Give the run another folder"
            )
        weights = self.weights()
        load_tensors(state, {f"parameter/{name}": weights[name] for name in stored}, self._world)
        self.optimizer.write_parameters()
        self.trained |= stored

    def load_optimizer(self, state: SavedState, *, num_steps: int, only_shared: bool = False) -> None:
        """Take over the optimizer's state: as a whole, or of the parameters that learned then and learn now."""
        stored = stored_names(state)
        wanted: dict[str, Tensor] = {}
        for moments in self._moments().values():
            if not only_shared or moments.keys() <= stored:
                wanted |= moments
        load_tensors(state, wanted, self._world)
        self.optimizer.num_steps = num_steps
