"""The device runs the steps that the core plans. Only this package of the engine imports torch.

Start with `runner.py`. `loading.py` loads a checkpoint folder into a runner.
"""
