"""Random scheduler traces on a simulated device that detects every wrong page, image, token and budget.

The device stores in each KV slot of each page the number of the prefix that ends there. A prefix is a salt, then tokens, each with the
image it belongs to and its offset in that image; equal numbers mean equal prefixes. The token that follows a prefix is a hash of its
number, so every output is known in advance. Each step executes copies, encodings and writes, and then checks all KV slots that its
chunks attend to.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from saccade.engine.encoder_cache import ENCODER_SLOT_TOKENS, EncoderCache, salted
from saccade.engine.pages import PagePool
from saccade.engine.request import Failure, ImageSpan, Request, SamplingParams
from saccade.engine.scheduler import Scheduler
from saccade.engine.step_plan import Chunk, Limits, StepPlan

VOCABULARY = 40
STOP = 0
PLACEHOLDER = 1  # every token of every image, and sometimes text
FAILURE = Failure("running", "injected failure")


@dataclass
class Prefixes:
    """Numbers of prefixes, and the token that follows each."""

    seed: int
    numbers: dict[tuple[object, ...], int] = field(default_factory=dict)

    def number(self, *prefix: object) -> int:
        return self.numbers.setdefault(prefix, len(self.numbers))

    def next_token(self, number: int) -> int:
        return ((number + self.seed) * 0x9E3779B97F4A7C15 >> 17) % VOCABULARY


class Expected:
    """The expected tokens of a request and contents of its KV slots, independent of scheduling."""

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

    def output(self) -> tuple[list[int], str]:
        """All output tokens and the finish reason."""
        first = self.request.num_prompt_tokens
        for index in range(first + self.request.sampling.min_tokens, self.limit):
            if self.tokens[index] == STOP:
                return self.tokens[first : index + 1], "stop"
        return self.tokens[first : self.limit], "length"


@dataclass
class Setting:
    """Random configuration of a trace."""

    limits: Limits
    page_size: int
    num_pages: int
    image_tokens: int
    keeps_prefixes: bool
    keeps_images: bool
    depth: int
    requests: list[Request]
    has_target: bool
    """Whether steps have a prompt-token budget."""
    rate: float
    """Fraction of steps before which requests arrive."""
    fault_rate: float
    """How often a request is cancelled or fails."""


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
    largest_size = max(-(-size // ENCODER_SLOT_TOKENS) for size in sizes)
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
        image_tokens=ENCODER_SLOT_TOKENS * (largest_size + rng.choice([0, 0, 1, 3])) + rng.randint(0, 63),
        keeps_prefixes=rng.random() < 0.75,
        keeps_images=rng.random() < 0.6,
        depth=rng.randint(0, 2),
        requests=requests,
        has_target=rng.random() < 0.2,
        rate=rng.choice([0.2, 1.0, 1.0]),
        fault_rate=rng.choice([0.0, 0.0, 0.01, 0.05]),
    )


Prompt = tuple[list[int], list[ImageSpan]]


def _draw_prompts(
    rng: random.Random, images: list[tuple[bytes, int, int]], max_length: int, count: int
) -> Iterator[Prompt]:
    """Prompts of text and images, many of which share a prefix with an earlier one."""
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
    """A prefix of a prompt that splits no image, half of the time all of it."""
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
    """Contents of pages, encoder-cache slots and request slots."""

    def __init__(self, setting: Setting) -> None:
        self.page_size = setting.page_size
        self.pages: list[list[int | None]] = [[None] * setting.page_size for _ in range(setting.num_pages)]
        self.encoder_slots: list[object] = [None] * (setting.image_tokens // ENCODER_SLOT_TOKENS)
        self.last_sampled: dict[int, tuple[str, int]] = {}

    def run(self, plan: StepPlan, expected: dict[str, Expected]) -> dict[str, list[int]]:
        """Execute a step, check everything it reads, and sample."""
        copied = [list(self.pages[source]) for source, _ in plan.page_copies]
        for (_, target), content in zip(plan.page_copies, copied, strict=True):
            self.pages[target] = content
        for image in plan.images:
            for number, slot in enumerate(image.slots):
                self.encoder_slots[slot] = (image.key, number)
        sampled: dict[str, list[int]] = {}
        for chunk in plan.chunks:
            self._write(chunk, expected[chunk.request.id])
        for chunk in plan.chunks:
            self._check_pages(chunk, expected[chunk.request.id])
            self._check_images(chunk)
            self._check_pending(chunk)
            if chunk.samples:
                sampled[chunk.request.id] = self._sample(chunk, expected[chunk.request.id])
        return sampled

    def _write(self, chunk: Chunk, expected: Expected) -> None:
        page_size = self.page_size
        contents = expected.numbers[chunk.start : chunk.end - len(chunk.drafts)]
        for token in chunk.drafts:
            contents.append(expected.prefixes.number(contents[-1], token, None))
        for index, content in enumerate(contents, chunk.start):
            self.pages[chunk.pages[index // page_size]][index % page_size] = content

    def _check_pages(self, chunk: Chunk, expected: Expected) -> None:
        known = chunk.end - len(chunk.drafts)
        held: list[int | None] = []
        for page in chunk.pages:
            held += self.pages[page]
        if held[:known] != expected.numbers[:known]:
            wrong = next(index for index in range(known) if held[index : index + 1] != [expected.numbers[index]])
            raise AssertionError(f"token {wrong} of request {chunk.request.id} is not in the page that it attends to")

    def _check_images(self, chunk: Chunk) -> None:
        within = [image for image in chunk.request.images if image.start < chunk.end and image.end > chunk.start]
        assert [image.span for image in chunk.images] == within, f"images of a chunk of {chunk.request.id}"
        for image in chunk.images:
            assert image.key == salted(chunk.request.salt, image.span.key)
            assert len(image.slots) == -(-image.span.num_tokens // ENCODER_SLOT_TOKENS)
            for number, slot in enumerate(image.slots):
                assert self.encoder_slots[slot] == (image.key, number), (
                    f"{chunk.request.id} reads another image in {slot}"
                )

    def _check_pending(self, chunk: Chunk) -> None:
        if chunk.reads_pending:
            assert chunk.num_tokens == 1
            assert self.last_sampled[chunk.slot] == (chunk.request.id, chunk.start), (
                "a slot's last token is not the pending one"
            )

    def _sample(self, chunk: Chunk, expected: Expected) -> list[int]:
        """The expected tokens after a chunk, as far as its drafts are accepted."""
        end = chunk.end - len(chunk.drafts)
        tokens = [expected.tokens[end]]
        for draft in chunk.drafts:
            if draft != tokens[-1]:
                break
            tokens.append(expected.tokens[end + len(tokens)])
        self.last_sampled[chunk.slot] = (chunk.request.id, end)
        return tokens


class Trace:
    """One random trace. `run` raises AssertionError at the first error."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed + 1_000_003)
        self.setting = setting = draw_setting(seed)
        self.device = Device(setting)
        self.pages = PagePool(setting.num_pages, setting.page_size, setting.keeps_prefixes)
        encoder_cache = EncoderCache(setting.image_tokens, setting.keeps_images)
        self.scheduler = Scheduler(setting.limits, self.pages, encoder_cache, draft=self._draft)
        self.prefixes = Prefixes(seed)
        self.expected: dict[str, Expected] = {}
        self.live: dict[str, Request] = {}
        self.ended: set[str] = set()
        self.in_flight: deque[tuple[StepPlan, dict[str, list[int]]]] = deque()
        self.num_steps = 0
        self.num_chunks = 0
        self.num_stalled = 0
        self.seen: set[str] = set()
        """Rare events that occurred."""

    def run(self) -> int:
        """Run to the end; returns the number of steps."""
        arrivals = deque(self.setting.requests)
        while arrivals or self.live or self.in_flight:
            while arrivals and self.rng.random() < self.setting.rate:
                self._add(arrivals.popleft())
                if self.rng.random() < 0.5:
                    break
            self._inject_fault()
            plan = self._plan()
            self._inject_fault()
            if plan is not None:
                self._launch(plan)
            self._inject_fault()
            if self.in_flight and (plan is None or len(self.in_flight) > self.setting.depth):
                self._update(*self.in_flight.popleft())
        assert self.ended == self.expected.keys(), "a request has not ended"
        assert self.scheduler.is_idle_clean(), "ended requests hold resources"
        return self.num_steps

    def _add(self, request: Request) -> None:
        limits = self.setting.limits
        limit = min(request.num_prompt_tokens + request.sampling.max_tokens, limits.max_length)
        self.expected[request.id] = Expected(request, self.prefixes, limit)
        self.live[request.id] = request
        self.scheduler.add(request)
        self.num_stalled = 0

    def _plan(self) -> StepPlan | None:
        budget = self.rng.choice([None, 0, 1, 16]) if self.setting.has_target else None
        drafting = {chunk.request.id for plan, _ in self.in_flight for chunk in plan.chunks if chunk.drafts}
        decoding = [
            r for r in self.live.values() if r.slot is not None and r.id not in drafting and self._is_decoding(r)
        ]
        is_idle = not self.in_flight
        plan = self.scheduler.plan(budget)
        self.scheduler.check()
        if plan is None:
            assert not (self.live and is_idle), "there is work, but no plan"
            return None
        self.num_steps += 1
        self.num_chunks += len(plan.chunks)
        self._check_budgets(plan, budget)
        self._check_fairness(plan, decoding)
        for chunk in plan.chunks:
            self._check_chunk(chunk, chunk.request in plan.started)
        sources, targets = {source for source, _ in plan.page_copies}, [target for _, target in plan.page_copies]
        assert len(set(targets)) == len(targets), "two copies into one page"
        assert not sources & set(targets), "a page is copied from and into"
        assert {id(r) for r in plan.started} <= {id(chunk.request) for chunk in plan.chunks}, (
            "a started request has no chunk"
        )
        self._record_events(plan)
        return plan

    def _is_decoding(self, request: Request) -> bool:
        """Whether it needs one token, and no image for it."""
        needs_one = request.num_computed_tokens + 1 == request.num_tokens < self.expected[request.id].limit
        return needs_one and (not request.images or request.num_computed_tokens >= request.images[-1].end)

    def _check_budgets(self, plan: StepPlan, budget: int | None) -> None:
        limits = self.setting.limits
        num_tokens = [chunk.num_tokens for chunk in plan.chunks]
        assert sum(num_tokens) <= limits.max_step_tokens, "a step has too many tokens"
        num_prompt_tokens = sum(chunk.num_tokens for chunk in plan.chunks if chunk.num_tokens > 1 + len(chunk.drafts))
        assert budget is None or num_prompt_tokens <= max(1, budget), "prompts got too many tokens"
        num_patches = sum(image.span.num_patches for image in plan.images)
        assert len(plan.images) <= 1 or num_patches <= limits.max_step_patches, "a step encodes too many patches"
        assert len({image.key for image in plan.images}) == len(plan.images), "an image is encoded twice in a step"
        slots = [chunk.slot for chunk in plan.chunks]
        assert len(set(slots)) == len(slots), "two chunks have one slot"

    def _check_fairness(self, plan: StepPlan, decoding: list[Request]) -> None:
        """Decoding requests get their token within the budget, and the first in order does not starve."""
        served = {chunk.request.id for chunk in plan.chunks}
        is_full = sum(chunk.num_tokens for chunk in plan.chunks) == self.setting.limits.max_step_tokens
        for request in decoding:
            assert request.id in served or request.slot is None or is_full, (
                f"decoding request {request.id} was left out"
            )
        first = min(self.live.values(), key=lambda request: request.arrival + 64 * request.priority)
        self.num_stalled = 0 if first.id in served else self.num_stalled + 1
        most = 10 + 2 * sum(self.expected[name].limit for name in self.live)
        assert self.num_stalled <= most, f"request {first.id} starves"

    def _check_chunk(self, chunk: Chunk, is_started: bool) -> None:
        request = chunk.request
        assert chunk.num_tokens >= 1
        assert request.slot == chunk.slot
        assert request.num_computed_tokens == chunk.end
        assert chunk.end == request.num_tokens - 1 or (not chunk.samples and chunk.end < request.num_tokens)
        assert chunk.reads_pending == (chunk.start >= len(request.token_ids))
        assert not chunk.drafts or (chunk.samples and chunk.num_tokens == 1 + len(chunk.drafts))
        for index in range(chunk.start // self.pages.page_size, (chunk.end - 1) // self.pages.page_size + 1):
            page = chunk.pages[index]
            is_writable = self.pages.num_owners(page) == 1 and page not in self.pages._key_of
            assert is_writable, f"page {page} is written but shared or cached"
        if is_started and (request.sampling.prompt_logprobs is not None or not self.setting.keeps_prefixes):
            assert chunk.start == 0, "a prompt must be computed from its first token"

    def _record_events(self, plan: StepPlan) -> None:
        """Record rare events, so that tests can check the coverage of traces."""
        if plan.page_copies:
            self.seen.add("copy")
        if plan.preempted:
            self.seen.add("preemption")
        if any(request.num_cached_tokens for request in plan.started):
            self.seen.add("cached prefix")
        keys: set[bytes] = set()
        for chunk in plan.chunks:
            if chunk.reads_pending:
                self.seen.add("pending")
            if chunk.drafts:
                self.seen.add("draft")
            for image in chunk.images:
                if image.span.end > chunk.end:
                    self.seen.add("image in chunks")
                if image.key in keys:
                    self.seen.add("shared image")
                keys.add(image.key)

    def _launch(self, plan: StepPlan) -> None:
        if plan.images and self.setting.fault_rate and self.rng.random() < 0.05:
            for request in self.scheduler.fail_image(plan, plan.images[0].key, FAILURE):
                self._end(request)
            self.seen.add("failed image")
        self.in_flight.append((plan, self.device.run(plan, self.expected)))

    def _update(self, plan: StepPlan, sampled: dict[str, list[int]]) -> None:
        ended = self.scheduler.update(plan, sampled)
        for request in ended:
            output, reason = self.expected[request.id].output()
            assert request.output_token_ids == output, f"the output of {request.id} is wrong"
            assert request.finish_reason == reason, f"{request.id} ended by {request.finish_reason}, not by {reason}"
            self._end(request)
        if ended:  # else the next plan is soon enough
            self.scheduler.check()
        for chunk in plan.chunks:
            request = chunk.request
            assert request.token_ids[-1] == self.expected[request.id].tokens[len(request.token_ids) - 1]

    def _end(self, request: Request) -> None:
        assert request.id not in self.ended, f"{request.id} ends twice"
        tokens = self.expected[request.id].tokens
        assert request.finish_reason is not None
        assert request.token_ids == tokens[: len(request.token_ids)]
        assert not request.pages
        assert request.slot is None
        self.ended.add(request.id)
        del self.live[request.id]
        self.num_stalled = 0

    def _inject_fault(self) -> None:
        """Cancel, fail or finish a random request."""
        if self.live and self.rng.random() < self.setting.fault_rate:
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
            self._end(request)
            self.scheduler.check()
            if self.in_flight:
                self.seen.add("ended in flight")

    def _draft(self, request: Request, most: int) -> list[int]:
        """Drafts of which two thirds are right."""
        assert request.num_pending == 0
        known = len(request.token_ids)
        right = self.expected[request.id].tokens[known : known + self.rng.randint(0, most)]
        return [token if self.rng.random() < 0.67 else self.rng.randrange(VOCABULARY) for token in right]
