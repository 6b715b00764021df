"""The objective that a recipe chooses."""

from saccade.train.objectives.config import ObjectiveConfig
from saccade.train.objectives.cross_entropy import CrossEntropy
from saccade.train.objectives.objective import Objective


def build_objective(config: ObjectiveConfig) -> Objective:
    """Make the objective of a stage."""
    return CrossEntropy(label_smoothing=config.label_smoothing)
