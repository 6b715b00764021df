"""What a request that waits would find and need: cached pages of its prefix, and pages to be had. Decides, changes nothing."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from saccade.engine.image_pool import IMAGE_PAGE, ImagePool
from saccade.engine.pages import PagePool
from saccade.engine.request import Request
from saccade.engine.step_plan import Limits
from saccade.engine.ticket import Ticket
from saccade.errors import ImageError, RequestError


@dataclass(frozen=True)
class Prefix:
    """Pages that hold the beginning of a request. The last of them is copied if the request has to write into it."""

    pages: list[int]
    num_tokens: int
    """Tokens that need not be computed: all of the pages', less one if the request has no more than those."""
    is_copied: bool = False

    def without_copy(self, page_size: int) -> Prefix:
        """The same with the last page computed anew."""
        pages = self.pages[:-1]
        return Prefix(pages, len(pages) * page_size)


NO_PREFIX = Prefix([], 0)


def find_prefix(ticket: Ticket, pool: PagePool) -> Prefix:
    """The longest cached prefix of a request's known tokens. Its last token is computed in any case, to sample behind it."""
    request, page_size = ticket.request, pool.page_size
    if not pool.keeps_prefixes or request.sampling.prompt_logprobs is not None:
        return NO_PREFIX
    pages: list[int] = []
    for index in range(len(request.token_ids) // page_size):
        page = pool.find(ticket.page_key(index, page_size))
        if page is None:
            break
        pages.append(page)
    last = len(request.token_ids) - 1
    if len(pages) * page_size <= last:
        return Prefix(pages, len(pages) * page_size)
    whole = Prefix(pages, last, is_copied=True)
    return whole if last % page_size else whole.without_copy(page_size)


def fit_prefix(ticket: Ticket, pool: PagePool, num_promised: int) -> Prefix | None:
    """What the request can begin with, if pages for all its known tokens can be had beside those promised to others; else None.

    A copy needs one page more than the request will own. Where that one is lacking, the page is computed anew instead: a request
    that needs the whole pool would otherwise wait for ever beside its own cached prefix.
    """
    prefix = find_prefix(ticket, pool)
    if _has_room(ticket, prefix, pool, num_promised):
        return prefix
    if prefix.is_copied:
        shorter = prefix.without_copy(pool.page_size)
        if _has_room(ticket, shorter, pool, num_promised):
            return shorter
    return None


def _has_room(ticket: Ticket, prefix: Prefix, pool: PagePool, num_promised: int) -> bool:
    num_kept = sum(pool.owners(page) == 0 for page in prefix.pages)  # free pages, but about to be shared
    num_new = pool.num_pages_for(len(ticket.request.token_ids)) - len(prefix.pages) + prefix.is_copied
    return pool.num_free - num_kept >= num_new + num_promised


def refuse_what_can_never_run(
    request: Request, limits: Limits, pages: PagePool, images: ImagePool, quarantine: Container[bytes]
) -> None:
    """Raise RequestError, saying what to do, unless the request could run if it were alone."""
    num_prompt = request.num_prompt_tokens
    if num_prompt == 0:
        raise RequestError("The prompt is empty; give it at least one token")
    if num_prompt >= limits.max_length:
        raise RequestError(
            f"The prompt has {num_prompt} tokens; prompt and answer together may have {limits.max_length}. "
            "Shorten it, use smaller images, or raise max_length"
        )
    num_computed = (
        min(num_prompt + request.sampling.max_tokens, limits.max_length) - 1
    )  # the last token is never computed
    if pages.num_pages_for(num_computed) > pages.num_pages:
        raise RequestError(
            f"A prompt of {num_prompt} tokens with up to {request.sampling.max_tokens} to answer needs "
            f"{pages.num_pages_for(num_computed)} pages; the cache has {pages.num_pages}. Lower max_tokens, shorten the prompt, or raise num_pages"
        )
    for image in request.images:
        if not images.fits(image.num_tokens):
            raise ImageError(
                f"An image takes {image.num_tokens} tokens; the pool of image features has {images.num_places * IMAGE_PAGE}. "
                "Use a smaller image, or raise image_pool_tokens"
            )
        if image.key in quarantine:
            raise ImageError("An image of this request could not be encoded before; send another one")
