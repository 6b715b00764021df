"""Saccade: from image-text pairs to a vision-language model in production, in one codebase.

ARCHITECTURE.md has the map. The doors are `saccade.model`, `saccade.processor` and the command line (`saccade --help`).
"""

__version__ = "0.1.0"
