"""The page in a real browser, on a real server: questions, answers, errors and keys."""

import json

import pytest
from model.hugging_face import picture
from serve.browsing import (
    ANSWER,
    BROWSER,
    COUNT_GROWTH,
    DROP,
    PASTE,
    STOP_AT_FIRST_TEXT,
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
from serve.running import data_url
from serve.scraping import wait_for_growth, wait_until_idle

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium")


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
