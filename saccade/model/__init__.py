"""The vision-language model: one definition over packed sequences, for training and serving.

    from saccade.model import load_model
    model = load_model("checkpoint/", device="cuda", dtype="bf16")
    logits = model(inputs)                       # [total tokens, vocabulary]

Start with `vlm.py` (embed text, encode images, merge both, run the decoder), then `vision/` and `language.py`.
`families/` has the names and sizes of each model family, `weights.py` reads and writes checkpoint folders,
`initialize.py` makes new ones, `generation.py` is the reference generation that the engine is compared with.
"""

from typing import TYPE_CHECKING

from saccade.imports import lazy_exports

if TYPE_CHECKING:
    from saccade.model.config import ModelConfig as ModelConfig
    from saccade.model.generation import generate as generate
    from saccade.model.vlm import VLM as VLM
    from saccade.model.weights import load_model as load_model
    from saccade.model.weights import save_model as save_model

__getattr__ = lazy_exports(
    __name__,
    {
        "load_model": "weights",
        "save_model": "weights",
        "generate": "generation",
        "VLM": "vlm",
        "ModelConfig": "config",
    },
)
