"""Transports connect a front end with a core, which runs in a thread (`thread.py`) or a process (`process.py`)."""
