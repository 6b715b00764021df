"""Complete a batch of prompts and wait for all of them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from saccade.engine.frontend.front_end import FrontEnd
from saccade.engine.prompt import TokenPrompt
from saccade.engine.request import Completion, CompletionDelta, RequestOptions
from saccade.engine.sampling_params import SamplingParams
from saccade.errors import ConfigError, RequestError

Conversation = Sequence[dict[str, Any]]
Sampling = SamplingParams | Mapping[str, Any]
"""Sampling parameters, or a dict of their fields."""
Preprocess = Callable[[], Future[TokenPrompt]]
"""Starts preprocessing one prompt."""


def complete_all(
    front_end: FrontEnd,
    prompts: Sequence[Preprocess],
    sampling: Sampling | Sequence[Sampling] | None,
    options: RequestOptions,
    *,
    progress: bool,
) -> list[Completion]:
    """Submit all prompts and wait for their completions, `n` consecutive ones for each. An interruption cancels all."""
    samplings = [_each_completion(one) for one in samplings_of(sampling, len(prompts))]
    for each in samplings:
        front_end.check(each[0])  # all prompts, before the first is preprocessed
    futures: list[Future[Completion]] = []
    ids: list[str] = []
    try:
        with progress_bar(sum(map(len, samplings)), is_shown=progress) as advance:
            for preprocess, each in zip(prompts, samplings, strict=True):
                prompt = preprocess()
                for one in each:
                    futures.append(Future())
                    futures[-1].add_done_callback(advance)
                    on_delta = partial(_set_completion, futures[-1])
                    ids.append(front_end.submit(prompt, one, on_delta, options, streams=False))
            return [future.result() for future in futures]
    except BaseException:
        for request_id in ids:
            front_end.cancel(request_id)
        raise


def _set_completion(future: Future[Completion], delta: CompletionDelta) -> None:
    if delta.completion is not None:
        future.set_result(delta.completion)


def _each_completion(sampling: SamplingParams) -> list[SamplingParams]:
    """The parameters of each of the `n` completions."""
    if sampling.n == 1:
        return [sampling]
    seeds = [None if sampling.seed is None else (sampling.seed + i) % 2**63 for i in range(sampling.n)]
    return [dataclasses.replace(sampling, n=1, seed=seed) for seed in seeds]


def conversations_of(given: Any) -> list[Any]:
    """Conversations as a list, also of a single one."""
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise RequestError('a conversation is a list of messages, such as [{"role": "user", "content": "hello"}]')
    batch = list(given)
    return [batch] if batch and isinstance(batch[0], Mapping) else batch


def samplings_of(given: Any, count: int) -> list[SamplingParams]:
    """Sampling parameters of each of `count` prompts."""
    if given is None or isinstance(given, SamplingParams | Mapping):
        return [sampling_of(given)] * count
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ConfigError(f"sampling is {given!r}; use SamplingParams, a dict of its fields, or a list of either")
    if len(given) != count:
        raise RequestError(f"{count} prompts but {len(given)} sampling parameters: give one, or one for each")
    return [sampling_of(one) for one in given]


def sampling_of(given: Any) -> SamplingParams:
    """Sampling parameters given as such, as a dict, or not at all."""
    if isinstance(given, SamplingParams):
        return given
    fields = {} if given is None else given
    if not isinstance(fields, Mapping):
        raise ConfigError(f"sampling is {fields!r}; use SamplingParams, a dict of its fields, or a list of either")
    known = [field.name for field in dataclasses.fields(SamplingParams)]
    unknown = sorted(map(str, fields.keys() - set(known)))
    if unknown:
        raise ConfigError(f"{', '.join(unknown)}: no such sampling parameter. Use {', '.join(known)}")
    return SamplingParams(**fields)


@contextlib.contextmanager
def progress_bar(total: int, *, is_shown: bool) -> Iterator[Callable[[Any], None]]:
    """A function that counts one completion."""
    if not is_shown:
        yield lambda _: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(TextColumn("completions"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("completions", total=total)
        yield lambda _: bar.advance(task)
