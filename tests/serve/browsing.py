"""The page in a real browser: the system's chromium, driven by Playwright."""

import base64
import io
import json
import shutil
import time
from contextlib import contextmanager

import pytest
from model.hugging_face import picture
from serve.running import TIMEOUT_S

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SIZES = {"desktop": {"width": 1280, "height": 800}, "phone": {"width": 360, "height": 740}}

DROP = """([name, type, content]) => {
  const bytes = Uint8Array.from(atob(content), (character) => character.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], name, { type }));
  for (const kind of ["dragenter", "dragover", "drop"])
    document.body.dispatchEvent(new DragEvent(kind, { dataTransfer: transfer, bubbles: true, cancelable: true }));
}"""

PASTE = """([name, type, content]) => {
  const bytes = Uint8Array.from(atob(content), (character) => character.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], name, { type }));
  const options = { clipboardData: transfer, bubbles: true, cancelable: true };
  document.body.dispatchEvent(new ClipboardEvent("paste", options));
}"""

# Lists text with less contrast to its background than WCAG asks for. A canvas resolves both colours.
CONTRAST = """() => {
  const context = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const paint = (colours) => {
    context.clearRect(0, 0, 1, 1);
    for (const colour of colours) { context.fillStyle = colour; context.fillRect(0, 0, 1, 1); }
    return [...context.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  };
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const background = (node) => {
    const colours = [];
    for (let at = node; at instanceof Element; at = at.parentElement)
      colours.unshift(getComputedStyle(at).backgroundColor);
    return ["white", ...colours];
  };
  const found = [];
  let checked = 0;
  const check = (node, colour, what) => {
    const [a, b] = [luminance(paint(background(node))), luminance(paint([...background(node), colour]))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    checked += 1;
    if (ratio < 4.5) found.push(`${what}: ${ratio.toFixed(2)}`);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.checkVisibility()) continue;
    if (node.closest(".unseen, .skip, noscript")) continue;
    const style = getComputedStyle(node);
    check(node, node instanceof SVGElement ? style.fill : style.color, walker.currentNode.data.trim().slice(0, 40));
  }
  for (const node of document.querySelectorAll("input, textarea"))
    if (node.checkVisibility() && node.placeholder)
      check(node, getComputedStyle(node, "::placeholder").color, node.placeholder);
  return { checked, found };
}"""

# Lists controls without an accessible name, images without a text, repeated ids, labels that point nowhere.
UNNAMED = """() => {
  const found = [];
  const text = (node) => (node?.textContent ?? "").trim();
  const byIds = (ids) => (ids ?? "").split(" ").filter(Boolean).map((id) => text(document.getElementById(id))).join("");
  for (const node of document.querySelectorAll("button, a[href], input, textarea, select")) {
    const labels = [...(node.labels ?? [])].map(text).join("");
    const name = node.ariaLabel || byIds(node.getAttribute("aria-labelledby")) || labels;
    const own = ["BUTTON", "A"].includes(node.tagName) ? text(node) : "";
    if (!name && !own) found.push(`${node.tagName} ${node.id} has no name`);
  }
  for (const node of document.querySelectorAll("img")) if (!node.alt) found.push("an image without a text");
  for (const node of document.querySelectorAll("svg"))
    if (node.ariaHidden !== "true" && !node.ariaLabel) found.push("a drawing without a label");
  const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
  found.push(...ids.filter((id, index) => ids.indexOf(id) !== index).map((id) => `${id} occurs twice`));
  for (const node of document.querySelectorAll("[for], [aria-describedby], [aria-controls], [aria-labelledby]"))
    for (const name of ["for", "aria-describedby", "aria-controls", "aria-labelledby"])
      for (const id of (node.getAttribute(name) ?? "").split(" ").filter(Boolean))
        if (!document.getElementById(id)) found.push(`${name} points to ${id}, which is missing`);
  return found;
}"""


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=BROWSER,
            args=[
                "--no-sandbox",
                "--disable-dev-shm-usage",
                "--disable-gpu",
                "--disable-software-rasterizer",
                "--in-process-gpu",
                "--renderer-process-limit=1",
                "--disable-site-isolation-trials",
            ],
        )
        yield browser
        browser.close()


@contextmanager
def open_page(browser, url, size="desktop", scheme="light", expects=()):
    """Open the page in a new tab. Complaints of the console or the policy fail the test, unless expected."""
    context = browser.new_context(
        viewport=SIZES[size], color_scheme=scheme, has_touch=size == "phone", is_mobile=size == "phone"
    )
    context.set_default_timeout(TIMEOUT_S * 1000)
    complaints = []
    page = context.new_page()
    page.on("console", lambda message: message.type in ("error", "warning") and complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    try:
        page.goto(url)
        yield page
        unexpected = [text for text in complaints if not any(one in text for one in expects)]
        assert not unexpected, unexpected
    finally:
        context.close()


def give_image(page, how, name, png):
    page.evaluate(how, [name, "image/png", base64.b64encode(png).decode()])


def choose_files(page, *files):
    """Choose files with the file button: pairs of a name and bytes. Waits until they are attached."""
    types = {"png": "image/png", "mp4": "video/mp4"}
    payloads = [{"name": name, "mimeType": types[name.rpartition(".")[2]], "buffer": data} for name, data in files]
    before = page.locator("#thumbs li").count()
    page.set_input_files("#files", payloads)
    wait_until(page, f"document.querySelectorAll('#thumbs li').length === {before + len(files)}")


def copied(page, button):
    """Return what a button copies."""
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.evaluate("navigator.clipboard.writeText('nothing')")
    button.click()
    wait_until(page, "navigator.clipboard.readText().then((text) => text !== 'nothing')")
    return page.evaluate("navigator.clipboard.readText()")


def ask(page, question, **settings):
    """Type a question and send it; returns the answer's node, which may still be busy."""
    set_fields(page, **settings)
    page.fill("#prompt", question)
    page.press("#prompt", "Enter")
    return page.locator(".message.assistant").last


def set_fields(page, **settings):
    if not settings:
        return
    if page.locator("#settings").is_hidden():
        page.click("#open-settings")
    page.evaluate("for (const node of document.querySelectorAll('#settings details')) node.open = true")
    for name, value in settings.items():
        if name == "format":
            page.select_option("#format", value)
        else:
            page.fill(f"#{name}", str(value))
    page.click("#close-settings")


def wait_until(page, expression):
    """Playwright's own waiting for an expression needs `eval`, which the page's policy forbids."""
    deadline = time.monotonic() + TIMEOUT_S
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(10)


def wait_until_done(page):
    page.wait_for_selector("#send:not([hidden])")
    page.wait_for_selector(".message.assistant.busy", state="detached")


ANSWER = ".message.assistant .text"
# Counts how often the text of the answer became longer.
COUNT_GROWTH = """() => {
  window.numGrown = 0;
  let length = 0;
  new MutationObserver(() => {
    const shown = document.querySelector(".message.assistant .text")?.textContent.length ?? 0;
    if (shown > length) window.numGrown += 1;
    length = shown;
  }).observe(document.getElementById("messages"), { subtree: true, childList: true, characterData: true });
}"""
# Runs inside the page, because the tiny model is done in a second.
STOP_AT_FIRST_TEXT = """() => new MutationObserver((_, observer) => {
  if (!document.querySelector(".message.assistant .text")?.textContent) return;
  observer.disconnect();
  document.getElementById("stop").click();
}).observe(document.getElementById("messages"), { subtree: true, childList: true, characterData: true })"""


def png_of(seed):
    file = io.BytesIO()
    picture(56, 84, seed).save(file, "PNG")
    return file.getvalue()


def canned(*deltas, finish="stop", usage=None):
    """A stream of events as the server sends it."""
    chunks = [{"choices": [{"index": 0, "delta": {"content": text}}]} for text in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    chunks += [{"choices": [], "usage": usage}] if usage else []
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


# Something of everything that the page renders.
MARKDOWN = """# Result
The **total** is *about* ~~11~~ `12`, see [the docs](https://example.com/a) and https://example.com/b.

| item | price |
|:-----|------:|
| tea  | 2.50  |
| a\\|b | $x^2$ |

1. first
   - nested
2. second

> quoted

```python
print("<b>")
```

$$\\frac{a}{b} = \\sum_{i=1}^{n} x_i$$
"""


def answer_with(page, body, status=200, **headers):
    """Have the network answer the next questions with texts that a tiny model cannot write."""
    content_type = "text/event-stream" if status == 200 else "application/json"
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=status, content_type=content_type, headers=headers, body=body),
    )
