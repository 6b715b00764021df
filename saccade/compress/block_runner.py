"""Run batches through a model block by block: all of them through the first block, then all through the second.

A forward pass is one function of the model, and what happens between two blocks is the family's business (windows,
features that enter later layers). Each batch therefore runs the model's own forward pass in a thread of its own, which
stops where a block is called. One thread runs at a time; the others wait. The caller takes the arguments of a block,
computes its output with whatever weights it likes, and lets the thread continue to the next block.

    runner = BlockRunner(model, blocks, batches, device)
    for name in blocks:
        calls = runner.calls(name)           # batches that reached this block
        for call in calls: runner.resume(call, output)

Memory holds the activations of all batches at one block. Weights are the caller's: only those outside of blocks need
to be loaded.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from saccade.model.vlm import VLM
from saccade.processor.inputs import ModelInputs

HEAD = "head"
"""The block after the decoder. The threads stop at it as at the others, and its output is not used."""


@dataclass
class Call:
    """A batch that stopped at a block."""

    inputs: ModelInputs
    block: str | None = None
    """Where it stopped; None: its forward pass is finished."""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    error: BaseException | None = None
    _answers: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    _stops: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)


class _Abandoned(BaseException):
    """Ends a thread whose runner is closed."""


class BlockRunner:
    """Forward passes of several batches that stop at every block."""

    def __init__(self, model: VLM, blocks: Mapping[str, nn.Module], batches: Sequence[ModelInputs]) -> None:
        self._model, self._blocks = model, blocks
        self._current = threading.local()
        for name, block in blocks.items():
            if name != HEAD:
                block.forward = self._stopping(name)
        self._calls = [Call(inputs) for inputs in batches]
        for call in self._calls:
            threading.Thread(target=self._run, args=(call,), daemon=True).start()
            self._wait(call)

    def _run(self, call: Call) -> None:
        self._current.call = call
        if call.inputs.token_ids.is_cuda:  # the current device is a setting of each thread
            torch.cuda.set_device(call.inputs.token_ids.device)
        try:
            with torch.no_grad():
                hidden_TD = self._model.hidden_states(call.inputs)
                if HEAD in self._blocks:
                    self._stop(HEAD, (hidden_TD,), {})
        except _Abandoned:
            return
        except BaseException as error:  # raised again in the caller's thread
            call.error = error
        call.block, call.args, call.kwargs = None, (), {}
        call._stops.put(None)

    def _stopping(self, name: str) -> Any:
        return lambda *args, **kwargs: self._stop(name, args, kwargs)

    def _stop(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        call: Call = self._current.call
        call.block, call.args, call.kwargs = name, args, kwargs
        del args, kwargs
        call._stops.put(None)
        answer = call._answers.get()
        if isinstance(answer, _Abandoned):
            raise answer
        return answer

    def calls(self, name: str) -> list[Call]:
        """The batches that stopped at this block."""
        return [call for call in self._calls if call.block == name]

    def compute(self, call: Call) -> Any:
        """The output of the block where a batch stopped, with the weights that it has now."""
        assert call.block is not None, "a finished batch has no block"
        block = self._blocks[call.block]
        return type(block).forward(block, *call.args, **call.kwargs)

    def resume(self, call: Call, output: Any) -> None:
        """Continue a batch with the output of its block, up to the next one."""
        call.args, call.kwargs = (), {}
        call._answers.put(output)
        self._wait(call)

    def _wait(self, call: Call) -> None:
        call._stops.get()
        if call.error is not None:
            raise call.error

    def close(self) -> None:
        """End the threads that wait, and give the blocks their forward pass back."""
        for call in self._calls:
            if call.block is not None:
                call._answers.put(_Abandoned())
        for name, block in self._blocks.items():
            if name != HEAD:
                del block.forward


def model_blocks(model: VLM) -> dict[str, nn.Module]:
    """The blocks in the order of the forward pass: tower, projector, decoder, and a head that is not the embedding."""
    blocks: dict[str, nn.Module] = {f"vision.blocks.{i}": block for i, block in enumerate(model.vision.blocks)}
    blocks["projector"] = model.projector
    blocks |= {f"language.layers.{i}": layer for i, layer in enumerate(model.language.layers)}
    return blocks if model.config.tied_head else blocks | {HEAD: model.head}


def is_in(name: str, block: str) -> bool:
    """Whether a parameter or projection is part of a block."""
    return name == block or name.startswith(f"{block}.")


def row_weights(block: str, inputs: ModelInputs, image_weight: float) -> Tensor | None:
    """[T]: how much each row counts at a decoder block or head, where rows are tokens; None: all the same."""
    if image_weight == 1.0 or not block.startswith(("language.", HEAD)):
        return None
    weight_T = torch.ones(inputs.num_tokens, device=inputs.token_ids.device)
    weight_T[inputs.image_token_index] = image_weight
    return weight_T
