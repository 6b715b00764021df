"""`/tokenize` and `/detokenize`: tokens of a text or a conversation, and back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import orjson
from fastapi import APIRouter, Request, Response

from saccade.serve.conversation import conversation_of
from saccade.serve.errors import bad_request
from saccade.serve.json_route import JsonRoute
from saccade.serve.models import Models, choose_model
from saccade.serve.openapi import GENERATION_ERRORS
from saccade.serve.prompt_input import Conversation, conversation_input
from saccade.serve.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizeRequest,
    TokenizeResponse,
    TokenizeTextRequest,
)
from saccade.serve.service import Service


def router(models: Models) -> APIRouter:
    """Return both endpoints."""
    routes = APIRouter(tags=["tokens"], route_class=JsonRoute)

    @routes.post("/tokenize", response_model=TokenizeResponse, responses=GENERATION_ERRORS, summary="Text to tokens")
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        service, _ = choose_model(models, body.model, request)
        tokens: Sequence[int]
        if isinstance(body, TokenizeTextRequest):
            tokens = await service.encode(request, body.prompt)
        else:  # images are preprocessed, since their size decides
            tokens = (await service.preprocess(request, conversation_input(_conversation(service, body)))).token_ids
        answer = {"count": len(tokens), "max_model_len": service.engine.max_length, "tokens": tokens}
        return Response(orjson.dumps(answer), media_type="application/json")

    @routes.post(
        "/detokenize", response_model=DetokenizeResponse, responses=GENERATION_ERRORS, summary="Tokens to text"
    )
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        service, _ = choose_model(models, body.model, request)
        tokenizer, vocab_size = service.processor.tokenizer, service.engine.vocab_size
        if len(body.tokens) > (max_length := service.engine.max_length):
            raise bad_request(
                f"tokens has {len(body.tokens)} entries; at most {max_length} are decoded at once", param="tokens"
            )
        if body.tokens and max(body.tokens) >= vocab_size:
            raise bad_request(
                f"token {max(body.tokens)} is not in the model's vocabulary of {vocab_size}", param="tokens"
            )
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special=False)
        return Response(orjson.dumps({"prompt": text}), media_type="application/json")

    return routes


def _conversation(service: Service, body: TokenizeChatRequest) -> Conversation:
    if len(body.messages) > service.front.config.max_messages:
        raise bad_request(f"messages has more than {service.front.config.max_messages} entries", param="messages")
    return conversation_of(body.messages, service.processor.template.names)
