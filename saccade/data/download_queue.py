"""Download the images of many items in a background thread, in whatever order they complete."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from saccade.data.download import Downloaded, Downloader, DownloadOptions, Failed

T = TypeVar("T")
logger = logging.getLogger(__name__)

MAX_REORDER = 100_000
"""Maximum distance between the newest URL and the oldest unfinished one; outcomes beyond it must be remembered."""
_URLS_PER_REQUEST = 4
"""URLs started for each concurrent request; most wait for their host."""


def download_as_completed(
    items: Iterable[T], url_of: Callable[[T], str | None], options: DownloadOptions
) -> Iterator[tuple[T, Downloaded | Failed | None]]:
    """Download the URLs of many items in a background thread; yields each item with its outcome as downloads complete.

    An item without a URL passes through at once, with None. Not in the order of the items: one dead host would hold
    back thousands of images. An item is overtaken by at most `MAX_REORDER` others.
    """
    background = _Background(options)
    waiting: OrderedDict[int, T] = OrderedDict()
    try:
        for number, item in enumerate(items):
            url = url_of(item)
            if url is None:
                yield item, None
                continue
            waiting[number] = item
            background.begin(number, url)
            while waiting and (
                background.has_finished
                or len(waiting) >= _URLS_PER_REQUEST * options.max_concurrent
                or number - next(iter(waiting)) >= MAX_REORDER
            ):
                number_done, outcome = background.take()
                yield waiting.pop(number_done), outcome
        while waiting:
            number_done, outcome = background.take()
            yield waiting.pop(number_done), outcome
    finally:
        background.close()


class _Background:
    """An event loop in a thread, started by the first URL, and a queue of outcomes."""

    def __init__(self, options: DownloadOptions) -> None:
        self._options = options
        self._finished: queue.SimpleQueue[tuple[int, Downloaded | Failed]] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._bytes_in, self._bytes_out = 0, 0  # each written by one thread only

    @property
    def has_finished(self) -> bool:
        """Whether an outcome can be taken without waiting."""
        return not self._finished.empty()

    def _can_start(self) -> bool:
        return self._bytes_in - self._bytes_out <= self._options.max_held_bytes

    def begin(self, number: int, url: str) -> None:
        """Start a download."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="download", daemon=True)
            self._thread.start()
            self._downloader = Downloader(self._options, can_start=self._can_start)
            asyncio.run_coroutine_threadsafe(self._downloader.__aenter__(), self._loop).result()
        asyncio.run_coroutine_threadsafe(self._download(number, url), self._loop)

    async def _download(self, number: int, url: str) -> None:
        try:
            outcome = await self._downloader.download(url)
        except Exception as error:  # a bug of ours must not block the other thread
            logger.exception("downloading %s", url)
            outcome = Failed(f"internal error: {type(error).__name__}")
        self._bytes_in += _num_bytes(outcome)
        self._finished.put((number, outcome))

    def take(self) -> tuple[int, Downloaded | Failed]:
        """Number and outcome of a finished download; blocks until there is one."""
        number, outcome = self._finished.get()
        self._bytes_out += _num_bytes(outcome)
        return number, outcome

    def close(self) -> None:
        """Cancel running downloads and stop the thread."""
        if self._loop is None:
            return
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._downloader.__aexit__(None, None, None)


def _num_bytes(outcome: Downloaded | Failed) -> int:
    return len(outcome.data) if isinstance(outcome, Downloaded) else 0
