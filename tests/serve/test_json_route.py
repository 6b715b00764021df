"""Bodies are bounded by their number of values, not by what their texts contain."""

import asyncio
import json
import random

import httpx
import pytest
from fastapi import APIRouter, FastAPI

from saccade.serve import json_route
from saccade.serve.body_limits import BodyLimits
from saccade.serve.errors import ApiError
from saccade.serve.json_route import count_values, parse_json

LIMIT = json_route._MAX_VALUES


def plain_count(body):
    """Commas and opening brackets outside strings, one character after the other."""
    count, in_string, is_escaped = 0, False, False
    for character in body.decode("latin-1"):
        if in_string:
            in_string, is_escaped = is_escaped or character != '"', character == "\\" and not is_escaped
        elif character == '"':
            in_string = True
        else:
            count += character in ",[{"
    return count


def random_value(rng, depth=0):
    kind = rng.randrange(6 if depth < 4 else 3)
    if kind < 3:
        return "".join(rng.choices(['"', "\\", ",", "[", "{", "a", "é", "\n", "\\\\"], k=rng.randrange(12)))
    if kind == 3:
        return rng.choice([None, True, 1.5, -3])
    children = [random_value(rng, depth + 1) for _ in range(rng.randrange(5))]
    return children if kind == 4 else {random_value(rng, 9) + str(n): child for n, child in enumerate(children)}


@pytest.mark.parametrize("step", [1, 2, 3, 7, 64, 2**20])
def test_structural_characters_are_counted_across_all_borders(step):
    rng = random.Random(step)
    for _ in range(300):
        body = json.dumps(random_value(rng), ensure_ascii=rng.random() < 0.5).encode()
        assert count_values(body, step) == plain_count(body), body
    for body in (b'"', b'"\\', b'"\\"', b'"\\\\",[', b'"\\\\\\",[', b"", b'",",', b'["a\\\\\\\\",{'):
        assert count_values(body, step) == plain_count(body), body


def parse(body):
    return asyncio.run(parse_json(body, max_depth=16))


def test_a_long_text_with_commas_is_one_value():
    assert parse(b'{"text": "' + b"," * (2 * LIMIT) + b'"}') == {"text": "," * (2 * LIMIT)}
    quoted = 'a "quoted", {list} of [things], ' * (LIMIT // 4)
    assert parse(json.dumps({"text": quoted}).encode()) == {"text": quoted}
    for first in (b"", b'"\\"",', b'"\\\\",'):
        with pytest.raises(ApiError, match=f"more than {LIMIT} values"):
            parse(b"[" + first + b"0," * LIMIT + b"0]")


def test_the_event_loop_runs_while_the_values_of_a_large_body_are_counted():
    body = b'{"text": "' + b'a,\\"' * 2**23 + b'"}'

    async def count_turns():
        counting = asyncio.create_task(json_route.check_num_values(body))
        turns = 0
        while not counting.done():
            await asyncio.sleep(0)
            turns += 1
        await counting
        return turns

    assert asyncio.run(count_turns()) > 10


def test_between_large_bodies_that_arrive_together_others_are_served():
    routes, app, order = APIRouter(route_class=json_route.JsonRoute), FastAPI(), []

    @routes.post("/")
    async def serve(body: list[str]) -> None:
        order.append(len(body[0]))

    app.include_router(routes)
    limits = BodyLimits(max_depth=8, max_length=None)

    async def send_all():
        async def with_state(scope, receive, send):  # as the server's gate does
            await limited({**scope, "state": {}}, receive, send)

        limited = json_route.with_body_limits(app, lambda path: limits)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(with_state), base_url="http://a") as client:
            await asyncio.gather(*[client.post("/", json=["x" * size]) for size in (*[100_000] * 16, 1)])

    asyncio.run(send_all())
    assert len(order) == 17
    assert 1 in order[:4], "the small one came last"
