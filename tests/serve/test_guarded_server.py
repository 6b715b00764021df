"""A server with keys, tight limits and admin routes: who may ask, what is refused, and what happens when things die."""

import contextlib
import json
import os
import signal
import socket
import threading
import time

import httpx
import pytest
from serve.running import TIMEOUT_S, RunningServer, chat_body, events

from saccade.serve.keys import create_key

SETTINGS = [
    "serve.max_body_bytes=100000",
    "serve.max_open_body_bytes=300000",
    "serve.max_header_bytes=8192",
    "serve.header_timeout_s=1.0",
    "serve.body_timeout_s=1.0",
    "serve.write_timeout_s=1.0",
    "serve.max_unsent_tokens=200",
    "serve.max_completions=4",
    "serve.cors_origins=['https://app.example']",
    "serve.allowed_hosts=['127.0.0.1', 'ai.example']",
    "engine.max_requests=2",
    "engine.max_draft_tokens=0",  # a step gives one token: long outputs take long
]
LONG = {"max_tokens": 300, "ignore_eos": True}
ENDLESS = {"max_tokens": 700, "ignore_eos": True}
"""Fields of requests that are ended before they are complete, however slow the test is."""


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    made = {"path": path, "alice": create_key(path, name="alice")}
    made["bob"] = create_key(path, name="bob")
    made["slow"] = create_key(path, name="slow", requests_per_minute=2)
    made["poor"] = create_key(path, name="poor", tokens_per_minute=300)
    made["admin"] = create_key(path, name="root", scope="admin")
    return made


@pytest.fixture(scope="module")
def guarded(checkpoint, tmp_path_factory, keys):
    options = ["--api-keys", keys["path"], "--admin-port", 0, "--max-queued", 2, "--json-logs"]
    folder = tmp_path_factory.mktemp("guarded")
    with RunningServer(checkpoint, folder, *options, settings=SETTINGS, key=keys["alice"]) as running:
        yield running


@pytest.fixture
def admin(guarded, keys):
    headers = {"authorization": f"Bearer {keys['admin']}"}
    with httpx.Client(base_url=guarded.admin_url, headers=headers, timeout=TIMEOUT_S) as client:
        yield client


def statistics(admin):
    return admin.get("/admin/status").json()["statistics"]


def num_open(admin):
    return admin.get("/admin/status").json()["admission"]["num_open"]


def wait_until(condition, what):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def as_key(guarded, key, **fields):
    headers = {"authorization": f"Bearer {key}"}
    return guarded.http.post("/v1/chat/completions", json=chat_body(**fields), headers=headers)


def code_of(response):
    return response.status_code, response.json()["error"]["code"]


# ------------------------------------------------------------------ who may ask


def test_every_path_needs_a_key_unless_it_is_listed(guarded, keys):
    with httpx.Client(base_url=guarded.url) as anonymous:
        assert anonymous.get("/health").status_code == anonymous.get("/ready").status_code == 200
        for path in (
            "/v1/models",
            "/v1/chat/completions",
            "/tokenize",
            "/metrics",
            "/metrics/history",
            "/nothing",
            "/docs",
            "/admin/status",
        ):
            assert code_of(anonymous.get(path)) == (401, "invalid_api_key"), path
        for secret in ("x", "nonsense", keys["alice"] + "x", keys["admin"], "é" * 40):
            found = anonymous.get("/v1/models", headers={"authorization": f"Bearer {secret}".encode()})
            assert code_of(found) == (401, "invalid_api_key")
        assert found.headers["www-authenticate"] == "Bearer"
    assert guarded.http.get("/v1/models").status_code == 200
    assert code_of(guarded.http.get("/nothing")) == (404, "not_found")
    assert code_of(guarded.http.get("/v1/chat/completions")) == (405, "method_not_allowed")


def test_a_revoked_key_stops_working_while_the_server_runs(guarded, keys, command):
    secret = command("keys", "create", keys["path"], "--name", "leaving").out.strip()
    wait_until(lambda: as_key(guarded, secret, max_tokens=1).status_code == 200, "a new key does not work")
    assert command("keys", "revoke", keys["path"], "leaving").status == 0
    wait_until(lambda: as_key(guarded, secret, max_tokens=1).status_code == 401, "a revoked key works")
    assert as_key(guarded, keys["alice"], max_tokens=1).status_code == 200


def test_admin_routes_have_a_port_and_a_key_of_their_own(guarded, admin, keys):
    assert code_of(httpx.get(f"{guarded.admin_url}/admin/status")) == (401, "invalid_api_key")
    alice = {"authorization": f"Bearer {keys['alice']}"}
    assert code_of(httpx.get(f"{guarded.admin_url}/admin/status", headers=alice)) == (401, "invalid_api_key")
    assert code_of(guarded.http.get("/admin/status")) == (404, "not_found")
    assert admin.get("/admin/status").json()["status"] == "ready"
    assert admin.post("/admin/log-level", json={"level": "info"}).json() == {"status": "ready"}
    assert code_of(admin.post("/admin/log-level", json={"level": "loud"})) == (400, "invalid_value")
    assert admin.post("/admin/profile", json={"seconds": 0.1}).json()["traceEvents"]
    assert admin.post("/admin/drain").json() == {"status": "draining"}
    assert code_of(guarded.chat()) == (503, "draining")
    assert admin.post("/admin/resume").json() == {"status": "ready"}
    assert guarded.chat().status_code == 200


def test_tenants_do_not_share_caches_and_a_flush_empties_them(guarded, admin, keys):
    question = "a question that is long enough to fill several pages of the cache"

    def cached(key, **fields):
        answer = as_key(guarded, key, content=question, **fields).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    admin.post("/admin/flush-caches")
    assert not cached(keys["alice"])
    assert cached(keys["alice"])
    assert not cached(keys["bob"])
    assert not cached(keys["alice"], cache_salt="mine")
    assert cached(keys["alice"], cache_salt="mine")
    assert admin.post("/admin/flush-caches").status_code == 200
    assert not cached(keys["alice"])


def test_requests_and_tokens_of_a_key_are_limited(guarded, keys):
    found = [as_key(guarded, keys["slow"], max_tokens=1) for _ in range(3)]
    assert [one.status_code for one in found] == [200, 200, 429]
    assert code_of(found[2]) == (429, "rate_limit_exceeded")
    assert 1 <= int(found[2].headers["retry-after"]) <= 30
    found = [as_key(guarded, keys["poor"], content="x" * 200, max_tokens=8) for _ in range(3)]
    assert [one.status_code for one in found] == [200, 429, 429]
    assert int(found[1].headers["retry-after"]) > 1


def test_a_deleted_key_is_refused_and_a_new_one_works_without_a_restart(guarded, keys):
    carol = create_key(keys["path"], name="carol")
    wait_until(lambda: as_key(guarded, carol, max_tokens=1).status_code == 200, "the new key is not known")
    entries = json.loads(keys["path"].read_text())["keys"]
    keys["path"].write_text(json.dumps({"keys": [entry for entry in entries if entry["name"] != "carol"]}))
    wait_until(lambda: as_key(guarded, carol, max_tokens=1).status_code == 401, "the deleted key still works")
    keys["path"].write_text("{")

    def is_read():
        assert as_key(guarded, keys["alice"], max_tokens=1).status_code == 200
        return "the keys stay as they were" in guarded.log

    wait_until(is_read, "the broken file is not read")
    assert as_key(guarded, keys["alice"], max_tokens=1).status_code == 200
    keys["path"].write_text(json.dumps({"keys": entries}))


def test_browsers_of_other_origins_are_not_let_in_and_headers_are_safe(guarded):
    preflight = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,x-stainless-os",
    }
    allowed = guarded.http.options("/v1/models", headers={"origin": "https://app.example", **preflight})
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (204, "https://app.example")
    assert "x-stainless-os" in allowed.headers["access-control-allow-headers"]
    refused = guarded.http.options("/v1/models", headers={"origin": "https://evil.example", **preflight})
    assert refused.status_code == 405
    assert not [name for name in refused.headers if name.startswith("access-control")]
    found = guarded.http.get("/v1/models")
    assert found.headers["x-content-type-options"] == "nosniff"
    assert found.headers["x-request-id"].startswith("req-")
    assert "server" not in found.headers
    assert code_of(guarded.http.get("/v1/models", headers={"host": "evil.example:80"})) == (421, "unknown_host")
    assert guarded.http.get("/v1/models", headers={"host": "ai.example:80"}).status_code == 200
    body = json.dumps(chat_body()).encode()
    plain = guarded.http.post("/v1/chat/completions", content=body, headers={"content-type": "text/plain"})
    assert code_of(plain) == (415, "unsupported_media_type")


def test_head_is_answered_as_get_without_the_body(guarded):
    for path in (
        "/health",
        "/ready",
        "/",
        "/openapi.json",
        "/metrics",
        "/v1/models",
        "/v1/models/tiny",
        "/v1/models/no",
    ):
        whole, head = guarded.http.get(path), guarded.http.head(path)
        assert (head.status_code, head.content) == (whole.status_code, b""), path
        same = ("content-type", "cache-control", "content-security-policy")
        assert [head.headers.get(name) for name in same] == [whole.headers.get(name) for name in same], path
        if path != "/metrics":
            assert head.headers["content-length"] == str(len(whole.content)), path
    assert guarded.http.head("/v1/chat/completions").status_code == 405
    with httpx.Client(base_url=guarded.url) as anonymous:
        assert anonymous.head("/v1/models").status_code == 401
    counted = guarded.http.get("/metrics").text
    assert 'http_requests_total{handler="/v1/models/{name:path}",method="HEAD",status="404"} 1.0' in counted


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[1]", "invalid_type"),
        (b"null", "invalid_json"),
        (b"\xff", "invalid_json"),
        (b'{"model": "tiny", "temperature": NaN}', "invalid_json"),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "temperature": 1e999}', "invalid_json"),
        (b'{"a": ' * 200 + b"1" + b"}" * 200, "invalid_json"),
        (b"[" * 5000, "invalid_json"),
        (b'{"model": "tiny"}', "missing_required_parameter"),
        (b'{"model": "tiny", "messages": []}', "invalid_value"),
    ],
    ids=range(11),
)
def test_a_body_that_is_no_request_is_refused(guarded, body, code):
    response = guarded.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert code_of(response) == (400, code)
    assert response.json()["error"]["param"] in (None, "messages")


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"n": 5}, "n", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"temperature": "1"}, "temperature", "invalid_type"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a", "invalid_value"),
        ({"logit_bias": {"99999": 1}}, None, "invalid_value"),
        ({"functions": []}, "functions", "unsupported_parameter"),
        ({"store": "yes"}, "store", "invalid_type"),
        ({"metadata": {"a": 1}}, "metadata.a", "invalid_type"),
        ({"service_tier": "ultra"}, "service_tier", "invalid_value"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction", "unsupported_parameter"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "invalid_value"),
        ({"response_format": {"type": "xml"}}, "response_format", "invalid_value"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0]", "invalid_value"),
        ({"messages": [{"role": "assistant"}]}, "messages[0]", "invalid_value"),
        ({"tool_choice": "required"}, "tools", "invalid_value"),
        ({"add_generation_prompt": False}, "add_generation_prompt", "invalid_value"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_field_that_cannot_be_honoured_is_refused_by_name(guarded, fields, param, code):
    error = guarded.chat(**fields).json()["error"]
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1/a.png", "file:///etc/passwd", "/etc/passwd", "ftp://a/b", "tiny.png"]
)
def test_files_and_remote_urls_are_not_opened(guarded, url):
    found = guarded.chat([{"type": "image_url", "image_url": {"url": url}}])
    assert found.status_code == 400
    assert found.json()["error"]["param"] == "messages[0].content[0].image_url.url"


def test_no_library_text_reaches_a_client(guarded):
    broken = guarded.chat([{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}])
    regex = guarded.chat(structured_outputs={"regex": "(a"})
    schema = guarded.chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 5}}})
    for found in (broken, regex, schema):
        assert found.status_code == 400
        text = found.text.lower()
        assert not [
            word for word in ("traceback", "pil", "pydantic", "llguidance", "error(", "site-packages") if word in text
        ]


def test_messages_about_the_form_of_the_output_name_the_field_that_was_sent(guarded):
    bad = {"type": 5}
    deep = {"type": "object"}
    for _ in range(60):
        deep = {"properties": {"a": deep}}

    def error(path="/v1/chat/completions", **fields):
        body = {"model": "tiny", **fields}
        if path == "/v1/chat/completions":
            body["messages"] = [{"role": "user", "content": "hi"}]
        found = guarded.http.post(path, json=body)
        assert found.status_code == 400, found.text
        return found.json()["error"]

    for schema in (bad, deep):
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        assert error(response_format=form)["message"].startswith("response_format.json_schema")
        assert error(structured_outputs={"json": schema})["message"].startswith("structured_outputs.json")
        answer = error(
            "/v1/responses", input="hi", text={"format": {"type": "json_schema", "name": "a", "schema": schema}}
        )
        assert answer["message"].startswith("text.format")
    assert error(structured_outputs={"regex": "(a"})["message"].startswith("structured_outputs.regex")
    assert error(structured_outputs={"regex": "a\\"})["param"] == "structured_outputs.regex"
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "string", "pattern": "a\\"}}}
    pattern = error(response_format=form)
    assert pattern["message"].startswith("response_format.json_schema: the pattern 'a\\\\' ends with a backslash")
    assert pattern["param"] == "response_format.json_schema"
    both = error(structured_outputs={"regex": "a", "json": bad})
    assert both["message"].startswith("structured_outputs sets json and regex; set exactly one of json, json_object")
    assert both["param"] == "structured_outputs"


def raw(guarded, *parts):
    """Return all that the server answers to these bytes until it closes the connection."""
    host, port = guarded.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(0.1)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    return answer


def head(guarded, length):
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {guarded.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def test_slow_and_large_senders_are_cut_off(guarded):
    assert b"408 Request Timeout" in raw(guarded, b"GET / HTTP/1.1\r\nHost: 127")
    assert b"body_timeout" in raw(guarded, head(guarded, 50) + b'{"model"')
    assert raw(guarded, b"") == b"" or b"408" in raw(guarded, b"")
    assert b"431 Request Header" in raw(guarded, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"a" * 20_000)
    assert b"body_too_large" in raw(guarded, head(guarded, 10**7) + b"Connection: close\r\n")[:600]
    chunked = guarded.http.post(
        "/v1/chat/completions",
        content=(b" " * 10_000 for _ in range(20)),
        headers={"content-type": "application/json"},
    )
    assert code_of(chunked) == (413, "body_too_large")


@pytest.mark.parametrize(
    "stray",
    [
        pytest.param(b"G", marks=pytest.mark.slow),
        pytest.param(b"\0", marks=pytest.mark.slow),
        b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000,
    ],
)
def test_bytes_sent_during_a_response_do_not_damage_it(guarded, stray):
    fields = {"stream": True, "n": 2, "logprobs": True, "top_logprobs": 20, **ENDLESS}
    body = json.dumps(chat_body(**fields)).encode()  # takes longer than header_timeout_s
    answer = raw(guarded, head(guarded, len(body)) + body, stray)
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), answer[-300:]


def test_large_bodies_are_bounded_together_and_small_ones_are_not_refused_for_them(guarded):
    host, port = guarded.url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as opened:
        for _ in range(4):  # 320,000 of 300,000 bytes
            connection = opened.enter_context(socket.create_connection((host, int(port)), timeout=TIMEOUT_S))
            connection.sendall(head(guarded, 90_000) + b" " * 80_000)
        found = b"".join(raw(guarded, head(guarded, 90_000) + b" " * 80_000) for _ in range(2))
        assert found.count(b"503 Service Unavailable") + found.count(b"body_timeout") == 2
        assert b'"code":"overloaded"' in found
        assert guarded.chat(max_tokens=1).status_code == 200
    assert guarded.chat("x" * 40_000, max_tokens=1).status_code in (200, 400)


def test_a_reader_that_does_not_read_is_cancelled(guarded, admin):
    before = statistics(admin)["finished"].get("cancelled", 0)
    body = json.dumps(
        chat_body(stream=True, logprobs=True, top_logprobs=20, n=4, max_tokens=700, ignore_eos=True)
    ).encode()
    host, port = guarded.url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(head(guarded, len(body)) + body)
        wait_until(lambda: statistics(admin)["finished"].get("cancelled", 0) > before, "it runs on")
        wait_until(lambda: statistics(admin)["num_running"] == 0, "it runs on")


# ------------------------------------------------------------------ many, and going away


def test_a_client_that_leaves_frees_its_pages_at_once(guarded, admin):
    wait_until(lambda: statistics(admin)["num_running"] == 0, "an earlier request runs on")
    before = statistics(admin)
    for number, fields in enumerate(({"stream": True}, {"stream": False})):
        body = json.dumps(chat_body(**ENDLESS, **fields)).encode()
        host, port = guarded.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head(guarded, len(body)) + body)
            wait_until(lambda: statistics(admin)["num_running"] == 1, "it does not start")
        wait_until(lambda: statistics(admin)["num_running"] == 0, "it runs on")
        after = statistics(admin)
        assert after["finished"]["cancelled"] == before["finished"].get("cancelled", 0) + number + 1
        assert after["num_free_pages"] == before["num_free_pages"]
    # the core has freed the pages; its report may still be on the way to the front
    wait_until(lambda: num_open(admin) == 0, "it stays admitted")


def test_a_full_server_says_429_at_once_and_when_to_come_back(guarded, admin):
    answers = []
    wait_until(lambda: num_open(admin) == 0, "an earlier request is open")
    threads = [threading.Thread(target=lambda: answers.append(guarded.chat(**LONG))) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: num_open(admin) == 4, "they are not admitted")
    for _ in range(3):
        refused = guarded.chat()
        assert code_of(refused) == (429, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
    assert not answers, "a refusal comes before any of those that run is done"
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [200] * 4
    assert guarded.chat().status_code == 200


def test_one_log_line_per_request_has_its_numbers_and_never_its_content(guarded):
    answer = guarded.chat("a very secret question", user="user-7")
    request_id = answer.headers["x-request-id"]
    guarded.wait_for_log(request_id)
    [line] = [json.loads(line) for line in guarded.log.splitlines() if request_id in line]
    assert (line["status"], line["key"], line["user"], line["out"]) == (200, "alice", "user-7", 8)
    assert (line["in"], line["ending"], line["route"]) == (
        answer.json()["usage"]["prompt_tokens"],
        "length",
        "/v1/chat/completions",
    )
    assert line["ttft_ms"] > 0
    assert line["total_ms"] >= line["ttft_ms"]
    assert "secret" not in guarded.log
    assert guarded.key not in guarded.log


# ------------------------------------------------------------------ death


def test_when_the_core_is_killed_open_requests_end_with_one_typed_error_and_the_server_is_ready_again(guarded, admin):
    pid = admin.get("/admin/status").json()["core_pid"]
    whole = []
    thread = threading.Thread(target=lambda: whole.append(guarded.chat(**ENDLESS)))
    with guarded.http.stream("POST", "/v1/chat/completions", json=chat_body(stream=True, **ENDLESS)) as response:
        lines = response.iter_lines()
        assert "chat.completion.chunk" in next(lines)
        thread.start()
        wait_until(lambda: statistics(admin)["num_running"] == 2, "the second does not run")
        os.kill(pid, signal.SIGKILL)
        *_, last = events(lines)
    thread.join()
    assert last["error"]["code"] == "engine_stopped"
    assert code_of(whole[0]) == (503, "engine_stopped")
    refused = guarded.http.get("/ready")
    assert (refused.status_code, refused.json()["status"]) == (503, "restarting")
    assert code_of(guarded.chat()) == (503, "engine_restarting")
    guarded.wait_until_ready()
    assert guarded.chat().status_code == 200
    status = admin.get("/admin/status").json()
    assert (status["num_restarts"], status["core_pid"] != pid) == (1, True)
    wait_until(lambda: num_open(admin) == 0, "a request stays admitted")


def test_a_terminated_server_finishes_what_runs_and_refuses_the_rest(guarded, admin):
    with guarded.http.stream("POST", "/v1/chat/completions", json=chat_body(stream=True, **ENDLESS)) as response:
        lines = response.iter_lines()
        next(lines)
        for number in (
            signal.SIGINT,
            signal.SIGTERM,
        ):  # terminals, Slurm and `timeout` signal every process of the group
            os.kill(admin.get("/admin/status").json()["core_pid"], number)
        guarded.process.send_signal(signal.SIGTERM)
        wait_until(lambda: guarded.http.get("/ready").status_code == 503, "it is still ready")
        assert code_of(guarded.chat()) == (503, "draining")
        *_, last = events(lines)
    assert last["choices"][0]["finish_reason"] == "length"
    assert guarded.process.wait(TIMEOUT_S) == 0
