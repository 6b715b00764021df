"""Take the pictures of the page in docs/images from a running server.

    saccade quickstart --no-serve && saccade serve quickstart/run/checkpoints/step-00001000 --model-name quickstart
    SCENES=quickstart/raw/held-out
    python -m bench.page_screenshots http://127.0.0.1:8000 $SCENES/000001.png $SCENES/000007.png $SCENES/000015.png \\
        --question 'What shape is purple?'

The answers are the server's own, except the one that shows Markdown, which no model of this size writes. Before the
status view is opened, a few clients ask at random times.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

QUESTIONS = ("What colour is the square?", "What colour is the bar?")
MARKDOWN = r"""The receipt has **two items**:

| item | price | number |
|:-----|------:|:------:|
| green tea | 2.50 | 2 |
| cake | 3.20 | 1 |

The total is $2 \cdot 2.50 + 3.20 = 8.20$. In general, with prices $p_i$ and numbers $n_i$:

$$\text{total} = (1 + t) \sum_{i=1}^{N} n_i \, p_i, \qquad t = \frac{\text{tax}}{\text{net}}$$

```python
total = (1 + tax / net) * sum(n * p for n, p in items)
```
"""
"""An answer that shows the forms that the page renders."""
VIEWS: dict[str, dict[str, Any]] = {
    "desktop": {"viewport": {"width": 1200, "height": 780}},
    "dark": {"viewport": {"width": 1200, "height": 780}, "color_scheme": "dark"},
    "phone": {
        "viewport": {"width": 390, "height": 844},
        "device_scale_factor": 2,
        "is_mobile": True,
        "has_touch": True,
    },
}


def main() -> None:
    """Write one picture per view."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("images", nargs="+", type=Path)
    parser.add_argument("--question", default=QUESTIONS[0], help="asked about the first image")
    names = [*VIEWS, "markdown", "status"]
    parser.add_argument("--views", nargs="*", default=names, choices=names)
    parser.add_argument("--output", type=Path, default=Path("docs/images"))
    parser.add_argument("--load-s", type=float, default=90.0, help="seconds of load before the status view is taken")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name in (view for view in VIEWS if view in args.views):
            page = browser.new_context(**VIEWS[name]).new_page()
            page.goto(args.url)
            talk(page, args.images, args.question)
            save(page, args.output / f"page-{name}.png")
        if "markdown" in args.views:
            page = browser.new_context(**VIEWS["desktop"]).new_page()
            show_markdown(page, args)
        if "status" in args.views:
            status(browser, args)
        browser.close()


def talk(page: Any, images: list[Path], question: str) -> None:
    """Ask about each image in a chat of its own, the first last, with greedy decoding.

    If there is space, the history and settings are open.
    """
    page.click("#open-settings")
    page.fill("#temperature", "0")
    is_wide = page.viewport_size["width"] > 800
    if not is_wide:
        page.click("#close-settings")
    asked = [*zip(images[1:], QUESTIONS, strict=False), (images[0], question)]
    for image, text in asked:
        page.click("#new-chat")
        ask_page(page, image, text)
    if is_wide:
        page.click("#open-history")
    page.mouse.move(5, 400)


def ask_page(page: Any, image: Path, question: str) -> None:
    """Attach an image, ask, and wait for the answer."""
    page.set_input_files("#files", image)
    page.wait_for_selector("#thumbs img")
    page.fill("#prompt", question)
    page.click("#send")
    page.wait_for_selector(".message.assistant:not(.busy)")


def show_markdown(page: Any, args: argparse.Namespace) -> None:
    """Show an answer with a table, maths and code."""
    chunks = [{"choices": [{"index": 0, "delta": {"content": MARKDOWN}}]}]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    page.goto(args.url)
    page.fill("#prompt", "What does the receipt say, and how is the total computed?")
    page.click("#send")
    page.wait_for_selector(".message.assistant:not(.busy)")
    page.locator(".figures").evaluate("node => node.remove()")
    page.evaluate("document.querySelector('#scroll').scrollTop = 0")
    save(page, args.output / "page-markdown.png")


def status(browser: Any, args: argparse.Namespace) -> None:
    """Show the status view, opened after some time under load."""
    ends_at = time.monotonic() + args.load_s
    clients = [threading.Thread(target=ask, args=(args.url, args.images, ends_at, seed)) for seed in range(6)]
    for client in clients:
        client.start()
    time.sleep(args.load_s - 3)
    page = browser.new_context(**VIEWS["desktop"] | {"viewport": {"width": 1200, "height": 1080}}).new_page()
    page.goto(f"{args.url}/#status")
    page.wait_for_selector("#tiles li")
    save(page, args.output / "page-status.png")
    for client in clients:
        client.join()


def ask(url: str, images: list[Path], ends_at: float, seed: int) -> None:
    """Ask as one client: a question, a pause, a question."""
    chance = random.Random(seed)
    with httpx.Client(base_url=url, timeout=60) as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        while time.monotonic() < ends_at:
            known = chance.random() < 0.6
            data = base64.b64encode(chance.choice(images).read_bytes() if known else new_image(chance)).decode()
            image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
            text = {"type": "text", "text": f"{chance.choice(QUESTIONS)} {chance.randrange(8)}"}
            body = {"model": model, "messages": [{"role": "user", "content": [text, image]}], "stream": True}
            http.post("/v1/chat/completions", json=body | {"max_tokens": chance.randrange(40, 200), "ignore_eos": True})
            time.sleep(chance.expovariate(2.0))


def new_image(chance: random.Random) -> bytes:
    """Return an image that no cache has."""
    file = io.BytesIO()
    Image.effect_noise((chance.randrange(56, 280), chance.randrange(56, 280)), chance.uniform(10, 90)).save(file, "PNG")
    return file.getvalue()


def save(page: Any, path: Path) -> None:
    """Save a picture with 256 colours, which are enough for a page."""
    page.wait_for_timeout(300)
    page.screenshot(path=path)
    Image.open(path).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}  {path.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
