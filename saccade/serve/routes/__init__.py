"""Endpoints, one per file. Each has a function that makes its router; `app.py` lists them."""
