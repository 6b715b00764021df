"""Endpoints, one per file. Each has a function `router`; `app.py` lists them."""
