"""A failure of one request does not change the tokens of the others."""

import dataclasses

import pytest
from engine.tiny import make_core, plain, request_of, run_all
from model.hugging_face import SHAPES, make_checkpoint

from saccade.engine.config import EngineConfig
from saccade.engine.core import EngineError
from saccade.engine.request import SamplingParams
from saccade.engine.runner import Runner
from saccade.errors import RequestError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("engine") / "checkpoint", SHAPES[0])


CONFIG = EngineConfig(
    num_pages=200, page_size=8, max_length=550, max_requests=12, max_step_tokens=96, encoder_cache_tokens=512
)
DOOMED = "doomed"


class FailsEncoding(Runner):
    def encode(self, images):
        if any(image.request.id.startswith(DOOMED) for image in images):
            raise RuntimeError("bad image")
        super().encode(images)


class FailsAtOnce(Runner):
    def run(self, chunks, started):
        if any(chunk.request.id.startswith(DOOMED) for chunk in chunks):
            raise RuntimeError("bad request")
        return super().run(chunks, started)


class FailsWhileDecoding(Runner):
    def run(self, chunks, started):
        if any(chunk.request.id.startswith(DOOMED) and chunk.request.num_output_tokens > 4 for chunk in chunks):
            raise ValueError("bad token")
        return super().run(chunks, started)


class FailsSampling(Runner):
    def _sample(self, chunks, logits_SV, prompt_logprobs):
        if any(chunk.request.id.startswith(DOOMED) for chunk in chunks):
            raise MemoryError("no memory")
        return super()._sample(chunks, logits_SV, prompt_logprobs)


class FailsBatchesOnly(Runner):
    """Large batches fail; every request alone succeeds."""

    def run(self, chunks, started):
        if len(chunks) > 3:
            raise MemoryError("out of memory")
        return super().run(chunks, started)


def load(folder, dooms):
    """A hundred requests, one in fifty of them (with its own image) doomed; and their expected tokens."""
    prompts, expected = plain(folder, 1, 50, 12)
    requests = []
    for number in range(100):
        prompt, tokens = prompts[number % 50], expected[number % 50]
        is_doomed = dooms and number % 50 == 20
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


@pytest.mark.parametrize("kind", [FailsEncoding, FailsAtOnce, FailsWhileDecoding, FailsSampling])
def test_of_fifty_requests_one_fails_and_the_others_get_their_tokens(folder, kind):
    requests, expected = load(folder, dooms=True)
    core = make_core(folder, CONFIG, runner_class=kind)
    outputs = run_all(core, requests, at_once=4)
    for (request, _), collected, tokens in zip(requests, outputs, expected, strict=True):
        if request.id.startswith(DOOMED):
            assert request.finish_reason == "failed"
            assert request.failure.stage == ("encoding" if kind is FailsEncoding else "running")
            assert "bad" not in request.failure.message  # the exception text stays in the log
        else:
            assert collected.token_ids == tokens
    assert core.statistics.finished["failed"] == 2
    assert core.scheduler.is_idle_clean()


def test_an_image_that_could_not_be_encoded_is_quarantined(folder):
    requests, _ = load(folder, dooms=True)
    core = make_core(folder, CONFIG, runner_class=FailsEncoding)
    run_all(core, requests[:30])
    doomed = next(prompt for request, prompt in requests if request.id.startswith(DOOMED))
    with pytest.raises(RequestError, match="image"):
        core.add(request_of("again", doomed, SamplingParams()), doomed, 0, lambda update: None)


def test_a_batch_that_fails_is_run_in_halves(folder):
    requests, expected = load(folder, dooms=False)
    outputs = run_all(make_core(folder, CONFIG, runner_class=FailsBatchesOnly), requests[:30])
    assert [collected.token_ids for collected in outputs] == expected[:30]


class Dies(Runner):
    is_dead = False

    def run(self, chunks, started):
        if any(chunk.request.num_output_tokens > 3 for chunk in chunks):
            self.is_dead = True
            raise RuntimeError("illegal memory access")
        return super().run(chunks, started)

    def is_alive(self):
        return not self.is_dead


def test_when_the_device_fails_every_request_ends_once_and_the_engine_raises(folder):
    requests, _ = load(folder, dooms=False)
    core = make_core(folder, CONFIG, runner_class=Dies)
    with pytest.raises(EngineError, match="device"):
        run_all(core, requests[:20])
    assert all(request.finish_reason in ("failed", "length") for request, _ in requests[:20])


def test_cancelling_at_any_time_leaks_nothing(folder):
    requests, _ = load(folder, dooms=False)
    core = make_core(folder, CONFIG)
    endings = []
    for request, prompt in requests[:24]:
        core.add(request, prompt, 0, lambda update: endings.append(update.request.id) if update.is_last else None)
    for number, (request, _) in enumerate(requests[:24]):
        core.step()
        if number % 2:
            core.cancel(request.id)
            core.cancel(request.id)
    while core.has_work:
        core.step()
    core.check()
    assert sorted(endings) == sorted(request.id for request, _ in requests[:24])


class FailsOneImage(Runner):
    """The image of a given key cannot be encoded."""

    bad: bytes = b""

    def encode(self, images):
        if any(image.span.key == self.bad for image in images):
            raise RuntimeError("bad image")
        super().encode(images)


def test_a_bad_image_does_not_affect_a_good_one_of_the_same_request(folder):
    """One request has both, another the good one alone, in the same step."""
    prompts, _ = plain(folder, 1, 50, 12)
    both = next(p for p in prompts if len({image.span.key for image in p.images}) >= 2)
    bad, good = both.images[0].span.key, both.images[1].span.key
    alone = next(p for p in prompts if [image.span.key for image in p.images] == [good])
    expected = run_all(make_core(folder, CONFIG), [(request_of("r", alone, SamplingParams(max_tokens=6)), alone)])
    core = make_core(folder, dataclasses.replace(CONFIG, max_step_tokens=512), runner_class=FailsOneImage)
    core._runner.bad = bad
    requests = [
        (request_of(name, p, SamplingParams(max_tokens=6)), p) for name, p in (("both", both), ("alone", alone))
    ]
    outputs = run_all(core, requests)
    assert [request.finish_reason for request, _ in requests] == ["failed", "length"]
    assert outputs[1].token_ids == expected[0].token_ids


class NonFiniteLogits(Runner):
    """The logits of some requests are NaN or infinite while they decode."""

    value = float("nan")

    def _sample(self, chunks, logits_SV, prompt_logprobs):
        sampled = [chunk for chunk in chunks if chunk.samples for _ in range(1 + len(chunk.drafts))]
        for row, chunk in enumerate(sampled):
            if chunk.request.id.startswith(DOOMED) and chunk.start > chunk.request.num_prompt_tokens:
                logits_SV[row, 7] = self.value
        return super()._sample(chunks, logits_SV, prompt_logprobs)


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
        return core, [request for request, _ in requests], run_all(core, requests)

    _, _, expected = run(None)
    core, requests, outputs = run(NonFiniteLogits)
    for name, request, output, plain_output in zip(names, requests, outputs, expected, strict=True):
        if name.startswith(DOOMED):
            assert (request.finish_reason, request.failure.kind) == ("failed", "non_finite_logits")
            assert output.token_ids == plain_output.token_ids[: len(output.token_ids)]
            assert len(output.token_ids) == 2
        else:
            assert output.token_ids == plain_output.token_ids
    assert core.scheduler.is_idle_clean()


class FailsCopying(Runner):
    def copy_pages(self, pairs):
        if pairs:
            raise RuntimeError("no memory")
        super().copy_pages(pairs)


def test_a_page_that_cannot_be_copied_fails_its_own_request(folder):
    prompts, expected = plain(folder, 1, 50, 12)
    whole = next(i for i, p in enumerate(prompts) if len(p.token_ids) % CONFIG.page_size == 0)
    core = make_core(folder, CONFIG, runner_class=FailsCopying)
    sampling = SamplingParams(max_tokens=4)
    first = run_all(core, [(request_of("first", prompts[whole], sampling), prompts[whole])])
    again, other = request_of("again", prompts[whole], sampling), request_of("other", prompts[0], sampling)
    outputs = run_all(core, [(again, prompts[whole]), (other, prompts[0])])
    assert first[0].request.finish_reason == other.finish_reason == "length"
    assert again.finish_reason == "failed"
    assert outputs[1].token_ids == expected[0][:4]


def test_a_page_that_cannot_be_copied_quarantines_no_image(folder):
    """The failed request has an image to encode, which another request of the step shares."""
    prompts, _ = plain(folder, 1, 50, 12)
    with_image = next(prompt for prompt in prompts if prompt.images)
    first = with_image.images[0].span
    config = dataclasses.replace(CONFIG, encoder_cache=False, page_size=1, num_pages=1600)
    core = make_core(folder, config, runner_class=FailsCopying)
    sampling = SamplingParams(max_tokens=2)
    run_all(core, [(request_of("first", with_image, sampling), with_image)])
    # A page of the prefix is copied although the request still has the image to encode.
    plan, expected = core.scheduler.plan, []

    def plan_with_a_copy(*args):
        found = plan(*args)
        if found is not None and found.images and not expected:
            target = found.chunks[0].pages[0]
            source = next(page for page in range(config.num_pages) if all(page not in c.pages for c in found.chunks))
            found.page_copies.append((source, target))
            expected.append(found.chunks[0].request.id)
        return found

    core.scheduler.plan = plan_with_a_copy
    sampling = SamplingParams(max_tokens=2, prompt_logprobs=0)
    again, other = request_of("again", with_image, sampling), request_of("other", with_image, sampling)
    outputs = run_all(core, [(again, with_image), (other, with_image)])
    assert expected == ["again"]
    assert (again.finish_reason, other.finish_reason) == ("failed", "length")
    assert first.key not in core._quarantine
    assert core.statistics.num_failures == 1
    assert len(outputs[1].token_ids) == 2


class FailsOnceAfterSampling(Runner):
    """The first attempts of some steps fail after their tokens were sampled."""

    num_attempts = 0

    def _sample(self, chunks, logits_SV, prompt_logprobs):
        self.num_attempts += 1
        if self.num_attempts % 3 == 0 and len(chunks) > 1:
            commit = self.sampler.commit
            self.sampler.commit = lambda: (_ for _ in ()).throw(MemoryError("no memory"))
            try:
                return super()._sample(chunks, logits_SV, prompt_logprobs)
            finally:
                self.sampler.commit = commit
        return super()._sample(chunks, logits_SV, prompt_logprobs)


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


def test_a_prompt_the_runner_refuses_leaks_nothing(folder):
    core = make_core(folder, CONFIG)
    prompts, _ = plain(folder, 1, 50, 12)
    broken = dataclasses.replace(prompts[0], positions=prompts[0].positions[:, :0])
    with pytest.raises(IndexError):
        core.add(request_of("broken", broken, SamplingParams()), broken, 0, lambda update: None)
    assert not core.has_work
    core.check()
