"""The page renders Markdown and maths, and nothing else of what a model writes."""

import pytest
from serve.browsing import (
    ANSWER,
    BROWSER,
    MARKDOWN,
    answer_with,
    ask,
    canned,
    copied,
    open_page,
    wait_until_done,
)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium")


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


@pytest.mark.slow
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


@pytest.mark.slow
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
