"""Metrics: pure functions from answers and references to numbers, one file each. No model, no files, no torch."""
