"""What the core waits for, and the times that it learns, on the simulated GPU of `bench/simulate_serving.py`."""

import itertools

import pytest

from bench.simulate_serving import Gpu, SimulatedRunner
from saccade.engine.config import EngineConfig
from saccade.engine.core.loop import EngineCore
from saccade.engine.core.messages import AddRequest, EndRequest
from saccade.engine.core.step import EncodeResult
from saccade.engine.request import Failure, ImageSpan, Request
from saccade.engine.sampling_params import SamplingParams

MANY = 10_000
NAMES = itertools.count()


class FailsLargeImages(SimulatedRunner):
    """Images that need more memory than there is fail at once."""

    def run_encoder(self, plan):
        spans = [self.requests[image.request_id].images[image.image_index] for image in plan.images]
        if any(span.num_patches >= MANY for span in spans):
            failure = Failure("encoding", "no memory", "out_of_memory")
            return tuple([EncodeResult(image.key, failure) for image in plan.images])
        return super().run_encoder(plan)


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
    """Run until there is no work, or for `seconds`. Returns the times of the tokens of each request."""
    times, until = {}, gpu.now + seconds
    while core.has_work and gpu.now < until:
        for output in core.step(lambda: gpu.run_until(gpu.now + 0.0005)):
            times.setdefault(output.request_id, []).extend([gpu.now] * bool(output.token_ids))
    return times


def longest_gap_ms(times):
    return 1e3 * max(later - earlier for earlier, later in itertools.pairwise(times))


def teach(core, gpu):
    """Let the core learn how long steps take."""
    add(core, request(100, 200))
    for _ in range(20):
        add(core, request(100, 1, 1024))
        run(core, gpu, 0.02)
    run(core, gpu)


def test_time_without_requests_is_no_encoding_time():
    gpu, core = make()
    teach(core, gpu)
    num_counted = sum(core.statistics.encode_counts)
    name = add(core, request(100, 1, 4096))
    core.step()
    core.handle(EndRequest(request_id=name, reason="cancelled"))
    run(core, gpu)
    assert not core.scheduler.images.is_encoding, "the end of an encoding without a request is seen"
    gpu.run_until(gpu.now + 600)
    add(core, request(100, 1, 1024))
    run(core, gpu)
    assert sum(core.statistics.encode_counts) == num_counted + 2
    assert core.statistics.encode_total_s < 1


@pytest.mark.parametrize("num_patches", [MANY, 8000])
def test_images_that_fail_delay_nothing_else(num_patches):
    """Images larger than a pass, or much larger."""
    gpu, core = make(FailsLargeImages)
    teach(core, gpu)
    decoding = add(core, request(100, 300))
    run(core, gpu, 0.1)
    names = [add(core, request(100, 1, num_patches + MANY)) for _ in range(6)]
    names += [add(core, request(100, 1, 1024)) for _ in range(2)]
    times = run(core, gpu)
    assert core.statistics.num_failures == 6
    assert names[-2:] == [name for name in times if name in names and times[name]]
    assert longest_gap_ms(times[decoding]) < 16


@pytest.mark.parametrize("images", [(7600,), (256, 7600), (7600, 256)], ids=str)
@pytest.mark.parametrize("target", [12.0, None])
def test_a_large_image_does_not_hold_up_others(images, target):
    """The image is encoded in parts, between which other requests decode."""
    gpu, core = make(target_step_ms=target)
    teach(core, gpu)
    decoding = add(core, request(100, 200))
    run(core, gpu, 0.1)
    for num_patches in images:
        add(core, request(100, 1, num_patches))
    times = run(core, gpu)
    # Alone, encoding the large image takes 24 ms, and its prompt 20 ms in one step without a target.
    assert longest_gap_ms(times[decoding]) < (35 if target is None else 17)


def test_an_image_larger_than_a_pass_does_not_freeze_others():
    """Encoding the image takes 94 ms, and its prompt of 8192 tokens about 90 ms."""
    gpu, core = make(max_step_tokens=4096)
    teach(core, gpu)
    decoding = add(core, request(100, 400))
    run(core, gpu, 0.1)
    before = core._step_budget.decode_ms
    name = add(core, request(10, 1, 30_000))
    times = run(core, gpu)
    assert times[name]
    assert longest_gap_ms(times[decoding]) < 40
    assert core._step_budget.decode_ms == pytest.approx(before, rel=0.1), (
        "the time of a step does not include its encoder parts"
    )


def test_a_burst_makes_steps_longer_until_it_is_served():
    gpu, core = make()
    teach(core, gpu)
    decoding = add(core, request(100, 400))
    run(core, gpu, 0.1)
    assert longest_gap_ms(run(core, gpu, 0.1)[decoding]) < 4
    for _ in range(12):
        add(core, request(300, 1, 2304))
    core.step()
    assert core._step_budget.has_backlog
    times = run(core, gpu, 0.3)
    assert 20 < longest_gap_ms(times[decoding]) < 32
    assert not core._step_budget.has_backlog
    assert longest_gap_ms(run(core, gpu, 0.1)[decoding]) < 4


def test_text_does_not_keep_images_from_being_encoded():
    """Prompts that arrive after the image do not take the encoder's share of a step."""
    gpu, core = make()
    teach(core, gpu)
    add(core, request(100, 2000))
    run(core, gpu, 0.1)
    name, added_at = add(core, request(100, 1, 4096)), gpu.now
    while core.scheduler.find(name) is not None:
        add(core, request(900, 1))
        core.step(lambda: gpu.run_until(gpu.now + 0.0005))
        assert gpu.now < added_at + 1
    run(core, gpu)


def test_the_encoder_is_no_part_of_the_time_of_a_step():
    gpu, core = make()
    teach(core, gpu)
    decoding = add(core, request(100, 400))
    run(core, gpu, 0.1)
    before = core._step_budget.decode_ms
    for _ in range(10):
        add(core, request(10, 1, 2304))
        run(core, gpu, 0.03)
    assert core.scheduler.find(decoding) is not None
    assert core._step_budget.decode_ms == pytest.approx(before, rel=0.1)


def test_a_request_that_arrives_early_in_a_decode_step_is_part_of_the_next_one():
    gpu, core = make()
    teach(core, gpu)
    for _ in range(24):
        add(core, request(100, 300))
    run(core, gpu, 0.3)
    core.step(lambda: gpu.run_until(gpu.now + 0.0005))
    new = [request(50, 1)]
    launched = launches_of(core)

    def arrive():
        if new:
            add(core, new.pop())
        gpu.run_until(gpu.now + 0.0005)

    core.step(arrive)
    assert any(chunk.num_tokens == 51 for chunk in launched[0].chunks)


def launches_of(core):
    """A list to which later plans are appended when they are launched."""
    launched, forward = [], core._runner.forward
    core._runner.forward = lambda plan: launched.append(plan) or forward(plan)
    return launched


def test_a_small_image_is_waited_for_while_others_decode():
    """The next step encodes and reads the image."""
    gpu, core = make()
    teach(core, gpu)
    decoding = add(core, request(100, 200))
    run(core, gpu, 0.1)
    launched = launches_of(core)
    name, added_at = add(core, request(100, 1, 1024)), gpu.now
    times = run(core, gpu)
    assert launched[0].encoder_parts == launched[0].pass_parts
    assert any(chunk.request_id == name and chunk.images for chunk in launched[0].chunks)
    assert (times[name][0] - added_at) * 1e3 < 14.5
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


class PreparesTwice(SimulatedRunner):
    """Has two parts of its start-up left."""

    num_left = 2

    def prepare_more(self):
        self.num_left -= 1
        return self.num_left > 0


def test_the_start_up_continues_while_there_is_no_work_and_messages_come_first():
    gpu, core = make(PreparesTwice)
    runner = core._runner
    add(core, request(100, 20))
    run(core, gpu)
    assert runner.num_left == 2, "requests were not held up"
    while not core.has_work and core.idle_s() is not None:
        assert core.idle_s() <= 1.0
        core.idle()
    assert runner.num_left == 0
    assert not core.wants_check, "the invariants were checked after it"
