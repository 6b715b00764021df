"""Log-probabilities as OpenAI's API reports them: text and bytes of each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from saccade.engine.request import TokenLogprobs
from saccade.processor import Processor

_MIN_LOGPROB = -9999.0
"""OpenAI's value for a token of probability 0; JSON has no infinity."""


def chat_logprobs(logprobs: Sequence[TokenLogprobs], processor: Processor) -> dict[str, Any]:
    """Log-probabilities of a chat completion or one of its chunks."""
    content = [
        _token(one.token_id, one.logprob, processor)
        | {"top_logprobs": [_token(token_id, logprob, processor) for token_id, logprob in one.top]}
        for one in logprobs
    ]
    return {"content": content, "refusal": None}


def _token(token_id: int, logprob: float, processor: Processor) -> dict[str, Any]:
    data = processor.tokenizer.token_bytes(token_id)
    return {
        "token": token_text(token_id, processor),
        "logprob": max(logprob, _MIN_LOGPROB),
        "bytes": None if data is None else list(data),
    }


def token_text(token_id: int, processor: Processor) -> str:
    """Text of a token. If it is part of a character, its bytes as OpenAI writes them."""
    data = processor.tokenizer.token_bytes(token_id)
    if data is None:
        return processor.tokenizer.decode([token_id], skip_special=False)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def prompt_logprobs(logprobs: Sequence[TokenLogprobs | None], processor: Processor) -> list[dict[str, Any] | None]:
    """Log-probabilities of a prompt, as vLLM reports them: by token id, the prompt's own token first."""

    def entry(one: TokenLogprobs) -> dict[str, Any]:
        return {
            str(token_id): {"logprob": max(logprob, _MIN_LOGPROB), "decoded_token": token_text(token_id, processor)}
            for token_id, logprob in [*one.top, (one.token_id, one.logprob)]
        }

    return [None if one is None else _first(str(one.token_id), entry(one)) for one in logprobs]


def _first(key: str, entries: dict[str, Any]) -> dict[str, Any]:
    return {key: entries[key]} | entries


def echoed_logprobs(
    token_ids: Sequence[int],
    prompt: Sequence[TokenLogprobs | None],
    logprobs: Sequence[TokenLogprobs],
    processor: Processor,
) -> dict[str, Any]:
    """Log-probabilities of a prompt and its completion, in one list. The first token has none."""
    first = token_text(token_ids[0], processor)
    rest = completion_logprobs(
        [one for one in (*prompt, *logprobs) if one is not None], processor=processor, offset=len(first)
    )
    nothing = {"tokens": first, "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
    return {name: [value, *rest[name]] for name, value in nothing.items()}


def completion_logprobs(logprobs: Sequence[TokenLogprobs], *, processor: Processor, offset: int) -> dict[str, Any]:
    """Log-probabilities of a text completion or a chunk of it, whose first token begins at character `offset`."""
    tokens = [token_text(one.token_id, processor) for one in logprobs]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [max(one.logprob, _MIN_LOGPROB) for one in logprobs],
        "top_logprobs": [
            {token_text(token_id, processor): max(logprob, _MIN_LOGPROB) for token_id, logprob in one.top}
            for one in logprobs
        ],
        "text_offset": offsets,
    }
