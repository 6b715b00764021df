"""The fleet view of the page in a real browser, on a front with real engines."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
from fleet.cluster.local_front import LocalFront
from model.hugging_face import SHAPES, make_checkpoint
from serve.browsing import BROWSER, CONTRAST, UNNAMED, open_page, wait_until
from serve.running import chat_body, image_part

from saccade.fleet.cluster.view import DecisionView
from saccade.fleet.experiment_run import ExperimentRun
from saccade.fleet.experiments import Experiment, Variant
from saccade.serve.keys import create_key

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium")

HOSTILE = "<img src=x onerror=alert(1)>" + "x" * 200
DECISIONS = (
    DecisionView(number=1, time_s=1_700_000_000.0, what="up", reason="generation 1 by ann"),
    DecisionView(
        number=2, time_s=1_700_000_060.0, what="ramping", reason=HOSTILE, model="tiny", version="june", share=0.1
    ),
)


@pytest.fixture(scope="module")
def front(tmp_path_factory):
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("fleet") / "tiny", SHAPES[0])
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    with LocalFront(checkpoint, key=create_key(file, name="me"), api_keys=str(file)) as front:
        front.add_version("june", generation=2, decisions=DECISIONS)
        for _ in range(3):
            assert front.http.post("/v1/chat/completions", json=chat_body([image_part()])).status_code == 200
        front.wait_until(lambda: front.fleet()["generation"] == 2)
        yield front


@contextmanager
def open_fleet(browser, front, **options):
    """Open the view with the key in the tab."""
    key = front.http.headers["authorization"].removeprefix("Bearer ")
    with open_page(browser, "about:blank", **options) as page:
        page.add_init_script(f"sessionStorage.setItem('saccade.api-key', '{key}')")
        page.goto(f"{front.url}/#fleet")
        page.wait_for_selector("#fleet-tiles li")
        yield page


def test_versions_replicas_and_decisions_are_shown_and_follow_the_fleet(browser, front):
    with open_fleet(browser, front) as page:
        assert page.text_content("#fleet-line") == "photos, generation 2, 1 front"
        tiles = dict(page.locator("#fleet-tiles li").evaluate_all(
            "nodes => nodes.map((node) => [...node.children].map((child) => child.textContent))"
        ))  # fmt: skip
        assert (tiles["Replicas ready"], tiles["Requests"], tiles["Lost"]) == ("2", "0", "0")
        assert tiles["Images resident"] in ("33 %", "67 %")
        may, june = page.locator(".version").all_inner_texts()
        assert "100 % of users" in may
        assert "2 replicas" in may
        assert "starting" in june
        assert "0 % of users" in june
        assert page.locator(".replicas tbody th").all_inner_texts() == ["one", "two"]
        newest, oldest = page.locator("#decisions li").all_inner_texts()
        assert "tiny june: ramping, 10 % of users" in newest
        assert HOSTILE in newest, "text stays text"
        assert "up" in oldest
        front.view = replace(front.view, generation=3, num_fronts=2)
        wait_until(page, "document.getElementById('fleet-line').textContent === 'photos, generation 3, 2 fronts'")
        front.view = replace(front.view, generation=2, num_fronts=1)
        page.click("#tab-chat")
        page.wait_for_selector("#prompt", state="visible")


@pytest.mark.slow
def test_the_view_says_when_the_controller_is_away(browser, front):
    with open_fleet(browser, front) as page:
        fleet = front.fleet() | {"view_age_s": 34.0}
        page.route("**/fleet", lambda route: route.fulfill(json=fleet))
        wait_until(page, "document.querySelector('#fleet-line.away') !== null")
        assert page.text_content("#fleet-line").startswith("The controller has not answered for 34 s")


@pytest.mark.slow
def test_a_large_fleet_shows_the_replicas_with_the_longest_queues(browser, front):
    with open_fleet(browser, front) as page:
        fleet = front.fleet()
        replicas = [
            {"name": f"r{number:03}", "is_draining": number == 99, "requests": number, "queue_s": number / 10}
            for number in range(100)
        ]
        fleet["models"][0]["versions"][0]["replicas"] = replicas
        page.route("**/fleet", lambda route: route.fulfill(json=fleet))
        page.wait_for_selector(".replicas caption")
        assert page.text_content(".replicas caption") == "76 more with shorter queues"
        assert page.locator(".replicas tbody th").all_inner_texts()[-1] == "r099, draining"
        assert "99 replicas" in page.locator(".version").first.inner_text()


@pytest.mark.slow
def test_an_experiment_is_shown_with_its_variants_and_verdicts(browser, front):
    variants = (Variant(name="bf16", version="may"), Variant(name="int4", version="june"))
    run = ExperimentRun(Experiment(name="quantized", variants=variants, share=0.5, metrics=("errors", "tpot")))
    run.is_running = True
    for number in range(800):
        variant = run.config.variant_of(f"user {number}").name
        values = {"errors": 0.0, "tpot": 0.012 if variant == "bf16" else 0.006 + 1e-6 * number}
        run.results.observe(f"user {number}", variant, values)
    before, front.view = front.view, replace(front.view, generation=7, reports={"tiny": [run.report()]})
    with open_fleet(browser, front) as page:
        wait_until(page, "document.getElementById('fleet-line').textContent.includes('generation 7')")
        [shown] = [text for text in page.locator(".version").all_inner_texts() if "Experiment quantized" in text]
        assert page.evaluate(CONTRAST)["found"] == []
    front.view = replace(before, generation=8)
    front.wait_until(lambda: front.fleet()["generation"] == 8)
    front.view = before
    assert "50 % of users" in shown
    assert "tpot 12 ms" in shown
    assert "int4 to bf16, tpot: lower (\u22125.6 ms, between \u2212" in shown
    assert "int4 to bf16, errors: no difference found" in shown


@pytest.mark.parametrize(
    ("size", "scheme"),
    [
        pytest.param("desktop", "light", marks=pytest.mark.slow),
        pytest.param("desktop", "dark", marks=pytest.mark.slow),
        ("phone", "dark"),
    ],
)
def test_the_view_has_contrast_and_fits_every_screen(browser, front, size, scheme):
    with open_fleet(browser, front, size=size, scheme=scheme) as page:
        page.wait_for_selector("#health-dot.ready")
        assert page.evaluate(UNNAMED) == []
        assert page.evaluate(CONTRAST)["found"] == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        outside = """[...document.querySelectorAll('#view-fleet *, .bar *')].filter((node) =>
            node.checkVisibility() && !node.closest('.unseen, .word') &&
            node.getBoundingClientRect().right > innerWidth + 1).map((node) => node.outerHTML)"""
        assert page.evaluate(outside) == []
