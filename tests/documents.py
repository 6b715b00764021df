"""Markdown documents of the repository: their code blocks, links and headings, and running the blocks."""

import ast
import asyncio
import inspect
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md", ".github/*.md")
    for path in ROOT.glob(pattern)
    if "site" not in path.parts
)
LANGUAGES = {"bash", "python", "toml", "json", "text"}
SERVED = re.compile(r"http://(127\.0\.0\.1|localhost):8000")
"""A block with this address needs a server."""


@dataclass(frozen=True)
class CodeBlock:
    """A fenced block. The line before it may be a comment: `<!-- not run: REASON -->`, or `<!-- file: NAME -->`."""

    path: Path
    line: int
    language: str
    source: str
    not_run: str | None
    file: str | None

    def __str__(self):
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def code_blocks(path):
    """The fenced blocks of a document, in order."""
    lines, blocks, before, number = path.read_text().splitlines(), [], "", 0
    while number < len(lines):
        if fence := re.match(r"(```+)(\S*)", lines[number]):
            end = lines.index(fence[1], number + 1)
            comment = re.fullmatch(r"<!-- (not run|file): (.+) -->", before.strip())
            marks = dict([comment.groups()]) if comment else {}
            source = "\n".join(lines[number + 1 : end]) + "\n"
            blocks.append(CodeBlock(path, number + 1, fence[2], source, marks.get("not run"), marks.get("file")))
            number = end
        before = lines[number]
        number += 1
    return blocks


def prose(path):
    """The document without its code blocks and code spans."""
    text = re.sub(r"^(```+).*?^\1$", "", path.read_text(), flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", "", text)


def links(path):
    """Targets of the links and images of a document that point into the repository."""
    found = re.findall(r"\]\(([^)\s]+)\)", prose(path)) + re.findall(r'(?:src|href)="([^"]+)"', prose(path))
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def anchors(path):
    """The ids that headings of a document get, on the site as on GitHub."""
    text = re.sub(r"^(```+).*?^\1$", "", path.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}


def commands(block):
    """The command lines of a bash block, continued lines joined, without comments."""
    joined = re.sub(r"\\\n\s*", " ", block.source)
    return [line for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def known_names():
    """What Python code in documents may use without defining it."""
    question = {"role": "user", "content": [{"type": "image", "image": "cat.jpg"}, {"type": "text", "text": "Hm?"}]}
    return {"conversation": [question], "conversations": [[question], [{"role": "user", "content": "Hello"}]]}


def run_bash(block, command, monkeypatch):
    """`saccade ...` through its entry in this process, `python -c` and scripts too; anything else in a shell."""
    for line in commands(block):
        words = [_last_exported(word) for word in shlex.split(line, comments=True)]
        while "=" in words[0]:
            monkeypatch.setenv(*words.pop(0).split("=", 1))
        if words[0] == "saccade" and not {"|", ">", "&"} & set(words):
            ended = command(*words[1:])
            assert ended.status == 0, f"{block}: {line}\n{ended.out}{ended.err}"
        elif words[:2] == ["python", "-c"]:
            exec(compile(words[2], str(block), "exec"), {})
        else:
            environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
            run = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, check=False)
            assert run.returncode == 0, f"{block}: {line}\n{run.stdout}{run.stderr}"


def _last_exported(word):
    """The last checkpoint of a run in place of one that the small substitute of a recipe did not reach."""
    run = re.fullmatch(r"(runs/[^/]+/checkpoints)/step-\d+(.*)", word)
    if run is None or Path(word).exists():
        return word
    return f"{max(Path(run[1]).glob('step-*'))}{run[2]}"


def run_python(block, names, source=None):
    """Run the code, with `await` and `async for` at the top level as in a notebook."""
    code = compile(source or block.source, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, names)
    if inspect.iscoroutine(result):
        asyncio.run(result)
