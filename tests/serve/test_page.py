"""The page in a real browser: its requests, the status view, safety, accessibility, screens."""

import contextlib
import io
import json
import subprocess
import time

import pytest
from processor.test_video import encode
from serve.browsing import (
    ANSWER,
    BROWSER,
    CONTRAST,
    DROP,
    MARKDOWN,
    PASTE,
    UNNAMED,
    answer_with,
    ask,
    canned,
    choose_files,
    copied,
    give_image,
    open_page,
    png_of,
    set_fields,
    wait_until,
    wait_until_done,
)
from serve.running import TIMEOUT_S
from serve.scraping import wait_for_growth, wait_until_idle

from saccade.serve.routes.page import FOLDER

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium")

MAX_PAGE_BYTES = 400_000


def test_the_page_loads_and_names_the_model(page):
    page.wait_for_selector("#health-dot.ready")
    assert page.text_content("#model-name") == "tiny"
    assert page.title() == "Saccade"


# ------------------------------------------------------------------ requests


@pytest.mark.slow
def test_a_video_is_sent_and_answered_and_one_that_is_too_large_is_not_sent(browser, server):
    clip = encode(8, rate=4, codec="libx264")
    with open_page(browser, "about:blank") as page:
        about = {"max_body_bytes": len(clip) * 2, "has_fleet": False}
        page.route("**/page/server.json", lambda route: route.fulfill(json=about))
        page.goto(server.url)
        choose_files(page, ("clip.mp4", clip))
        wait_until(page, "document.querySelector('#thumbs video').videoWidth === 84")
        with page.expect_request("**/v1/chat/completions") as asked:
            ask(page, "what moves", max_tokens=4, fps=1)
        wait_until_done(page)
        part, text = asked.value.post_data_json["messages"][0]["content"]
        assert part["type"] == "video_url"
        assert part["video_url"]["url"].startswith("data:video/mp4;base64,")
        assert (part["fps"], text["text"]) == (1, "what moves")
        assert page.locator(".failure").count() == 0
        assert page.locator(ANSWER).text_content()
        assert page.locator(".message.user video").count() == 1
        choose_files(page, ("again.mp4", clip))
        ask(page, "and this")
        page.wait_for_selector("#notice:not([hidden])")
        assert "the server takes" in page.text_content("#notice")
        assert page.locator("#thumbs video").count() == 1, "still attached"
        assert page.locator(".message").count() == 2
        assert page.input_value("#prompt") == "and this"
    assert server.http.get("/page/server.json").json() == {"max_body_bytes": 64 * 2**20, "has_fleet": False}


def test_sampling_options_are_sent_as_the_api_names_them_and_bad_ones_are_named(page):
    answer_with(page, canned("yes"))
    numbers = {
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
    }
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "all of them", **numbers, stop_texts="END\n###", seed=7)
    wait_until_done(page)
    body = asked.value.post_data_json
    assert {name: body[name] for name in numbers} == numbers
    assert (body["stop"], body["seed"]) == (["END", "###"], 7)
    assert "response_format" not in body
    page.reload()
    page.click("#open-settings")
    assert page.input_value("#top_k") == "20", "settings last as long as the tab"
    page.click("#reset-settings")
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "none of them", format="json_object")
    wait_until_done(page)
    body = asked.value.post_data_json
    assert not {*numbers, "stop", "seed"} & body.keys()
    assert body["response_format"] == {"type": "json_object"}
    for fields, complaint in (
        ({"format": "json_schema", "schema": "{"}, "The JSON schema is not valid JSON"),
        ({"format": "text", "min_p": 2}, "Min p: "),
    ):
        ask(page, "once more", **fields)
        page.wait_for_selector("#notice:not([hidden])")
        assert complaint in page.text_content("#notice")
        assert page.evaluate("document.activeElement.id") == next(reversed(fields))
        page.click("#close-settings")
        assert page.locator(".message").count() == 4


@pytest.mark.slow
def test_an_answer_in_a_json_schema_is_shown_indented(page):
    schema = {
        "type": "object",
        "properties": {"is_red": {"type": "boolean"}},
        "required": ["is_red"],
        "additionalProperties": False,
    }
    ask(page, "is it red", format="json_schema", schema=json.dumps(schema), max_tokens=60, temperature=0)
    wait_until_done(page)
    said = copied(page, page.locator("text='Copy'"))
    value = json.loads(said)["is_red"]
    assert page.locator(f"{ANSWER} pre").text_content() == json.dumps({"is_red": value}, indent=2)
    indented = """async (text) => (await import("./page/json.js")).indentJson(text)"""
    tree = {"a": [1, {"b": 'x, {y}: "z"'}], "empty": {}, "none": [], "big": 12345678901234567890}
    assert page.evaluate(indented, json.dumps(tree)) == json.dumps(tree, indent=2)
    assert page.evaluate(indented, '{"a": [1, "unfini') == '{\n  "a": [\n    1,\n    "unfini'


@pytest.mark.slow
def test_a_request_is_copied_as_curl_and_as_python_that_give_the_same_answer(page, server, tmp_path, monkeypatch):
    question = 'what\'s "it"?\n$HOME `ls` \\n ! é'
    (tmp_path / "it's.png").write_bytes(png_of(3))
    choose_files(page, ("it's.png", png_of(3)))
    set_fields(page, temperature=0, max_tokens=12, top_k=5, stop_texts="\\", system="Answer in $5 words!")
    page.fill("#prompt", question)
    page.click("#send")
    wait_until_done(page)
    said = copied(page, page.locator("text='Copy'"))
    curl = copied(page, page.locator("text=Copy as curl"))
    assert "Authorization" not in curl
    run = subprocess.run(["bash", "-c", curl], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(run.stdout)["choices"][0]["message"]["content"] == said
    python = copied(page, page.locator("text=Copy as Python"))
    assert 'extra_body={\n      "top_k": 5\n    }' in python
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(python, "copied", "exec"), {})
    assert printed.getvalue() == said + "\n"

    page.evaluate("sessionStorage.setItem('saccade.api-key', 'sk-secret')")
    curl, python = copied(page, page.locator("text=Copy as curl")), copied(page, page.locator("text=Copy as Python"))
    assert '-H "Authorization: Bearer $SACCADE_API_KEY"' in curl
    assert 'os.environ["SACCADE_API_KEY"]' in python
    assert "sk-secret" not in curl + python


# ------------------------------------------------------------------ status


def tile(name):
    """The number on a tile of the status view."""
    tiles = "[...document.querySelectorAll('#tiles li')]"
    found = f"{tiles}.find((node) => node.textContent.startsWith('{name}'))"
    return f"Number({found}.querySelector('.value').textContent.replace(',', ''))"


@pytest.mark.slow
def test_the_status_view_shows_what_was_recorded_before_it_was_opened_and_moves_with_the_load(page, server):
    before = wait_until_idle(server)
    server.chunks("before the view is open", max_tokens=16)
    wait_for_growth(server, before, "vllm:request_success_total", 1)
    done = before["vllm:request_success_total"] + 1
    deadline = time.monotonic() + TIMEOUT_S
    while server.http.get("/metrics/history").json()["values"]["vllm:request_success_total"][-1] != done:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    page.evaluate(
        "new MutationObserver((_, observer) => { window.first = document.querySelector('#stages').textContent; "
        "observer.disconnect(); })"
        ".observe(document.querySelector('#stages'), { childList: true })"
    )
    page.click("#tab-status")
    page.wait_for_selector("#tiles li")
    whole_request = page.evaluate("window.first").split("Whole request")[1]
    assert whole_request[0] in "123456789", "requests of the last minute"
    assert page.evaluate(tile("Requests done")) == done
    labels = page.locator(".plot").evaluate_all("nodes => nodes.map((node) => node.ariaLabel)")
    assert len(labels) == 7
    first_token = next(label for label in labels if label.startswith("Time to first token"))
    assert "ms" in first_token or " s" in first_token
    assert page.locator(".plot .series-0").first.get_attribute("d").count("L") >= 1, "several samples"
    assert page.locator("#status-line").text_content().startswith("Live")
    assert page.locator("#stages tr").count() == 5
    lines = "[...document.querySelectorAll('.plot .series-0')].map((node) => node.getAttribute('d')).join()"
    drawn = page.evaluate(lines)
    for number in range(3):
        server.chunks([{"type": "text", "text": f"question {number}"}], max_tokens=16)
    wait_until(page, f"{tile('Requests done')} === {done + 3}")
    wait_until(page, f"{lines} !== {json.dumps(drawn)}")
    page.click("#tab-chat")
    page.wait_for_selector("#prompt", state="visible")


def test_a_single_server_has_no_view_of_a_fleet(browser, server):
    assert server.http.get("/fleet").status_code == 404
    with open_page(browser, f"{server.url}/#fleet") as page:
        page.wait_for_selector("#health-dot.ready")
        assert page.locator("#tab-fleet").is_hidden()
        assert page.locator("#view-chat").is_visible()


# ------------------------------------------------------------------ safe, accessible, on any screen


def test_the_policy_allows_nothing_but_files_of_the_server(browser, server):
    headers = server.http.get("/").headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    with open_page(browser, server.url, expects=["Content Security Policy", "Trusted", "violates", "Refused"]) as page:
        violations = """async () => {
          const found = [];
          document.addEventListener("securitypolicyviolation", (event) => found.push(event.effectiveDirective));
          const style = document.createElement("style");
          style.textContent = "body { display: none }";
          document.head.append(style);
          await fetch("https://example.com/").catch(() => {});
          const image = new Image();
          image.src = "https://example.com/x.png";
          await new Promise((resolve) => { image.onerror = resolve; });
          const video = document.createElement("video");
          video.src = "https://example.com/x.mp4";
          await new Promise((resolve) => { video.onerror = resolve; });
          try { document.body.innerHTML = "<b>x</b>"; } catch { found.push("innerHTML"); }
          try { eval("1"); } catch { found.push("eval"); }
          return found;
        }"""
        found = page.evaluate(violations)
        assert {"style-src-elem", "connect-src", "img-src", "media-src", "innerHTML", "eval"} <= set(found)
        assert page.locator("#prompt").is_visible()
    for path in FOLDER.iterdir():
        source = server.http.get(f"/page/{path.name}").text
        assert source == path.read_text()
        assert "://" not in source.replace("http://www.w3.org/", ""), f"{path.name} names another host"
        assert "innerHTML" not in source


def test_the_files_of_the_page_are_small_and_loaded_at_once():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= MAX_PAGE_BYTES
    index = (FOLDER / "index.html").read_text()
    assert [path.name for path in FOLDER.glob("*.js") if f'"page/{path.name}"' not in index] == []


def test_files_of_the_page_are_cached_until_they_change_and_there_are_no_others(server):
    first = server.http.get("/page/app.js")
    assert first.headers["content-type"].startswith("text/javascript")
    again = server.http.get("/page/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    for path in ("/page/nothing.js", "/page/../app.py", "/page/%2e%2e/app.py", "/page/__init__.py"):
        assert server.http.get(path).status_code == 404


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_controls_have_names_and_text_has_contrast(browser, server, scheme):
    with open_page(browser, server.url, scheme=scheme, expects=["429"]) as page:
        page.wait_for_selector("#health-dot.ready")
        give_image(page, PASTE, "one.png", png_of(1))
        page.wait_for_selector("#thumbs img")
        answer_with(page, canned(MARKDOWN))
        ask(page, "a question")
        wait_until_done(page)
        answer_with(page, json.dumps({"error": {"message": "the queue is full"}}), 429)
        ask(page, "another")
        page.wait_for_selector(".failure")
        give_image(page, DROP, "broken.png", b"x")
        page.click("#open-settings")
        page.click("#settings summary")
        page.select_option("#format", "json_schema")
        page.click("#open-history")
        page.wait_for_selector("#conversations li")
        page.locator(".message.user").first.hover()
        wait_until(page, "!document.getAnimations().some((one) => one instanceof CSSTransition)")
        assert page.evaluate(UNNAMED) == []
        result = page.evaluate(CONTRAST)
        assert result["checked"] > 20
        assert result["found"] == []
        page.click(".message.user .zoom")
        assert page.evaluate(UNNAMED) == []
        assert page.evaluate(CONTRAST)["found"] == []
        page.keyboard.press("Escape")
        page.click("#tab-status")
        page.wait_for_selector("#tiles li")
        assert page.evaluate(UNNAMED) == []
        assert page.evaluate(CONTRAST)["found"] == []


def test_everything_is_reached_and_done_by_keyboard(page):
    answer_with(page, canned("an answer"))
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.type("hello")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("there")
    page.keyboard.press("Enter")
    wait_until_done(page)
    assert page.locator(".message.user .text").text_content() == "hello\nthere"
    wait_until(page, "document.getElementById('announcer').textContent === 'an answer'")  # in the next animation frame
    page.keyboard.press("ArrowUp")
    assert page.evaluate("document.activeElement.ariaLabel") == "Edit your question"
    page.keyboard.press("Escape")
    page.evaluate("document.activeElement.blur(); document.querySelector('.skip').focus()")
    seen = []
    for _ in range(20):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    order = [
        "tab-chat",
        "tab-status",
        "open-history",
        "new-chat",
        "open-settings",
        "Edit",
        "Copy",
        "Answer again",
        "Copy as curl",
        "Copy as Python",
        "prompt",
        "files",
        "send",
    ]
    assert [name for name in seen if name in order][: len(order)] == order
    page.focus("#open-settings")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "settings-title"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "open-settings"
    page.focus("#open-history")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "history-title"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "open-history"


def test_a_phone_shows_everything_without_scrolling_sideways(browser, server):
    with open_page(browser, server.url, size="phone") as page:
        wide = """document.documentElement.scrollWidth <= innerWidth &&
            [...document.querySelectorAll('button, a, input, textarea')].filter(
              (node) => node.checkVisibility() && !node.closest('.unseen, .skip') &&
                !node.matches('.unseen, .skip, .markdown a')
            ).every((node) => {
              const box = node.getBoundingClientRect();
              return box.right <= innerWidth + 1 && box.left >= -1 && box.height >= 24;
            })"""
        answer_with(page, canned("a long word: " + "x" * 400 + "\n\n" + MARKDOWN))
        page.fill("#prompt", "hello " * 40)
        page.click("#send")
        wait_until_done(page)
        assert page.evaluate(wide)
        page.click("#open-settings")
        assert page.evaluate(wide)
        page.click("#close-settings")
        page.click("#open-history")
        page.wait_for_selector("#conversations li")
        assert page.evaluate(wide)
        page.click("#close-history")
        page.click("#tab-status")
        page.wait_for_selector("#tiles li")
        assert page.evaluate(wide)


def test_adapters_are_a_choice(browser, server):
    names = ["tiny", "receipts", "charts"]
    models = {"object": "list", "data": [{"id": name, "object": "model"} for name in names]}
    with open_page(browser, "about:blank") as page:
        page.route("**/v1/models", lambda route: route.fulfill(json=models))
        answer_with(page, canned("Yes."))
        page.goto(server.url)
        page.wait_for_selector("#model-choice:visible")
        assert page.locator("#model-choice option").all_inner_texts() == names
        assert page.locator("#model-name").is_hidden()
        assert page.evaluate(UNNAMED) == []
        page.select_option("#model-choice", "receipts")
        with page.expect_request("**/v1/chat/completions") as asked:
            ask(page, "Which one?")
        assert asked.value.post_data_json["model"] == "receipts"
