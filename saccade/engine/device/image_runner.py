"""Run the vision encoder's parts of each step, and keep the features of images on the device.

    images of a plan -> a pass -> parts of it, before the chunks of each step -> features in slots of the encoder cache

The encoder runs on the stream of the steps. So a chunk that reads features runs after the part that writes them, and a
pass that reuses slots runs after the steps that read them. If a pass fails, its images are encoded again in halves
until the failing image is alone. The slots of that image have no features, and chunks that read them fail. Features
that came with a request are copied into their slots.

Legend: M image tokens, F features of an image token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from saccade.device import lazy_zeros, to_device
from saccade.engine.core.encoder_cache import ENCODER_SLOT_TOKENS
from saccade.engine.core.step import ENCODER_PARTS, Chunk, EncodeResult, ImageToEncode, StepPlan
from saccade.engine.device.encoder import Encoder
from saccade.engine.device.failures import check_alive, failure_of
from saccade.engine.device.step_inputs import RequestInputs, feature_index
from saccade.engine.prompt import PromptImage
from saccade.engine.request import Failure


class PassImage(NamedTuple):
    """An image of the pass in progress."""

    planned: ImageToEncode
    image: PromptImage
    """Input of the image, kept here because its request may end before the pass."""


class ImageRunner:
    """The vision encoder and the features in the encoder cache."""

    def __init__(self, encoder: Encoder, *, num_tokens: int, feature_size: int) -> None:
        """`num_tokens`: capacity of the encoder cache in image tokens."""
        self.encoder = encoder
        self.device = encoder.device
        self.num_features = num_tokens // ENCODER_SLOT_TOKENS * ENCODER_SLOT_TOKENS
        """Number of rows of `features` that images use."""
        self.features = lazy_zeros((self.num_features + 1, feature_size), encoder.dtype, self.device)
        """[num_features + 1, F]. The last row is zero; tokens without features read it."""
        self.images: Sequence[PassImage] = ()
        """Images of the pass in progress."""
        self.failures: dict[int, Failure] = {}
        """Failures of images that could not be encoded, by slot."""

    def run(self, plan: StepPlan, requests: Mapping[str, RequestInputs]) -> tuple[EncodeResult, ...]:
        """Launch the encoder parts of a plan. Returns the images whose encoding ends with this step, or failed."""
        assert plan.encoder_parts, "the plan has encoder parts"
        if plan.images:
            images = [
                PassImage(planned, requests[planned.request_id].prompt.images[planned.image_index])
                for planned in plan.images
            ]
        else:
            images = list(self.images)
        if not images:
            return ()
        try:
            if plan.images:
                self.start_pass(images, plan.pass_parts)
            return self.run_parts(plan.encoder_parts)
        except Exception as error:
            self.images = ()
            return self._isolate(images, error)

    def load(self, plan: StepPlan, requests: Mapping[str, RequestInputs]) -> tuple[EncodeResult, ...]:
        """Copy the features that came with requests into the slots of their images."""
        results = []
        for planned in plan.loads:
            image = requests[planned.request_id].prompt.images[planned.image_index]
            failure = None
            self._forget_failures([planned])
            try:
                self.load_image(planned, image)
            except Exception as error:
                failure = failure_of(self.device, "encoding", planned.request_id, error)
                self.failures |= dict.fromkeys(planned.slots, failure)
            results.append(EncodeResult(planned.key, failure))
        return tuple(results)

    def start_pass(self, images: Sequence[PassImage], num_parts: int) -> None:
        """Start a pass that is divided into `num_parts` parts."""
        self._forget_failures([one.planned for one in images])
        self.images = images
        self.encoder.start([one.image for one in images], num_parts)

    def load_image(self, planned: ImageToEncode, image: PromptImage) -> None:
        """Copy the features that came with an image into its slots."""
        features = to_device(image.patches.copy(), self.device).view(self.features.dtype)  # aligned, writable
        index = feature_index(planned.slots, 0, image.span.num_tokens)
        self.features.index_copy_(0, to_device(index, self.device), features)

    def _forget_failures(self, images: Sequence[ImageToEncode]) -> None:
        """Forget the failures of earlier images in the slots of new ones."""
        for slot in [slot for one in images for slot in one.slots] if self.failures else ():
            self.failures.pop(slot, None)

    def run_parts(self, num_parts: int) -> tuple[EncodeResult, ...]:
        """Run parts of the pass in progress. After the last part, store its features and return its images."""
        features_MF = self.encoder.run(num_parts)
        if features_MF is None:
            return ()
        images, self.images = self.images, ()
        index = [feature_index(planned.slots, 0, image.span.num_tokens) for planned, image in images]
        self.features.index_copy_(0, to_device(np.concatenate(index), self.device), features_MF.to(self.features.dtype))
        return tuple([EncodeResult(one.planned.key) for one in images])

    def _isolate(self, images: Sequence[PassImage], error: Exception) -> tuple[EncodeResult, ...]:
        """Encode the images of a failed pass again, in halves, until the failing image is alone."""
        if len(images) == 1:
            planned = images[0].planned
            failure = failure_of(self.device, "encoding", planned.request_id, error)
            self.failures |= dict.fromkeys(planned.slots, failure)
            return (EncodeResult(planned.key, failure),)
        check_alive(self.device, error)
        middle = len(images) // 2
        results: tuple[EncodeResult, ...] = ()
        for half in (images[:middle], images[middle:]):
            try:
                self.start_pass(half, ENCODER_PARTS)
                results += self.run_parts(ENCODER_PARTS)
            except Exception as again:
                self.images = ()
                results += self._isolate(half, again)
        return results

    def failures_of(self, chunks: Sequence[Chunk]) -> dict[str, Failure]:
        """Failures of requests whose chunk reads an image that could not be encoded."""
        return {
            chunk.request_id: self.failures[image.slots[0]]
            for chunk in chunks
            for image in chunk.images
            if image.slots[0] in self.failures
        }
