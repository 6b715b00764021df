"""Texts that cannot fit into the context are refused while their body arrives, or as soon as they are counted."""

import asyncio
import base64
import itertools
import json
import random
import re
import socket

import pytest
from serve.running import TIMEOUT_S, chat_body, image_part

from saccade.engine import Engine, EngineConfig
from saccade.serve.body_limits import TextCounter
from saccade.serve.errors import ApiError
from saccade.serve.prompt_input import text_input


def test_bytes_outside_of_data_urls_are_counted_however_the_body_arrives():
    rng = random.Random(0)
    pieces = [b'"data:', b"data:", b'"', b"abc", b"\\", b'"dat', b",", b'"}', b"x" * 9]
    for _ in range(2000):
        body = b"".join(rng.choices(pieces, k=rng.randrange(12)))
        cuts = sorted(rng.randrange(len(body) + 1) for _ in range(rng.randrange(5)))
        counter = TextCounter()
        for start, end in itertools.pairwise([0, *cuts, len(body)]):
            num_bytes = counter.add(body[start:end])
        assert num_bytes == len(re.sub(rb'("data:)[^"]*("?)', rb"\1\2", body)), (body, cuts)


def test_a_text_that_cannot_fit_is_refused_before_all_of_it_has_arrived(server):
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as connection:  # a body may take 30 s
        connection.sendall(f"{head}content-length: 60000000\r\n\r\n".encode())
        connection.sendall(b'{"model": "tiny", "messages": [{"role": "user", "content": "' + b"x" * 2_000_000)
        answer = b""
        while b"}}" not in answer:
            answer += connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b'"code":"context_length_exceeded"' in answer


def test_images_are_no_text(server):
    part = image_part()
    kind, _, content = part["image_url"]["url"].partition(",")
    large = base64.b64encode(
        base64.b64decode(content) + bytes(3_000_000)
    ).decode()  # decoders ignore bytes after the image
    for url in (f"{kind},{large}", f"{kind},{large}".replace("/", r"\/")):  # the way PHP writes a URL
        body = json.dumps(chat_body([{"type": "image_url", "image_url": {"url": "URL"}}])).replace("URL", url)
        answer = server.http.post(
            "/v1/chat/completions", content=body, headers={"content-type": "application/json"}, timeout=TIMEOUT_S
        )
        assert answer.status_code == 200, answer.text


def test_a_long_text_is_refused_by_its_number_of_tokens_before_a_prompt_is_made_of_them(checkpoint, server):
    text = "a b " * 1000
    tokenized = server.http.post("/tokenize", json={"prompt": text}).json()
    assert tokenized["count"] == len(tokenized["tokens"]) > tokenized["max_model_len"]
    config, message = (
        EngineConfig(num_workers=0, max_length=800),
        rf"is 800 tokens; the prompt has {tokenized['count']}\.",
    )
    with (
        Engine.load(checkpoint, device="cpu", config=config) as engine,
        pytest.raises(ApiError, match=message) as refused,
    ):
        asyncio.run(text_input(engine, text).prepare(lambda num_bytes: None))
    assert (refused.value.status_code, refused.value.code) == (400, "context_length_exceeded")
