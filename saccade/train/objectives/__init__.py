"""Training objectives: from the hidden states of a packed sequence to the terms of a loss.

    hidden states, head, labels -> Objective.loss -> LossTerms: weighted terms, divided by the normaliser of the step

Start with `objective.py`, which says what an objective is, then `cross_entropy.py`, the default. A recipe chooses one
in the section `stages.objective` (`config.py`), and `build.py` makes it. The training loop knows none of them by name.
"""
