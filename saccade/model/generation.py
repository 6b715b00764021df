"""Reference generation, with which the engine is compared.

    embed the prompts -> prefill the KV cache -> sample one token each -> decode -> ...

All conversations step together until the last has ended. No paging, no continuous batching.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.errors import ConfigError, RequestError
from saccade.model.attention import CachedAttention, ContiguousKVCache
from saccade.model.vlm import VLM
from saccade.processor.inputs import ModelInputs


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters."""

    temperature: float = 0.0
    """0 is greedy; above 0 the logits are divided by it."""
    top_k: int | None = None
    """Sample from the k most probable tokens."""
    top_p: float | None = None
    """Sample from the most probable tokens of this total probability."""
    seed: int = 0
    """Same seed and prompt give the same tokens, whatever else is in the batch."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature is {self.temperature}; use 0 or a positive number")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed is {self.seed}; use 0 up to 2^63 - 1")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k is {self.top_k}; use 1 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; use a number above 0 and up to 1")


def generate(
    model: VLM,
    inputs: ModelInputs,
    *,
    max_new_tokens: int,
    eos_ids: Set[int] = frozenset(),
    sampling: Sampling | Sequence[Sampling] = Sampling(),  # noqa: B008  frozen
) -> list[list[int]]:
    """Generated tokens of each conversation, including the eos token. `sampling` for all, or one each."""
    outputs: list[list[int]] = [[] for _ in range(inputs.num_conversations)]
    for step in stream(model, inputs, max_new_tokens=max_new_tokens, eos_ids=eos_ids, sampling=sampling):
        for output, token_id in zip(outputs, step, strict=True):
            if token_id is not None:
                output.append(token_id)
    return outputs


@torch.inference_mode()
def stream(
    model: VLM,
    inputs: ModelInputs,
    *,
    max_new_tokens: int,
    eos_ids: Set[int] = frozenset(),
    sampling: Sampling | Sequence[Sampling] = Sampling(),  # noqa: B008  frozen
) -> Iterator[list[int | None]]:
    """Yield one token per conversation and step, None for those that have ended."""
    samplings = [sampling] * inputs.num_conversations if isinstance(sampling, Sampling) else list(sampling)
    assert len(samplings) == inputs.num_conversations, "one sampling for all conversations, or one for each"
    _check_length(model, inputs.max_seqlen + max_new_tokens)
    inputs = inputs.to(model.device)
    cache = _cache_for(model, inputs, capacity=inputs.max_seqlen + max_new_tokens)
    generators = [torch.Generator().manual_seed(one.seed) for one in samplings]
    last = inputs.cu_seqlens[1:].long() - 1
    next_position = inputs.positions[:, last].amax(0) + 1
    window = model.config.language.window
    attend = CachedAttention(cache, model.cos_sin(inputs.positions), inputs.cu_seqlens, window)
    x_TD, features = model.embed(inputs)
    hidden = model.language(x_TD, attend, features)[last]
    is_running = [True] * inputs.num_conversations
    one_each = torch.arange(inputs.num_conversations + 1, dtype=torch.int32, device=hidden.device)
    for step in range(max_new_tokens):
        logits_NV = model.head(hidden).float()
        token_ids = [
            _sample_token(logits_V, one, g) for logits_V, one, g in zip(logits_NV, samplings, generators, strict=True)
        ]
        yield [token_id if runs else None for token_id, runs in zip(token_ids, is_running, strict=True)]
        is_running = [runs and token_id not in eos_ids for token_id, runs in zip(token_ids, is_running, strict=True)]
        if not any(is_running) or step + 1 == max_new_tokens:
            return
        attend = CachedAttention(cache, model.cos_sin((next_position + step).expand(3, -1)), one_each, window)
        hidden = model.language(model.language.embed_tokens(torch.tensor(token_ids, device=hidden.device)), attend)


def _check_length(model: VLM, num_tokens: int) -> None:
    if num_tokens > (most := model.config.language.max_positions):
        raise RequestError(
            f"prompt and output may have {num_tokens} tokens, but the model supports {most}. Shorten the prompt, "
            "use smaller "
            "images or ask for fewer tokens"
        )


def _cache_for(model: VLM, inputs: ModelInputs, capacity: int) -> ContiguousKVCache:
    language = model.config.language
    return ContiguousKVCache(
        num_layers=language.num_layers,
        num_conversations=inputs.num_conversations,
        capacity=capacity,
        num_kv_heads=language.num_kv_heads,
        head_dim=language.head_dim,
        device=model.device,
        dtype=model.dtype,
    )


def _sample_token(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Sample one token with the conversation's own random generator."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    probabilities = _mask_logits(logits_V / sampling.temperature, sampling).softmax(-1).cpu()
    return int(torch.multinomial(probabilities, 1, generator=generator))


def _mask_logits(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """Set tokens outside top-k and top-p to -inf; the most probable token always stays."""
    if sampling.top_k is not None:
        kth = logits_V.topk(min(sampling.top_k, len(logits_V))).values[-1]
        logits_V = logits_V.masked_fill(logits_V < kth, float("-inf"))
    if sampling.top_p is not None:
        ordered, order = logits_V.sort(descending=True)
        probabilities = ordered.softmax(-1)
        is_excluded = probabilities.cumsum(-1) - probabilities >= sampling.top_p
        logits_V = logits_V.masked_fill(is_excluded.scatter(-1, order, is_excluded), float("-inf"))
    return logits_V
