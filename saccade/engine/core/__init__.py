"""The engine core: plain Python that decides what every step computes. Nothing here imports torch.

Start with `loop.py`, the engine loop. `step.py` defines the plan and the result of a step; `scheduler.py` holds the
requests.
"""
