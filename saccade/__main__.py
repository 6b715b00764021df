"""`python -m saccade` is the `saccade` command."""

from saccade.cli.entry import run

run()
