"""A failure of one request does not change the tokens of the others."""

import dataclasses
from concurrent.futures import Future

import pytest
from engine.tiny import make_core, plain, request_of, run_all
from model.hugging_face import SHAPES, make_checkpoint

from saccade.engine.config import EngineConfig
from saccade.engine.core.encoder_cache import salted
from saccade.engine.core.grammar_requests import GrammarRequests
from saccade.engine.core.loop import EngineError
from saccade.engine.core.messages import AddRequest, EndRequest
from saccade.engine.core.step import ENCODER_PARTS, EncodeResult, ImageToEncode, StepPlan
from saccade.engine.device.image_runner import ImageRunner
from saccade.engine.device.runner import Runner
from saccade.engine.sampling_params import SamplingParams
from saccade.engine.structured import StructuredOutput
from saccade.engine.transport.thread import STOPPED


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("engine") / "checkpoint", SHAPES[0])


CONFIG = EngineConfig(
    num_pages=200, page_size=8, max_length=550, max_requests=12, max_step_tokens=96, encoder_cache_tokens=512
)
DOOMED = "doomed"


class FailsEncoding(ImageRunner):
    def start_pass(self, images, num_parts):
        if any(one.planned.request_id.startswith(DOOMED) for one in images):
            raise RuntimeError("bad image")
        super().start_pass(images, num_parts)


class FailsInTheEncoder(ImageRunner):
    def run_parts(self, num_parts):
        if any(one.planned.request_id.startswith(DOOMED) for one in self.images):
            raise RuntimeError("bad image")
        return super().run_parts(num_parts)


class FailsAtOnce(Runner):
    def _run_chunks(self, chunks):
        if any(chunk.request_id.startswith(DOOMED) for chunk in chunks):
            raise RuntimeError("bad request")
        return super()._run_chunks(chunks)


class FailsWhileDecoding(Runner):
    def _run_chunks(self, chunks):
        if any(chunk.request_id.startswith(DOOMED) and self._num_output(chunk) > 4 for chunk in chunks):
            raise ValueError("bad token")
        return super()._run_chunks(chunks)

    def _num_output(self, chunk):
        return chunk.end - self._requests[chunk.request_id].request.num_prompt_tokens


class FailsSampling(Runner):
    def _sample_chunks(self, forward, masks):
        if any(chunk.request_id.startswith(DOOMED) for chunk in forward.chunks):
            raise MemoryError("no memory")
        return super()._sample_chunks(forward, masks)


class FailsBatchesOnly(Runner):
    """Large batches fail; every request alone succeeds."""

    def _run_chunks(self, chunks):
        if len(chunks) > 3:
            raise MemoryError("out of memory")
        return super()._run_chunks(chunks)


def load(folder, dooms):
    """Fifty requests and their expected tokens. Two with their own images will fail; other prompts occur twice."""
    prompts, expected = plain(folder, 1, 25, 12)
    requests = []
    for number in range(50):
        prompt, tokens = prompts[number % 25], expected[number % 25]
        is_doomed = dooms and number % 25 == 20
        if is_doomed:
            prompt, tokens = next((p, a) for p, a in zip(prompts, expected, strict=True) if p.images and len(a) > 6)
            images = tuple(
                dataclasses.replace(
                    image, span=dataclasses.replace(image.span, key=bytes([number]) + image.span.key[1:])
                )
                for image in prompt.images
            )
            prompt = dataclasses.replace(prompt, images=images)
        name = f"{DOOMED if is_doomed else 'r'}-{number}"
        requests.append(((request_of(name, prompt, SamplingParams(max_tokens=len(tokens))), prompt), tokens))
    return [request for request, _ in requests], [tokens for _, tokens in requests]


@pytest.mark.parametrize("kind", [FailsEncoding, FailsInTheEncoder, FailsAtOnce, FailsWhileDecoding, FailsSampling])
def test_of_fifty_requests_two_fail_and_the_others_get_their_tokens(folder, kind):
    requests, expected = load(folder, dooms=True)
    core = make_core(folder, CONFIG, runner_class=kind)
    outputs = run_all(core, requests, at_once=4)
    for (request, _), collected, tokens in zip(requests, outputs, expected, strict=True):
        if request.id.startswith(DOOMED):
            assert collected.last.finish_reason == "failed"
            assert collected.last.failure.stage == (
                "encoding" if kind in (FailsEncoding, FailsInTheEncoder) else "running"
            )
            assert collected.last.failure.kind == ("out_of_memory" if kind is FailsSampling else "internal_error")
            assert "bad" not in collected.last.failure.message  # the exception text stays in the log
        else:
            assert collected.token_ids == tokens
    assert core.statistics.finished["failed"] == 2
    assert core.scheduler.is_idle_clean()


def test_an_image_that_fails_while_others_decode_is_not_read(folder):
    """Its request arrives between two steps, and its encoding fails before the next one is planned."""
    prompts, _ = plain(folder, 1, 25, 12)
    text, doomed = (next(p for p in prompts if bool(p.images) == has_images) for has_images in (False, True))
    core, sampling = (
        make_core(folder, CONFIG, runner_class=FailsEncoding),
        SamplingParams(max_tokens=40, ignore_eos=True),
    )
    core.handle(AddRequest(request=request_of("text", text, sampling), prompt=text))
    for _ in range(4):
        core.step()
    assert core.scheduler.num_decoding == 1
    core.handle(AddRequest(request=request_of(DOOMED, doomed, sampling), prompt=doomed))
    outputs = [output for _ in range(60) for output in core.step() if output.request_id == DOOMED]
    assert [(output.finish_reason, output.token_ids) for output in outputs] == [("failed", ())]
    assert not core.has_work


class FailsTogether(ImageRunner):
    """The last part of a pass fails unless the pass has one image."""

    num_calls = 0

    def run_parts(self, num_parts):
        if len(self.images) == 1:
            return super().run_parts(num_parts)
        self.num_calls += 1
        if self.num_calls == 2:
            raise MemoryError("no memory")
        return ()


def test_images_of_a_pass_that_fails_later_are_encoded_though_a_request_has_ended(folder):
    prompts, _ = plain(folder, 1, 25, 12)
    chosen = [prompt for prompt in prompts if len(prompt.images) == 1][:2]
    runner = make_core(folder, CONFIG, runner_class=FailsTogether)._runner
    images = []
    for number, prompt in enumerate(chosen):
        runner.register(request_of(str(number), prompt, SamplingParams()), prompt)
        images.append(ImageToEncode(str(number), 0, bytes([number]), (number,)))
    first = StepPlan(number=0, images=tuple(images), encoder_parts=1, pass_parts=ENCODER_PARTS)
    assert runner.sample(runner.forward(first)).read().images == ()
    runner.unregister("0")
    second = StepPlan(number=1, encoder_parts=ENCODER_PARTS - 1)
    assert runner.sample(runner.forward(second)).read().images == (EncodeResult(b"\0"), EncodeResult(b"\1"))


def test_an_image_that_could_not_be_encoded_is_quarantined(folder):
    requests, _ = load(folder, dooms=True)
    core = make_core(folder, CONFIG, runner_class=FailsEncoding)
    run_all(core, requests[:30])
    doomed = next(prompt for request, prompt in requests if request.id.startswith(DOOMED))
    [refused] = core.handle(AddRequest(request=request_of("again", doomed, SamplingParams()), prompt=doomed))
    assert (refused.finish_reason, refused.failure.kind) == ("failed", "invalid_request")
    assert "image" in refused.failure.message
    core.check()


def test_a_batch_that_fails_is_run_in_halves(folder):
    requests, expected = load(folder, dooms=False)
    outputs = run_all(make_core(folder, CONFIG, runner_class=FailsBatchesOnly), requests[:30])
    assert [collected.token_ids for collected in outputs] == expected[:30]


class Dies(Runner):
    def _run_chunks(self, chunks):
        if any(chunk.end - self._requests[chunk.request_id].request.num_prompt_tokens > 3 for chunk in chunks):
            raise RuntimeError("illegal memory access")
        return super()._run_chunks(chunks)


def test_when_the_device_fails_the_core_raises_and_every_request_can_be_ended_once(folder, monkeypatch):
    monkeypatch.setattr("saccade.engine.device.failures.is_alive", lambda device: False)
    requests, _ = load(folder, dooms=False)
    core = make_core(folder, CONFIG, runner_class=Dies)
    endings = []
    for request, prompt in requests[:20]:
        core.handle(AddRequest(request=request, prompt=prompt))

    def run():
        while core.has_work:
            endings.extend(output for output in core.step() if output.finish_reason)

    with pytest.raises(EngineError, match="device"):
        run()
    endings += core.fail_all(STOPPED)
    assert sorted(output.request_id for output in endings) == sorted(request.id for request, _ in requests[:20])
    assert {output.failure for output in endings if output.finish_reason == "failed"} == {STOPPED}
    assert core.fail_all(STOPPED) == []
    core.check()


def test_cancelling_at_any_time_leaks_nothing(folder):
    requests, _ = load(folder, dooms=False)
    core = make_core(folder, CONFIG)
    outputs = []
    for request, prompt in requests[:24]:
        outputs += core.handle(AddRequest(request=request, prompt=prompt))
    for number, (request, _) in enumerate(requests[:24]):
        outputs += core.step()
        if number % 2:
            outputs += core.handle(EndRequest(request_id=request.id, reason="cancelled"))
            assert core.handle(EndRequest(request_id=request.id, reason="cancelled")) == []
    while core.has_work:
        outputs += core.step()
    core.check()
    endings = [output.request_id for output in outputs if output.finish_reason]
    assert sorted(endings) == sorted(request.id for request, _ in requests[:24])
    assert "cancelled" in core.statistics.finished


class FailsOneImage(ImageRunner):
    """The image of a given key cannot be encoded."""

    bad: bytes = b""

    def start_pass(self, images, num_parts):
        if any(one.image.span.key == self.bad for one in images):
            raise RuntimeError("bad image")
        super().start_pass(images, num_parts)


def test_a_bad_image_does_not_affect_a_good_one_of_the_same_request(folder):
    """In one step, a request has both images and another request only the good one."""
    prompts, _ = plain(folder, 1, 50, 12)
    both = next(p for p in prompts if len({image.span.key for image in p.images}) >= 2)
    bad, good = both.images[0].span.key, both.images[1].span.key
    alone = next(p for p in prompts if [image.span.key for image in p.images] == [good])
    expected = run_all(make_core(folder, CONFIG), [(request_of("r", alone, SamplingParams(max_tokens=6)), alone)])
    core = make_core(folder, dataclasses.replace(CONFIG, max_step_tokens=512), runner_class=FailsOneImage)
    core._runner.images.bad = bad
    requests = [
        (request_of(name, p, SamplingParams(max_tokens=6)), p) for name, p in (("both", both), ("alone", alone))
    ]
    outputs = run_all(core, requests)
    assert [collected.last.finish_reason for collected in outputs] == ["failed", "length"]
    assert outputs[1].token_ids == expected[0].token_ids


def test_requests_that_share_a_bad_image_all_fail(folder):
    """One request reads the image for the last time in the step that encodes it for another request."""
    prompts, _ = plain(folder, 1, 50, 12)
    prompt = next(p for p in prompts if len(p.images) == 1)
    core = make_core(folder, dataclasses.replace(CONFIG, max_step_tokens=512), runner_class=FailsOneImage)
    core._runner.images.bad = prompt.images[0].span.key
    names = ["first", "second", "third"]
    outputs = run_all(core, [(request_of(name, prompt, SamplingParams(max_tokens=6)), prompt) for name in names])
    assert [collected.last.finish_reason for collected in outputs] == ["failed"] * 3
    assert [collected.token_ids for collected in outputs] == [[]] * 3
    assert not core.scheduler.encoder_cache.contains(salted(b"", core._runner.images.bad))


class NonFiniteLogits(Runner):
    """The logits of some requests are NaN or infinite while they decode."""

    value = float("nan")

    def _sample_chunks(self, forward, masks):
        sampled = [chunk for chunk in forward.chunks if chunk.samples for _ in range(1 + len(chunk.drafts))]
        for row, chunk in enumerate(sampled):
            if (
                chunk.request_id.startswith(DOOMED)
                and chunk.start > self._requests[chunk.request_id].request.num_prompt_tokens
            ):
                forward.logits[row, 7] = self.value
        return super()._sample_chunks(forward, masks)


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.8, "top_p": 0.9}, {"logprobs": 2}, {"presence_penalty": 0.5, "logit_bias": {3: 1.0}}],
    ids=str,
)
def test_non_finite_logits_fail_their_own_request(folder, value, sampling):
    prompts, _ = plain(folder, 1, 50, 12)
    names = ["a", f"{DOOMED}-1", "b", f"{DOOMED}-2", "c"]
    params = SamplingParams(max_tokens=8, seed=3, **sampling)

    def run(kind):
        requests = [(request_of(name, prompts[i], params), prompts[i]) for i, name in enumerate(names)]
        core = make_core(folder, CONFIG, runner_class=kind)
        core._runner.value = value
        return core, run_all(core, requests)

    _, expected = run(None)
    core, outputs = run(NonFiniteLogits)
    for name, output, plain_output in zip(names, outputs, expected, strict=True):
        if name.startswith(DOOMED):
            assert (output.last.finish_reason, output.last.failure.kind) == ("failed", "non_finite_logits")
            assert output.token_ids == plain_output.token_ids[: len(output.token_ids)]
            assert len(output.token_ids) == 2
        else:
            assert output.token_ids == plain_output.token_ids
    assert core.scheduler.is_idle_clean()


def failing_copy(pairs):
    raise RuntimeError("no memory")


def test_a_page_that_cannot_be_copied_fails_its_own_request(folder):
    prompts, expected = plain(folder, 1, 50, 12)
    whole = next(i for i, p in enumerate(prompts) if len(p.token_ids) % CONFIG.page_size == 0)
    core = make_core(folder, CONFIG)
    core._runner.cache.copy = failing_copy
    sampling = SamplingParams(max_tokens=4)
    first = run_all(core, [(request_of("first", prompts[whole], sampling), prompts[whole])])
    again, other = request_of("again", prompts[whole], sampling), request_of("other", prompts[0], sampling)
    outputs = run_all(core, [(again, prompts[whole]), (other, prompts[0])])
    assert first[0].last.finish_reason == outputs[1].last.finish_reason == "length"
    assert outputs[0].last.finish_reason == "failed"
    assert outputs[1].token_ids == expected[0][:4]


def test_a_page_that_cannot_be_copied_quarantines_no_image(folder):
    """The failed request has an image to encode, which another request of the step shares."""
    prompts, _ = plain(folder, 1, 50, 12)
    with_image = next(prompt for prompt in prompts if prompt.images)
    first = with_image.images[0].span
    config = dataclasses.replace(CONFIG, encoder_cache=False, page_size=1, num_pages=1600)
    core = make_core(folder, config)
    core._runner.cache.copy = failing_copy
    sampling = SamplingParams(max_tokens=2)
    run_all(core, [(request_of("first", with_image, sampling), with_image)])
    # A page of the prefix is copied although the request still has the image to encode.
    forward, expected = core._runner.forward, []

    def forward_with_a_copy(plan):
        if plan.images and not expected:
            target = plan.chunks[0].new_pages[0]
            source = next(page for page in range(config.num_pages) if all(page not in c.new_pages for c in plan.chunks))
            plan = dataclasses.replace(plan, page_copies=((source, target),))
            expected.append(plan.chunks[0].request_id)
        return forward(plan)

    core._runner.forward = forward_with_a_copy
    sampling = SamplingParams(max_tokens=2, prompt_logprobs=0)
    again, other = request_of("again", with_image, sampling), request_of("other", with_image, sampling)
    outputs = run_all(core, [(again, with_image), (other, with_image)])
    assert expected == ["again"]
    assert [collected.last.finish_reason for collected in outputs] == ["failed", "length"]
    assert first.key not in core.scheduler.images._quarantine
    assert core.statistics.num_failures == 1
    assert len(outputs[1].token_ids) == 2


class FailsOnceAfterSampling(Runner):
    """The first attempts of some steps fail after their tokens were sampled."""

    num_attempts = 0

    def _sample_chunks(self, forward, masks):
        self.num_attempts += 1
        if self.num_attempts % 3 == 0 and len(forward.chunks) > 1:
            commit = self.sampler.commit
            self.sampler.commit = lambda: (_ for _ in ()).throw(MemoryError("no memory"))
            try:
                return super()._sample_chunks(forward, masks)
            finally:
                self.sampler.commit = commit
        return super()._sample_chunks(forward, masks)


def test_a_retried_step_gives_the_same_tokens(folder):
    """Penalties count every token once, and a pending token is not overwritten by a failed attempt."""
    prompts, _ = plain(folder, 1, 50, 12)
    sampling = SamplingParams(
        max_tokens=12, temperature=0.8, seed=5, frequency_penalty=1.5, repetition_penalty=1.3, logprobs=1
    )
    found = [
        run_all(
            make_core(folder, CONFIG, runner_class=kind),
            [(request_of(f"r{i}", prompt, sampling), prompt) for i, prompt in enumerate(prompts[:10])],
        )
        for kind in (None, FailsOnceAfterSampling)
    ]
    assert [outputs.token_ids for outputs in found[0]] == [outputs.token_ids for outputs in found[1]]


def test_a_prompt_the_runner_refuses_fails_alone_and_leaks_nothing(folder):
    core = make_core(folder, CONFIG)
    prompts, expected = plain(folder, 1, 50, 12)
    broken = dataclasses.replace(prompts[0], positions=prompts[0].positions[:, :0])
    [output] = core.handle(AddRequest(request=request_of("broken", broken, SamplingParams()), prompt=broken))
    assert (output.request_id, output.finish_reason, output.failure.kind) == ("broken", "failed", "internal_error")
    assert not core.has_work
    core.check()
    [collected] = run_all(core, [(request_of("r", prompts[1], SamplingParams(max_tokens=2)), prompts[1])])
    assert collected.token_ids == expected[1][:2]


# ------------------------------------------------------------------ bounds


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def timed_core(folder, **changes):
    core = make_core(folder, dataclasses.replace(CONFIG, **changes))
    core._clock = clock = Clock()
    return core, clock


def endings(outputs):
    return {output.request_id: output.failure and output.failure.kind for output in outputs if output.finish_reason}


def test_a_full_queue_refuses_requests_at_once(folder):
    prompts, _ = plain(folder, 1, 50, 12)
    core, _ = timed_core(folder, max_requests=1, max_waiting_requests=2)
    sampling = SamplingParams(max_tokens=4)

    def send(name):
        return core.handle(AddRequest(request=request_of(name, prompts[0], sampling), prompt=prompts[0]))

    assert send("running") == []
    outputs = core.step()
    assert send("a") == send("b") == []
    [refused] = send("c")
    assert (refused.request_id, refused.finish_reason) == ("c", "failed")
    assert (refused.failure.kind, refused.failure.stage) == ("overloaded", "waiting")
    assert core._runner.num_registered == 3
    core.handle(EndRequest(request_id="a", reason="cancelled"))
    assert send("d") == []
    while core.has_work:
        outputs += core.step()
    assert endings(outputs) == {"running": None, "b": None, "d": None}
    core.check()


def test_a_request_that_does_not_start_in_time_fails(folder):
    prompts, _ = plain(folder, 1, 50, 12)
    core, clock = timed_core(folder, max_requests=1)
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    for name, seconds in (("running", 5.0), ("waiting", 5.0), ("patient", 50.0)):
        request = request_of(name, prompts[0], sampling, queue_timeout_s=seconds)
        core.handle(AddRequest(request=request, prompt=prompts[0]))
    outputs = core.step()
    clock.now += 4.9
    outputs += core.step()
    assert endings(outputs) == {}
    clock.now += 0.2
    outputs += core.step()
    assert endings(outputs) == {"waiting": "timeout"}
    assert core.scheduler.find("waiting") is None
    while core.has_work:
        outputs += core.step()
    assert endings(outputs) == {"running": None, "waiting": "timeout", "patient": None}
    core.check()


class NeverCompiled:
    """Grammars whose compilation never ends."""

    def __init__(self):
        self.futures = []

    def compile(self, structured):
        self.futures.append(Future())
        return self.futures[-1]


def test_time_spent_in_compiling_a_grammar_counts_and_is_ended(folder):
    prompts, _ = plain(folder, 1, 50, 12)
    core, clock = timed_core(folder)
    grammars = NeverCompiled()
    core._grammars = GrammarRequests(grammars, core.inbox.put, clock)
    sampling = SamplingParams(max_tokens=6, structured=StructuredOutput(json_object=True))
    for name in ("slow", "left"):
        core.handle(AddRequest(request=request_of(name, prompts[0], sampling, queue_timeout_s=5.0), prompt=prompts[0]))
    assert core.idle_s() == 5.0
    assert endings(core.handle(EndRequest(request_id="left", reason="cancelled"))) == {"left": None}
    clock.now += 4.9
    assert core.idle() == []
    clock.now += 0.2
    assert core.idle_s() == 0.0
    assert endings(core.idle()) == {"slow": "timeout"}
    assert core.idle_s() is None
    assert all(future.cancelled() for future in grammars.futures), "nothing waits for them"


def test_a_preempted_request_has_started_in_time(folder):
    prompts, _ = plain(folder, 1, 50, 12)
    core, clock = timed_core(folder, num_pages=75, max_length=600)
    sampling = SamplingParams(max_tokens=60, ignore_eos=True)
    outputs = []
    for i, prompt in enumerate(prompts[:10]):
        request = request_of(f"r{i}", prompt, sampling, queue_timeout_s=0.5)
        outputs += core.handle(AddRequest(request=request, prompt=prompt))
    for _ in range(30):
        outputs += core.step()
    clock.now += 1.0
    outputs += core.step()
    while core.has_work:
        outputs += core.step()
    assert core.statistics.num_preemptions > 0
    assert set(endings(outputs).values()) <= {None, "timeout"}
    assert all(output.num_preemptions == 0 for output in outputs if output.failure)
    core.check()


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_request_that_is_not_complete_in_time_fails_with_the_tokens_it_has(folder, num_steps):
    prompts, expected = plain(folder, 1, 50, 12)
    core, clock = timed_core(folder)
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    late = request_of("late", prompts[0], sampling, timeout_s=2.0)
    other = request_of("other", prompts[1], SamplingParams(max_tokens=len(expected[1])))
    outputs = core.handle(AddRequest(request=late, prompt=prompts[0]))
    outputs += core.handle(AddRequest(request=other, prompt=prompts[1]))
    for _ in range(num_steps):
        outputs += core.step()
    clock.now += 2.1
    outputs += core.step()
    assert endings(outputs)["late"] == "timeout"
    while core.has_work:
        outputs += core.step()
    assert endings(outputs) == {"late": "timeout", "other": None}
    assert [token for output in outputs if output.request_id == "other" for token in output.token_ids] == expected[1]
    core.check()
    assert core.scheduler.pages.num_free == core.scheduler.pages.num_pages


def test_a_request_that_ended_in_time_is_not_ended_again(folder):
    prompts, expected = plain(folder, 1, 50, 12)
    core, clock = timed_core(folder)
    request = request_of("r", prompts[0], SamplingParams(max_tokens=2), timeout_s=2.0, queue_timeout_s=1.0)
    run_all(core, [(request, prompts[0])])
    clock.now += 10
    [collected] = run_all(core, [(request_of("next", prompts[0], SamplingParams(max_tokens=2)), prompts[0])])
    assert collected.token_ids == expected[0][:2]
