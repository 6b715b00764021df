"""Training: a recipe of stages, on one device or many, that can be stopped and taken up at any time.

    from saccade.train import TrainConfig, train
    train(load_config(TrainConfig, Path("recipes/tiny.toml")))

Read `stages.py` first (a run is its stages), then `trainer.py` (a stage is a loop). `parallelize.py` spreads the model over devices
from outside, `learner.py` is model and optimizer as one, `feed.py` brings rows to the device, `loss.py` is what they are trained on,
`checkpoint.py` and `export.py` write. `guard.py`, `schedule.py` and `groups.py` decide in plain Python.
"""

from typing import TYPE_CHECKING

from saccade.lazy import lazy_exports

if TYPE_CHECKING:
    from saccade.train.config import TrainConfig as TrainConfig
    from saccade.train.stages import train as train

__getattr__ = lazy_exports(__name__, {"train": "stages", "TrainConfig": "config"})
