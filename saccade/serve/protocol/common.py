"""What several endpoints share: the base model, sampling fields, usage, errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from saccade.engine.sampling_params import MAX_BIASED_TOKENS, MAX_COMPLETIONS, MAX_STOP_IDS, MAX_STOP_LENGTH, MAX_STOPS

_T = TypeVar("_T")
Items = Annotated[list[_T], Field(fail_fast=True)]
"""A list in a request. Validation stops at its first bad entry: millions of errors would take minutes."""
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenIdText = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
JsonObject = dict[str, Any]


def _check_false(value: bool) -> bool:
    if value:
        raise ValueError("only false")
    return value


OnlyFalse = Annotated[bool, AfterValidator(_check_false), WithJsonSchema({"type": "boolean", "const": False})]
"""A switch that cannot be on. (`Literal[False]` accepts 0.)"""


class Wire(BaseModel):
    """A JSON object of the API: no unknown fields, no conversion between types, no NaN or infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True)


class Earlier(Wire):
    """A part of an earlier turn, as a client sends it back.

    Fields beyond those of the API are given to the chat template if it reads them, else dropped.
    """

    model_config = ConfigDict(extra="allow")


class StreamOptions(Wire):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    """Send a last chunk with the usage."""
    continuous_usage_stats: bool | None = None
    """Send the usage so far with every chunk."""
    include_obfuscation: bool | None = None
    """No effect: chunks are not padded."""


class StructuredOutputs(Wire):
    """The form of the output. Set one field."""

    json_: JsonObject | str | None = Field(None, alias="json")
    """JSON that follows this schema."""
    json_object: bool | None = None
    """Any JSON object."""
    regex: str | None = None
    """Text that matches this regular expression as a whole."""
    choice: Items[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """Text of this grammar, in Lark's notation."""


class SamplingFields(Wire):
    """Sampling parameters of every endpoint that generates text."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """Sampling temperature; 0: greedy. Default 1."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample among the most likely tokens of this total probability. Default 1."""
    n: Annotated[int, Field(ge=1, le=MAX_COMPLETIONS)] | None = None
    """Completions of the prompt. Default 1."""
    stop: StopString | Annotated[Items[StopString], Field(max_length=MAX_STOPS)] | None = None
    """Texts that end the output; they are not part of it."""
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    """Seed of sampling: the same seed and prompt give the same output."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Subtracted from the logits of tokens in the output."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Subtracted from a token's logit for each time it occurs in the output."""
    logit_bias: Annotated[dict[TokenIdText, Bias], Field(max_length=MAX_BIASED_TOKENS)] | None = None
    """Added to the logits of these tokens."""
    stream: bool | None = None
    """Send the output as server-sent events while it is generated."""
    stream_options: StreamOptions | None = None
    """Options of a streamed answer; only with `stream`."""
    user: Annotated[str, Field(max_length=256)] | None = None
    """An identifier of the end user; it is written to the request log."""
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    """Priority; lower is scheduled earlier. Default 0."""
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    """Sample among the k most likely tokens; -1 or 0: all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Sample among tokens with at least this fraction of the probability of the most likely one."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    """Divides (or multiplies, if negative) the logits of tokens that occurred."""
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Output tokens before which nothing ends the output."""
    stop_token_ids: Annotated[Items[TokenId], Field(max_length=MAX_STOP_IDS)] | None = None
    """Tokens that end the output."""
    ignore_eos: bool | None = None
    """Continue after the model's end of turn."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Share cached prefixes and images only with requests of the same salt."""
    structured_outputs: StructuredOutputs | None = None
    """The form of the output."""


class NeutralFields(Wire):
    """Fields that are accepted since they change nothing in the answer."""

    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    """Labels of the request. `/v1/responses` returns them."""
    store: bool | None = None
    """No effect: nothing is stored."""
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    """No effect: there is one tier; see `priority`."""
    safety_identifier: Annotated[str, Field(max_length=256)] | None = None
    """No effect: an identifier of the end user; see `user`."""
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    """No effect: prefixes are cached without it; `cache_salt` separates tenants."""
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    """No effect: prefixes are cached as long as memory allows."""
    prompt_cache_options: JsonObject | None = None
    """No effect: prefixes are cached without it."""


UNSUPPORTED = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "the model has no audio output",
    "prediction": "predicted outputs are not implemented",
    "web_search_options": "the server does not search the web",
    "reasoning_effort": "the model has no reasoning levels",
    "verbosity": "ask for it in the prompt",
    "best_of": "use n, and choose among the answers",
    "suffix": "the model does not fill in the middle",
    "guided_json": "use structured_outputs.json or response_format",
    "guided_regex": "use structured_outputs.regex",
    "guided_choice": "use structured_outputs.choice",
    "guided_grammar": "use structured_outputs.grammar",
    "use_beam_search": "beam search is not implemented",
    "length_penalty": "beam search is not implemented",
    "chat_template": "clients cannot send a template; the operator can, with --chat-template",
    "chat_template_kwargs": "the chat template takes no arguments from clients",
    "mm_processor_kwargs": "images are processed as the checkpoint says; resize them before sending",
    "documents": "put them into the messages",
    "allowed_token_ids": "use logit_bias or structured_outputs",
    "bad_words": "use logit_bias",
    "lora": "adapters are not served",
    "truncate_prompt_tokens": "shorten the prompt before sending it",
}
"""Fields of OpenAI's and vLLM's API that are refused, with the reason."""


class PromptLogprob(Wire):
    """A token of the prompt, or a likely one in its place."""

    logprob: float
    """Log-probability of the token."""
    decoded_token: str
    """Text of the token."""


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Entries by token id, the prompt's own token first; null for the first token, which nothing precedes."""


class PromptTokensDetails(Wire):
    """Details of the prompt's tokens."""

    cached_tokens: int
    """Tokens found in the prefix cache."""


class Usage(Wire):
    """Tokens of a request."""

    prompt_tokens: int
    """Tokens of the prompt, images included."""
    completion_tokens: int
    """Tokens of all completions."""
    total_tokens: int
    """Sum of prompt and completion tokens."""
    prompt_tokens_details: PromptTokensDetails
    """Details of the prompt's tokens."""


class ErrorDetail(Wire):
    """Description of an error."""

    message: str
    """Message for people."""
    type: str
    """Class of the error, as OpenAI names it."""
    param: str | None
    """The field it is about."""
    code: str
    """Code for programs."""


class ErrorBody(Wire):
    """An error."""

    error: ErrorDetail
    """Description of an error."""
