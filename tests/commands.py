"""Commands of the command line in processes of their own, and how they ended."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    out: str
    err: str


_FORK_EACH = """
import gc, importlib, json, os, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
if "triton" not in sys.modules:  # whose bindings report leaks
    gc.freeze()  # a process that ends collects garbage, over all that torch has imported for 0.4 s
for case in json.load(sys.stdin):
    if (pid := os.fork()) == 0:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(case[name], os.O_WRONLY | os.O_CREAT), number)
        exec(case["code"], {"__name__": "__main__"})
        sys.exit()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(status, flush=True)
"""


def run_forked(codes, folder: Path, modules=("torch",), **environment: str) -> list[Ended]:
    """Run each Python code in its own process, one after another, forked from one that has imported the modules."""
    cases = [
        {"code": code, "out": str(folder / f"{i}.out"), "err": str(folder / f"{i}.err")} for i, code in enumerate(codes)
    ]
    run = subprocess.run(
        [sys.executable, "-c", _FORK_EACH, *modules],
        input=json.dumps(cases),
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    statuses = map(int, run.stdout.split())
    return [
        Ended(status, Path(case["out"]).read_text(), Path(case["err"]).read_text())
        for status, case in zip(statuses, cases, strict=True)
    ]


def is_alive(pid) -> bool:
    """Whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
