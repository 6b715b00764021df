"""Fuzz a server by its OpenAPI document with schemathesis: no 5xx, no answer that the document does not describe.

    PYTHONPATH=tests python -m stress.fuzz [--examples 500] [--url URL] [--seed 0] [--phases coverage,fuzzing,stateful]

Without --url a server is started on a tiny model. All checks of schemathesis are on, except that valid requests are
always accepted: what a schema cannot say (an image that decodes, a prompt that fits, fields that exclude each other) is
a 400.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from stress.tiny_server import tiny_server

OPTIONS = ["--device", "cpu", "--max-model-len", 256, "--set", "engine.num_workers=1", "--set", "engine.num_pages=400"]


def fuzz(url, *, examples, seed, phases):
    """Run schemathesis; returns the number of cases, its report, and whether it found nothing."""
    command = [Path(sys.executable).with_name("schemathesis"), "run", f"{url}/openapi.json"]
    command += ["--exclude-checks", "positive_data_acceptance", "--max-examples", examples, "--seed", seed]
    command += ["--phases", phases, "--suppress-health-check", "all", "--continue-on-failure"]
    command += ["--generation-database", "none", "--request-timeout", 60]
    with tempfile.TemporaryDirectory() as folder:  # it writes where it runs
        done = subprocess.run([str(word) for word in command], cwd=folder, capture_output=True, text=True, check=False)
    found = re.search(r"(\d+) generated", done.stdout)
    return int(found[1]) if found else 0, done.stdout + done.stderr, done.returncode == 0


def main():
    """Fuzz, print the report and the number of cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a running server; one is started if not given")
    parser.add_argument("--examples", type=int, default=500, help="random cases per operation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--phases", default="coverage,fuzzing,stateful")
    settings = vars(parser.parse_args())
    url = settings.pop("url")
    if url:
        num_cases, report, is_clean = fuzz(url, **settings)
    else:
        with tiny_server(*OPTIONS) as server:
            num_cases, report, is_clean = fuzz(server.url, **settings)
    print(report)
    print(f"{num_cases} cases: {'no 5xx, no violation of the document' if is_clean else 'see above'}")
    sys.exit(0 if is_clean else 1)


if __name__ == "__main__":
    main()
