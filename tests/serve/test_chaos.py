"""Parts of a server are killed under load: every request ends once, everything comes back (`stress.chaos`)."""

import base64
import http.server
import threading
import time

import httpx
import pytest
from commands import is_alive
from model.hugging_face import picture
from serve.running import TIMEOUT_S, chat_body, data_url
from stress.chaos import OPTIONS, check_log, measure
from stress.tiny_server import pids_of

from bench.server_process import ServerProcess
from saccade.serve.load.loops import run_loop

PNG = data_url(picture(56, 84, 1))


class Picture(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        data = base64.b64decode(PNG.partition(",")[2])
        self.send_response(200 if self.path == "/a.png" else 302)
        self.send_header("content-length", str(len(data)))
        self.send_header("location", "/a.png")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Picture) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def server(checkpoint, site, tmp_path_factory):
    log = tmp_path_factory.mktemp("chaos") / "log"
    with ServerProcess(checkpoint, *OPTIONS, "--device", "cpu", "--allow-remote-media", site, log=log) as server:
        yield server


def ask(server, url):
    body = chat_body([{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it"}])
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=TIMEOUT_S)


def test_an_image_of_an_allowed_host_is_fetched_and_others_are_not(server, site):
    fetched, sent = ask(server, f"http://{site}/a.png"), ask(server, PNG)
    assert fetched.status_code == sent.status_code == 200
    assert fetched.json()["choices"] == sent.json()["choices"]
    for url, reason in (
        (f"http://{site}/b", "redirects"),
        ("http://127.0.0.1:9/a.png", "port not allowed"),
        ("http://localhost/", "not allowed"),
    ):
        refused = ask(server, url)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "remote_media_failed")
        assert reason in refused.json()["error"]["message"]


def test_killed_workers_and_a_killed_core_come_back_and_every_request_ends_once(server):
    found = run_loop(measure(server, requests=60, clients=6, kills={"media": 3, "core": 1}, seed=1))
    assert found["problems"] == []
    assert found["requests"] >= 60
    assert found["endings"].get("done", 0) >= 20
    assert (found["media_kills"], len(found["core_restarts_s"])) == (3, 1)


def test_a_killed_front_takes_all_its_processes_with_it(server):
    pids = pids_of(server)
    assert len(pids) >= 6
    server.kill()
    deadline = time.monotonic() + TIMEOUT_S
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, "a process outlives the front"
        time.sleep(0.02)


def test_a_request_that_is_logged_twice_or_never_is_found():
    assert check_log("id req-a  x\nid req-b  x", ["req-a", "req-b"]) == []
    assert check_log("id req-a  x\nid req-a  x", ["req-b"]) == [
        "1 requests are in the log twice",
        "1 requests are not in the log",
    ]
