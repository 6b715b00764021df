"""The `saccade` command: wires packages together, no logic of its own.

Each group of commands has a file; `commands.py` lists the commands. A command imports what it needs when it runs, so
that `--help` is fast. Importing the package imports nothing, so that `entry.py` can handle a Ctrl-C from the first
moment.
"""

TYPE_CHECKING = False  # the constant of `typing`, which takes a while to import
if TYPE_CHECKING:
    from saccade.cli.commands import app as app
    from saccade.cli.commands import main as main


def __getattr__(name: str) -> object:
    if name not in ("app", "main"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from saccade.cli import commands

    return getattr(commands, name)
