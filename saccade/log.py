"""Logging: one handler for the whole program, with rank 0 in full and other ranks from warnings up.

Library code uses `logging.getLogger(__name__)` and never prints. Only a program (the command line, a test, a script)
calls `set_up_logging`.
"""

import functools
import json
import logging
import os
from datetime import UTC, datetime
from typing import Any

from saccade.errors import ConfigError


class _PackageFormatter(logging.Formatter):
    """Formats `12:30:01 model  message`: the package is the second part of the logger's name."""

    def format(self, record: logging.LogRecord) -> str:
        parts = record.name.split(".")
        record.package = parts[1] if parts[0] == "saccade" and len(parts) > 1 else parts[0]
        return super().format(record)


class _JsonFormatter(logging.Formatter):
    """Formats one JSON object per line; the `fields` of a record are part of it."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        line |= {"message": record.getMessage()} if fields is None else fields
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up_logging(*, verbose: bool = False, as_json: bool = False) -> None:
    """Log all packages to standard error, as text or as JSON lines. Calling it again replaces the earlier handler."""
    rank = rank_of_process()
    handler = logging.StreamHandler()
    prefix = "" if rank == 0 else f"[rank {rank}] "
    text = _PackageFormatter(f"%(asctime)s {prefix}%(package)-9s %(message)s", datefmt="%H:%M:%S")
    handler.setFormatter(_JsonFormatter() if as_json else text)
    logger = logging.getLogger("saccade")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel((logging.DEBUG if verbose else logging.INFO) if rank == 0 else logging.WARNING)


def logs_json() -> bool:
    """Whether this process logs JSON lines, so that its child processes can do the same."""
    return any(isinstance(handler.formatter, _JsonFormatter) for handler in logging.getLogger("saccade").handlers)


def rank_of_process() -> int:
    """The launcher's RANK; 0 without a launcher."""
    value = os.environ.get("RANK", "0")
    if not (value.isascii() and value.isdigit()):
        raise ConfigError(f"environment variable RANK is {value!r}, not a number. Start through torchrun, or unset it")
    return int(value)


@functools.cache
def log_once(package: str, message: str, level: int = logging.INFO) -> None:
    """Log `message` the first time it occurs in this process."""
    logging.getLogger(f"saccade.{package}").log(level, message)
