"""Draw `docs/images/architecture.svg` from `docs/images/architecture.toml`; with `--check`, say whether it is current."""

import sys
import tomllib
from html import escape
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).parents[1] / "images"
WIDTH, MARGIN, GAP, ARROW_GAP = 960, 8, 16, 72
ROW_GAP, TITLE_HEIGHT, LINE_HEIGHT = 14, 30, 17
STYLE = """
  text { font-family: system-ui, -apple-system, "Segoe UI", sans-serif; text-anchor: middle; }
  .title { font-size: 16px; font-weight: 600; fill: #0b4f55; }
  .line { font-size: 12.5px; fill: #33474a; }
  .label { font-size: 11px; fill: #6f8285; }
  rect { fill: #e6f2f3; stroke: #0b6b73; stroke-width: 1.2; }
  path { stroke: #6f8285; stroke-width: 1.5; fill: none; marker-end: url(#head); }
"""


def draw(figure: dict[str, Any]) -> str:
    """The whole figure as SVG."""
    parts, top = [], MARGIN
    for row in figure["rows"]:
        height = TITLE_HEIGHT + LINE_HEIGHT * max(len(box["lines"]) for box in row["boxes"] if box) + 10
        parts += draw_row(row, top, height)
        top += height + ROW_GAP
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<polygon points="0,0 8,4 0,8" fill="#6f8285"/></marker>'
    )
    size = f'viewBox="0 0 {WIDTH} {top - ROW_GAP + MARGIN}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="Packages of Saccade">',
            f"<style>{STYLE}</style>",
            f"<defs>{head}</defs>",
            *parts,
            "</svg>\n",
        ]
    )


def draw_row(row: dict[str, Any], top: int, height: int) -> list[str]:
    """Boxes of equal width, with labelled arrows between them if the row has any."""
    boxes, arrows = row["boxes"], row.get("arrows", [])
    gap = ARROW_GAP if arrows else GAP
    width = (WIDTH - 2 * MARGIN - gap * (len(boxes) - 1)) / len(boxes)
    parts = []
    for number, box in enumerate(boxes):
        left = MARGIN + number * (width + gap)
        parts += draw_box(box, left, top, width, height) if box else []
        if number < len(arrows):
            start, middle = left + width + 4, top + height / 2
            words = arrows[number].split()
            parts.append(f'<path d="M{start:.1f} {middle:.1f} h{gap - 8:.1f}"/>')
            for line, word in enumerate(words):
                y = middle - 8 - 12 * (len(words) - 1 - line)
                parts.append(f'<text class="label" x="{left + width + gap / 2:.1f}" y="{y:.1f}">{escape(word)}</text>')
    return parts


def draw_box(box: dict[str, Any], left: float, top: int, width: float, height: int) -> list[str]:
    """A box with its title and lines, centred."""
    middle = left + width / 2
    parts = [
        f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{height}" rx="8"/>',
        f'<text class="title" x="{middle:.1f}" y="{top + 22}">{escape(box["title"])}</text>',
    ]
    for number, line in enumerate(box["lines"]):
        y = top + TITLE_HEIGHT + 11 + number * LINE_HEIGHT
        parts.append(f'<text class="line" x="{middle:.1f}" y="{y}">{escape(line)}</text>')
    return parts


def main(*, check: bool) -> int:
    """Write the figure, or say that it is not current."""
    drawn, path = draw(tomllib.loads((IMAGES / "architecture.toml").read_text())), IMAGES / "architecture.svg"
    if not check:
        path.write_text(drawn)
    elif path.read_text() != drawn:
        print("architecture.svg is not current. Run: python docs/scripts/architecture.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
