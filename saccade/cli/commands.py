"""The list of commands, and how errors end them."""

import errno
import sys
from typing import Annotated

import typer

from saccade import __version__
from saccade.cli import (
    bench,
    chat,
    compress,
    data,
    evaluate,
    fleet,
    merge,
    model,
    plan,
    prune,
    quickstart,
    recipes,
    serve,
    train,
)
from saccade.cli.options import CommandGroup, examples
from saccade.errors import UserError
from saccade.imports import missing_extra

app = typer.Typer(
    name="saccade",
    cls=CommandGroup,
    help="From image-text pairs to a vision-language model in production.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # tables of options cut words at 80 columns
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMANDS = (
    quickstart.quickstart, model.models, model.init, train.train, plan.plan, evaluate.evaluate, compress.compress,
    prune.prune, merge.merge, chat.chat, serve.serve,
)  # fmt: skip
_EXAMPLES = {
    train.train: ("saccade train recipe.toml --check", "saccade train recipe.toml --set stages.learn.steps=100"),
    evaluate.evaluate: ("saccade evaluate checkpoint --tasks vqa --data shards/test -o results/mine",),
    model.init: ("saccade init tiny --size tiny --dtype fp32",),
    chat.chat: ('saccade chat checkpoint cat.jpg "What is in the picture?"',),
    serve.serve: ("saccade serve checkpoint", "saccade serve checkpoint --adapter mine=runs/a/adapter"),
}  # fmt: skip
for command in _COMMANDS:
    app.command(epilog=examples(*_EXAMPLES[command]) if command in _EXAMPLES else None)(command)
app.add_typer(data.app, name="data")
app.add_typer(recipes.app, name="recipes")
app.add_typer(serve.keys, name="keys")
app.add_typer(fleet.app, name="fleet")
app.add_typer(bench.app, name="bench")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_BAD_PATH = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)


def main() -> None:
    """Run the command line.

    A user error, a path that the system refuses, a full disk or an extra that is not installed ends it with one line
    and exit status 2. Ctrl-C ends it with 130 and a closed pipe with 141, as the shell reports a program that a signal
    ended. Anything else is a bug and keeps its traceback.
    """
    try:
        app()
    except UserError as error:
        print(f"saccade: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    except ModuleNotFoundError as error:
        command = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
        if remedy := missing_extra(error.name, command):
            print(f"saccade: {remedy}", file=sys.stderr)  # noqa: T201
            sys.exit(2)
        raise
    except OSError as error:
        if remedy := _path_remedy(error):
            print(f"saccade: {remedy}", file=sys.stderr)  # noqa: T201
            sys.exit(2)
        raise
    except KeyboardInterrupt:
        sys.exit(130)
    except SystemExit as ended:  # click turns a broken pipe into exit status 1
        if isinstance(ended.__context__, BrokenPipeError):
            sys.exit(141)
        raise


def _path_remedy(error: OSError) -> str | None:
    """Advise about a full disk, or a path that cannot be read or written; None for other errors of the system."""
    path = error.filename2 or error.filename
    where = "" if path is None else f"{path}: "
    if error.errno in _NO_SPACE:
        return f"{where}{error.strerror}. Free space and run the command again"
    if error.errno in _BAD_PATH and where:
        return f"{where}{error.strerror}. Give access to it, or choose another path"
    return None


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"saccade {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log details.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    from saccade.log import set_up_logging

    del version
    set_up_logging(verbose=verbose)
