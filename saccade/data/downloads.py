"""Many downloads at once, in a thread of their own, for a caller that wants one image after another.

links -> begun ahead, a few for each request in flight -> outcomes as they end
"""

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
log = logging.getLogger(__name__)

MAX_REACH = 100_000
"""How far behind the newest link the oldest unfinished one may be; what was fetched beyond it must be remembered."""
_LINKS_AHEAD = 4
"""Links begun for each request in flight; most wait for their host's turn."""


def fetch_as_completed(
    items: Iterable[T], url_of: Callable[[T], str | None], options: DownloadOptions
) -> Iterator[tuple[T, Downloaded | Failed | None]]:
    """Each item with what its link gave, as downloads end; an item without a link passes through at once, with None.

    Not in the order of the items: one dead host would hold back thousands of images. An item is overtaken by at most `MAX_REACH`.
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
                or len(waiting) >= _LINKS_AHEAD * options.max_concurrent
                or number - next(iter(waiting)) >= MAX_REACH
            ):
                ended, outcome = background.take()
                yield waiting.pop(ended), outcome
        while waiting:
            ended, outcome = background.take()
            yield waiting.pop(ended), outcome
    finally:
        background.close()


class _Background:
    """An event loop in a thread, started by the first link, and the outcomes that nobody has taken yet."""

    def __init__(self, options: DownloadOptions) -> None:
        self._options = options
        self._finished: queue.SimpleQueue[tuple[int, Downloaded | Failed]] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._bytes_in, self._bytes_out = 0, 0  # each counted by one thread alone

    @property
    def has_finished(self) -> bool:
        """Whether an outcome can be taken without waiting."""
        return not self._finished.empty()

    def _has_room(self) -> bool:
        return self._bytes_in - self._bytes_out <= self._options.max_held_bytes

    def begin(self, number: int, url: str) -> None:
        """Start a download."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="fetch", daemon=True)
            self._thread.start()
            self._fetcher = Downloader(self._options, has_room=self._has_room)
            asyncio.run_coroutine_threadsafe(self._fetcher.__aenter__(), self._loop).result()
        asyncio.run_coroutine_threadsafe(self._fetch(number, url), self._loop)

    async def _fetch(self, number: int, url: str) -> None:
        try:
            outcome = await self._fetcher.fetch(url)
        except Exception as error:  # a bug of ours must not leave the other thread waiting
            log.exception("fetching %s", url)
            outcome = Failed(f"internal error: {type(error).__name__}")
        self._bytes_in += _num_bytes(outcome)
        self._finished.put((number, outcome))

    def take(self) -> tuple[int, Downloaded | Failed]:
        """The number and outcome of a download, waiting for one to end."""
        number, outcome = self._finished.get()
        self._bytes_out += _num_bytes(outcome)
        return number, outcome

    def close(self) -> None:
        """Drop what is under way and end the thread."""
        if self._loop is None:
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._fetcher.__aexit__(None, None, None)


def _num_bytes(outcome: Downloaded | Failed) -> int:
    return len(outcome.data) if isinstance(outcome, Downloaded) else 0
