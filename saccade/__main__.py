"""`python -m saccade` is the `saccade` command."""

from saccade.cli import main

main()
