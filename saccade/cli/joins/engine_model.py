"""The engine as a model of `saccade evaluate`. It is loaded at the first question: finished results need none."""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from saccade.errors import CheckpointError, RequestError
from saccade.evaluate.model import Answer, Conversation, Decoding, Likelihood

if TYPE_CHECKING:
    from saccade.engine import CompletionDelta, Engine, RequestOptions
    from saccade.engine.prompt import TokenPrompt
    from saccade.engine.request import Completion
    from saccade.engine.sampling_params import SamplingParams

_HASHED_BYTES = 2**20
_MAX_SCORING = 1024
"""Continuations scored at once, over all threads: enough for full steps, far fewer than the engine's queue holds."""
_MAX_TOKENIZED = 2**15
"""Continuations whose tokens are kept: those of a retrieval pool are scored for every image."""


class EngineModel:
    """A checkpoint folder, served in this process. Any thread may ask; concurrent requests are batched."""

    can_score = True
    can_embed = False
    has_beam_search = True

    def __init__(
        self, folder: Path, *, device: str = "auto", dtype: str | None = None, adapter: Path | None = None,
        tensor_parallel_size: int = 1,
    ) -> None:  # fmt: skip
        """`adapter`: the LoRA adapter to evaluate with. `tensor_parallel_size`: GPUs of the engine."""
        if not (folder / "config.json").is_file():
            raise CheckpointError(
                f"{folder}: no checkpoint folder (config.json), no results folder and no URL. Check the path"
            )
        self._folder, self._device, self._dtype = folder, device, dtype
        self._num_ranks = tensor_parallel_size
        self._adapter_folder, self._adapter = adapter, None if adapter is None else "adapter"
        self._lock = threading.Lock()
        self._scoring = threading.Semaphore(_MAX_SCORING)
        self._turn = threading.Lock()  # conversations are scored one after another: each is complete soon
        self._tokenized: dict[tuple[str, str], tuple[tuple[int, ...], list[int]]] = {}

    def describe(self) -> dict[str, Any]:
        """The folder, and a hash of its config and of the beginning and the end of its weights."""
        digest = hashlib.sha256((self._folder / "config.json").read_bytes())
        adapter = [] if self._adapter_folder is None else sorted(self._adapter_folder.glob("adapter_*"))
        for path in [*sorted(self._folder.glob("*.safetensors")), *adapter]:
            size = path.stat().st_size
            with path.open("rb") as file:
                digest.update(f"{path.name} {size}".encode() + file.read(_HASHED_BYTES))
                file.seek(max(0, size - _HASHED_BYTES))
                digest.update(file.read())
        found = {"checkpoint": str(self._folder.resolve()), "weights": digest.hexdigest()[:16], "dtype": self._dtype}
        return found if self._adapter_folder is None else found | {"adapter": str(self._adapter_folder.resolve())}

    @functools.cached_property
    def _loaded(self) -> Engine:
        from saccade.engine import Engine

        adapters = {} if self._adapter_folder is None else {"adapter": self._adapter_folder}
        engine = Engine.load(
            self._folder, device=self._device, dtype=self._dtype, adapters=adapters,
            tensor_parallel_size=self._num_ranks,
        )  # fmt: skip
        if engine.refused_adapters:
            engine.close()
            raise CheckpointError(engine.refused_adapters["adapter"])
        return engine

    @property
    def _engine(self) -> Engine:
        with self._lock:
            return self._loaded

    @property
    def _options(self) -> RequestOptions:
        from saccade.engine import RequestOptions

        return RequestOptions(adapter=self._adapter)

    def generate(self, conversation: Conversation, decoding: Decoding) -> Answer:
        """Generate one answer."""
        if decoding.num_beams > 1:
            [completion] = self._engine.beam_search(
                [conversation], num_beams=decoding.num_beams, max_tokens=decoding.max_tokens, options=self._options
            )
        else:
            [completion] = self._engine.generate([conversation], _sampling(decoding), options=self._options)
        _check(completion)
        return Answer(
            text=completion.text,
            num_prompt_tokens=completion.num_prompt_tokens,
            num_tokens=len(completion.token_ids),
            finish_reason=completion.finish_reason,
        )

    def log_likelihoods(self, conversation: Conversation, continuations: Sequence[str]) -> list[Likelihood]:
        """Score all continuations as requests of their own: each is the assistant's turn, without its end."""
        texts, images = _texts(conversation), _images(conversation)
        tokenized = [self._tokens(conversation, texts, continuation.strip()) for continuation in continuations]
        prompts = {  # one, unless the template writes a turn differently if another follows
            prompt_ids: self._engine.preprocess_tokens(prompt_ids, images).result()
            for prompt_ids in dict.fromkeys(prompt_ids for prompt_ids, _ in tokenized)
        }
        with self._turn:
            scoring = [self._score(prompts[prompt_ids].continued(token_ids)) for prompt_ids, token_ids in tokenized]
        return [_likelihood(one.result(), len(ids)) for one, (_, ids) in zip(scoring, tokenized, strict=True)]

    def _tokens(self, conversation: Conversation, texts: str, continuation: str) -> tuple[tuple[int, ...], list[int]]:
        """Tokens of the prompt and of the continuation; they do not depend on pixels, so pools are tokenized once."""
        found = self._tokenized.get((texts, continuation))
        if found is None:
            processor, answer = self._engine.processor, {"role": "assistant", "content": continuation}
            num_prompt = len(processor.tokenize(conversation, add_generation_prompt=True))
            token_ids = processor.tokenize([*conversation, answer], continue_final_message=True)
            if len(self._tokenized) >= _MAX_TOKENIZED:
                self._tokenized.clear()
            found = self._tokenized[texts, continuation] = tuple(token_ids[:num_prompt]), token_ids[num_prompt:]
        return found

    def _score(self, prompt: TokenPrompt) -> Future[Completion]:
        """Submit a prompt for its log-probabilities; waits while too many are being scored."""
        from saccade.engine import SamplingParams

        given: Future[TokenPrompt] = Future()
        given.set_result(prompt)
        scored: Future[Completion] = Future()

        def on_delta(delta: CompletionDelta) -> None:
            if delta.completion is not None:
                self._scoring.release()
                scored.set_result(delta.completion)

        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
        self._scoring.acquire()
        try:
            self._engine.submit(given, sampling, on_delta, options=self._options, streams=False)
        except BaseException:
            self._scoring.release()
            raise
        return scored

    def embed(self, conversation: Conversation) -> list[float]:
        """Refuse: a generative checkpoint has no embeddings."""
        raise RequestError("a generative checkpoint has no embeddings. Use the task retrieval, by likelihood")

    def close(self) -> None:
        """Stop the engine, if it was loaded."""
        if "_loaded" in vars(self):
            self._loaded.close()

    def __enter__(self) -> EngineModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _sampling(decoding: Decoding) -> SamplingParams:
    from saccade.engine import SamplingParams

    return SamplingParams(
        max_tokens=decoding.max_tokens,
        temperature=decoding.temperature,
        seed=decoding.seed,
        ignore_eos=decoding.ignore_eos,
    )


def _texts(conversation: Conversation) -> str:
    """The conversation without its images."""
    return json.dumps(conversation, default=lambda _: None)


def _images(conversation: Conversation) -> list[bytes]:
    contents = [message["content"] for message in conversation if not isinstance(message["content"], str)]
    return [part["image"] for content in contents for part in content if part["type"] == "image"]


def _check(completion: Completion) -> None:
    """Raise the failure of a request; a broken engine ends the evaluation."""
    failure = completion.failure
    if failure is None:
        return
    if failure.kind in ("engine_stopped", "internal_error"):
        raise RuntimeError(f"the engine failed: {failure.message}")
    raise RequestError(failure.message)


def _likelihood(completion: Completion, num_tokens: int) -> Likelihood:
    """The log-likelihood of the last tokens of a prompt."""
    _check(completion)
    scored = (completion.prompt_logprobs or [])[-num_tokens:] if num_tokens else []
    return Likelihood(sum(one.logprob for one in scored if one is not None), num_tokens)
