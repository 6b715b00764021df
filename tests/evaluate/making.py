"""Evaluation data in every format, a model that looks at colours, and an OpenAI-compatible server around a model."""

import base64
import io
import json
import math
import threading
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from PIL import Image

from saccade.data.sample import Sample
from saccade.data.shards import ShardWriter
from saccade.evaluate.model import Answer, Likelihood

COLOURS = {"red": (220, 30, 30), "green": (30, 180, 40), "blue": (30, 60, 220), "black": (10, 10, 10)}


def picture(colour: str, number: int = 0) -> bytes:
    """A plain image; the number changes it a little, so that every file is another one."""
    red, green, blue = COLOURS[colour]
    image = Image.new("RGB", (40, 30), (red, green, blue + number % 20))
    image.putpixel((number % 40, number % 30), (255, 255, 255))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def caption(colour: str) -> str:
    return f"a {colour} wall in the evening"


def write_shards(folder, count=12, questions=True):
    """Samples whose colour has to be named; some are also asked whether it is red."""
    with ShardWriter(folder, max_samples=8) as writer:
        for number in range(count):
            colour = list(COLOURS)[number % 4]
            if questions:
                asked = [{"question": "What colour is it?", "answer": colour, "kind": "colour"}]
                if number % 4 == 0 or number % 8 == 1:
                    answer = "yes" if colour == "red" else "no"
                    asked.append({"question": "Is it red?", "answer": answer, "kind": "yes_no"})
                fields = {"questions": asked}
            else:
                fields = {"captions": [caption(colour), f"the wall is painted {colour}"]}
            members = {"png": picture(colour, number), "json": json.dumps(fields).encode()}
            writer.write(Sample(key=f"{number:04d}", source="walls", members=members))
    return folder


class ColourModel:
    """Names the colour of the first image. What it is asked is counted; it fails on images in `refuses`."""

    can_score = True
    can_embed = True
    has_beam_search = True

    def __init__(self, name="colours", refuses=(), knows=tuple(COLOURS)):
        self.name, self.refuses, self.knows = name, refuses, knows
        self.asked, self.num_beams, self._lock = Counter(), set(), threading.Lock()

    def describe(self):
        return {"rules": self.name}

    def _see(self, conversation):
        content = conversation[-1]["content"]
        parts = [part for part in content if part["type"] == "image"] if isinstance(content, list) else []
        if not parts:
            return None
        with Image.open(io.BytesIO(parts[0]["image"])) as image:
            seen = image.convert("RGB").getpixel((39, 0))
        return min(COLOURS, key=lambda name: math.dist(COLOURS[name], seen))

    @staticmethod
    def _text(conversation):
        content = conversation[-1]["content"]
        return content if isinstance(content, str) else " ".join(p["text"] for p in content if p["type"] == "text")

    def generate(self, conversation, decoding):
        from saccade.errors import RequestError

        colour, text = self._see(conversation), self._text(conversation)
        with self._lock:
            self.asked[text] += 1
            self.num_beams.add(decoding.num_beams)
        if colour in self.refuses:
            raise RequestError(f"{colour} hurts")
        said = colour if colour in self.knows else "grey"
        if "Describe" in text:
            said = caption(said)
        elif "letter" in text:
            said = next((line[0] for line in text.splitlines() if line.endswith(f". {said}")), "A")
        elif text.startswith("Is it"):
            said = "yes" if said in text else "no"
        return Answer(text=said, num_prompt_tokens=20, num_tokens=len(said.split()), finish_reason="stop")

    def log_likelihoods(self, conversation, continuations):
        seen = self._see(conversation)
        return [
            Likelihood(-1.0 * len(text.split()) - (0.0 if seen in text.split() else 5.0), len(text.split()))
            for text in continuations
        ]

    def embed(self, conversation):
        colour = self._see(conversation) or next((c for c in COLOURS if c in self._text(conversation).split()), None)
        return [float(colour == name) + 0.1 for name in COLOURS]


def decoded(message):
    """A message of OpenAI's API with its images as bytes."""
    if isinstance(message["content"], str):
        return message
    parts = []
    for part in message["content"]:
        if part["type"] == "image_url":
            data = part["image_url"]["url"].partition(";base64,")[2]
            part = {"type": "image", "image": base64.b64decode(data)}
        parts.append(part)
    return message | {"content": parts}


@contextmanager
def served(model, *, responses=(), scores=True, delay_s=0.0, key=None):
    """A real HTTP server on loopback that asks a model; the first requests get `responses` (status, headers)
    instead.

    Yields its URL and the list of requests it got.
    """
    import time

    waiting, requests = list(responses), []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_GET(self):
            self._send(200, {"data": [{"id": "walls"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if key is not None and self.headers.get("Authorization") != f"Bearer {key}":
                self._send(401, {"error": {"message": "no such key"}})
                return
            with lock:
                requests.append(body)
                early = waiting.pop(0) if waiting else None
            time.sleep(delay_s)
            if early is not None:
                self._send(early[0], {"error": {"message": f"status {early[0]}"}}, early[1])
            else:
                self._answer(body)

        def _answer(self, body):
            from saccade.errors import RequestError
            from saccade.evaluate.model import Decoding

            messages = [decoded(message) for message in body["messages"]]
            if self.path.endswith("/embeddings"):
                self._send(200, {"data": [{"embedding": model.embed(messages)}]})
                return
            if "prompt_logprobs" in body and not scores:
                self._send(400, {"error": {"message": "prompt_logprobs is not served"}})
                return
            decoding = Decoding(max_tokens=body["max_tokens"])
            if "prompt_logprobs" in body:
                [scored] = model.log_likelihoods(messages[:-1], [messages[-1]["content"]])
                tokens = [{"7": {"logprob": scored.logprob / scored.num_tokens}}] * scored.num_tokens
                self._send(
                    200, {"prompt_logprobs": [None] * 20 + tokens, "choices": [], "usage": {"prompt_tokens": 20}}
                )
                return
            try:
                answer = model.generate(messages, decoding)
            except RequestError as error:
                self._send(400, {"error": {"message": str(error)}})
                return
            choice = {"message": {"role": "assistant", "content": answer.text}, "finish_reason": answer.finish_reason}
            usage = {"prompt_tokens": answer.num_prompt_tokens, "completion_tokens": answer.num_tokens}
            self._send(200, {"choices": [choice], "usage": usage})

        def _send(self, status, content, headers=()):
            data = json.dumps(content).encode()
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
