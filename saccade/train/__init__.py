"""Training: a recipe of stages on one device or many, resumable at any step.

    from saccade.train import TrainConfig, train
    train(load_config(TrainConfig, Path("recipes/tiny.toml")))

Start with `stages.py` (a run is a list of stages), then `trainer.py` (a stage is a training loop). `batches.py` is the
batch iterator, `loss.py` the model with its loss, `objectives/` what is optimized, `train_state.py` model and
optimizer, `parallelize.py` FSDP and DDP. `saver.py` saves the training state, `weights.py` loads and exports
checkpoint folders. `guard.py`, `schedule.py` and `parameter_groups.py` are plain Python.
"""

from typing import TYPE_CHECKING

from saccade.imports import lazy_exports

if TYPE_CHECKING:
    from saccade.train.config import TrainConfig as TrainConfig
    from saccade.train.stages import train as train

__getattr__ = lazy_exports(__name__, {"train": "stages", "TrainConfig": "config"})
