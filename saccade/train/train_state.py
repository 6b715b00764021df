"""State of a stage: model and optimizer. Backward passes, optimizer steps, saving and loading.

Gradient accumulation sums in fp32, so that many small micro-batches do not vanish in their sum. FSDP does that by
itself. Without sharding, parameters of lower precision get fp32 gradients while more micro-batches of the step follow;
the gradient of a single micro-batch keeps the parameter's dtype. DDP reduces in the parameters' dtype, so there the sum
is rounded before the last micro-batch is added.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from saccade.errors import CheckpointError
from saccade.train.batches import MicroBatch, StepBatch
from saccade.train.optimizer import Optimizer, total_norm
from saccade.train.parallelize import ParallelModel
from saccade.train.saved_state import SavedState, load_tensors, stored_names, weight_names
from saccade.train.weight_average import WeightAverage
from saccade.world import World


class TrainState:
    """Model and optimizer of a stage: backward passes, optimizer steps, saving and loading."""

    def __init__(
        self,
        parallel: ParallelModel,
        optimizer: Optimizer,
        world: World,
        *,
        reduce_each_micro_batch: bool = True,
        ema_decay: float | None = None,
    ) -> None:
        """With `ema_decay`, an average of the trained weights is kept."""
        self.parallel, self.optimizer, self._world = parallel, optimizer, world
        self._reduce_each_micro_batch = reduce_each_micro_batch
        self._parameters = dict(parallel.model.named_parameters())
        self.trained = {name for name, parameter in self._parameters.items() if parameter.requires_grad}
        """Parameters changed by this stage or an earlier one; all others equal the initial checkpoint."""
        is_sharded = parallel.strategy in ("fsdp", "hsdp")
        trained = [] if is_sharded else [self._parameters[name] for name in self.trained]
        self._low_precision = [parameter for parameter in trained if parameter.dtype != torch.float32]
        self._accumulates_in_fp32 = False
        self._has_gradients = False
        self._average = None if ema_decay is None else WeightAverage(optimizer.masters, ema_decay)

    # -------------------------------------------------------------- a step

    def backward(self, batch: MicroBatch, count: Tensor, *, is_last_micro_batch: bool) -> tuple[Tensor, Tensor]:
        """Accumulate the gradients of a micro-batch; (its loss, its sums by source and metrics), on the device.

        `count`: the objective's normaliser, of the whole step.
        """
        self._set_grad_dtype(is_last_micro_batch=is_last_micro_batch)
        self.parallel.sync_gradients(
            is_last_micro_batch=is_last_micro_batch, each_micro_batch=self._reduce_each_micro_batch
        )
        # FSDP and DDP average over the ranks, but the sum is needed: every rank's loss is multiplied by their number.
        num_ranks = self._world.num_loss_ranks
        local_count = count / num_ranks
        loss, sums = self.parallel.wrapped(
            batch.inputs, batch.labels, local_count, batch.num_loss_tokens, batch.by_source, batch.targets
        )
        loss.backward()
        if is_last_micro_batch and self.parallel.tensor is not None:
            self.parallel.tensor.sum_gradients()
        return loss.detach() / num_ranks, sums

    def run_pipeline(self, batch: StepBatch, count: Tensor, num_sums: int) -> tuple[list[Tensor], Tensor]:
        """Accumulate the gradients of a step over the ranks of a pipeline: (losses, sums); see `backward`."""
        pipeline, num_ranks = self.parallel.pipeline, self._world.num_loss_ranks
        assert pipeline is not None, "the model is divided into stages"
        self._set_grad_dtype(is_last_micro_batch=batch.num_micro_batches == 1)
        losses, sums = pipeline.run(batch.on_device, batch.num_micro_batches, count / num_ranks, num_sums)
        if self.parallel.tensor is not None:
            self.parallel.tensor.sum_gradients()
        return [loss / num_ranks for loss in losses], sums

    def _set_grad_dtype(self, *, is_last_micro_batch: bool) -> None:
        """Switch gradients between fp32 and the parameters' dtype, as the module docstring explains."""
        is_reduced = is_last_micro_batch and self.parallel.strategy == "ddp" and self.parallel.pipeline is None
        in_fp32 = (self._has_gradients or not is_last_micro_batch) and not is_reduced
        self._has_gradients = True
        if in_fp32 == self._accumulates_in_fp32:
            return
        self._accumulates_in_fp32 = in_fp32
        for parameter in self._low_precision:
            dtype = torch.float32 if in_fp32 else parameter.dtype
            gradient, parameter.grad = parameter.grad, None  # grad_dtype can only be set while there is no gradient
            parameter.grad_dtype = dtype
            parameter.grad = None if gradient is None else gradient.to(dtype)

    def grad_norm(self) -> Tensor:
        """L2 norm of all gradients, the same on every rank, on the device."""
        pipeline = self.parallel.pipeline
        copies = {name for name in self._parameters if pipeline is not None and pipeline.is_copy(name)}
        if self.parallel.tensor is not None:
            norm = self.parallel.tensor.grad_norm(copies)
        else:
            counted = [parameter for name, parameter in self._parameters.items() if name not in copies]
            norm = total_norm(counted).to(self._world.device)
        return norm if pipeline is None else pipeline.total_norm(norm)

    def without_gradient(self) -> list[str]:
        """Trainable parameters that received no gradient."""
        return [
            name for name, parameter in self._parameters.items() if parameter.requires_grad and parameter.grad is None
        ]

    def step(self, lr_factor: float, grad_scale: float) -> None:
        """Run the optimizer, average the weights, and drop the gradients."""
        self.optimizer.step(lr_factor, grad_scale)
        if self._average is not None:
            self._average.update(self.optimizer.masters)
        self._zero_grad()

    def drop_gradients(self) -> None:
        """Discard the gradients of a skipped step."""
        self._zero_grad()
        self.parallel.reset_compression()

    def _zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self._has_gradients = False

    # -------------------------------------------------------------- saving and loading

    def weights(self) -> dict[str, Tensor]:
        """Return every parameter at its highest precision: its fp32 master, if it has one."""
        masters = self.optimizer.masters
        return {name: masters.get(name, parameter.detach()) for name, parameter in self._parameters.items()}

    def weights_to_export(self) -> dict[str, Tensor]:
        """Return `weights`, with the average of each parameter that has one.

        What other ranks of a pipeline have is on the meta device, see `ParallelModel.collected`.
        """
        elsewhere: dict[str, Tensor] = {}
        if self.parallel.pipeline is not None:
            elsewhere = dict(self.parallel.whole.named_parameters())
        return elsewhere | self.weights() | ({} if self._average is None else self._average.tensors)

    def averaged(self) -> AbstractContextManager[None]:
        """The model has its averaged weights until the end of this context; without an average it stays as it is."""
        return contextlib.nullcontext() if self._average is None else self._average.in_place_of(self._parameters)

    def tensors(self) -> dict[str, Tensor]:
        """Everything to save, by name: changed parameters, optimizer state and averages. No copies."""
        weights = {
            f"parameter/{name}": self._to_save(name, tensor)
            for name, tensor in self.weights().items()
            if name in self.trained
        }
        optimizer = {name: tensor for state in self._optimizer_tensors().values() for name, tensor in state.items()}
        return weights | optimizer | self._average_tensors()

    def _to_save(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter, or state of it, as this rank's part of the whole, which does not depend on the layout."""
        return tensor if self.parallel.tensor is None else self.parallel.tensor.as_part(name, tensor)

    def _average_tensors(self) -> dict[str, Tensor]:
        """Averages, under the names they are saved as."""
        if self._average is None:
            return {}
        averages = {f"average/{name}": self._to_save(name, tensor) for name, tensor in self._average.tensors.items()}
        return averages | {"average_updates": self._average.num_updates}

    def _optimizer_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Optimizer state of each parameter, under the names it is saved as."""
        return {
            name: {f"optimizer/{name}/{key}": self._to_save(name, tensor) for key, tensor in tensors.items()}
            for name, tensors in self.optimizer.state().items()
        }

    def load_weights(self, state: SavedState, *, averaged: bool = False) -> None:
        """Load every parameter stored in a saved state; `averaged`: its average instead, where the state has one.

        An average that this stage keeps starts again from these weights.
        """
        stored = self._own(weight_names(state, averaged=averaged))
        if unknown := sorted(stored.keys() - self._parameters.keys()):
            raise CheckpointError(
                f"{state.path}: {', '.join(unknown[:4])} are not in this model. Use another run folder: --set run=NAME"
            )
        weights = self.weights()
        wanted = {on_disk: self._to_save(name, weights[name]) for name, on_disk in stored.items()}
        load_tensors(state, wanted, self._world)
        self.optimizer.write_parameters()
        self.trained |= stored.keys()
        if self._average is not None:
            self._average.restart(self.optimizer.masters)

    def _own(self, names: dict[str, str]) -> dict[str, str]:
        """The parameters in a state without those of other ranks of a pipeline."""
        pipeline = self.parallel.pipeline
        return {name: one for name, one in names.items() if pipeline is None or not pipeline.is_elsewhere(name)}

    def load_average(self, state: SavedState) -> None:
        """Load the average of this stage, if it keeps one."""
        load_tensors(state, self._average_tensors(), self._world)

    def load_optimizer(self, state: SavedState, *, num_steps: int, only_shared: bool = False) -> None:
        """Load the optimizer state, either all of it or only that of parameters trained both then and now."""
        stored = stored_names(state)
        wanted: dict[str, Tensor] = {}
        for tensors in self._optimizer_tensors().values():
            if not only_shared or tensors.keys() <= stored:
                wanted |= tensors
        load_tensors(state, wanted, self._world)
        self.optimizer.num_steps = num_steps
