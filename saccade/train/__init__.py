"""Training: a recipe of stages, on one device or many, that can be stopped and taken up at any time.

    from saccade.train import TrainConfig, train
    train(load_config(TrainConfig, Path("recipes/tiny.toml")))

Read `stages.py` first (a run is its stages), then `trainer.py` (a stage is a loop). `parallelize.py` spreads the model over devices
from outside, `learner.py` is model and optimizer as one, `feed.py` brings rows to the device, `loss.py` is what they are trained on,
`checkpoint.py` and `export.py` write. `guard.py`, `schedule.py` and `groups.py` decide in plain Python.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from saccade.train.config import TrainConfig as TrainConfig
    from saccade.train.stages import train as train

_DOOR = {"train": "stages", "TrainConfig": "config"}


def __getattr__(name: str) -> object:
    """Resolve the door's names on first use."""
    if name not in _DOOR:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_DOOR[name]}"), name)
