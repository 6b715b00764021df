"""The front end: prompts in, text out. The open requests of an engine whose output is text."""

from __future__ import annotations

from concurrent.futures import Future

from saccade.engine.frontend.core_client import Connect, CoreClient
from saccade.engine.frontend.open_requests import OpenRequests
from saccade.engine.frontend.text_request import OnDelta, TextRequest
from saccade.engine.prompt import TokenPrompt
from saccade.engine.request import RequestOptions
from saccade.engine.sampling_params import SamplingParams
from saccade.errors import RequestError
from saccade.processor import Processor


class FrontEnd(OpenRequests):
    """Open requests that get deltas of text."""

    def __init__(self, connect: Connect, processor: Processor) -> None:
        """`connect` starts the core."""
        self.processor = processor
        super().__init__(connect)

    def submit(
        self,
        prompt: Future[TokenPrompt],
        sampling: SamplingParams,
        on_delta: OnDelta,
        options: RequestOptions,
        *,
        streams: bool,
    ) -> str:
        """Submit a request that starts when its prompt is preprocessed; returns its id.

        `on_delta` gets every delta if it `streams`, else the last one only.
        """
        self.check(sampling)

        def make(core: CoreClient) -> TextRequest:
            return TextRequest(
                self.new_id(),
                prompt,
                sampling,
                options,
                on_delta,
                streams=streams,
                core=core,
                processor=self.processor,
                on_end=self.forget,
            )

        return self.open(make).id

    def check(self, sampling: SamplingParams) -> None:
        """Raise RequestError if no request with these parameters can be submitted."""
        self.check_open()
        if sampling.n > 1:
            raise RequestError(f"n is {sampling.n}: a stream has one completion. Use generate")
        sampling.check_vocabulary(self.info.vocab_size)
