"""The processor: conversations to packed model inputs.

    conversation -> prompt pieces -> load images -> token ids + positions -> pack

Training and serving share it. Serving calls the steps one by one, to run them in several processes and to skip cached
images: `split_visuals`, `tokenize`, `patchify_image`, `expand_placeholders`. Two resizes are available:

    "pillow"   bit-identical to Hugging Face's; the default
    "torch"    within 2/255 of it at a fifth of the time: 0.8 instead of 4.2 ms for a 512 px image
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from saccade.errors import CheckpointError, ConfigError, ImageError, RequestError
from saccade.processor.chat_template import ChatTemplate, read_template, token_text
from saccade.processor.conversation import Piece, Prompt, render_prompt
from saccade.processor.families import VisionRules, load_rules
from saccade.processor.folder import read_config, read_json
from saccade.processor.image import MediaBudget, MediaLimits, Pixels, check_size, load_image, read_encoded
from saccade.processor.messages import ImageItem, Message, VideoFileItem, VisualItem, check_messages, is_list
from saccade.processor.parts import Visual, VisualKind, expand_placeholders, in_written_order, repeat_placeholders
from saccade.processor.patches import Grid, ImageSettings, Resize
from saccade.processor.pillow_resize import pillow_resize
from saccade.processor.tokenizer import Tokenizer
from saccade.processor.tools import Tool
from saccade.processor.video import sampled_frames

if TYPE_CHECKING:  # workers that tokenise and patchify start without torch, in a third of the time
    from saccade.processor.inputs import ModelInputs

ResizeName = Literal["pillow", "torch"]


_SPACED_TEXT_VERSION = 2
"""Incremented when tokenizers that write a space before text change their tokens: lengths are then measured again."""


def resize_named(name: ResizeName) -> Resize:
    """The resize of this name."""
    if name == "pillow":
        return pillow_resize
    if name == "torch":
        from saccade.processor.torch_resize import torch_resize

        return torch_resize
    raise ConfigError(f"resize is {name!r}. Use one of {', '.join(get_args(ResizeName))}")


class Processor:
    """Tokenizer, chat template and image preprocessing of one checkpoint folder."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        rules: VisionRules,
        eos_ids: frozenset[int],
        limits: MediaLimits,
        resize: ResizeName = "pillow",
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.rules = rules
        """The rules by which images and videos become patches and tokens."""
        self.eos_ids = eos_ids
        """Tokens that end a turn, from `generation_config.json`."""
        self.limits = limits
        self._resize = resize_named(resize)

    @staticmethod
    def load(
        folder: str | Path,
        *,
        limits: MediaLimits | None = None,
        resize: ResizeName = "pillow",
        chat_template: str | None = None,
    ) -> Processor:
        """Read tokenizer, template and image settings of a checkpoint folder.

        `chat_template`: Jinja source that replaces the folder's own.
        """
        folder = Path(folder)
        config, tokenizer, rules = read_config(folder), Tokenizer.load(folder), load_rules(folder)
        if not tokenizer.is_control(rules.image_id):
            raise CheckpointError(
                f"{folder}: the image token of config.json (image_token_id or image_token_index), "
                f"{rules.image_id}, is no control token of "
                "tokenizer.json. Take both files from the same model"
            )
        return Processor(
            rules=rules,
            tokenizer=tokenizer,
            template=ChatTemplate.load(folder, chat_template),
            eos_ids=_eos_ids(folder, config, tokenizer),
            limits=limits or MediaLimits(),
            resize=resize,
        )

    @staticmethod
    def fingerprint(folder: str | Path) -> str:
        """Equal for folders that give every conversation the same tokens and number of patches. Builds no tokenizer."""
        folder = Path(folder)
        if not (folder / "tokenizer.json").is_file():
            raise CheckpointError(
                f"{folder}: no tokenizer.json. Check the path; a checkpoint folder needs a fast tokenizer"
            )
        tokens, rules = read_json(folder / "tokenizer_config.json"), load_rules(folder)
        texts = [read_template(folder), token_text(tokens, "bos_token"), token_text(tokens, "eos_token")]
        decisive = [texts, repr(rules.images), rules.image_id]
        tokenizer = (folder / "tokenizer.json").read_bytes()
        if re.search(rb'"type":\s*"(Prepend|Metaspace)"', tokenizer):
            decisive.append(_SPACED_TEXT_VERSION)
        digest = hashlib.sha256(json.dumps(decisive).encode() + tokenizer)
        return digest.hexdigest()[:16]

    @property
    def images(self) -> ImageSettings:
        """Settings of images."""
        return self.rules.images

    @property
    def videos(self) -> ImageSettings:
        """Settings of videos."""
        return self.rules.videos

    def __call__(
        self,
        conversations: Sequence[Sequence[Message]],
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        *,
        tools: Sequence[Tool] | None = None,
    ) -> ModelInputs:
        """Preprocess and pack conversations.

        `add_generation_prompt` appends the start of an assistant turn; `continue_final_message` instead leaves the
        final assistant message open, for the model to continue. `tools` are the functions that the model may call, in
        OpenAI's format.
        """
        if not is_list(conversations) or not all(is_list(messages) for messages in conversations):
            raise RequestError(
                "the processor takes a list of conversations, each a list of messages: processor([messages])"
            )
        from saccade.processor.inputs import ModelInputs

        return ModelInputs.pack(
            [
                self.preprocess(
                    messages, add_generation_prompt, continue_final_message=continue_final_message, tools=tools
                )
                for messages in conversations
            ]
        )

    def preprocess(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        into: Pixels | None = None,
        *,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
        not_decoded: Mapping[int, tuple[int, int]] | None = None,
    ) -> ModelInputs:
        """Preprocess one conversation. Its patches become the first rows of `into` [patches, patch_dim].

        `not_decoded`: upright width and height of images, by number, that get tokens and grids but no patches.
        """
        prompt = self._render(messages, add_generation_prompt, continue_final_message, tools)
        budget = MediaBudget(self.limits)
        visuals: list[Visual] = []
        used, num_images = 0, count_images(prompt.visuals)
        for number, item in enumerate(prompt.visuals):
            with prefix_errors(f"{visual_kind(item)} {number + 1}"):
                memory = None if into is None else into[used:]
                size = None if not_decoded is None else not_decoded.get(number)
                visuals.append(
                    self.preprocess_visual(item, memory, budget, num_images)
                    if size is None
                    else self.undecoded_image(*size, num_images)
                )
            used += len(visuals[-1].patches)
        patches = self._concatenate(visuals) if into is None else into[:used]
        return self._assemble(prompt.pieces, visuals, patches)

    def tokenize(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
    ) -> list[int]:
        """Token ids with a single placeholder per image and video. No image is read."""
        return self._tokens(self._render(messages, add_generation_prompt, continue_final_message, tools).pieces)[0]

    def preprocess_visual(
        self, item: VisualItem, into: Pixels | None = None, budget: MediaBudget | None = None, num_images: int = 1
    ) -> Visual:
        """Decode, resize and patchify one image or video.

        `budget` counts it against the limits of its request; `num_images`: images of its conversation.
        """
        budget = budget or MediaBudget(self.limits)
        if isinstance(item, ImageItem):
            return self.patchify_image(load_image(item.source, self.limits, budget), into, num_images)
        if isinstance(item, VideoFileItem):
            data = read_encoded(item.source, self.limits, "video")
            budget.add_bytes(len(data))
            return self.patchify_video(sampled_frames(data, item.fps, budget), item.fps, into)
        budget.add_frames(len(item.frames))
        frames = []
        for number, source in enumerate(item.frames):
            with prefix_errors(f"frame {number + 1}"):
                frames.append(load_image(source, self.limits, budget))
        return self.patchify_video(frames, item.fps, into)

    def patchify_image(self, pixels: Pixels, into: Pixels | None = None, num_images: int = 1) -> Visual:
        """Resize and patchify a decoded image, one of `num_images` in its conversation."""
        return self._patchify("image", [pixels], 1.0, into, num_images)

    def patchify_video(self, frames: Sequence[Pixels], fps: float, into: Pixels | None = None) -> Visual:
        """Resize and patchify the decoded frames of a video, `fps` of them per second."""
        if len(sizes := {frame.shape for frame in frames}) > 1:
            shapes = ", ".join(f"{width}x{height}" for height, width, _ in sorted(sizes))
            raise ImageError(f"the frames have different sizes: {shapes}. Give frames of one size")
        return self._patchify("video", frames, fps, into)

    def undecoded_image(self, width: int, height: int, num_images: int = 1) -> Visual:
        """The tokens of an image whose patches are elsewhere, from its upright size."""
        check_size((width, height), self.limits)
        grid = self.rules.image_grid(height, width, num_images)
        patches = np.zeros((0, self.images.patch_dim), dtype=np.uint8)
        return self._visual("image", patches, grid, 1, 1.0)

    def _patchify(
        self, kind: VisualKind, frames: Sequence[Pixels], fps: float, into: Pixels | None, num_images: int = 1
    ) -> Visual:
        patches, grid = self.rules.patchify(kind, frames, self._resize, into, num_images)
        return self._visual(kind, patches, grid, len(frames), fps)

    def _visual(self, kind: VisualKind, patches: Pixels, grid: Grid, num_frames: int, fps: float) -> Visual:
        texts = [self.tokenizer.encode_text(text) for text in self.rules.texts(kind, num_frames, fps)]
        return Visual(patches, grid, texts, self.rules.parts(kind, grid, fps, texts))

    def measure(self, messages: Sequence[Message], image_sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """Number of tokens and patches that `preprocess` would return.

        No image is read: `image_sizes` are their upright widths and heights.
        """
        prompt = self._render(messages, add_generation_prompt=False)
        if len(prompt.visuals) != len(image_sizes) or not all(isinstance(item, ImageItem) for item in prompt.visuals):
            raise RequestError(
                f"{len(prompt.visuals)} images or videos but {len(image_sizes)} image sizes: only images can be "
                "measured, each with its size"
            )
        for size in image_sizes:
            check_size(size, self.limits)
        grids = [self.rules.image_grid(height, width, len(image_sizes)) for width, height in image_sizes]
        parts = [self.rules.parts("image", grid, 1.0, ()) for grid in grids]
        num_image_tokens = sum(part.length for of_image in parts for part in of_image)
        num_patches = sum(map(self.rules.num_patches, grids))
        token_ids, _, placeholders = self._tokens(prompt.pieces)
        return num_image_tokens + len(token_ids) - len(placeholders), num_patches

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of generated tokens, without special tokens."""
        return self.tokenizer.decode(token_ids)

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
    ) -> Prompt:
        prompt = render_prompt(
            messages,
            self.template,
            self.tokenizer,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
        )
        return self._match_placeholders(prompt)

    def _match_placeholders(self, prompt: Prompt) -> Prompt:
        """Check that the template wrote one placeholder per image and video, and return them in its order."""
        names: dict[int | None, VisualKind] = {self.rules.image_id: "image"}
        given = [visual_kind(item) for item in prompt.visuals]
        if self.rules.video_id is not None:
            names[self.rules.video_id] = "video"
        elif "video" in given:
            raise RequestError("this model takes images but no videos. Send frames of the video as images")
        written = [names[piece.control_id] for piece in prompt.pieces if piece.control_id in names]
        if sorted(written) == sorted(given):
            return dataclasses.replace(prompt, visuals=tuple(in_written_order(written, given, prompt.visuals)))
        if len(written) < len(given):
            raise RequestError(
                f"{len(given)} images or videos but {len(written)} placeholders: an image without a placeholder "
                "would be ignored. "
                "The checkpoint's chat template writes none for it; use a template for images"
            )
        if len(written) > len(given):
            raise RequestError(
                f"{len(written)} image placeholders but {len(given)} images or videos: a placeholder without an image. "
                "The checkpoint's chat template writes too many; add the image or correct the template"
            )
        raise RequestError(f"the chat template writes placeholders for {written} where the conversation has {given}")

    def _concatenate(self, visuals: Sequence[Visual]) -> Pixels:
        if len(visuals) == 1:
            return visuals[0].patches
        none = np.zeros((0, self.images.patch_dim), dtype=np.uint8)
        return np.concatenate([none, *(visual.patches for visual in visuals)])

    def _ids(self, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, list[int]]]:
        """The tokens of each piece. Text between two control tokens is encoded as a whole."""
        for is_text, group in groupby(pieces, key=lambda piece: piece.control_id is None):
            together = list(group)
            if is_text:
                texts = [piece.text for piece in together]
                is_first, cuts = together[0] is pieces[0], [piece.starts_turn for piece in together]
                encoded = self.tokenizer.encode_parts(texts, is_first=is_first, cuts=cuts)
                yield from zip(together, encoded, strict=True)
            else:
                yield from ((piece, [piece.control_id]) for piece in together if piece.control_id is not None)

    def _tokens(self, pieces: Sequence[Piece]) -> tuple[list[int], list[bool], list[int]]:
        """Token ids, their loss mask, and the index of each placeholder: one per image and video."""
        prefix = self.tokenizer.prefix_ids
        if prefix and pieces and pieces[0].control_id == prefix[0]:  # the template writes it itself
            prefix = ()
        token_ids = list(prefix)
        loss_mask = [False] * len(prefix)
        placeholders: list[int] = []
        for piece, ids in self._ids(pieces):
            is_placeholder = piece.control_id in (self.rules.image_id, self.rules.video_id)
            is_placeholder = is_placeholder and piece.control_id is not None
            if is_placeholder:
                placeholders.append(len(token_ids))
            token_ids += ids
            loss_mask += [piece.in_loss and not is_placeholder] * len(ids)
        return token_ids, loss_mask, placeholders

    def _assemble(self, pieces: Sequence[Piece], visuals: Sequence[Visual], patches: Pixels) -> ModelInputs:
        """Model inputs of one conversation."""
        from saccade.processor.inputs import ModelInputs

        compact, loss_mask, placeholders = self._tokens(pieces)
        parts = [visual.parts for visual in visuals]
        spans = [span for visual in visuals for span in visual.spans]
        token_ids, positions, starts = expand_placeholders(compact, placeholders, parts)
        image_tokens = (range(start, start + span.length) for start, span in zip(starts, spans, strict=True))
        return ModelInputs.from_arrays(
            token_ids=np.array(token_ids, np.int64),
            positions=positions,
            loss_mask=np.array(repeat_placeholders(loss_mask, placeholders, parts), np.bool_),
            patches=patches,
            image_grids=np.array([span.grid for span in spans], np.int64).reshape(-1, 3),
            image_token_index=np.array([*chain.from_iterable(image_tokens)], np.int64),
            pixel_mean=self.images.mean,
            pixel_std=self.images.std,
        )


def split_visuals(messages: Sequence[Message]) -> tuple[list[Message], list[VisualItem]]:
    """Split a conversation into JSON messages for `tokenize` and its images and videos for `preprocess_visual`."""
    checked, visuals = check_messages(messages)
    sources = {"image": {"image": "elsewhere"}, "video": {"video": ["elsewhere"]}}
    for message in checked:
        if not isinstance(message["content"], str):
            message["content"] = [part | sources.get(part["type"], {}) for part in message["content"]]
    return list(checked), visuals


def visual_kind(item: VisualItem) -> VisualKind:
    """`image` or `video`."""
    return "image" if isinstance(item, ImageItem) else "video"


def count_images(items: Sequence[VisualItem]) -> int:
    """Images of a conversation; videos are not counted."""
    return sum(isinstance(item, ImageItem) for item in items)


@contextlib.contextmanager
def prefix_errors(what: str) -> Iterator[None]:
    """Prefix the message of an `ImageError` with the image, video or frame it is about."""
    try:
        yield
    except ImageError as error:
        raise ImageError(f"{what}: {error}") from error


def _eos_ids(folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer) -> frozenset[int]:
    """End-of-turn tokens from `generation_config.json`, else `config.json`, one id or a list; else the tokenizer's."""
    text_config, name = (
        config.get("text_config") or {},
        token_text(read_json(folder / "tokenizer_config.json"), "eos_token"),
    )
    own = {"eos_token_id": tokenizer.control_ids.get(name)}
    sources = (read_json(folder / "generation_config.json"), config, text_config, own)
    found: Any = next((source["eos_token_id"] for source in sources if source.get("eos_token_id") is not None), [])
    ids = found if isinstance(found, list) else [found]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise CheckpointError(f"{folder}: eos_token_id is {found!r}, not a token id or a list of them")
    return frozenset(ids)
