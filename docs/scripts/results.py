"""Write the result tables of the documents from `docs/results.toml`; with `--check`, say whether they are current.

A table stands between `<!-- results: NAME -->` and `<!-- end -->`.
"""

import re
import string
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.S)


class _Quoting(string.Formatter):
    """Replace `{table.row.column}` by that figure."""

    def get_field(self, field_name: str, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        table, row, column = field_name.split(".")
        return args[0][table]["rows"][row][column], field_name


def table(results: dict[str, Any], name: str) -> str:
    """A Markdown table of the results file; a column that no row has is left out."""
    rows = results[name]["rows"].values()
    columns = {key: heading for key, heading in results[name]["columns"].items() if any(key in row for row in rows)}
    cells = [[_Quoting().vformat(row.get(key, ""), [results], {}) for key in columns] for row in rows]
    rule = "|" + "---|" * len(columns)
    first, *rest = [
        "|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in (columns.values(), *cells)
    ]
    return "\n".join([first, rule, *rest, ""])


def with_tables(document: str, results: dict[str, Any]) -> str:
    """The document with its tables written again."""
    return BLOCK.sub(lambda block: f"{block[1]}\n{table(results, block[2])}\n{block[3]}", document)


def main(*, check: bool) -> int:
    """Write the tables, or name the documents whose tables are not current."""
    results = tomllib.loads((ROOT / "docs" / "results.toml").read_text())
    status = 0
    for path in DOCUMENTS:
        old = path.read_text()
        new = with_tables(old, results)
        if check and new != old:
            print(f"{path.relative_to(ROOT)}: tables are not current. Run: python docs/scripts/results.py")
            status = 1
        elif new != old:
            path.write_text(new)
    return status


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
