"""Log-probabilities as OpenAI's API reports them: text and bytes of each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from saccade.engine.request import TokenLogprobs
from saccade.processor import Processor


def chat_logprobs(logprobs: Sequence[TokenLogprobs], processor: Processor) -> dict[str, Any]:
    """Of a chat completion or one of its chunks."""
    content = [
        _token(one.token_id, one.logprob, processor)
        | {"top_logprobs": [_token(token_id, logprob, processor) for token_id, logprob in one.top]}
        for one in logprobs
    ]
    return {"content": content, "refusal": None}


def _token(token_id: int, logprob: float, processor: Processor) -> dict[str, Any]:
    text = processor.tokenizer.decode([token_id], skip_special=False)
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}
