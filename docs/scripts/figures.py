"""Draw the figures of `docs/images` from the TOML files next to them; with `--check`, say whether they are current."""

import sys
import tomllib
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).parents[1] / "images"
WIDTH, MARGIN = 960, 8
STYLE = """
  text { font-family: system-ui, -apple-system, "Segoe UI", sans-serif; text-anchor: middle; }
  .title { font-size: 16px; font-weight: 600; fill: #0b4f55; }
  .line { font-size: 12.5px; fill: #33474a; }
  .label { font-size: 11px; fill: #6f8285; }
  .span { font-size: 11px; fill: #33474a; }
  rect { fill: #e6f2f3; stroke: #0b6b73; stroke-width: 1.2; }
  rect.odd { fill: #fdf1dd; stroke: #a3701a; }
  rect.none { fill: #f4f6f6; stroke: #b6c3c5; }
  path { stroke: #6f8285; stroke-width: 1.5; fill: none; marker-end: url(#head); }
"""
HEAD = (
    '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<polygon points="0,0 8,4 0,8" fill="#6f8285"/></marker>'
)


def svg(label: str, height: float, parts: Sequence[str]) -> str:
    """The parts as one figure."""
    size = f'viewBox="0 0 {WIDTH} {height:g}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(label)}">'
    return "\n".join([start, f"<style>{STYLE}</style>", f"<defs>{HEAD}</defs>", *parts, "</svg>\n"])


def text(kind: str, x: float, y: float, content: str) -> str:
    """One line of text, centred at x."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(content)}</text>'


GAP, ARROW_GAP = 16, 72
ROW_GAP, TITLE_HEIGHT, LINE_HEIGHT = 14, 30, 17


def packages(figure: dict[str, Any]) -> str:
    """Rows of boxes of equal width, with labelled arrows between them if the row has any."""
    parts, top = [], MARGIN
    for row in figure["rows"]:
        height = TITLE_HEIGHT + LINE_HEIGHT * max(len(box["lines"]) for box in row["boxes"] if box) + 10
        parts += draw_row(row, top, height)
        top += height + ROW_GAP
    return svg("Packages of Saccade", top - ROW_GAP + MARGIN, parts)


def draw_row(row: dict[str, Any], top: int, height: int) -> list[str]:
    """The boxes and arrows of one row."""
    boxes, arrows = row["boxes"], row.get("arrows", [])
    gap = ARROW_GAP if arrows else GAP
    width = (WIDTH - 2 * MARGIN - gap * (len(boxes) - 1)) / len(boxes)
    parts = []
    for number, box in enumerate(boxes):
        left = MARGIN + number * (width + gap)
        parts += draw_box(box, left, top, width, height) if box else []
        if number < len(arrows):
            middle, words = top + height / 2, arrows[number].split()
            parts.append(f'<path d="M{left + width + 4:.1f} {middle:.1f} h{gap - 8:.1f}"/>')
            for line, word in enumerate(words):
                parts.append(text("label", left + width + gap / 2, middle - 8 - 12 * (len(words) - 1 - line), word))
    return parts


def draw_box(box: dict[str, Any], left: float, top: int, width: float, height: int) -> list[str]:
    """A box with its title and lines, centred."""
    middle = left + width / 2
    lines = [
        text("line", middle, top + TITLE_HEIGHT + 11 + number * LINE_HEIGHT, line)
        for number, line in enumerate(box["lines"])
    ]
    rect = f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{height}" rx="8"/>'
    return [rect, text("title", middle, top + 22, box["title"]), *lines]


NAME_WIDTH, SPAN_HEIGHT, SPAN_GAP = 84, 44, 46


def timeline(figure: dict[str, Any]) -> str:
    """Two rows of spans over time; spans of odd and even steps have different colours."""
    scale = (WIDTH - NAME_WIDTH - 2 * MARGIN) / figure["end"]
    tops = [MARGIN + number * (SPAN_HEIGHT + SPAN_GAP) for number in range(len(figure["rows"]))]
    parts = []
    for row, top in zip(figure["rows"], tops, strict=True):
        parts += [
            text("title" if number == 0 else "label", NAME_WIDTH / 2, top + 19 + 17 * number, line)
            for number, line in enumerate(row["name"])
        ]
        for span in row["spans"]:
            parts += draw_span(span, NAME_WIDTH + MARGIN + scale * span["at"], top, scale * span["length"])
    for arrow in figure["arrows"]:
        start, end = (NAME_WIDTH + MARGIN + scale * at for at in arrow.get("down") or arrow["up"])
        upper, lower = tops[0] + SPAN_HEIGHT + 2, tops[1] - 3
        first, last = (upper, lower) if "down" in arrow else (lower, upper)
        parts.append(f'<path d="M{start:.1f} {first} L{end:.1f} {last}"/>')
        side = -26 if "down" in arrow else 24
        parts.append(text("label", (start + end) / 2 + side, (upper + lower) / 2 + 4, arrow["label"]))
    return svg("Engine steps over time", tops[-1] + SPAN_HEIGHT + MARGIN, parts)


def draw_span(span: dict[str, Any], left: float, top: int, width: float) -> list[str]:
    """A span with its lines, in the colour of its step."""
    kind = "none" if "step" not in span else "odd" if span["step"] % 2 else "even"
    rect = f'<rect class="{kind}" x="{left + 1:.1f}" y="{top}" width="{width - 2:.1f}" height="{SPAN_HEIGHT}" rx="4"/>'
    lines = [text("span", left + width / 2, top + 19 + 15 * number, line) for number, line in enumerate(span["lines"])]
    return [rect, *lines]


FIGURES = {"architecture": packages, "engine-steps": timeline}


def main(*, check: bool) -> int:
    """Write the figures, or name those that are not current."""
    status = 0
    for name, draw in FIGURES.items():
        drawn, path = draw(tomllib.loads((IMAGES / f"{name}.toml").read_text())), IMAGES / f"{name}.svg"
        if not check:
            path.write_text(drawn)
        elif not path.exists() or path.read_text() != drawn:
            print(f"{path.name} is not current. Run: python docs/scripts/figures.py")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
