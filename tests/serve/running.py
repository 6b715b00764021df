"""A server in a process of its own, and requests to it."""

import base64
import io
import json
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import cached_property

import httpx
from model.hugging_face import picture

TIMEOUT_S = 300
"""Long, because tests share a machine: only a failing test waits so long."""
ENGINE = ("engine.num_workers=1", "engine.num_pages=200")


class RunningServer:
    """`saccade serve` on a free port, ready when the block is entered."""

    def __init__(self, checkpoint, folder, *options, settings=(), waits=True, key=None):
        self.log_path = folder / "log"
        command = [sys.executable, "-m", "saccade", "serve", checkpoint, "--port", 0, "--device", "cpu"]
        command += ["--max-model-len", 800]
        for setting in (*ENGINE, *settings):
            command += ["--set", setting]
        self.command = [str(word) for word in (*command, *options)]
        self._waits, self.key = waits, key

    def __enter__(self):
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=subprocess.STDOUT)
        try:
            self._wait_until_listening()
            if self._waits:
                self.wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait_until_listening(self):
        deadline = time.monotonic() + TIMEOUT_S
        while not (found := re.search(r"^(http://\S+)", self.log, re.M)):
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)
        self.url = found[1]
        admin = re.search(r"^(http://\S+)  admin", self.log, re.M)
        self.admin_url = admin and admin[1]

    def __exit__(self, *_):
        if "http" in vars(self):
            self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(TIMEOUT_S)
        finally:
            with suppress(ProcessLookupError):
                self.process.kill()

    @property
    def log(self):
        return self.log_path.read_text(errors="replace")

    @cached_property
    def http(self):
        headers = {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=self.url, timeout=TIMEOUT_S, headers=headers)

    def wait_until_ready(self):
        deadline = time.monotonic() + TIMEOUT_S
        while self.http.get("/ready").status_code != 200:
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)

    def wait_for_log(self, text, count=1):
        """Until the log has the text so many times."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.log.count(text) < count:
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)

    def chat(self, content="hello", **fields):
        return self.http.post("/v1/chat/completions", json=chat_body(content, **fields))

    def chunks(self, content="hello", **fields):
        """All chunks of a streamed answer."""
        body = chat_body(content, stream=True, **fields)
        with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            return events(response.iter_lines())


def chat_body(content="hello", **fields):
    messages = fields.pop("messages", None) or [{"role": "user", "content": content}]
    return {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0, **fields}


def events(lines):
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(one) for one in data]


def data_url(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def image_part(width=56, height=84, seed=1):
    return {"type": "image_url", "image_url": {"url": data_url(picture(width, height, seed))}}
