"""The process of a `saccade` command."""

from saccade.cli import main
from saccade.startup import QuickExit, collect_rarely_while_importing


def run() -> None:
    """Run the command line in a process of its own."""
    quick_exit = QuickExit()
    collect_rarely_while_importing()
    try:
        main()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            quick_exit.status = ended.code or 0
        raise
