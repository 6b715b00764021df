"""The page keeps conversations in the browser, with their images, and enlarges images."""

import json

import pytest
from model.hugging_face import picture
from serve.browsing import (
    ANSWER,
    BROWSER,
    answer_with,
    ask,
    canned,
    choose_files,
    copied,
    open_page,
    png_of,
    wait_until,
    wait_until_done,
)
from serve.running import data_url

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium")


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


@pytest.mark.slow
def test_an_answer_that_a_reload_interrupted_can_be_asked_for_again(page):
    page.route("**/v1/chat/completions", lambda route: None)  # no answer comes before the page is left
    ask(page, "are you there")
    wait_until(page, f"({DATABASE})().then((rows) => rows.includes('are you there'))")
    answer_with(page, canned("yes"))
    page.reload()
    page.wait_for_selector("text=The page was left before the answer ended.")
    page.click("text=Answer again")
    page.wait_for_selector(f"{ANSWER} >> text=yes")


@pytest.mark.slow
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


@pytest.mark.slow
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
