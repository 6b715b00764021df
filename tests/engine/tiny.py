"""A tiny model, prompts for it, and the tokens of plain generation that every engine configuration must reproduce."""

import functools
import random

import torch
from model.hugging_face import picture

from saccade.engine import Engine
from saccade.engine.config import EngineConfig
from saccade.engine.core.loop import EngineCore
from saccade.engine.core.messages import AddRequest
from saccade.engine.device.image_runner import ImageRunner
from saccade.engine.device.loading import make_runner
from saccade.engine.device.runner import PixelScale
from saccade.engine.prompt import PromptImage, TokenPrompt
from saccade.engine.request import ImageSpan, Request
from saccade.engine.sampling_params import SamplingParams
from saccade.model import load_model
from saccade.model.generation import generate
from saccade.processor import ModelInputs, Processor
from saccade.processor.families import VisionRules


def prompt_of(inputs: ModelInputs, rules: VisionRules) -> TokenPrompt:
    """The engine's prompt from the model inputs of one conversation with images."""
    import hashlib

    images, patch, token = [], 0, 0
    indices = inputs.image_token_index.tolist()
    for grid in inputs.image_grids.tolist():
        [part] = rules.parts("image", tuple(grid), 1.0, ())
        num_patches, num_tokens = part.num_patches, part.length
        frames = inputs.patches[patch : patch + num_patches].unflatten(1, (3, rules.images.temporal_patch_size, -1))
        patches = frames[:, :, 0].flatten(1).numpy()  # an image has one frame
        key = hashlib.sha256(repr(grid).encode() + patches.tobytes()).digest()
        span = ImageSpan(key=key, start=indices[token], num_tokens=num_tokens, num_patches=num_patches)
        images.append(PromptImage(span=span, grid=tuple(grid), patches=patches))
        patch, token = patch + num_patches, token + num_tokens
    return TokenPrompt(token_ids=inputs.token_ids.tolist(), positions=inputs.positions.numpy(), images=tuple(images))


def request_of(name: str, prompt: TokenPrompt, sampling: SamplingParams, **fields) -> Request:
    return Request(
        id=name, token_ids=prompt.token_ids, images=tuple(image.span for image in prompt.images), sampling=sampling,
        seed=sampling.seed or 0, **fields,
    )  # fmt: skip


def requests_of(prompts, outputs, **fields):
    """(request, prompt) of each prompt, for as many tokens as its output has."""
    return [
        (request_of(str(i), prompt, SamplingParams(max_tokens=len(tokens), ignore_eos=True, **fields)), prompt)
        for i, (prompt, tokens) in enumerate(zip(prompts, outputs, strict=True))
    ]


def make_core(folder, config: EngineConfig, runner_class=None, device="cpu", dtype=None, grammars=None) -> EngineCore:
    processor = Processor.load(folder)
    model = load_model(folder, device=device, dtype=dtype).requires_grad_(False)
    pixels = PixelScale(mean=processor.images.mean, std=processor.images.std)
    runner = make_runner(model, config, pixels=pixels)
    if runner_class is not None:
        owner = runner.images if issubclass(runner_class, ImageRunner) else runner
        owner.__class__ = runner_class
    return EngineCore(runner, grammars=grammars)


def core_of(engine: Engine) -> EngineCore:
    """The core of an engine that runs it in a thread."""
    return engine._front_end.core._core


class Collected:
    """All output of a request."""

    def __init__(self) -> None:
        self.token_ids, self.logprobs, self.prompt_logprobs, self.num_endings = [], [], [], 0
        self.last = None

    def add(self, output) -> None:
        assert self.num_endings == 0, "an output after the last one"
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.num_endings += output.finish_reason is not None
        self.last = output


def run_all(core: EngineCore, requests, at_once: int | None = None, max_steps: int = 100_000) -> list[Collected]:
    """Run all (request, prompt) pairs to their end; `at_once` requests arrive per step."""
    collected = {request.id: Collected() for request, _ in requests}
    waiting = list(reversed(requests))
    for _ in range(max_steps):
        outputs = []
        for _ in range(min(len(waiting), at_once or len(waiting))):
            request, prompt = waiting.pop()
            outputs += core.handle(AddRequest(request=request, prompt=prompt))
        while not core.inbox.empty():  # grammars that are compiled
            outputs += core.handle(core.inbox.get())
        if core.has_work:
            outputs += core.step()
        for output in outputs:
            collected[output.request_id].add(output)
        if not core.has_work and not waiting:
            if all(one.num_endings for one in collected.values()):
                break
            core.inbox.put(core.inbox.get(timeout=60))  # waits for a grammar
    assert all(one.num_endings == 1 for one in collected.values())
    core.check()
    return list(collected.values())


def training_inputs(prompt, output) -> ModelInputs:
    """Prompt and output as one packed sequence."""
    num_prompt, first = len(prompt.token_ids), int(prompt.positions[:, -1].max()) + 1
    later = torch.arange(first, first + len(output)).expand(3, -1)
    grids = torch.tensor([image.grid for image in prompt.images], dtype=torch.int64).reshape(-1, 3)
    index = [i for image in prompt.images for i in range(image.span.start, image.span.end)]
    patches = [
        torch.from_numpy(image.patches).unflatten(1, (3, 1, -1)).repeat(1, 1, 2, 1).flatten(1)
        for image in prompt.images
    ]
    num_tokens = num_prompt + len(output)
    return ModelInputs(
        token_ids=torch.tensor([*prompt.token_ids, *output]),
        cu_seqlens=torch.tensor([0, num_tokens], dtype=torch.int32),
        positions=torch.cat([torch.from_numpy(prompt.positions.copy()), later], dim=1),
        loss_mask=torch.zeros(num_tokens, dtype=torch.bool),
        patches=torch.cat(patches) if patches else torch.zeros(0, 1176, dtype=torch.uint8),
        image_grids=grids,
        image_token_index=torch.tensor(index, dtype=torch.int64),
        pixel_mean=(0.48145466, 0.4578275, 0.40821073),
        pixel_std=(0.26862954, 0.26130258, 0.27577711),
        max_seqlen=num_tokens,
    )


PICTURES = [picture(56, 56, 1), picture(84, 56, 2), picture(112, 140, 3), picture(28, 28, 4), picture(60, 90, 5)]
WORDS = "the a cat dog red blue sits runs under over what is this colour how many please tell me".split()


def conversation(rng: random.Random, *, num_images: int, num_words: int, prefix: str = "") -> list[dict]:
    content = [{"type": "text", "text": prefix}] if prefix else []
    for _ in range(num_images):
        content.append({"type": "image", "image": rng.choice(PICTURES)})
        content.append({"type": "text", "text": " ".join(rng.choices(WORDS, k=rng.randint(1, 4)))})
    content.append({"type": "text", "text": " ".join(rng.choices(WORDS, k=num_words))})
    return [{"role": "user", "content": content}]


@functools.lru_cache(maxsize=4)
def plain(folder, seed: int, count: int, max_tokens: int):
    """Random prompts and their outputs by plain generation."""
    rng = random.Random(seed)
    processor, model = Processor.load(folder), load_model(folder, device="cpu").requires_grad_(False)
    prefixes = ["", "", "you are a careful assistant " * 2, "look " * 9]
    prompts, outputs = [], []
    while len(prompts) < count:
        messages = conversation(
            rng, num_images=rng.choice([0, 0, 1, 1, 2, 3]), num_words=rng.randint(1, 30), prefix=rng.choice(prefixes)
        )
        inputs = processor([messages], add_generation_prompt=True)
        num_tokens = rng.randint(1, max_tokens)
        [tokens] = generate(model, inputs, max_new_tokens=num_tokens)
        prompts.append(prompt_of(inputs, processor.rules))
        outputs.append(tokens)
    return prompts, outputs
