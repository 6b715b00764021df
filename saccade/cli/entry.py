"""The process of a `saccade` command."""

import sys


def run() -> None:
    """Run the command line in a process of its own.

    A Ctrl-C while its modules are imported ends it with 130, without a traceback.
    """
    try:
        from saccade.workers.process import QuickExit, collect_rarely_while_importing

        quick_exit = QuickExit()
        collect_rarely_while_importing()
        from saccade.cli.commands import main
    except KeyboardInterrupt:
        sys.exit(130)
    try:
        main()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            quick_exit.status = ended.code or 0
        raise
