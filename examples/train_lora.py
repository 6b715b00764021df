"""Fine-tune a checkpoint with LoRA on your own images with captions.

python examples/train_lora.py CHECKPOINT photos/ work/                 # photos/: NAME.jpg with NAME.txt
python examples/train_lora.py CHECKPOINT photos/ work/ stages.instruct.lora.rank=64
"""

import sys
from pathlib import Path

from saccade.config import load_config
from saccade.data.prepare import PrepareOptions, prepare
from saccade.data.readers import parse_input
from saccade.train import TrainConfig, train

RECIPE = Path(__file__).with_name("lora.toml")


def main(checkpoint: str, photos: str, work: str, *settings: str) -> None:
    """Write shards, train, and print where the checkpoint and its adapter are."""
    shards, run = Path(work) / "shards", Path(work) / "run"
    report = prepare([parse_input(photos)], shards, PrepareOptions())
    print(f"{shards}: {report.num_samples} samples")
    paths = [f"run={run}", f"model.folder={checkpoint}", f"stages.instruct.data.sources=[{{path='{shards}'}}]"]
    train(load_config(TrainConfig, RECIPE, [*paths, *settings]))
    newest = max((run / "checkpoints").iterdir())
    print(f"{newest}: the model with the adapter merged; {newest / 'adapter'}: the adapter, for PEFT")


if __name__ == "__main__":
    main(*sys.argv[1:])
