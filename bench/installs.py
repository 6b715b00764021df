"""Install the package and each extra into clean environments: size, time, and one command that needs the extra.

    python -m bench.installs                     # prints the table; --write puts it into docs/install.md

torch is installed once, pinned by constraints.txt, and every environment starts as a copy of that one: sizes and times
are those of everything else. Environments are removed at the end. With a cache or a mirror nearby, pip mostly unpacks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "install.md"
BLOCK = re.compile(r"(<!-- installs -->\n).*?(<!-- end -->)", re.S)
PIP = (
    *("-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"),
    *("--constraint", str(ROOT / "constraints.txt")),
)
MADE = """
from pathlib import Path
from saccade.data.toy import toy_sample, write_toy_shards
write_toy_shards("shards", first=0, count=12, side=56)
Path("photos").mkdir()
for number in range(4):
    Path(f"photos/{number}.png").write_bytes(toy_sample(number).members["png"])
    Path(f"photos/{number}.txt").write_text(f"picture number {number}")
"""
TRAIN = (
    "saccade train {root}/recipes/tiny.toml --device cpu --set run=run --set model.folder=tiny "
    "--set stages.learn.data.sources=[{{path='shards'}}] --set validation.sources=[{{path='shards'}}] "
    "--set stages.learn.steps=2 --set stages.learn.schedule.warmup_steps=1 --set validation.num_generations=0"
)
EXTRAS: dict[str, tuple[str, str]] = {
    "": ("saccade chat tiny hi --max-tokens 2 --device cpu", "`saccade chat`: an answer"),
    "serve": ("", "`saccade serve`: an answer over HTTP"),
    "train": (TRAIN, "`saccade train`: two steps and an exported checkpoint"),
    "data": ("saccade data prepare photos -o prepared", "`saccade data prepare`: shards"),
    "eval": (
        "saccade evaluate tiny --tasks vqa --data shards -o results --limit 2 --max-tokens 2 --device cpu",
        "`saccade evaluate`: a report",
    ),
    "hub": ("", "`saccade chat org/name`: asks the hub for it"),
    "all": (TRAIN, "`saccade train`: two steps and an exported checkpoint"),
}
"""Command that must succeed with each extra, and what it does; `smoke` treats `serve` and `hub` on their own."""


def main() -> None:
    """Install each extra, run its command, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extras", nargs="*", default=list(EXTRAS), help="only these; '' is the package alone")
    parser.add_argument("--write", action="store_true", help="write the table into docs/install.md")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    parser.add_argument("--read", type=Path, help="take the figures from such a file instead of measuring")
    options = parser.parse_args()
    if options.read:
        rows = json.loads(options.read.read_text())
    else:
        with tempfile.TemporaryDirectory(prefix="installs-") as folder:
            rows = measure(Path(folder), options.extras)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))
    if options.write:
        PAGE.write_text(BLOCK.sub(lambda block: f"{block[1]}\n{table(rows)}\n{block[2]}", PAGE.read_text()))
    if not all(row["works"] for row in rows):
        sys.exit("some commands failed")


def measure(folder: Path, extras: list[str]) -> list[dict[str, object]]:
    """One row for torch alone, one for every extra."""
    base = folder / "torch"
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "venv", base], check=True)
    run_python(base, *PIP, "torch")
    rows = [row("torch", base, None, time.perf_counter() - began, "", works=True)]
    for extra in extras:
        environment = folder / (extra or "alone")
        shutil.copytree(base, environment, symlinks=True, copy_function=os.link)
        began = time.perf_counter()
        run_python(environment, *PIP, f"{ROOT}[{extra}]" if extra else str(ROOT))
        seconds = time.perf_counter() - began
        work = folder / f"work-{extra or 'alone'}"
        works = smoke(environment, extra, work)
        rows.append(row(f".[{extra}]" if extra else ".", environment, base, seconds, EXTRAS[extra][1], works=works))
        print(json.dumps(rows[-1]), flush=True)
        shutil.rmtree(environment)
    return rows


def row(
    name: str, environment: Path, base: Path | None, seconds: float, command: str, *, works: bool
) -> dict[str, object]:
    """The figures of one environment, without what is in `base`."""
    numbers = [count(environment)] + ([] if base is None else [count(base)])
    packages, num_bytes = (of[0] - (of[1] if base else 0) for of in zip(*numbers, strict=True)) if base else numbers[0]
    return {
        "name": name,
        "packages": packages,
        "mb": round(num_bytes / 1e6, 1),
        "seconds": round(seconds, 1),
        "command": command,
        "works": works,
    }


def count(environment: Path) -> tuple[int, int]:
    """Packages and bytes of an environment, pip left out."""
    [site] = environment.glob("lib/python3*/site-packages")
    found = (path for path in site.rglob("*") if path.is_file())
    files = [path for path in found if path.relative_to(site).parts[0].partition("-")[0] != "pip"]
    packages = [path for path in site.glob("*.dist-info") if not path.name.startswith("pip-")]
    return len(packages), sum(path.stat().st_size for path in files if "__pycache__" not in path.parts)


def run_python(environment: Path, *words: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run the environment's Python; its output is shown if it fails."""
    done = subprocess.run([environment / "bin/python", *words], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        raise SystemExit(f"{words} failed in {environment}")
    return done  # type: ignore[no-any-return]


def smoke(environment: Path, extra: str, folder: Path) -> bool:
    """Make a model and a few samples, and run the command of an extra."""
    folder.mkdir()
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    options = {"cwd": folder, "env": variables | {"PATH": f"{environment / 'bin'}:{os.environ['PATH']}"}}
    run_python(environment, "-c", MADE, **options)
    run_python(environment, "-m", "saccade", "init", "tiny", "--size", "tiny", "--dtype", "fp32", **options)
    if extra == "serve":
        return serves(environment, options)
    if extra == "hub":
        options["env"] = options["env"] | {"HF_HUB_OFFLINE": "1"}  # type: ignore[operator]
        ended = subprocess.run(
            [environment / "bin/saccade", "chat", "org/name", "hi"],
            capture_output=True,
            text=True,
            check=False,
            **options,
        )  # type: ignore[call-overload]
        return ended.returncode == 2 and "saccade[hub]" not in ended.stderr
    words = EXTRAS[extra][0].format(root=ROOT).split()
    ended = subprocess.run(words, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    if ended.returncode:
        print(ended.stdout[-2000:], ended.stderr[-2000:], sep="\n", file=sys.stderr)
    return bool(ended.returncode == 0)


def serves(environment: Path, options: dict[str, object]) -> bool:
    """Start the server, ask it once, and stop it."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    server = subprocess.Popen(
        [environment / "bin/saccade", "serve", "tiny", "--port", str(port), "--device", "cpu"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options,
    )  # type: ignore[call-overload]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and server.poll() is None:
            try:
                with urllib.request.urlopen(request, timeout=60) as reply:
                    return "choices" in json.load(reply)
            except OSError:
                time.sleep(0.5)
        return False
    finally:
        server.terminate()
        server.wait()


def table(rows: list[dict[str, object]]) -> str:
    """The table as Markdown."""
    lines = ["| `pip install` | packages | MB | time | then works |", "|---|---|---|---|---|"]
    for found in rows:
        works = str(found["command"]) if found["works"] else "failed"
        lines.append(f"| `{found['name']}` | {found['packages']} | {found['mb']} | {found['seconds']} s | {works} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
