"""`/tokenize` and `/detokenize`: tokens of a text or a conversation, and back."""

from __future__ import annotations

import asyncio

import orjson
from fastapi import APIRouter, Request, Response

from saccade.errors import RequestError
from saccade.serve.conversation import conversation_of, prompt_input
from saccade.serve.errors import ApiError, bad_request
from saccade.serve.json_route import JsonRoute
from saccade.serve.openapi import GENERATION_ERRORS
from saccade.serve.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizeResponse,
    TokenizeTextRequest,
)
from saccade.serve.service import Service, encode_text


def router(service: Service) -> APIRouter:
    """Both endpoints."""
    routes = APIRouter(tags=["tokens"], route_class=JsonRoute)

    @routes.post("/tokenize", response_model=TokenizeResponse, responses=GENERATION_ERRORS, summary="Text to tokens")
    async def tokenize(body: TokenizeTextRequest | TokenizeChatRequest, request: Request) -> Response:
        if body.model is not None:
            service.check_model(body.model)
        if isinstance(body, TokenizeTextRequest):
            tokens = await asyncio.to_thread(encode_text, service, body.prompt)
        else:
            tokens = await _chat_tokens(service, body, request)
        answer = {"count": len(tokens), "max_model_len": service.supervisor.engine.max_length, "tokens": tokens}
        return Response(orjson.dumps(answer), media_type="application/json")

    @routes.post(
        "/detokenize", response_model=DetokenizeResponse, responses=GENERATION_ERRORS, summary="Tokens to text"
    )
    async def detokenize(body: DetokenizeRequest) -> Response:
        if body.model is not None:
            service.check_model(body.model)
        tokenizer, vocab_size = service.processor.tokenizer, service.supervisor.engine.vocab_size
        if body.tokens and max(body.tokens) >= vocab_size:
            raise bad_request(
                f"token {max(body.tokens)} is not in the model's vocabulary of {vocab_size}", param="tokens"
            )
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special=False)
        return Response(orjson.dumps({"prompt": text}), media_type="application/json")

    return routes


async def _chat_tokens(service: Service, body: TokenizeChatRequest, request: Request) -> list[int]:
    """Tokens of a conversation; its images are preprocessed, since their size decides."""
    prompt = prompt_input(conversation_of(body.messages))
    salt = b"" if request.state.key is None else request.state.key.salt
    try:
        async with asyncio.timeout(service.config.queue_timeout_s):
            ready = await asyncio.wrap_future(prompt.preprocess(service.supervisor.engine, salt))
    except RequestError as error:
        raise bad_request(str(error)) from error
    except TimeoutError as error:
        raise ApiError(504, "the conversation was not tokenized in time", code="timeout") from error
    return ready.token_ids
