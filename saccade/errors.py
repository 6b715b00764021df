"""Errors that tell the user what to do.

    Exception
    └── UserError            printed as one line, no traceback, exit status 2
        ├── ConfigError      a recipe, an option or a `--set` that cannot be honoured
        ├── DataError        a shard, sample or source file
        ├── CheckpointError  a checkpoint folder: missing, incomplete, of an unknown kind
        └── RequestError     a conversation that cannot be answered or learned from
            └── ImageError   one image or video frame of it

A message has up to three parts: what happened, with the values; why it matters, if that is not plain; what to do next.
Anything that is not a `UserError` is a bug of ours and keeps its traceback.
"""


class UserError(Exception):
    """Something the user can fix; the message says how."""


class ConfigError(UserError):
    """A recipe, an option or a `--set` that cannot be honoured."""


class DataError(UserError):
    """A shard, a sample or a source file that cannot be used."""


class CheckpointError(UserError):
    """A checkpoint folder that is missing, incomplete or of an unknown kind."""


class RequestError(UserError):
    """A conversation that cannot be turned into model inputs."""


class ImageError(RequestError):
    """An image or video frame that cannot be used."""
