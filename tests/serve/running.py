"""Run a server in a process, and send it requests."""

import base64
import io
import json
import re
import time
from functools import cached_property

import httpx
from model.hugging_face import picture

from bench.server_process import ServerProcess

TIMEOUT_S = 300
"""Time limit of anything. It is long, because tests share a machine: only a failing test reaches it."""
ENGINE = ("engine.num_workers=1", "engine.num_pages=200")


class RunningServer(ServerProcess):
    """`saccade serve` on a free port, ready when the block is entered."""

    def __init__(self, checkpoint, folder, *options, settings=(), key=None):
        fixed = ["--device", "cpu", "--max-model-len", 800]
        fixed += [word for setting in (*ENGINE, *settings) for word in ("--set", setting)]
        super().__init__(checkpoint, *fixed, *options, log=folder / "log", ready_s=TIMEOUT_S)
        self.key = key

    def __exit__(self, *_):
        if "http" in vars(self):
            self.http.close()
        super().__exit__()

    @property
    def admin_url(self):
        found = re.search(r"^(http://\S+)  admin", self.log, re.M)
        return found and found[1]

    @cached_property
    def http(self):
        headers = {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=self.url, timeout=TIMEOUT_S, headers=headers)

    def wait_until_ready(self):
        deadline = time.monotonic() + TIMEOUT_S
        while not self.is_ready():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)

    def wait_for_log(self, text, count=1):
        """Wait until the log has the text `count` times."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.log.count(text) < count:
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)

    def chat(self, content="hello", **fields):
        return self.http.post("/v1/chat/completions", json=chat_body(content, **fields))

    def chunks(self, content="hello", **fields):
        """Return all chunks of a streamed answer."""
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
