"""When the core waits, for what, and what it learns of times: on the simulated GPU of `bench/simulate_serving.py`."""

import itertools

import pytest

from bench.simulate_serving import Gpu, SimulatedRunner
from saccade.engine.config import EngineConfig
from saccade.engine.core import AddRequest, EndRequest, EngineCore
from saccade.engine.request import Failure, ImageSpan, Request, SamplingParams
from saccade.engine.step import EncodeResult

MANY = 10_000
NAMES = itertools.count()


class FailsLargeImages(SimulatedRunner):
    """As images that need more memory than there is: they fail at once."""

    def __init__(self, config, gpu):
        super().__init__(config, gpu)
        self._failed = []

    def start_encodings(self, plan):
        spans = [self._requests[image.request_id].images[image.image_index] for image in plan.images]
        if any(span.num_patches >= MANY for span in spans):
            failure = Failure("encoding", "no memory", "out_of_memory")
            self._failed += [EncodeResult(image.key, failure) for image in plan.images]
        else:
            super().start_encodings(plan)

    def finished_encodings(self, *, waits=False):
        failed, self._failed = tuple(self._failed), []
        return failed + super().finished_encodings(waits=waits and not failed)


def make(runner_class=SimulatedRunner, **settings):
    gpu = Gpu()
    config = EngineConfig(max_length=8192, max_draft_tokens=0, **settings)
    return gpu, EngineCore(runner_class(config, gpu), clock=lambda: gpu.now)


def request(num_text, num_output=1, *patches):
    name = str(next(NAMES))
    token_ids, spans = [1], []
    for index, num_patches in enumerate(patches):
        key = f"{name}-{index}".encode()
        spans.append(ImageSpan(key=key, start=len(token_ids), num_tokens=num_patches // 4, num_patches=num_patches))
        token_ids += [2] * (num_patches // 4)
    sampling = SamplingParams(max_tokens=num_output, ignore_eos=True)
    return Request(id=name, token_ids=[*token_ids, *[3 + int(name)] * num_text], images=tuple(spans), sampling=sampling)


def add(core, one):
    assert core.handle(AddRequest(request=one, prompt=None)) == []
    return one.id


def run(core, gpu, seconds=1e9):
    """The times of the tokens of each request, until no work is left or the time is over."""
    times, until = {}, gpu.now + seconds
    while core.has_work and gpu.now < until:
        for output in core.step(lambda: gpu.run_until(gpu.now + 0.0005)):
            times.setdefault(output.request_id, []).extend([gpu.now] * bool(output.token_ids))
    return times


def longest_gap_ms(times):
    return 1e3 * max(later - earlier for earlier, later in itertools.pairwise(times))


def learned(core, gpu):
    """Patches that are expected within 12 ms."""
    return core._encoder_progress.num_patches(gpu.now, 0.012)


def teach(core, gpu):
    """Have it encode images beside a request that decodes."""
    add(core, request(100, 200))
    for _ in range(20):
        add(core, request(100, 1, 1024))
        run(core, gpu, 0.02)
    run(core, gpu)
    assert 1000 < learned(core, gpu) < 4200


def test_time_without_requests_is_no_encoding_time():
    gpu, core = make()
    teach(core, gpu)
    before, num_counted = learned(core, gpu), sum(core.statistics.encode_counts)
    name = add(core, request(100, 1, 4096))
    core.step()
    core.handle(EndRequest(request_id=name, reason="cancelled"))
    run(core, gpu)
    assert not core.scheduler.is_encoding, "the end of an encoding without a request is seen"
    gpu.run_until(gpu.now + 600)
    add(core, request(100, 1, 1024))
    run(core, gpu)
    assert learned(core, gpu) == pytest.approx(before, rel=0.3)
    assert sum(core.statistics.encode_counts) == num_counted + 2
    assert core.statistics.encode_total_s < 1


def test_images_that_fail_say_nothing_of_the_encoder():
    gpu, core = make(FailsLargeImages)
    teach(core, gpu)
    before = learned(core, gpu)
    for _ in range(6):
        add(core, request(100, 1, 2 * MANY))
        run(core, gpu)
    assert learned(core, gpu) == before
    assert core.statistics.num_failures == 6


@pytest.mark.parametrize("images", [(7900,), (256, 7900), (7900, 256)], ids=str)
@pytest.mark.parametrize("target", [12.0, None])
def test_a_large_image_does_not_hold_up_others(images, target):
    """Though a step waits for images that are encoded soon: nothing large joins the pass that it waits for."""
    gpu, core = make(target_step_ms=target)
    teach(core, gpu)
    decoding = add(core, request(100, 200))
    run(core, gpu, 0.1)
    for num_patches in images:
        add(core, request(100, 1, num_patches))
    times = run(core, gpu)
    # Alone, the large image takes 24 ms and its prompt, one step without a target, 20.
    assert longest_gap_ms(times[decoding]) < (35 if target is None else 19)


def test_a_small_image_is_waited_for_beside_decoding():
    """It is read by the step after the one in flight, which would otherwise be one more without it."""
    gpu, core = make()
    teach(core, gpu)
    decoding = add(core, request(100, 200))
    run(core, gpu, 0.1)
    name, added_at = add(core, request(100, 1, 1024)), gpu.now
    times = run(core, gpu)
    assert (times[name][0] - added_at) * 1e3 < 14
    assert longest_gap_ms(times[decoding]) < 12


def test_messages_are_handled_during_the_first_part_of_a_decode_step():
    gpu, core = make()
    add(core, request(100, 50))
    run(core, gpu, 0.05)
    polls = []

    def poll():
        polls.append(gpu.now)
        gpu.run_until(gpu.now + 0.0001)

    for _ in range(10):
        polls.clear()
        begin = core._last_read_at
        core.step(poll)
        end = core._last_read_at
        assert polls
        assert max(polls) - begin < 0.75 * (end - begin), "the end of the step is left to `read`"


def test_a_request_that_ends_during_a_decode_step_is_over():
    gpu, core = make()
    first, second = add(core, request(100, 500)), add(core, request(100, 20))
    run(core, gpu, 0.05)
    endings = []

    def end():
        if not endings:
            endings.extend(core.handle(EndRequest(request_id=first, reason="cancelled")))
        gpu.run_until(gpu.now + 0.0005)

    outputs = core.step(end)
    assert [output.finish_reason for output in endings] == ["cancelled"]
    assert first not in [output.request_id for output in outputs]
    assert first not in run(core, gpu)
    assert core.scheduler.find(second) is None


def test_a_long_step_beside_the_encoder_has_half_the_prompt_tokens():
    """One that waits for the last image being encoded runs alone; one of a backlog is long enough to run beside it in any case."""
    gpu, core = make()
    teach(core, gpu)
    add(core, request(100, 500))
    run(core, gpu, 0.1)
    usual = core._step_budget.num_tokens()
    assert core._runs_beside_encoder(usual, 4000) is False
    core.handle(AddRequest(request=request(100, 1, 1024), prompt=None))
    core.step(lambda: gpu.run_until(gpu.now + 0.0005))
    assert core.scheduler.num_patches_encoding == 1024
    usual = core._step_budget.num_tokens()
    assert core._runs_beside_encoder(usual, 4000) is False
    assert core._runs_beside_encoder(usual, 1000) is True
    assert core._runs_beside_encoder(2 * usual, 4000) is True
    assert core._token_budget(1000) <= usual // 2
