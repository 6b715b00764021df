"""A front's reports: each is sent until it is answered, and a view that cannot be followed ends nothing."""

import asyncio

from saccade.fleet.cluster.controller_link import ControllerLink
from saccade.fleet.cluster.view import FleetView, FrontReport
from saccade.fleet.objectives import Outcome


def run(sync, on_view, *, num_calls):
    """Reports that a link sends until `sync` was called so often."""
    sent = []

    async def main():
        done = asyncio.Event()

        async def counted(message):
            sent.append(FrontReport.from_bytes(message))
            if len(sent) == num_calls:
                done.set()
            return await sync(len(sent))

        link = ControllerLink(
            "front", "http://127.0.0.1:1", counted, on_view, take_consumption=dict, take_poison=tuple,
        )  # fmt: skip
        link.observe("tiny", Outcome(user="ann", version="v1", values={"errors": 0.0}))
        running = asyncio.create_task(link.run())
        await asyncio.wait_for(done.wait(), 30)
        running.cancel()

    asyncio.run(main())
    return sent


def view(generation=1):
    return FleetView(epoch=1, generation=generation, models=()).to_bytes()


def test_a_report_is_sent_again_under_its_number_until_it_is_answered():
    async def sync(call):
        if call < 3:
            raise ConnectionError("away")
        return view()

    views = []
    first, second, third, fourth = run(sync, views.append, num_calls=4)
    assert [one.number for one in (first, second, third, fourth)] == [1, 1, 1, 2]
    assert first == third
    assert first.outcomes
    assert not fourth.outcomes
    assert len(views) >= 1


def test_a_view_that_cannot_be_followed_is_followed_a_second_later(caplog):
    async def sync(call):
        return view(call)

    followed = []

    def follow(view):
        if view.generation == 1:
            raise RuntimeError("an application that is not there yet")
        followed.append(view.generation)

    run(sync, follow, num_calls=3)
    assert followed[0] == 2
    assert "cannot be followed" in caplog.text
