"""`saccade bench serve URL`: load on a server, and the numbers other tools print."""

import asyncio
import json
from xml.etree import ElementTree

import pytest

from saccade.serve.load.client import Outcome, open_session, stream_chat
from saccade.serve.load.summary import Load, result_block, summarize
from saccade.serve.load.workload import Workload


def run(command, *words):
    ended = command("bench", "serve", *words)
    assert ended.status == 0, ended.err
    return ended


@pytest.mark.parametrize("images", ["unique", "repeated", "mixed", "none"])
def test_a_closed_loop_reports_what_it_served(command, server, images):
    words = ["--requests", 9, "--output", 5, "--words", 4, "--side", 56]
    ended = run(command, server.url, "--concurrency", 3, "--images", images, *words, "--json")
    [result] = json.loads(ended.out)
    assert (result["completed"], result["failed"], result["errors"]) == (9, 0, {})
    assert (result["max_concurrency"], result["max_concurrent_requests"]) == (3, 3)
    assert result["total_output_tokens"] == 45
    assert result["total_input_tokens"] > 9 * 4
    assert 0 < result["mean_ttft_ms"] < result["mean_e2el_ms"] <= result["p99_e2el_ms"] <= 1e3 * result["duration"]


def test_clients_in_two_processes_send_all_requests_once(command, server):
    words = ["--requests", 7, "--output", 2, "--words", 4, "--images", "none", "--concurrency", 3, "--processes", 2]
    [result] = json.loads(run(command, server.url, *words, "--json").out)
    assert (result["completed"], result["total_output_tokens"]) == (7, 14)


def test_an_open_loop_prints_blocks_and_draws_latency_over_load(command, server, tmp_path):
    plot = tmp_path / "load.svg"
    words = ["--seconds", 2, "--output", 3, "--words", 4, "--side", 56, "--plot", plot]
    ended = run(command, server.url, "--open-loop", 4, "--open-loop", 8, *words)
    assert ended.out.count("Serving Benchmark Result") == 2
    assert "Successful requests:                     16" in ended.out
    assert len(ElementTree.parse(plot).getroot().findall("{http://www.w3.org/2000/svg}polyline")) == 4


def test_the_block_has_the_names_other_tools_print():
    outcome = Outcome(1.0, 200, None, [1.5, 1.6, 1.8], 2.0, num_prompt_tokens=10, num_output_tokens=4)
    failed = Outcome(1.2, 429, "overloaded", ended_at=1.3)
    result = summarize([outcome, failed], 2.0, Load(rate=3.0))
    assert (result["completed"], result["failed"], result["errors"]) == (1, 1, {"overloaded": 1})
    assert result["max_concurrent_requests"] == 2
    assert result["mean_ttft_ms"] == pytest.approx(500)
    assert result["mean_tpot_ms"] == pytest.approx(100)
    assert result["median_itl_ms"] == pytest.approx(150)
    assert result["p99_e2el_ms"] == pytest.approx(1000)
    block = result_block(result)
    for name in (
        "Successful requests:", "Failed requests:", "Request rate configured (RPS):", "Benchmark duration (s):",
        "Total input tokens:", "Total generated tokens:", "Request throughput (req/s):",
        "Output token throughput (tok/s):", "Total token throughput (tok/s):", "Peak concurrent requests:",
        "Mean TTFT (ms):", "Median TPOT (ms):", "P99 ITL (ms):", "P99 E2EL (ms):", "Failed (overloaded):",
    ):  # fmt: skip
        assert name in block, name
    assert {len(line.rstrip()) <= 50 for line in block.splitlines()} == {True}


def test_unique_images_differ_and_repeated_ones_do_not():
    def images(kind):
        bodies = map(json.loads, Workload(num_requests=16, images=kind, side=28, num_words=2).bodies("m"))
        contents = [body["messages"][0]["content"] for body in bodies]
        return [
            next((part["image_url"]["url"] for part in content if "image_url" in part), None) for content in contents
        ]

    assert len(set(images("unique"))) == 16
    assert len(set(images("repeated"))) == 1
    mixed = images("mixed")
    assert mixed.count(None) == 2
    assert len({one for one in mixed if one}) < 14
    assert images("unique") == images("unique")


ANSWERS = {
    "http 500": b"HTTP/1.1 500 X\r\ncontent-length: 3\r\n\r\nbad",
    "overloaded": b'HTTP/1.1 429 X\r\ncontent-length: 34\r\n\r\n{"error": {"code": "overloaded"} }',
    "no ending": b'HTTP/1.1 200 X\r\nconnection: close\r\n\r\ndata: {"choices":[{"delta":{"content":"a"}}]}\n\n',
    "no output": b"HTTP/1.1 200 X\r\nconnection: close\r\n\r\ndata: [DONE]\n\n",
    "engine_stopped": b'HTTP/1.1 200 X\r\nconnection: close\r\n\r\ndata: {"error":{"code":"engine_stopped"}}\n\ndata: '
    b"[DONE]\n\n",
    "ClientPayloadError": b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\n5\r\ndata:\r\n",
    "ServerDisconnectedError": b"",
}


@pytest.mark.parametrize("error", ANSWERS)
def test_a_request_that_fails_is_counted_with_its_reason(error):
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(ANSWERS[error])
        writer.close()

    async def ask():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, open_session() as session:
            return await stream_chat(session, f"http://127.0.0.1:{port}", b"{}")

    outcome = asyncio.run(ask())
    assert outcome.error == error
    assert not outcome.is_success


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["http://127.0.0.1:9"], "no server with OpenAI's API answers there"),
        (["http://127.0.0.1:9", "--checkpoint", "x"], "--checkpoint is for the engine without a server"),
        (["http://127.0.0.1:9", "--open-loop", "-1"], "positive number of requests per second"),
        (["--concurrency", "2"], "--concurrency is for a server"),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_one_line(command, words, said):
    ended = command("bench", "serve", *words)
    assert ended.status == 2
    assert said in ended.err
