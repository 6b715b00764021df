"""Random days of a scheduler, with a simulated device that notices every wrong page, image, token and budget.

The device keeps what stands in each slot of each page: the number of the prefix that ends there. A prefix is a salt, then tokens,
each with the image it belongs to and its place in that image; equal numbers mean equal prefixes. The token that goes on behind a
prefix is a hash of its number, so every answer is known beforehand. Each step carries out copies, encodings and writes, and then
looks at all slots that its chunks attend to.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from saccade.engine.image_pool import IMAGE_PAGE, ImagePool, salted
from saccade.engine.pages import PagePool
from saccade.engine.request import Failure, ImageSpan, Request, SamplingParams
from saccade.engine.scheduler import Chunk, Limits, Scheduler, StepPlan

VOCABULARY = 40
STOP = 0
PLACEHOLDER = 1  # stands for every token of every image, and sometimes in a text
FAILURE = Failure("running", "it was to fail")

WEIGHTS = 1 << 40
"""A slot holds the number of its prefix, plus this for each time the weights had changed when it was computed."""


@dataclass
class Prefixes:
    """Numbers for prefixes, and the token behind each."""

    seed: int
    numbers: dict[tuple[object, ...], int] = field(default_factory=dict)

    def number(self, *prefix: object) -> int:
        return self.numbers.setdefault(prefix, len(self.numbers))

    def next_token(self, number: int) -> int:
        return ((number + self.seed) * 0x9E3779B97F4A7C15 >> 17) % VOCABULARY


class Truth:
    """What a request's tokens will be and what its slots hold, however the scheduler goes about it."""

    def __init__(self, request: Request, prefixes: Prefixes, limit: int) -> None:
        self.request = request
        self.prefixes = prefixes
        self.limit = limit
        self.tokens = list(request.token_ids)
        self.numbers: list[int] = []
        within = {
            index: (image.key, index - image.start)
            for image in request.images
            for index in range(image.start, image.end)
        }
        number = prefixes.number(request.salt)
        for index, token in enumerate(self.tokens):
            number = prefixes.number(number, token, within.get(index))
            self.numbers.append(number)
        while len(self.tokens) < limit:
            self.tokens.append(prefixes.next_token(self.numbers[-1]))
            self.numbers.append(prefixes.number(self.numbers[-1], self.tokens[-1], None))
        self._contents, self._weights = self.numbers, 0

    def contents(self, weights: int) -> list[int]:
        """What its slots hold if they were computed with these weights."""
        if weights != self._weights:
            self._weights = weights
            self._contents = [number + weights * WEIGHTS for number in self.numbers]
        return self._contents

    def answer(self) -> tuple[list[int], str]:
        """The whole answer and why it ends."""
        first = self.request.num_prompt_tokens
        for index in range(first + self.request.sampling.min_tokens, self.limit):
            if self.tokens[index] == STOP:
                return self.tokens[first : index + 1], "stop"
        return self.tokens[first : self.limit], "length"


@dataclass
class Setting:
    """What a trace is run with; drawn from its seed."""

    limits: Limits
    page_size: int
    num_pages: int
    image_tokens: int
    keeps_prefixes: bool
    keeps_images: bool
    depth: int
    requests: list[Request]
    has_target: bool
    """Whether steps are given a budget for prompts."""
    rate: float
    """Share of steps before which requests arrive."""
    mischief: float
    """How often a request is cancelled or fails, in each moment."""


def draw_setting(seed: int) -> Setting:
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 3, 4, 5, 7, 8, 16, 16, 32])
    max_length = rng.choice([40, 80, 160, 240])
    sizes = [rng.randint(1, max_length // rng.choice([2, 3, 6, 12])) for _ in range(rng.randint(1, 5))]
    images = [(bytes([number]) * 32, size, rng.randint(1, 4 * size)) for number, size in enumerate(sizes)]
    prompts = list(_draw_prompts(rng, images, max_length, rng.randint(3, 32)))
    requests = [_draw_request(rng, f"{seed}-{number}", *prompt) for number, prompt in enumerate(prompts)]
    most_tokens = max(min(len(r.token_ids) + r.sampling.max_tokens, max_length) for r in requests) - 1
    most_pages = -(-most_tokens // page_size)
    most_places = max(-(-size // IMAGE_PAGE) for size in sizes)
    max_step_tokens = rng.choice([rng.randint(1, 16), rng.randint(16, 512), rng.randint(16, 512)])
    return Setting(
        limits=Limits(
            max_requests=rng.choice([1, 2, 4, 4, 8, 8, 8, 16, 16, 16]),
            max_step_tokens=max_step_tokens,
            max_step_patches=rng.randint(1, 3 * max(patches for _, _, patches in images)),
            max_length=max_length,
            max_draft_tokens=rng.choice([0, 0, 1, 4]),
        ),
        page_size=page_size,
        num_pages=most_pages + rng.choice([0, 1, most_pages, 2 * most_pages, 3 * most_pages]),
        image_tokens=IMAGE_PAGE * (most_places + rng.choice([0, 0, 1, 3])) + rng.randint(0, 63),
        keeps_prefixes=rng.random() < 0.75,
        keeps_images=rng.random() < 0.6,
        depth=rng.randint(0, 1),
        requests=requests,
        has_target=rng.random() < 0.2,
        rate=rng.choice([0.2, 1.0, 1.0]),
        mischief=rng.choice([0.0, 0.0, 0.01, 0.05]),
    )


Prompt = tuple[list[int], list[ImageSpan]]


def _draw_prompts(
    rng: random.Random, images: list[tuple[bytes, int, int]], max_length: int, count: int
) -> Iterator[Prompt]:
    """Prompts of texts and images, many of which begin as an earlier one does."""
    earlier: list[Prompt] = []
    while len(earlier) < count:
        tokens: list[int] = []
        spans: list[ImageSpan] = []
        if earlier and rng.random() < 0.7:
            tokens, spans = _cut(*rng.choice(earlier), rng)
        while not tokens or rng.random() < 0.6:
            if rng.random() < 0.4:
                key, size, patches = rng.choice(images)
                spans.append(ImageSpan(key=key, start=len(tokens), num_tokens=size, num_patches=patches))
                tokens += [PLACEHOLDER] * size
            else:
                choices = [PLACEHOLDER] if rng.random() < 0.3 else [2, 3]
                tokens += rng.choices(choices, k=rng.randint(1, rng.choice([2, 10, 40])))
        if len(tokens) < max_length:
            earlier.append((tokens, spans))
            yield tokens, spans


def _cut(tokens: list[int], spans: list[ImageSpan], rng: random.Random) -> Prompt:
    """A beginning of a prompt that cuts no image, half of the time all of it."""
    length = len(tokens) if rng.random() < 0.5 else rng.randint(0, len(tokens))
    for span in spans:
        if span.start < length < span.end:
            length = span.end
    return tokens[:length], [span for span in spans if span.end <= length]


def _draw_request(rng: random.Random, name: str, tokens: list[int], spans: list[ImageSpan]) -> Request:
    max_tokens = rng.choice([1, 5, 20, 60])
    return Request(
        id=name,
        token_ids=list(tokens),
        num_prompt_tokens=len(tokens),
        images=tuple(spans),
        sampling=SamplingParams(
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, 0, max_tokens // 2]),
            prompt_logprobs=0 if rng.random() < 0.1 else None,
        ),
        stop_ids=frozenset([STOP]),
        priority=rng.choice([0, 0, 0, -1, 1]),
        salt=rng.choice([b"", b"", b"other"]),
    )


class Device:
    """Pages, places and rows as the steps leave them."""

    def __init__(self, setting: Setting) -> None:
        self.page_size = setting.page_size
        self.slots: list[list[int | None]] = [[None] * setting.page_size for _ in range(setting.num_pages)]
        self.places: list[object] = [None] * (setting.image_tokens // IMAGE_PAGE)
        self.last_sampled: dict[int, tuple[str, int]] = {}
        self.weights = 0

    def run(self, plan: StepPlan, truths: dict[str, Truth]) -> dict[str, list[int]]:
        """Carry out a step, look at everything it reads, and sample."""
        copied = [list(self.slots[source]) for source, _ in plan.copies]
        for (_, target), content in zip(plan.copies, copied, strict=True):
            self.slots[target] = content
        for image in plan.images:
            for number, place in enumerate(image.places):
                self.places[place] = (image.key, number, self.weights)
        sampled: dict[str, list[int]] = {}
        for chunk in plan.chunks:
            self._write(chunk, truths[chunk.request.id])
        for chunk in plan.chunks:
            truth = truths[chunk.request.id]
            self._look_at_pages(chunk, truth)
            self._look_at_images(chunk)
            self._look_at_pending(chunk)
            if chunk.samples:
                sampled[chunk.request.id] = self._sample(chunk, truth)
        return sampled

    def _write(self, chunk: Chunk, truth: Truth) -> None:
        page_size = self.page_size
        contents = truth.contents(self.weights)[chunk.start : chunk.end - len(chunk.drafts)]
        for token in chunk.drafts:
            contents.append(truth.prefixes.number(contents[-1] % WEIGHTS, token, None) + self.weights * WEIGHTS)
        for index, content in enumerate(contents, chunk.start):
            self.slots[chunk.pages[index // page_size]][index % page_size] = content

    def _look_at_pages(self, chunk: Chunk, truth: Truth) -> None:
        known = chunk.end - len(chunk.drafts)
        held: list[int | None] = []
        for page in chunk.pages:
            held += self.slots[page]
        if held[:known] != truth.contents(self.weights)[:known]:
            wrong = next(
                index for index in range(known) if held[index : index + 1] != [truth.contents(self.weights)[index]]
            )
            raise AssertionError(f"token {wrong} of request {chunk.request.id} is not in the page that it attends to")

    def _look_at_images(self, chunk: Chunk) -> None:
        within = [image for image in chunk.request.images if image.start < chunk.end and image.end > chunk.start]
        assert [placed.image for placed in chunk.images] == within, f"images of a chunk of {chunk.request.id}"
        for placed in chunk.images:
            assert placed.key == salted(chunk.request.salt, placed.image.key)
            assert len(placed.places) == -(-placed.image.num_tokens // IMAGE_PAGE)
            for number, place in enumerate(placed.places):
                assert self.places[place] == (placed.key, number, self.weights), (
                    f"{chunk.request.id} reads another image in {place}"
                )

    def _look_at_pending(self, chunk: Chunk) -> None:
        if chunk.reads_pending:
            assert chunk.num_tokens == 1
            assert self.last_sampled[chunk.row] == (chunk.request.id, chunk.start), (
                "a row's last token is not the pending one"
            )

    def _sample(self, chunk: Chunk, truth: Truth) -> list[int]:
        """The true tokens behind a chunk, as far as its drafts are right."""
        end = chunk.end - len(chunk.drafts)
        tokens = [truth.tokens[end]]
        for draft in chunk.drafts:
            if draft != tokens[-1]:
                break
            tokens.append(truth.tokens[end + len(tokens)])
        self.last_sampled[chunk.row] = (chunk.request.id, end)
        return tokens


class Trace:
    """One random day. `run` raises AssertionError at the first thing that is wrong."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed + 1_000_003)
        self.setting = setting = draw_setting(seed)
        self.device = Device(setting)
        self.pages = PagePool(setting.num_pages, setting.page_size, setting.keeps_prefixes)
        self.images = ImagePool(setting.image_tokens, setting.keeps_images)
        self.scheduler = Scheduler(setting.limits, self.pages, self.images, draft=self._draft)
        self.prefixes = Prefixes(seed)
        self.truths: dict[str, Truth] = {}
        self.live: dict[str, Request] = {}
        self.ended: set[str] = set()
        self.under_way: deque[tuple[StepPlan, dict[str, list[int]]]] = deque()
        self.num_steps = 0
        self.num_chunks = 0
        self.num_stalled = 0
        self.seen: set[str] = set()
        """What happened in it."""

    def run(self) -> int:
        """Number of steps, all of them right."""
        arrivals = deque(self.setting.requests)
        while arrivals or self.live or self.under_way:
            while arrivals and self.rng.random() < self.setting.rate:
                self._add(arrivals.popleft())
                if self.rng.random() < 0.5:
                    break
            self._meddle()
            if self.setting.mischief and self.rng.random() < 0.005:
                self._change_weights()
            plan = self._plan()
            self._meddle()
            if plan is not None:
                self._launch(plan)
            self._meddle()
            if self.under_way and (plan is None or len(self.under_way) > self.setting.depth):
                self._update(*self.under_way.popleft())
        assert self.ended == self.truths.keys(), "a request has no end"
        assert self.scheduler.is_idle_clean(), "something is left of ended requests"
        return self.num_steps

    def _add(self, request: Request) -> None:
        limits = self.setting.limits
        limit = min(request.num_prompt_tokens + request.sampling.max_tokens, limits.max_length)
        self.truths[request.id] = Truth(request, self.prefixes, limit)
        self.live[request.id] = request
        self.scheduler.add(request)
        self.num_stalled = 0

    def _plan(self) -> StepPlan | None:
        budget = self.rng.choice([None, 0, 1, 16]) if self.setting.has_target else None
        guessing = {chunk.request.id for plan, _ in self.under_way for chunk in plan.chunks if chunk.drafts}
        answering = [
            r for r in self.live.values() if r.row is not None and r.id not in guessing and self._is_answering(r)
        ]
        is_cut_off = not self.under_way
        plan = self.scheduler.plan(budget)
        self.scheduler.check()
        if plan is None:
            assert not (self.live and is_cut_off), "there is work, but no plan"
            return None
        self.num_steps += 1
        self.num_chunks += len(plan.chunks)
        self._check_budgets(plan, budget)
        self._check_fairness(plan, answering)
        for chunk in plan.chunks:
            self._check_chunk(chunk, chunk.request in plan.began)
        sources, targets = {source for source, _ in plan.copies}, [target for _, target in plan.copies]
        assert len(set(targets)) == len(targets), "two copies into one page"
        assert not sources & set(targets), "a page is copied from and into"
        assert {id(r) for r in plan.began} <= {id(chunk.request) for chunk in plan.chunks}, "who began has no chunk"
        self._note(plan)
        return plan

    def _is_answering(self, request: Request) -> bool:
        """Whether it needs one token that no image is needed for."""
        needs_one = request.num_computed + 1 == request.num_tokens < self.truths[request.id].limit
        return needs_one and (not request.images or request.num_computed >= request.images[-1].end)

    def _check_budgets(self, plan: StepPlan, budget: int | None) -> None:
        limits = self.setting.limits
        num_tokens = [chunk.num_tokens for chunk in plan.chunks]
        assert sum(num_tokens) <= limits.max_step_tokens, "a step has too many tokens"
        num_prompt_tokens = sum(chunk.num_tokens for chunk in plan.chunks if chunk.num_tokens > 1 + len(chunk.drafts))
        assert budget is None or num_prompt_tokens <= max(1, budget), "prompts got too many tokens"
        num_patches = sum(image.image.num_patches for image in plan.images)
        assert len(plan.images) <= 1 or num_patches <= limits.max_step_patches, "a step encodes too many patches"
        assert len({image.key for image in plan.images}) == len(plan.images), "an image is encoded twice in a step"
        rows = [chunk.row for chunk in plan.chunks]
        assert len(set(rows)) == len(rows), "two chunks have one row"

    def _check_fairness(self, plan: StepPlan, answering: list[Request]) -> None:
        """Who answers gets its token while the budget lasts, and whose turn it is does not wait for ever."""
        served = {chunk.request.id for chunk in plan.chunks}
        is_full = sum(chunk.num_tokens for chunk in plan.chunks) == self.setting.limits.max_step_tokens
        for request in answering:
            assert request.id in served or request.row is None or is_full, f"answer {request.id} was left out"
        first = min(self.live.values(), key=lambda request: request.arrival + 64 * request.priority)
        self.num_stalled = 0 if first.id in served else self.num_stalled + 1
        most = 10 + 2 * sum(self.truths[name].limit for name in self.live)
        assert self.num_stalled <= most, f"request {first.id} starves"

    def _check_chunk(self, chunk: Chunk, began: bool) -> None:
        request = chunk.request
        assert chunk.num_tokens >= 1
        assert request.row == chunk.row
        assert request.num_computed == chunk.end
        assert chunk.end == request.num_tokens - 1 or (not chunk.samples and chunk.end < request.num_tokens)
        assert chunk.reads_pending == (chunk.start >= len(request.token_ids))
        assert not chunk.drafts or (chunk.samples and chunk.num_tokens == 1 + len(chunk.drafts))
        for index in range(chunk.start // self.pages.page_size, (chunk.end - 1) // self.pages.page_size + 1):
            assert self.pages.is_writable(chunk.pages[index]), f"page {chunk.pages[index]} is written but not writable"
        if began and (request.sampling.prompt_logprobs is not None or not self.setting.keeps_prefixes):
            assert chunk.start == 0, "a prompt must be computed from its beginning"

    def _note(self, plan: StepPlan) -> None:
        """Remember which rare things happened, so that tests can ask whether traces are any good."""
        if plan.copies:
            self.seen.add("copy")
        if plan.preempted:
            self.seen.add("preemption")
        if any(request.num_cached for request in plan.began):
            self.seen.add("cached prefix")
        keys: set[bytes] = set()
        for chunk in plan.chunks:
            if chunk.reads_pending:
                self.seen.add("pending")
            if chunk.drafts:
                self.seen.add("draft")
            for placed in chunk.images:
                if placed.image.end > chunk.end:
                    self.seen.add("image in chunks")
                if placed.key in keys:
                    self.seen.add("shared image")
                keys.add(placed.key)

    def _launch(self, plan: StepPlan) -> None:
        if self.setting.mischief and self.rng.random() < 0.01:
            self._abandon(plan)
        elif plan.images and self.setting.mischief and self.rng.random() < 0.01:
            for request in self.scheduler.fail_image(plan, plan.images[0].key, FAILURE):
                self._ends(request)
            self.seen.add("failed image")
            self._abandon(plan)
        else:
            self.under_way.append((plan, self.device.run(plan, self.truths)))

    def _abandon(self, plan: StepPlan) -> None:
        self.scheduler.abandon(plan)
        self.scheduler.check()
        self.seen.add("abandoned")

    def _update(self, plan: StepPlan, sampled: dict[str, list[int]]) -> None:
        ended = self.scheduler.update(plan, sampled)
        for request in ended:
            answer, reason = self.truths[request.id].answer()
            assert request.answer == answer, f"the answer of {request.id} is wrong"
            assert request.finish_reason == reason, f"{request.id} ended by {request.finish_reason}, not by {reason}"
            self._ends(request)
        if ended:  # else the next plan is soon enough
            self.scheduler.check()
        for chunk in plan.chunks:
            request = chunk.request
            assert request.token_ids[-1] == self.truths[request.id].tokens[len(request.token_ids) - 1]

    def _ends(self, request: Request) -> None:
        assert request.id not in self.ended, f"{request.id} ends twice"
        truth = self.truths[request.id].tokens
        assert request.finish_reason is not None
        assert request.token_ids == truth[: len(request.token_ids)]
        assert not request.pages
        assert request.row is None
        self.ended.add(request.id)
        del self.live[request.id]
        self.num_stalled = 0

    def _meddle(self) -> None:
        """Cancel a request or let it fail, at any moment."""
        if self.live and self.rng.random() < self.setting.mischief:
            request = self.rng.choice(list(self.live.values()))
            kind = self.rng.randrange(3)
            if kind == 0:
                has_ended = self.scheduler.cancel(request.id)
            elif kind == 1:
                has_ended = self.scheduler.fail(request, FAILURE)
            else:
                has_ended = self.scheduler.finish(request.id)
            assert has_ended
            assert not self.scheduler.cancel(request.id)
            assert request.finish_reason == ("cancelled", "failed", "stop")[kind]
            self._ends(request)
            self.scheduler.check()
            if self.under_way:
                self.seen.add("ended under way")

    def _change_weights(self) -> None:
        self.scheduler.forget_caches()
        self.device.weights += 1
        self.scheduler.check()
        self.seen.add("weights changed")

    def _draft(self, request: Request, most: int) -> list[int]:
        """Guesses that are right two times out of three."""
        assert request.num_pending == 0
        known = len(request.token_ids)
        right = self.truths[request.id].tokens[known : known + self.rng.randint(0, most)]
        return [token if self.rng.random() < 0.67 else self.rng.randrange(VOCABULARY) for token in right]
