"""The forward pass of one rank of a tensor-parallel engine.

    broadcast of the tokens sampled last -> own rows of the embedding, added up -> layers with own heads and channels,
    added up after attention and MLP -> own part of the vocabulary, gathered

Legend: T tokens, S sampled tokens, D decoder width, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.engine.core.step import Chunk
from saccade.engine.device.cuda_graphs import CudaGraphs
from saccade.engine.device.forward import ForwardPass, Logits
from saccade.engine.device.rank_exchange import Collective, RankExchange
from saccade.engine.device.results import num_samples
from saccade.engine.device.step_inputs import RequestInputs, StepInputs, StepSize
from saccade.kernels.embed import ImageRows, StepTokens, insert_features, token_ids_of
from saccade.model.layers import row_chunks
from saccade.model.normed_sum import Input
from saccade.model.quantized_linear import Linear8bit
from saccade.model.vlm import VLM


def step_collectives(
    model: VLM, num_slots: int, *, num_tokens: int, num_selected: int, num_logits: int, in_chunks: bool = False
) -> list[Collective]:
    """The collectives of a forward pass, in order.

    `num_selected`: tokens of the last MLP; `in_chunks`: MLPs run over chunks of rows (`in_row_chunks`).
    """
    width, dtype = model.config.language.hidden_size, model.dtype
    found = [Collective("broadcast", (num_slots + 1,), torch.int64), Collective("sum", (num_tokens, width), dtype)]
    num_layers = len(model.language.layers)
    for number, layer in enumerate(model.language.layers):
        num_rows = num_tokens if number < num_layers - 1 else num_selected
        if _rounds_inputs(layer.get_submodule("self_attn.o_proj")):
            found.append(Collective("maximum", (num_tokens,), torch.float32))
        found.append(Collective("sum", (num_tokens, width), dtype))
        if _rounds_inputs(layer.get_submodule("mlp.down_proj")):
            sizes = row_chunks(num_rows) if in_chunks else [num_rows]
            found += [Collective("maximum", (size,), torch.float32) for size in sizes]
        found.append(Collective("sum", (num_rows, width), dtype))
    return [*found, _of_head(model, num_logits)]


def _rounds_inputs(projection: Any) -> bool:
    """Whether a row-parallel projection rounds its inputs by their maximum over the ranks."""
    return isinstance(projection, Linear8bit) and projection.input_scale is None


def _of_head(model: VLM, num_logits: int) -> Collective:
    assert model.head.shard is not None, "the model is divided"
    return Collective("gather", (num_logits, max(model.head.shard.sizes)), model.dtype)


class DividedForwardPass(ForwardPass):
    """A forward pass that all ranks run together. If it fails on one, the others are not left waiting."""

    def __init__(self, model: VLM, *args: Any, exchange: RankExchange, **settings: Any) -> None:
        """See `ForwardPass`."""
        super().__init__(model, *args, **settings)
        self._exchange = exchange
        assert model.head.shard is not None, "the model is divided"
        self._head_shard = model.head.shard
        if self.graphs is not None:
            self.graphs = CudaGraphs(self.run_captured, agree=self._agree)
        own_size = self._head_shard.stop - self._head_shard.start
        self._own_logits = torch.empty(self.max_samples, own_size, dtype=model.dtype, device=self._device)
        self.num_fallback_steps = 0
        """Forward passes on GPUs that cannot access each other's memory, which small sums would use."""

    def run(self, chunks: Sequence[Chunk], requests: Mapping[str, RequestInputs]) -> Logits:
        """See `ForwardPass`."""
        self.num_fallback_steps += self._device.type == "cuda" and self._exchange.peers is None
        return super().run(chunks, requests)

    def _agree(self, is_captured: bool) -> bool:
        return self._exchange.least(int(is_captured), self._device) == 1

    @contextlib.contextmanager
    def _together(self, expected: Iterator[Collective]) -> Iterator[None]:
        """Take part in all expected collectives, whatever fails."""
        self._exchange.begin()
        try:
            yield
        except Exception:
            self._exchange.complete(list(expected), self._device)
            raise

    def _collectives(self, num_logits: int, **sizes: Any) -> Iterator[Collective]:
        num_slots = len(self.last_tokens) - 1
        yield from step_collectives(self._model, num_slots, num_logits=num_logits, **sizes)

    def _run_eager(
        self,
        decode: Sequence[Chunk],
        prefill: Sequence[Chunk],
        requests: Mapping[str, RequestInputs],
        *,
        needs_all: bool,
    ) -> Logits:
        chunks = [*decode, *prefill]
        num_tokens, num_logits = sum([chunk.num_tokens for chunk in chunks]), num_samples(chunks)
        has_adapters = any(requests[chunk.request_id].adapter_slot is not None for chunk in chunks)
        expected = self._collectives(
            num_logits,
            num_tokens=num_tokens,
            num_selected=num_tokens if needs_all else num_logits,
            in_chunks=self._device.type == "cpu" and not has_adapters,
        )
        with self._together(expected):
            return super()._run_eager(decode, prefill, requests, needs_all=needs_all)

    def _run_size(self, size: StepSize) -> Tensor:
        num_selected = size.num_tokens if size.num_chunks == 0 else size.num_samples
        expected = self._collectives(num_selected, num_tokens=size.num_tokens, num_selected=num_selected)
        with self._together(expected):
            return super()._run_size(size)

    def run_head(self, hidden_SD: Tensor) -> Tensor:
        """See `ForwardPass`."""
        with self._together(iter([_of_head(self._model, len(hidden_SD))])):
            return super().run_head(hidden_SD)

    def _embed(self, inputs: StepInputs[Tensor], images: ImageRows | None) -> Tensor:
        """[T, D]: the input of the first layer. Rank 0 samples, so that it has the last tokens."""
        self._exchange.broadcast(self.last_tokens)
        tokens = StepTokens(inputs.token_ids, inputs.last_token_slots, self.last_tokens)
        rows_TD: Tensor = self._model.language.embed_tokens(token_ids_of(tokens))  # of all ranks, by its hook
        return rows_TD if images is None else insert_features(rows_TD, images)

    def _head(self, hidden_SD: Input) -> Tensor:
        """[S, V]: logits, which the next step overwrites."""
        own_SV = self._model.head.forward_into(hidden_SD, self._own_logits[: len(hidden_SD)])
        return self._exchange.gather_into(own_SV, self._head_shard, self.logits[: len(hidden_SD)])
