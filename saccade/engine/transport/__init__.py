"""Transports connect a front end with a core: in a thread (`thread.py`) or in a process of its own (`process.py`)."""
