"""The page in a real browser, on a real server."""

import io
import json

import pytest
from model.hugging_face import picture
from serve.browsing import (
    BROWSER,
    CONTRAST,
    DROP,
    PASTE,
    UNNAMED,
    ask,
    give_image,
    open_page,
    set_fields,
    wait_until,
    wait_until_done,
)
from serve.running import data_url
from serve.scraping import wait_for_growth, wait_until_idle

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium")

ANSWER = ".message.assistant .text"
COUNT_GROWTH = """() => {
  window.numGrown = 0;
  new MutationObserver((changes) => { window.numGrown += changes.filter(({ type }) => type === "characterData").length; })
    .observe(document.getElementById("messages"), { subtree: true, characterData: true });
}"""
# From inside the page, because the tiny model is done in a second.
STOP_AT_FIRST_TEXT = """() => new MutationObserver((_, observer) => {
  if (!document.querySelector(".message.assistant .text")?.textContent) return;
  observer.disconnect();
  document.getElementById("stop").click();
}).observe(document.getElementById("messages"), { subtree: true, childList: true, characterData: true })"""


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


@pytest.fixture
def page(browser, server):
    with open_page(browser, server.url) as page:
        yield page


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


def answer_with(page, body, status=200, **headers):
    """Have the network answer the next questions: what a tiny model cannot be made to say."""
    content_type = "text/event-stream" if status == 200 else "application/json"
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=status, content_type=content_type, headers=headers, body=body),
    )


# ------------------------------------------------------------------ talking


def test_the_page_loads_and_names_the_model(page):
    page.wait_for_selector("#health-dot.ready")
    assert page.text_content("#model-name") == "tiny"
    assert page.title() == "Saccade"


def test_a_dropped_image_is_sent_and_its_answer_streams(page, server):
    before = wait_until_idle(server)
    give_image(page, DROP, "stripes.png", png_of(91))
    page.wait_for_selector("#thumbs img[alt='stripes.png']")
    page.evaluate(COUNT_GROWTH)
    ask(page, "what is it", temperature=0, max_tokens=400)
    wait_until_done(page)
    assert page.evaluate("window.numGrown") > 2, "the answer grew in front of the reader"
    figures = page.text_content(".message.assistant .figures")
    assert "first token" in figures
    assert "tokens/s" in figures
    wait_for_growth(server, before, "saccade:request_images_sum", 1)
    image = {"type": "image_url", "image_url": {"url": data_url(picture(56, 84, 91))}}
    said = server.chat([image, {"type": "text", "text": "what is it"}], max_tokens=400).json()
    shown = page.locator(ANSWER).evaluate("node => node.firstChild.data")
    assert shown == said["choices"][0]["message"]["content"]
    assert f"{said['usage']['completion_tokens']} tokens" in figures


def test_images_are_pasted_and_removed_and_other_files_are_refused(page):
    give_image(page, PASTE, "one.png", png_of(1))
    give_image(page, PASTE, "two.png", png_of(2))
    page.wait_for_selector("#thumbs img[alt='two.png']")
    page.click("[aria-label='Remove one.png']")
    assert page.locator("#thumbs img").evaluate_all("nodes => nodes.map((node) => node.alt)") == ["two.png"]
    give_image(page, DROP, "broken.png", b"not an image")
    page.wait_for_selector("#notice:not([hidden])")
    assert "broken.png is not an image" in page.text_content("#notice")


def test_stop_ends_the_answer_here_and_on_the_server(page, server):
    before = wait_until_idle(server)
    page.evaluate(STOP_AT_FIRST_TEXT)
    ask(page, "count", temperature=1, seed=3, max_tokens=700)
    page.wait_for_selector("text=Stopped.")
    assert page.locator("#send").is_visible()
    assert page.locator(".message.assistant .text").text_content()
    wait_for_growth(server, before, ("vllm:request_success_total", "finished_reason=abort"), 1)
    assert wait_until_idle(server)["vllm:kv_cache_usage_perc"] == 0


def test_a_conversation_has_turns_and_an_edited_question_replaces_what_follows(page):
    sent = []
    page.on("request", lambda request: "chat" in request.url and sent.append(json.loads(request.post_data)))
    set_fields(page, temperature=0, max_tokens=4, seed=5, top_p=0.9, system="Be short.")
    for question in ("first", "second"):
        ask(page, question)
        wait_until_done(page)
    assert [message["role"] for message in sent[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert sent[1]["messages"][2]["content"] == page.locator(ANSWER).first.evaluate("node => node.firstChild.data")
    expected = {"model": "tiny", "temperature": 0, "top_p": 0.9, "max_completion_tokens": 4, "seed": 5, "stream": True}
    assert {name: sent[0][name] for name in expected} == expected

    page.locator(".message.user").first.hover()
    page.locator(".message.user >> text=Edit").first.click()
    page.fill(".edit textarea", "changed")
    page.click("text=Resend")
    wait_until_done(page)
    assert [message["content"] for message in sent[2]["messages"]] == ["Be short.", "changed"]
    assert page.locator(".message").count() == 2
    page.click("text=Answer again")
    wait_until_done(page)
    assert sent[3] == sent[2]
    page.click("#new-chat")
    assert page.locator(".message").count() == 0
    assert page.locator("#welcome").is_visible()


def test_what_the_model_says_is_text_never_markup(page):
    said = "<img src=x onerror=\"document.title='owned'\"> & <b>bold</b> <script>1</script>"
    answer_with(page, canned(said[:9], said[9:], usage={"prompt_tokens": 3, "completion_tokens": 20}))
    ask(page, said)
    wait_until_done(page)
    assert (
        page.locator(".message .text").evaluate_all("nodes => nodes.map((node) => node.firstChild.data)") == [said] * 2
    )
    assert page.locator(".message .text *").count() == 0
    assert page.title() == "Saccade"


def test_an_answer_that_is_cut_off_by_its_length_says_so(page):
    answer_with(page, canned("and then", finish="length"))
    ask(page, "go on")
    page.wait_for_selector("text=The answer reached the maximum number of tokens.")


def test_errors_are_shown_and_the_next_question_leaves_them_out(browser, server):
    with open_page(browser, server.url, expects=["429", "401"]) as page:
        full = {"error": {"message": "the queue is full", "type": "rate_limit", "code": "overloaded", "param": None}}
        answer_with(page, json.dumps(full), 429, **{"Retry-After": "7"})
        ask(page, "hello")
        page.wait_for_selector("text=the queue is full Try again in 7 s.")
        page.unroute("**/v1/chat/completions")
        answer_with(page, 'data: {"error": {"message": "the engine has stopped"}}\n\n')
        page.click("text=Answer again")
        page.wait_for_selector("text=the engine has stopped")
        page.unroute("**/v1/chat/completions")
        answer_with(page, canned("half an")[: len(canned("half an")) // 2])
        page.click("text=Answer again")
        page.wait_for_selector("text=The connection ended before the answer did.")


def test_a_key_is_asked_for_kept_in_the_tab_and_sent_with_every_request(browser, server):
    def guard(route):
        if route.request.headers.get("authorization") == "Bearer sk-right":
            route.continue_()
        else:
            error = {"error": {"message": "no valid API key", "code": "invalid_api_key"}}
            route.fulfill(status=401, content_type="application/json", body=json.dumps(error))

    with open_page(browser, "about:blank", expects=["401"]) as page:
        page.route("**/v1/*", guard)
        page.goto(server.url)
        page.wait_for_selector("#settings:not([hidden])")
        assert page.evaluate("document.activeElement.id") == "api-key"
        page.keyboard.type("sk-right")
        page.keyboard.press("Enter")
        wait_until(page, "document.querySelector('#model-name').textContent === 'tiny'")
        stored = page.evaluate(
            "[Object.values(localStorage).join(), Object.values(sessionStorage).join(), document.cookie]"
        )
        assert "sk-right" in stored[1]
        assert "sk-right" not in stored[0] + stored[2]


# ------------------------------------------------------------------ status


def test_the_status_view_moves_with_the_load(page, server):
    before = wait_until_idle(server)
    server.chat("before the view is open")
    wait_for_growth(server, before, "vllm:request_success_total", 1)
    page.click("#tab-status")
    page.wait_for_selector("#tiles li")
    done = "Number([...document.querySelectorAll('#tiles li')].find((node) => node.textContent.startsWith('Requests done')).querySelector('.value').textContent.replace(',', ''))"
    lines = "[...document.querySelectorAll('.plot .series-0')].map((node) => node.getAttribute('d')).join()"
    before, drawn = page.evaluate(done), page.evaluate(lines)
    for number in range(3):
        server.chunks([{"type": "text", "text": f"question {number}"}], max_tokens=16)
    wait_until(page, f"{done} === {int(before) + 3}")
    wait_until(page, f"{lines} !== {json.dumps(drawn)}")
    labels = page.locator(".plot").evaluate_all("nodes => nodes.map((node) => node.ariaLabel)")
    assert len(labels) == 7
    first_token = next(label for label in labels if label.startswith("Time to first token"))
    assert "ms" in first_token or " s" in first_token
    assert page.locator("#status-line").text_content().startswith("Live")
    assert page.locator("#stages tr").count() == 5
    page.click("#tab-chat")
    page.wait_for_selector("#prompt", state="visible")


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
          try { document.body.innerHTML = "<b>x</b>"; } catch { found.push("innerHTML"); }
          try { eval("1"); } catch { found.push("eval"); }
          return found;
        }"""
        found = page.evaluate(violations)
        assert {"style-src-elem", "connect-src", "img-src", "innerHTML", "eval"} <= set(found)
        assert page.locator("#prompt").is_visible()
    for name in ("index.html", "app.js", "style.css"):
        source = server.http.get(f"/page/{name}").text
        assert "://" not in source.replace("http://www.w3.org/2000/svg", ""), f"{name} names another host"


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
        answer_with(page, canned("an answer"))
        ask(page, "a question")
        wait_until_done(page)
        answer_with(page, json.dumps({"error": {"message": "the queue is full"}}), 429)
        ask(page, "another")
        page.wait_for_selector(".failure")
        give_image(page, DROP, "broken.png", b"x")
        page.click("#open-settings")
        page.locator(".message.user").first.hover()
        wait_until(page, "!document.getAnimations().some((one) => one instanceof CSSTransition)")
        assert page.evaluate(UNNAMED) == []
        result = page.evaluate(CONTRAST)
        assert result["checked"] > 20
        assert result["found"] == []
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
        "new-chat",
        "open-settings",
        "Edit",
        "Copy",
        "Answer again",
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


def test_a_phone_shows_everything_without_scrolling_sideways(browser, server):
    with open_page(browser, server.url, size="phone") as page:
        wide = "document.documentElement.scrollWidth <= innerWidth && [...document.querySelectorAll('button, a, input, textarea')].filter((node) => node.checkVisibility() && !node.closest('.unseen, .skip') && !node.matches('.unseen, .skip')).every((node) => { const box = node.getBoundingClientRect(); return box.right <= innerWidth + 1 && box.left >= -1 && box.height >= 24; })"
        answer_with(page, canned("a long word: " + "x" * 400))
        page.fill("#prompt", "hello " * 40)
        page.click("#send")
        wait_until_done(page)
        assert page.evaluate(wide)
        page.click("#open-settings")
        assert page.evaluate(wide)
        page.click("#close-settings")
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
