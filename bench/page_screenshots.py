"""Take the pictures of the page in docs/images from a running server.

    saccade quickstart --no-serve && saccade serve quickstart/run/checkpoints/step-00001000 --model-name quickstart
    python -m bench.page_screenshots http://127.0.0.1:8000 quickstart/held-out.png --question 'What shape is purple?'

`held-out.png` is a scene of the held-out set. The answers are the server's own. While the status view is photographed, a few clients ask at random times.
"""

from __future__ import annotations

import argparse
import base64
import io
import random
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

QUESTIONS = ("What shape is it?", "What colour is it?")
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
    parser.add_argument("--views", nargs="*", default=[*VIEWS, "status"], choices=[*VIEWS, "status"])
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
            talk(page, args.images[0], args.question)
            save(page, args.output / f"page-{name}.png")
        if "status" in args.views:
            status(browser, args)
        browser.close()


def talk(page: Any, image: Path, question: str) -> None:
    """Ask about an image with greedy decoding; where there is space for them, the settings stay open."""
    page.click("#open-settings")
    page.fill("#temperature", "0")
    if page.viewport_size["width"] < 800:
        page.click("#close-settings")
    page.set_input_files("#files", image)
    page.wait_for_selector("#thumbs img")
    page.fill("#prompt", question)
    page.click("#send")
    page.wait_for_selector(".message.assistant:not(.busy)")
    page.mouse.move(5, 400)


def status(browser: Any, args: argparse.Namespace) -> None:
    """The status view after some time under load."""
    page = browser.new_context(**VIEWS["desktop"] | {"viewport": {"width": 1200, "height": 1080}}).new_page()
    page.goto(f"{args.url}/#status")
    ends_at = time.monotonic() + args.load_s
    clients = [threading.Thread(target=ask, args=(args.url, args.images, ends_at, seed)) for seed in range(6)]
    for client in clients:
        client.start()
    page.wait_for_timeout(args.load_s * 1000 - 1000)
    save(page, args.output / "page-status.png")
    for client in clients:
        client.join()


def ask(url: str, images: list[Path], ends_at: float, seed: int) -> None:
    """One client: a question, a pause, a question."""
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
    """An image that no cache has."""
    file = io.BytesIO()
    Image.effect_noise((chance.randrange(56, 280), chance.randrange(56, 280)), chance.uniform(10, 90)).save(file, "PNG")
    return file.getvalue()


def save(page: Any, path: Path) -> None:
    """A picture with 256 colours, which are enough for a page."""
    page.wait_for_timeout(300)
    page.screenshot(path=path)
    Image.open(path).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}  {path.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
