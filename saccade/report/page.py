"""One self-contained HTML page: title, sections, tables, small images. All text is escaped unless it is `Html`."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Collection, Iterable, Sequence
from html import escape
from pathlib import Path

from PIL import Image, ImageOps

from saccade.files import atomic_write
from saccade.report.charts import CHART_STYLE
from saccade.report.html import Html, to_html


def write_page(path: Path, title: str, sections: Iterable[str]) -> None:
    """Write a page atomically. Characters that UTF-8 cannot encode are replaced."""
    style_hash = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{style_hash}'; base-uri 'none'; form-action 'none'"
    head = (
        '<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width">'
        f'<meta http-equiv=Content-Security-Policy content="{policy}"><meta name=referrer content=no-referrer>'
        f"<style>{_STYLE}</style><title>{escape(title)}</title><h1>{escape(title)}</h1>"
    )
    with atomic_write(path) as temporary:
        temporary.write_text("\n".join([head, *sections, "</html>\n"]), encoding="utf-8", errors="replace")


def table(
    head: Sequence[object], rows: Iterable[Sequence[object]], *, numbers: Collection[int] = (), wraps: bool = False
) -> Html:
    """A table that scrolls sideways if it is too wide.

    `numbers` are the columns that are aligned to the right. With `wraps`, long text is wrapped instead.
    """

    def line(tag: str, cells: Sequence[object]) -> str:
        kinds = [" class=number" if column in numbers else "" for column in range(len(cells))]
        return "".join(f"<{tag}{kind}>{to_html(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))

    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    kind = " class=wraps" if wraps else ""
    return Html(f"<div class=wide><table{kind}><tr>{line('th', head)}</tr>{body}</table></div>")


def paragraph(text: object, kind: str = "") -> Html:
    """A paragraph; `kind` is a class of the style sheet: soft, warning."""
    return Html(f"<p{f' class={kind}' if kind else ''}>{to_html(text)}</p>")


def details(summary: object, body: str, *, is_open: bool = False) -> Html:
    """A section that the reader opens. `body` is HTML."""
    return Html(f"<details{' open' if is_open else ''}><summary>{to_html(summary)}</summary>{body}</details>")


def cards(bodies: Iterable[str], kind: str = "cards") -> Html:
    """A grid; `kind` is `cards` or, wider, `charts`. Empty if there are none."""
    content = "".join(bodies)
    return Html(f"<div class={kind}>{content}</div>" if content else "")


def image(url: str) -> Html:
    """An image of the page. `url` must be a data URL."""
    return Html(f'<img alt="" src="{escape(url)}">')


def thumbnail(content: bytes | Image.Image, side: int) -> str:
    """An image that fits into `side` x `side` pixels, upright, as a JPEG in a data URL."""
    opened = Image.open(io.BytesIO(content)) if isinstance(content, bytes) else content
    with opened:
        opened.draft("RGB", (2 * side, 2 * side))
        small = ImageOps.exif_transpose(opened).convert("RGB")
    small.thumbnail((side, side))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


_STYLE = f"""
:root {{ color-scheme: light dark; --back: #fff; --text: #1c2126; --soft: #5d656e; --line: #e3e6ea;
  --good: #1d7a43; --bad: #b3261e; }}
@media (prefers-color-scheme: dark) {{ :root {{ --back: #14171a; --text: #e4e7ea; --soft: #9aa2ab; --line: #2d3238;
  --good: #5fc98a; --bad: #f2938c; }} }}
body {{ background: var(--back); color: var(--text); font: 14px/1.5 system-ui, sans-serif; max-width: 1120px;
  margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; overflow-wrap: anywhere; }} h2 {{ font-size: 1.15rem; margin-top: 2.2rem; }}
h3 {{ font-size: 1rem; margin-top: 1.4rem; }} pre {{ overflow-x: auto; }} summary {{ margin: 1rem 0; cursor: pointer; }}
.soft, small {{ color: var(--soft); font-weight: 400; }} .own {{ font-weight: 600; }}
.better {{ color: var(--good); }} .worse {{ color: var(--bad); }}
.warning {{ border-left: 3px solid var(--bad); padding-left: .7rem; }}
.facts {{ display: flex; flex-wrap: wrap; gap: 2rem; }} .facts dd {{ font-size: 1.2rem; }}
.wide {{ overflow-x: auto; }} table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th {{ text-align: left; color: var(--soft); font-weight: 500; }} .number {{ text-align: right; }}
th, td {{ border-bottom: 1px solid var(--line); padding: .25rem 1.2rem .25rem 0; vertical-align: top;
  white-space: nowrap; }}
.wraps td {{ white-space: pre-wrap; overflow-wrap: anywhere; }}
td img {{ max-width: 160px; }} td svg {{ width: 24rem; }}
.charts, .cards {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 1rem; }}
.cards {{ grid-template-columns: repeat(auto-fill, minmax(min(240px, 100%), 1fr)); }}
.card, figure {{ margin: 0; border: 1px solid var(--line); border-radius: 6px; padding: .6rem .8rem;
  overflow-wrap: anywhere; }}
.card h3 {{ margin: 0; }} .card p {{ margin: .25rem 0 0; }} .card img {{ max-width: 100%; max-height: 180px; }}
.card .text {{ max-height: 7.5em; overflow: auto; white-space: pre-line; }} .pair img {{ max-width: 48%; }}
dl {{ margin: .4rem 0 0; }} dt {{ color: var(--soft); }} dd {{ margin: 0 0 .35rem; }}
figcaption {{ font-weight: 600; }} figure p {{ margin: 0; color: var(--soft); }} figure span {{ margin-right: 1rem; }}
svg {{ width: 100%; }} i {{ display: inline-block; width: .7em; height: .7em; margin-right: .3em; border-radius: 2px; }}
{CHART_STYLE}
"""
