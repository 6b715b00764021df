"""Saccade: from image-text pairs to a vision-language model in production, in one codebase.

ARCHITECTURE.md is the overview. The public API is `saccade.data`, `saccade.train`, `saccade.model`,
`saccade.processor`, `saccade.engine` and the command line (`saccade --help`).
"""

__version__ = "0.1.0"
