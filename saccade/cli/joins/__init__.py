"""Joins of packages that may not import each other. Only `cli` may import them together.

engine_model.py            the engine as a model of `evaluate`
evaluation.py              options of `saccade evaluate` as its config; checkpoints of `train` and `compress` evaluated
checkpoint_evaluations.py  the checkpoints that a training run exports, evaluated in a process of their own
"""
