"""The page in a real browser, on a real server."""

import contextlib
import io
import json
import subprocess
import time

import pytest
from model.hugging_face import picture
from processor.test_video import encode
from serve.browsing import (
    BROWSER,
    CONTRAST,
    DROP,
    PASTE,
    UNNAMED,
    ask,
    choose_files,
    copied,
    give_image,
    open_page,
    set_fields,
    wait_until,
    wait_until_done,
)
from serve.running import TIMEOUT_S, data_url
from serve.scraping import wait_for_growth, wait_until_idle

from saccade.serve.routes.page import FOLDER

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium")

ANSWER = ".message.assistant .text"
MAX_PAGE_BYTES = 400_000
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
    ask(page, "what is it", temperature=0, max_tokens=300)
    wait_until_done(page)
    assert page.evaluate("window.numGrown") > 2, "the answer grew in front of the reader"
    figures = page.text_content(".message.assistant .figures")
    assert "first token" in figures
    assert "tokens/s" in figures
    wait_for_growth(server, before, "saccade:request_images_sum", 1)
    image = {"type": "image_url", "image_url": {"url": data_url(picture(56, 84, 91))}}
    said = server.chat([image, {"type": "text", "text": "what is it"}], max_tokens=300).json()
    assert copied(page, page.locator("text='Copy'")) == said["choices"][0]["message"]["content"]
    assert f"{said['usage']['completion_tokens']} tokens" in figures


def test_images_are_pasted_and_removed_and_other_files_are_refused(page):
    give_image(page, PASTE, "one.png", png_of(1))
    give_image(page, PASTE, "two.png", png_of(2))
    page.wait_for_selector("#thumbs img[alt='two.png']")
    page.click("[aria-label='Remove one.png']")
    assert page.locator("#thumbs img").evaluate_all("nodes => nodes.map((node) => node.alt)") == ["two.png"]
    give_image(page, DROP, "broken.png", b"not an image")
    page.wait_for_selector("#notice:not([hidden])")
    assert "broken.png is neither an image" in page.text_content("#notice")


def test_all_chosen_files_are_attached_in_order_and_a_new_chat_has_none_of_them(page):
    answer_with(page, canned("three images"))
    choose_files(page, *[(f"{number}.png", png_of(number)) for number in range(3)])
    assert page.locator("#thumbs img").evaluate_all("nodes => nodes.map((node) => node.alt)") == [
        "0.png", "1.png", "2.png"
    ]  # fmt: skip
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "which")
    parts = asked.value.post_data_json["messages"][0]["content"]
    assert [part["image_url"]["url"] for part in parts[:3]] == [data_url(picture(56, 84, n)) for n in range(3)]
    wait_until_done(page)
    choose_files(page, ("left.png", png_of(4)))
    give_image(page, DROP, "broken.png", b"not an image")
    page.wait_for_selector("#notice:not([hidden])")
    page.click("#new-chat")
    assert page.locator("#thumbs li").count() == 0
    assert page.locator("#notice").is_hidden()
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "alone")
    assert asked.value.post_data_json["messages"] == [{"role": "user", "content": "alone"}]


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
    assert sent[1]["messages"][2]["content"] == copied(page, page.locator("text='Copy'").first)
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
    assert page.locator(".message .text").evaluate_all("nodes => nodes.map((node) => node.textContent)") == [said] * 2
    assert page.locator(f"{ANSWER} > p").evaluate("node => node.firstChild.data") == said
    assert page.locator(".message .text *").count() == 1, "one paragraph"
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


def guarded(url, secret):
    """A route that refuses requests without the key, as the server does."""

    def guard(route):
        if route.request.headers.get("authorization") == f"Bearer {secret}":
            route.continue_()
        else:
            error = {"error": {"message": "no valid API key", "code": "invalid_api_key"}}
            route.fulfill(status=401, content_type="application/json", body=json.dumps(error))

    return url, guard


STORED = "[Object.values(localStorage).join(), Object.values(sessionStorage).join(), document.cookie]"


def test_a_key_is_asked_for_kept_in_the_tab_and_sent_with_every_request(browser, server):
    with open_page(browser, "about:blank", expects=["401"]) as page:
        page.route(*guarded("**/v1/*", "sk-right"))
        page.goto(server.url)
        page.wait_for_selector("#key-dialog[open]")
        assert page.evaluate("document.activeElement.id") == "api-key"
        assert page.locator("#health-dot.locked").count() == 1, "not green"
        assert page.evaluate(UNNAMED) == []
        page.keyboard.type("sk-wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=The server refuses this key.")
        assert "sk-wrong" not in "".join(page.evaluate(STORED))
        page.keyboard.press("Escape")
        page.wait_for_selector("#key-dialog:not([open])", state="attached")
        page.click("#enter-key")
        page.keyboard.type("sk-right")
        page.keyboard.press("Enter")
        wait_until(page, "document.querySelector('#model-name').textContent === 'tiny'")
        page.wait_for_selector("#health-dot.ready")
        assert page.locator("#enter-key").is_hidden()
        stored = page.evaluate(STORED)
        assert "sk-right" in stored[1]
        assert "sk-right" not in stored[0] + stored[2]
        page.click("#open-settings")
        page.click("#forget-key")
        page.wait_for_selector("#health-dot.locked")
        assert "sk-right" not in "".join(page.evaluate(STORED))


def test_a_question_that_was_refused_for_its_key_is_asked_again_with_the_right_one(browser, server):
    with open_page(browser, server.url, expects=["401"]) as page:
        page.wait_for_selector("#health-dot.ready")
        page.route(*guarded("**/v1/**", "sk-new"))
        ask(page, "hello", max_tokens=4)
        page.wait_for_selector("#key-dialog[open]")
        page.keyboard.type("sk-new")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=The answer reached the maximum number of tokens.")
        assert page.locator(".message").count() == 2
        assert page.locator(".failure").count() == 0


# ------------------------------------------------------------------ Markdown and maths

# The page's own modules, asked directly.
RENDER = """async (text) => {
  const { MarkdownView } = await import("./page/markdown.js");
  const node = document.createElement("div");
  new MarkdownView(node).update(text);
  return node.innerHTML;
}"""
RENDER_GROWING = """async (text) => {
  const { MarkdownView } = await import("./page/markdown.js");
  const node = document.createElement("div");
  const view = new MarkdownView(node);
  for (let end = 0; end <= text.length; end += 3) view.update(text.slice(0, end));
  view.update(text);
  return node.innerHTML;
}"""
DEPTH = """async (texts) => {
  const { MarkdownView } = await import("./page/markdown.js");
  const depth = (node) => 1 + Math.max(0, ...[...node.children].map(depth));
  return texts.map((text) => {
    const node = document.createElement("div");
    new MarkdownView(node).update(text);
    return depth(node);
  });
}"""
# A formula as a call of each element with its children; "source" if it is not understood.
FORMULA = """async (sources) => {
  const { maths } = await import("./page/tex.js");
  const spell = (node) => node.localName + "(" + ([...node.children].map(spell).join(" ") || node.textContent) + ")";
  return sources.map((source) => {
    const made = maths(source, true);
    return made ? spell(made.querySelector("semantics").firstChild) : "source";
  });
}"""


def test_answers_are_rendered_as_markdown_and_code_is_copied(page):
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    answer_with(page, canned(*[MARKDOWN[at : at + 5] for at in range(0, len(MARKDOWN), 5)]))
    ask(page, "everything")
    wait_until_done(page)
    answer = page.locator(ANSWER)
    assert answer.locator("h3").text_content() == "Result"
    assert answer.locator("thead th").all_text_contents() == ["item", "price"]
    assert answer.locator("tbody td").first.text_content() == "tea"
    assert answer.locator("tbody td >> text=a|b").count() == 1
    right = answer.locator("tbody td").nth(1).evaluate("node => getComputedStyle(node).textAlign")
    assert right == "right"
    for tag, text in (
        ("strong", "total"),
        ("em", "about"),
        ("del", "11"),
        ("p > code", "12"),
        ("blockquote", "quoted"),
    ):
        assert answer.locator(tag).text_content() == text
    assert answer.locator("ol > li").count() == 2
    assert answer.locator("ol ul > li").text_content() == "nested"
    assert copied(page, answer.locator("text=Copy code")) == 'print("<b>")'
    assert answer.locator("td math msup").count() == 1
    formula = answer.locator(".formula math[display=block]")
    assert formula.locator("mfrac").count() == formula.locator("munderover").count() == 1
    assert formula.evaluate("node => node.getBoundingClientRect().height") > 20, "the browser sets it"
    links = answer.locator("a").evaluate_all("nodes => nodes.map((node) => [node.href, node.rel, node.target])")
    expected = ["noopener noreferrer nofollow", "_blank"]
    assert links == [["https://example.com/a", *expected], ["https://example.com/b", *expected]]
    assert page.evaluate(RENDER, MARKDOWN) == page.evaluate(RENDER_GROWING, MARKDOWN), "streamed = not streamed"
    assert not [url for url in requests if "example.com" in url]


def test_links_are_http_only_and_images_are_never_loaded(browser, server):
    link = 'target="_blank" rel="noopener noreferrer nofollow"'
    cases = {
        "![a *cat*](https://evil.example/x.png)": f'<p><a href="https://evil.example/x.png" {link} '
        f'title="https://evil.example/x.png">Image: a <em>cat</em></a></p>',
        "![x](data:image/png;base64,AAAA)": "<p>![x](data:image/png;base64,AAAA)</p>",
        "[x](javascript:alert(1))": "<p>[x](javascript:alert(1))</p>",
        "[x](JaVaScRiPt:alert(1)) <javascript:x>": "<p>[x](JaVaScRiPt:alert(1)) &lt;javascript:x&gt;</p>",
        "[x](/v1/models) [y](//evil.example)": "<p>[x](/v1/models) [y](//evil.example)</p>",
        "[bank](https://bank.example@evil.example)": "<p>[bank](https://bank.example@evil.example)</p>",
        "[![i](https://a.example/i)](https://b.example/)": f'<p><a href="https://b.example/" {link} '
        f'title="https://b.example/">Image: i</a></p>',
        "see https://a.example/x_(y).": f'<p>see <a href="https://a.example/x_(y)" {link} title="https://a.example/x_(y)">https://a.example/x_(y)</a>.</p>',
        "<img src=x onerror=alert(1)>": "<p>&lt;img src=x onerror=alert(1)&gt;</p>",
        "`<b>` \\*plain\\* snake_case_name 2 * 3 * 4": "<p><code>&lt;b&gt;</code> *plain* "
        "snake_case_name 2 * 3 * 4</p>",
        "***both*** **a *b* c** *a **b***": "<p><em><strong>both</strong></em> <strong>a <em>b</em> c</strong> <em>a "
        "<strong>b</strong></em></p>",
        "first line\nsecond line": "<p>first line<br>second line</p>",
        "it costs $5 and $10, or \\$3": "<p>it costs $5 and $10, or $3</p>",
        "- [x] done\n- [ ] open": '<ul><li class="task-item"><span class="task" role="img" aria-label="done">☑</span>'
        'done</li><li class="task-item"><span class="task" role="img" aria-label="to do">☐</span>open</li></ul>',
        "3. three\n4. four\n\ntext": '<ol start="3"><li>three</li><li>four</li></ol><p>text</p>',
        "text\n---\n# # not closed #x": "<p>text</p><hr><h3># not closed #x</h3>",
        "```": '<div class="code"><div class="code-head"><span>code</span><button type="button" class="quiet">Copy '
        'code</button></div><pre tabindex="0" role="region" aria-label="Code"><code></code></pre></div>',
    }
    with open_page(browser, server.url, expects=["TrustedHTML"]) as page:
        for text, html in cases.items():
            assert page.evaluate(RENDER, text) == html
        huge = [
            "> " * 5000 + "x",
            "*a **b " * 3000 + "b** a* " * 3000,
            "[" * 20000 + "](" * 20000,
            "`" * 9999 + "$ " * 9999,
        ]
        huge += [
            "- " * 3000,
            "| a " * 5000 + "\n" + "|-" * 5000,
            "\\[\n" * 5000,
            "!" + "[a](" * 9000,
            "${" * 2000 + "$",
        ]
        assert max(page.evaluate(DEPTH, huge)) < 60


def test_formulas_become_mathml_and_unknown_commands_stay_source(page):
    cases = {
        r"x": "mi(x)",
        r"\frac12 + x^{10}": "mrow(mfrac(mn(1) mn(2)) mo(+) msup(mi(x) mn(10)))",
        r"x_i^2": "msubsup(mi(x) mi(i) mn(2))",
        r"\sqrt[3]{2}": "mroot(mn(2) mn(3))",
        r"\sum_{i=1}^n i": "mrow(munderover(mo(∑) mrow(mi(i) mo(=) mn(1)) mi(n)) mi(i))",
        r"\int_0^1": "msubsup(mo(∫) mn(0) mn(1))",
        r"\lim_{x \to 0} f'": "mrow(munder(mo(lim) mrow(mi(x) mo(→) mn(0))) mspace() msup(mi(f) mo(′)))",  # noqa: RUF001
        r"a \sin b": "mrow(mi(a) mspace() mi(sin) mspace() mi(b))",
        r"\left( \frac{a}{b} \right]": "mrow(mo(() mfrac(mi(a) mi(b)) mo(]))",
        r"\mathbb{R} \mathbf{v} \mathrm{d}": "mrow(mi(ℝ) mi(𝐯) mi(d))",  # noqa: RUF001
        r"\text{if } x": "mrow(mtext(if\u00a0) mi(x))",
        r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}": "mrow(mo([) mtable(mtr(mtd(mn(1)) mtd(mn(2))) mtr(mtd(mn(3)) "
        "mtd(mn(4)))) mo(]))",
        r"\begin{cases} 1 & x \\ 0 \end{cases}": "mrow(mo({) mtable(mtr(mtd(mn(1)) mtd(mi(x))) mtr(mtd(mn(0)))) mo())",
        r"a &= b \\ c &= d": "mtable(mtr(mtd(mi(a)) mtd(mo(=) mi(b))) mtr(mtd(mi(c)) mtd(mo(=) mi(d))))",
        r"\hat{y} \not= \alpha \times -1": "mrow(mover(mi(y) mo(^)) mo(=\u0338) mi(α) mo(×) mo(−) mn(1))",  # noqa: RUF001
        r"\binom{n}{k} \Big| 50\%": "mrow(mrow(mo(() mfrac(mi(n) mi(k)) mo())) mo(|) mn(50) mi(%))",
        r"\operatorname*{argmax}_x": "munder(mo(argmax) mi(x))",
        r"\newcommand{\x}{y}": "source",
        r"\frac{a}": "source",
        r"x^2^3": "source",
        r"{a": "source",
        r"a}": "source",
        r"\href{javascript:alert(1)}{x}": "source",
        "{" * 100 + "}" * 100: "source",
        r"\constructor \toString": "source",
    }
    assert dict(zip(cases, page.evaluate(FORMULA, list(cases)), strict=True)) == cases
    shown = page.evaluate(RENDER, r"so $\unknown{x}$, \(y\)")
    assert '<code class="tex">\\unknown{x}</code>' in shown
    assert 'application/x-tex">y</annotation>' in shown


# ------------------------------------------------------------------ history and images

# Everything that this origin has in IndexedDB, as text.
DATABASE = """async () => {
  const settled = (request) => new Promise((resolve) => { request.onsuccess = () => resolve(request.result); });
  const database = await settled(indexedDB.open("saccade"));
  const rows = [];
  for (const name of database.objectStoreNames)
    rows.push(...await settled(database.transaction(name).objectStore(name).getAll()));
  database.close();
  return JSON.stringify(rows);
}"""


def exported(page, button):
    """Return what a button downloads."""
    with page.expect_download() as download:
        page.click(button)
    return json.loads(download.value.path().read_text())


def test_conversations_survive_a_reload_are_exported_and_deleted(page, server):
    page.evaluate("sessionStorage.setItem('saccade.api-key', 'sk-secret')")
    choose_files(page, ("one.png", png_of(7)))
    ask(page, "first *question*", temperature=0, max_tokens=6, seed=3, system="Be short.")
    wait_until_done(page)
    said = copied(page, page.locator("text='Copy'"))
    page.reload()
    page.wait_for_selector(".message.assistant")
    assert page.locator(".message.user .text").text_content() == "first *question*"
    assert page.locator(".message.user img").evaluate("node => node.decode().then(() => node.naturalWidth)") == 56
    page.wait_for_selector("text=The answer reached the maximum number of tokens.")
    assert "tokens" in page.locator(".figures").text_content()
    assert copied(page, page.locator("text='Copy'")) == said
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "second")
    wait_until_done(page)
    first, answer, second = asked.value.post_data_json["messages"][1:]
    image = {"type": "image_url", "image_url": {"url": data_url(picture(56, 84, 7))}}
    assert first["content"] == [image, {"type": "text", "text": "first *question*"}]
    assert [answer["content"], second["content"]] == [said, "second"]

    page.click("#new-chat")
    ask(page, "another chat", max_tokens=2)
    wait_until_done(page)
    page.click("#open-history")
    page.wait_for_selector("#conversations li:nth-child(2)")
    assert page.locator("#conversations .title").all_text_contents() == ["another chat", "first *question*"]
    whole = exported(page, "#export-history")
    assert whole["format"] == "saccade-conversations"
    assert [len(one["messages"]) for one in whole["conversations"]] == [2, 4]
    assert whole["conversations"][1]["messages"][0] == {"role": "user", "content": first["content"]}
    assert whole["conversations"][1]["messages"][1]["content"] == said
    settings = whole["conversations"][1]["messages"][1]["settings"]
    assert settings["sampling"] == {"temperature": 0, "top_p": 1, "max_completion_tokens": 6, "seed": 3}
    assert "sk-secret" not in json.dumps(whole) + page.evaluate(DATABASE)
    assert len(exported(page, "#export-chat")["conversations"]) == 1

    page.on("dialog", lambda dialog: dialog.accept())
    page.locator("#conversations .open").nth(1).click()
    page.wait_for_selector(".message.user >> text=first *question*")  # not its title in the list
    assert page.locator(".message").count() == 4
    page.locator("#conversations li").nth(1).hover()
    page.click("[aria-label='Delete first *question*']")
    page.wait_for_selector("#conversations li:nth-child(2)", state="detached")
    assert page.locator("#welcome").is_visible()
    page.reload()
    page.click("#open-history")
    page.wait_for_selector("#conversations li")
    assert page.locator("#conversations .title").all_text_contents() == ["another chat"]
    assert "one.png" not in page.evaluate(DATABASE), "its image is deleted with it"
    page.click("#delete-history")
    page.wait_for_selector("text=No conversations yet.")
    assert page.evaluate(DATABASE) == "[]"
    page.uncheck("#keep-history")
    ask(page, "off the record", max_tokens=2)
    wait_until_done(page)
    assert page.evaluate(DATABASE) == "[]"


def test_an_answer_that_a_reload_interrupted_can_be_asked_for_again(page):
    page.route("**/v1/chat/completions", lambda route: None)  # no answer comes
    ask(page, "are you there")
    wait_until(page, f"({DATABASE})().then((rows) => rows.includes('are you there'))")
    page.unroute("**/v1/chat/completions")
    answer_with(page, canned("yes"))
    page.reload()
    page.wait_for_selector("text=The page was left before the answer ended.")
    page.click("text=Answer again")
    page.wait_for_selector(f"{ANSWER} >> text=yes")


def test_a_browser_without_storage_can_still_ask(browser, server):
    denied = """for (const name of ["indexedDB", "localStorage", "sessionStorage"])
      Object.defineProperty(window, name, { get() { throw new DOMException("denied", "SecurityError"); } });"""
    with open_page(browser, "about:blank") as page:
        page.add_init_script(denied)
        page.goto(server.url)
        page.wait_for_selector("#health-dot.ready")
        ask(page, "hello", max_tokens=4)
        wait_until_done(page)
        page.click("#open-history")
        page.wait_for_selector("text=This browser does not let the page store conversations")
        assert page.locator("#keep-history").is_disabled()
        assert exported(page, "#export-chat")["conversations"][0]["title"] == "hello"


def test_an_image_is_enlarged_and_moved(page):
    choose_files(page, ("one.png", png_of(1)))
    page.click("#thumbs .zoom")
    page.wait_for_selector("#lightbox[open]")
    width = "document.querySelector('#lightbox-image').getBoundingClientRect().width"
    fitting = page.evaluate(width)
    assert fitting > 1000, "as wide as the window"
    page.click("#lightbox-in")
    assert page.evaluate(width) == pytest.approx(1.5 * fitting, rel=0.02)
    page.keyboard.press("+")
    assert page.evaluate(width) == pytest.approx(2.25 * fitting, rel=0.02)
    left = "document.querySelector('#lightbox-pane').scrollLeft"
    before = page.evaluate(left)
    page.mouse.move(600, 400)
    page.mouse.down()
    page.mouse.move(500, 400, steps=4)
    page.mouse.up()
    assert page.evaluate(left) == pytest.approx(before + 100, abs=2)
    page.mouse.wheel(0, -100)
    wait_until(page, f"{width} > {2.3 * fitting}")
    page.keyboard.press("0")
    assert page.evaluate(width) == fitting
    assert page.locator("#lightbox-out").is_disabled()
    page.keyboard.press("Escape")
    page.wait_for_selector("#lightbox:not([open])", state="attached")
    assert page.evaluate("document.activeElement.className") == "zoom"


# ------------------------------------------------------------------ requests


def test_a_video_is_sent_and_answered_and_one_that_is_too_large_is_not_sent(browser, server):
    clip = encode(8, rate=4, codec="libx264")
    with open_page(browser, "about:blank") as page:
        limits = {"max_body_bytes": len(clip) * 2}
        page.route("**/page/limits.json", lambda route: route.fulfill(json=limits))
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
    assert server.http.get("/page/limits.json").json() == {"max_body_bytes": 64 * 2**20}


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
