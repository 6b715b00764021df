"""Exceptions with a message that says what to do.

    Exception
    └── UserError            printed as one line, no traceback, exit status 2
        ├── ConfigError      a recipe, option or `--set` that is not supported
        ├── DataError        a shard, sample or input file
        │   └── StorageError the disk or server that holds it: retry or resume later, the content may be good
        ├── QualityError     a compressed model that loses more than the stated bound
        ├── CheckpointError  a checkpoint folder: missing, incomplete, of an unknown type
        └── RequestError     a conversation that cannot be converted to model inputs
            └── ImageError   one of its images or video frames

A message has up to three parts: what happened, with the values; why it matters, if not obvious; what to do next. Any
other exception is a bug and keeps its traceback, except errors of the system about a path or a full disk, which
`saccade.cli` prints as one line.
"""


class UserError(Exception):
    """An error the user can fix; the message says how."""


class ConfigError(UserError):
    """An unsupported recipe, option or `--set`."""


class DataError(UserError):
    """An unusable shard, sample or input file."""


class StorageError(DataError):
    """A disk or server that cannot be read at present; says nothing about the content."""


class QualityError(UserError):
    """A compressed model that loses more than the bound that was stated."""


class CheckpointError(UserError):
    """A missing or incomplete checkpoint folder, or one of an unknown type."""


class RequestError(UserError):
    """A conversation that cannot be converted to model inputs."""


class ImageError(RequestError):
    """An unusable image or video frame."""
