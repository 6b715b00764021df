"""An engine whose requests arrive as tokens and encoded media, and whose outputs leave as tokens. It knows no text.

    SentRequest, media -> preprocess (media workers) -> the prompt that was announced? -> core -> RequestOutput

The sender has measured the images of a request (`measures_only`) and knows tokens, positions and keys. The host makes
the prompt again from the media, with keys of its own: a sender can give no image the key of another. Media whose images
are processed already need not be sent. The features of an image that an encoder has encoded (`encoder_host.py`) take
the place of its data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from saccade.engine.config import EngineConfig
from saccade.engine.core.messages import AddRequest
from saccade.engine.frontend.adapters import with_slots
from saccade.engine.frontend.core_client import Connect, CoreClient
from saccade.engine.frontend.open_request import OpenRequest
from saccade.engine.frontend.open_requests import OpenRequests
from saccade.engine.frontend.preprocessing.preprocessor import Preprocessor
from saccade.engine.media import EncodedImage
from saccade.engine.media import MediaMissingError as MediaMissingError
from saccade.engine.prompt import TokenPrompt
from saccade.engine.request import Failure, Request, RequestOutput
from saccade.engine.start import RunningEngine, start
from saccade.engine.transport.spawn import spare_core
from saccade.engine.transport.wire import SentRequest
from saccade.errors import RequestError
from saccade.processor.families import vision_language_type
from saccade.processor.image import MediaLimits

OnOutput = Callable[[RequestOutput], None]
"""Called from the host's thread; it must return at once. If it raises, the request is cancelled."""

_DIFFERS = Failure(
    "preprocessing",
    "the prompt made of this request's media is not the one that was announced. Send the media that belong to the "
    "request, and run the same version and checkpoint everywhere",
)

if TYPE_CHECKING:  # the core's process imports torch at the same time as this one
    import torch


class EngineHost(RunningEngine):
    """Serves requests of several senders at once. Thread-safe. Close it to end its threads and processes."""

    def __init__(self, connect: Connect, preprocessor: Preprocessor, adapters: Mapping[str, str | Path]) -> None:
        """Start the core with `connect`. `load` makes the arguments."""
        super().__init__(OpenRequests(connect), preprocessor, adapters)

    @staticmethod
    def load(
        folder: str | Path,
        *,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype | None = "auto",
        config: EngineConfig | None = None,
        limits: MediaLimits | None = None,
        adapters: Mapping[str, str | Path] | None = None,
    ) -> EngineHost:
        """Load a checkpoint folder; the arguments are those of `Engine.load`."""
        config = config or EngineConfig()
        with spare_core(str(device), is_needed=config.has_core_process) as spare:
            folder, config = Path(folder), with_slots(config, adapters or {})
            vision_language_type(folder)  # a model of another kind is refused before anything starts
            return start(
                folder,
                config,
                lambda connect, preprocessor: EngineHost(connect, preprocessor, adapters or {}),
                device=device,
                dtype=dtype,
                limits=limits,
                spare=spare,
            )

    # -------------------------------------------------------------- requests

    def missing_media(self, sent: SentRequest) -> list[int]:
        """Numbers of the tasks whose media are needed: their images are neither processed nor being processed."""
        salt = sent.request.salt
        return [number for number, task in enumerate(sent.tasks) if not self._preprocessor.has(task.digest, salt)]

    def submit(self, sent: SentRequest, media: Sequence[bytes | EncodedImage | None], on_output: OnOutput) -> None:
        """Serve a request, whose id no open request may have. `media` of each task: its data, the image that an encoder
        has encoded, or None where it is not missing.

        `on_output` gets its outputs; exactly one of them, the last, has a finish reason. A request that is refused
        fails in the same way. MediaMissingError: more data are needed, since images were evicted, or their features do
        not fit; nothing is started and `on_output` is not called. RuntimeError: the host is closed.
        """
        request = sent.request
        try:
            self._requests.check_open()
            request.sampling.check_vocabulary(self.info.vocab_size)
            if len(media) != len(sent.tasks):
                raise RequestError(f"{len(media)} media for {len(sent.tasks)} images and videos. Send one for each")
        except RequestError as error:
            self._refuse(request, str(error), on_output)
            return
        if unfit := [number for number, one in enumerate(media) if not self._fits(one)]:
            raise MediaMissingError(unfit)
        prompt = self._preprocessor.submit_tasks(sent.token_ids, sent.tasks, media, salt=request.salt)
        try:
            self._requests.open(
                lambda core: _HostedRequest(request, prompt, on_output, core=core, on_end=self._requests.forget)
            )
        except RequestError as error:
            prompt.cancel()
            self._refuse(request, str(error), on_output)

    def _fits(self, media: bytes | EncodedImage | None) -> bool:
        """Whether an encoded image has features of this model."""
        return not isinstance(media, EncodedImage) or media.features.shape[1:] == (self.info.feature_bytes,)

    def _refuse(self, request: Request, message: str, on_output: OnOutput) -> None:
        failure = self._requests.failure or Failure("waiting", message, "invalid_request")
        output = RequestOutput(request_id=request.id, finish_reason="failed", failure=failure)
        self._requests.post(partial(on_output, output))

    # -------------------------------------------------------------- the state of the engine

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return self._requests.num_open


class _HostedRequest(OpenRequest):
    """A request whose outputs are passed on as they are."""

    def __init__(
        self,
        request: Request,
        prompt: Future[TokenPrompt],
        on_output: OnOutput,
        *,
        core: CoreClient,
        on_end: Callable[[str], None],
    ) -> None:
        super().__init__(
            request.id,
            prompt,
            queue_timeout_s=request.queue_timeout_s,
            timeout_s=request.timeout_s,
            core=core,
            on_end=on_end,
        )
        self.request = request
        self._on_output = on_output

    def _message(self, prompt: TokenPrompt) -> AddRequest | Failure:
        """The request with the prompt that was made here. Tokens after it continue it."""
        announced = list(self.request.token_ids)
        if rest := announced[len(prompt.token_ids) :]:
            prompt = prompt.continued(rest)
        spans = tuple([image.span for image in prompt.images])
        if (prompt.token_ids, spans) != (announced, self.request.images):
            return _DIFFERS
        images = tuple([image.without_encoding() for image in prompt.images])
        prompt = replace(prompt, images=images)
        self.request = request = replace(
            self.request,
            images=tuple([image.span for image in images]),
            queue_timeout_s=self._remaining(self.request.queue_timeout_s),
            timeout_s=self._remaining(self.request.timeout_s),
        )
        return AddRequest(request=request, prompt=prompt)

    def _process(self, output: RequestOutput) -> None:
        if output.finish_reason is not None:
            self._set_ended()
        self._on_output(output)
