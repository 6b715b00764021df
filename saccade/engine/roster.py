"""Who runs and who waits, by rank, and what each holds: a row, pages, images."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from heapq import heappop, heappush

from saccade.engine.image_pool import ImagePool
from saccade.engine.pages import PagePool
from saccade.engine.request import Request
from saccade.engine.ticket import Ticket


def _order(ticket: Ticket) -> tuple[int, int]:
    return ticket.order


class Roster:
    """Tickets of all requests that have not ended. Who waits holds nothing."""

    def __init__(self, max_requests: int, pages: PagePool, images: ImagePool) -> None:
        self.pages = pages
        self.images = images
        self.running: list[Ticket] = []
        self.waiting: list[Ticket] = []
        self.preempted: list[Request] = []  # since someone last asked
        self._max_requests = max_requests
        self._tickets: dict[str, Ticket] = {}
        self._free_rows = list(range(max_requests))  # a heap: low rows first

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(list(self._tickets.values()))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tickets

    @property
    def has_row(self) -> bool:
        """Whether one more may run."""
        return bool(self._free_rows)

    def find(self, request: Request) -> Ticket | None:
        """Its ticket, unless it has ended."""
        ticket = self._tickets.get(request.id)
        return ticket if ticket is not None and ticket.request is request else None

    def find_id(self, request_id: str) -> Ticket | None:
        """The ticket of the request with this id that has not ended."""
        return self._tickets.get(request_id)

    def add(self, ticket: Ticket) -> None:
        """Let a new request wait."""
        self._tickets[ticket.request.id] = ticket
        insort(self.waiting, ticket, key=_order)

    def admit(self, ticket: Ticket) -> None:
        """Give a waiting request a row."""
        _remove(self.waiting, ticket)
        ticket.request.row = heappop(self._free_rows)
        insort(self.running, ticket, key=_order)

    def preempt(self, ticket: Ticket) -> None:
        """Take everything from a running request and let it wait again."""
        _remove(self.running, ticket)
        self._let_go(ticket)
        ticket.request.num_preemptions += 1
        self.preempted.append(ticket.request)
        insort(self.waiting, ticket, key=_order)

    def remove(self, ticket: Ticket) -> None:
        """Take everything from a request that has ended."""
        del self._tickets[ticket.request.id]
        _remove(self.waiting if ticket.request.row is None else self.running, ticket)
        self._let_go(ticket)

    def check(self) -> None:
        """Raise AssertionError unless pages, images, rows and queues agree with what the requests hold."""
        self.pages.check([ticket.request.pages for ticket in self._tickets.values()])
        self.images.check(Counter([key for ticket in self.running for key in ticket.images_in_use]))
        rows = [ticket.request.row for ticket in self.running if ticket.request.row is not None]
        assert sorted(self._free_rows + rows) == list(range(self._max_requests)), "a row is lost or was given out twice"
        queued = [ticket.request.id for ticket in self.running + self.waiting]
        assert len(queued) == len(self._tickets), "a request is in no queue or in two"
        assert set(queued) == self._tickets.keys(), "a request is in no queue or in two"
        for ticket in self.waiting:
            holds_nothing = ticket.request.row is None and not ticket.request.pages and not ticket.images_in_use
            assert holds_nothing, f"request {ticket.request.id} waits but holds something"

    def _let_go(self, ticket: Ticket) -> None:
        """Give back pages, images and row. Steps under way keep the page table they were given; the request gets a new one."""
        request = ticket.request
        self.pages.free(reversed(request.pages))
        request.pages = []
        for key in ticket.images_in_use:
            self.images.release(key)
        if request.row is not None:
            heappush(self._free_rows, request.row)
            request.row = None
        ticket.num_registered = 0
        ticket.start_at(0)


def _remove(queue: list[Ticket], ticket: Ticket) -> None:
    index = bisect_left(queue, ticket.order, key=_order)
    assert queue[index : index + 1] == [ticket], f"request {ticket.request.id} is not where it belongs"
    del queue[index]
