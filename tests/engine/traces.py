"""Random scheduler traces on a simulated device that detects every wrong page, image, token and budget.

Like the runner, the device has a page table and the last sampled token of every slot, which it knows from plans alone.
In each KV slot of each page it stores the number of the prefix that ends there. A prefix is a salt, then tokens, each
with its image and its offset in that image; equal numbers mean equal prefixes. The token that follows a prefix is a
hash of its number, so every output is known in advance. Each step executes copies and writes, and then checks all KV
slots that its chunks attend to.

Sampling is a second launch. It uses what the slots hold at that time: whether their request has penalties, and the
tokens counted so far, which change the hash. Grammars ban some tokens, depending on the tokens that the host has read.
A step that samples a request with a grammar may wait until they are read, while other requests end and new ones start.

Images are encoded in passes, in parts that steps run. The encoder-cache slots of a pass are empty from its start to
its end, which is some time after its last part is launched, or earlier if the pass fails. A chunk that reads such an
image makes the device wait.

Some images came with their features, which a step copies into encoder-cache slots before its chunks.

Some requests continue after output tokens that are known already, from none to all of the output.
"""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from saccade.engine.core.encoder_cache import ENCODER_SLOT_TOKENS, EncoderCache, salted
from saccade.engine.core.image_policy import EncoderTurn
from saccade.engine.core.pages import PagePool
from saccade.engine.core.request_state import RequestState
from saccade.engine.core.scheduler import Limits, Scheduler
from saccade.engine.core.step import (
    ENCODER_PARTS,
    Chunk,
    ChunkResult,
    EncodeResult,
    ImageToEncode,
    StepPlan,
    StepResult,
)
from saccade.engine.request import Failure, ImageSpan, Request, RequestOutput, TokenLogprobs
from saccade.engine.sampling_params import SamplingParams
from saccade.engine.structured import StructuredOutput
from saccade.errors import ImageError

VOCABULARY = 40
STOP = 0
PLACEHOLDER = 1  # every token of every image, and sometimes text
FAILURE = Failure("running", "injected failure")
BAD_IMAGE = Failure("encoding", "injected bad image")
NO_MEMORY = Failure("encoding", "injected lack of memory", "out_of_memory")


@dataclass
class Prefixes:
    """Numbers of prefixes, and the token that follows each."""

    seed: int
    numbers: dict[tuple[object, ...], int] = field(default_factory=dict)

    def number(self, *prefix: object) -> int:
        return self.numbers.setdefault(prefix, len(self.numbers))

    def next_token(self, number: int, counted: int = 0, banned: int | None = None) -> int:
        """`counted`: `count` of the penalized tokens. `banned`: see `banned_after`."""
        token = ((number + self.seed + counted * 0x1F123BB5) * 0x9E3779B97F4A7C15 >> 17) % VOCABULARY
        while token % 3 == banned:
            token = (token + 1) % VOCABULARY
        return token


def count(tokens: Iterable[int]) -> int:
    """A number that stands for the penalty counts of output tokens."""
    return sum(token + 1 for token in tokens)


def banned_after(tokens: Sequence[int]) -> int:
    """The remainder by three of the tokens that the grammar bans after these output tokens."""
    return (sum(tokens) + len(tokens)) % 3


class Expected:
    """The expected tokens of a request and contents of its KV slots, which do not depend on scheduling."""

    def __init__(self, request: Request, prefixes: Prefixes, limit: int) -> None:
        self.request = request
        self.prefixes = prefixes
        self.limit = limit
        self.image_keys = [salted(request.salt, image.key) for image in request.images]
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
        sampling = request.sampling
        while len(self.tokens) < limit:
            output = self.tokens[request.num_prompt_tokens :]
            counted = count(output) if sampling.has_penalties else 0
            banned = None if sampling.structured is None else banned_after(output)
            self.tokens.append(prefixes.next_token(self.numbers[-1], counted, banned))
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
    """Probability that requests arrive before a step."""
    fault_rate: float
    """Probability that a request is cancelled or fails."""
    max_patches: int
    """Maximum patches of an encoder pass in some of the steps."""
    encoder_rate: float
    """Probability that an encoder pass ends before a step."""


def draw_setting(seed: int) -> Setting:
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 3, 4, 5, 7, 8, 16, 16, 32])
    max_length = rng.choice([40, 80, 160, 240])
    sizes = [rng.randint(1, max_length // rng.choice([2, 3, 6, 12])) for _ in range(rng.randint(1, 5))]
    images = [(bytes([number]) * 32, size, rng.randint(1, 4 * size)) for number, size in enumerate(sizes)]
    prompts = list(_draw_prompts(rng, images, max_length, rng.randint(3, 32)))
    requests = [_draw_request(rng, seed, number, *prompt) for number, prompt in enumerate(prompts)]
    most_tokens = max(min(len(r.token_ids) + r.sampling.max_tokens, max_length) for r in requests) - 1
    most_pages = -(-most_tokens // page_size)
    largest_size = max(-(-size // ENCODER_SLOT_TOKENS) for size in sizes)
    max_step_tokens = rng.choice([rng.randint(1, 16), rng.randint(16, 512), rng.randint(16, 512)])
    return Setting(
        limits=Limits(
            max_requests=rng.choice([1, 2, 4, 4, 8, 8, 8, 16, 16, 16]),
            max_step_tokens=max_step_tokens,
            max_step_chunks=rng.choice([1, 2, 4, 32]),
            max_encoder_patches=rng.randint(1, 3 * max(patches for _, _, patches in images)),
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
        max_patches=rng.choice([4, 32, 2048]),
        encoder_rate=rng.choice([0.1, 0.5, 1.0]),
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
    """A prefix of a prompt that splits no image; half of the time the whole prompt."""
    length = len(tokens) if rng.random() < 0.5 else rng.randint(0, len(tokens))
    for span in spans:
        if span.start < length < span.end:
            length = span.end
    return tokens[:length], [span for span in spans if span.end <= length]


def _draw_request(rng: random.Random, seed: int, number: int, tokens: list[int], spans: list[ImageSpan]) -> Request:
    max_tokens = rng.choice([1, 5, 20, 60])
    min_tokens = rng.choice([0, 0, max_tokens // 2])
    other_rng = random.Random(1000 * seed + number)
    has_grammar = min_tokens == 0 and other_rng.random() < 0.25
    features_rng = random.Random(f"features {seed} {number}")
    images = [replace(span, num_patches=0) if features_rng.random() < 0.2 else span for span in spans]
    return Request(
        id=f"{seed}-{number}",
        token_ids=tuple(tokens),
        images=tuple(images),
        sampling=SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            prompt_logprobs=0 if rng.random() < 0.1 else None,
            frequency_penalty=1.0 if other_rng.random() < 0.4 else 0.0,
            structured=StructuredOutput(regex=".*") if has_grammar else None,
        ),
        stop_ids=frozenset([STOP]),
        priority=rng.choice([0, 0, 0, -1, 1]),
        salt=rng.choice([b"", b"", b"other"]),
        stream_interval=(1, 1, 2, 7)[(seed + number) % 4],
    )


@dataclass(eq=False)
class Slot:
    """State of a request slot on the device."""

    request: Request
    num_start_tokens: int
    """Known tokens when the request got the slot."""
    counted: int
    """`count` of its output tokens, if it has penalties."""
    pages: list[int] = field(default_factory=list)
    last_sampled: int | None = None
    """Index of the token sampled last."""


class EncoderPass:
    """Images that are encoded in one pass."""

    def __init__(self, images: Sequence[ImageToEncode], num_parts: int, failures: dict[bytes, Failure]) -> None:
        self.images, self.failures = images, failures
        self.parts_left = num_parts
        """Parts that are not launched yet."""


class Features(NamedTuple):
    """Content of an encoder-cache slot."""

    key: bytes
    number: int
    """Index of the slot in the image."""
    failure: Failure | None


class Device:
    """Contents of pages, encoder-cache slots and request slots."""

    def __init__(self, setting: Setting) -> None:
        self.page_size = setting.page_size
        self.pages: list[list[int | None]] = [[None] * setting.page_size for _ in range(setting.num_pages)]
        self.encoder_slots: list[Features | None] = [None] * (setting.image_tokens // ENCODER_SLOT_TOKENS)
        self.slots: dict[int, Slot] = {}
        self.passes: deque[EncoderPass] = deque()
        self.encoded: list[EncodeResult] = []
        """Results of encodings that ended but are not reported yet."""
        self.failed: dict[str, Failure] = {}
        """Failures of requests with a failed chunk, by request id."""

    def encode(self, encoder_pass: EncoderPass) -> None:
        """Start an encoder pass."""
        for slot in [slot for image in encoder_pass.images for slot in image.slots]:
            assert slot not in self._slots_being_written(), f"two encodings write to encoder-cache slot {slot}"
        for slot in [slot for image in encoder_pass.images for slot in image.slots]:
            self.encoder_slots[slot] = None
        self.passes.append(encoder_pass)

    def load(self, images: Sequence[ImageToEncode], failures: dict[bytes, Failure]) -> None:
        """Copy features that came with requests."""
        for image in images:
            assert self._slots_being_written().isdisjoint(image.slots), "a load writes to slots of an encoding"
            failure = failures.get(image.key)
            for number, slot in enumerate(image.slots):
                self.encoder_slots[slot] = Features(image.key, number, failure)
            self.encoded.append(EncodeResult(image.key, failure))

    def _slots_being_written(self) -> set[int]:
        return {slot for one in self.passes for image in one.images for slot in image.slots}

    def end_pass(self) -> None:
        """End the first encoder pass."""
        ended = self.passes.popleft()
        for image in ended.images:
            failure = ended.failures.get(image.key)
            for number, slot in enumerate(image.slots):
                self.encoder_slots[slot] = Features(image.key, number, failure)
            self.encoded.append(EncodeResult(image.key, failure))

    def launch_parts(self, num_parts: int) -> None:
        """Launch parts of the pass in progress, unless it has ended early."""
        if num_parts and self.passes and self.passes[-1].parts_left:
            self.passes[-1].parts_left -= num_parts
            assert self.passes[-1].parts_left >= 0, "a pass has more parts than there are"

    def run(self, plan: StepPlan, expected: dict[str, Expected], failing: set[str]) -> None:
        """Execute a step and check everything it reads. Chunks of `failing` requests fail."""
        for start in plan.started:
            known = expected[start.request_id]
            num_prompt = known.request.num_prompt_tokens
            num_start = num_prompt + len(start.output_token_ids)
            assert list(start.output_token_ids) == known.tokens[num_prompt:num_start], "a start with other tokens"
            counted = count(start.output_token_ids) if known.request.sampling.has_penalties else 0
            self.slots[start.slot] = Slot(known.request, num_start, counted)
        for chunk in plan.chunks:
            slot = self.slots[chunk.slot]
            assert slot.request.id == chunk.request_id, f"slot {chunk.slot} has {slot.request.id}"
            slot.pages += chunk.new_pages
            assert len(slot.pages) * self.page_size >= chunk.end, f"{chunk.request_id} has too few pages on the device"
        copied = [list(self.pages[source]) for source, _ in plan.page_copies]
        for (_, target), content in zip(plan.page_copies, copied, strict=True):
            self.pages[target] = content
        self._wait_for_images(plan)
        for chunk in plan.chunks:
            if chunk.request_id in failing:
                self.failed.setdefault(chunk.request_id, FAILURE)
            self._check_images(chunk, expected[chunk.request_id])
        chunks = [chunk for chunk in plan.chunks if chunk.request_id not in self.failed]
        for chunk in chunks:
            self._write(chunk, expected[chunk.request_id])
        for chunk in chunks:
            self._check_pages(chunk, expected[chunk.request_id])

    def sample(self, plan: StepPlan, expected: dict[str, Expected], masks: dict[str, int]) -> tuple[ChunkResult, ...]:
        """Sample a step that was run. `masks`: remainders of banned tokens by request id; see `banned_after`."""
        return tuple([self._sample(chunk, expected[chunk.request_id], masks) for chunk in plan.chunks])

    def _wait_for_images(self, plan: StepPlan) -> None:
        slots = {slot for chunk in plan.chunks for image in chunk.images for slot in image.slots}
        while not slots.isdisjoint(self._slots_being_written()):
            assert self.passes[0].parts_left == 0, "a chunk reads an image of which parts of the encoder have not run"
            self.end_pass()

    def _write(self, chunk: Chunk, expected: Expected) -> None:
        slot, known = self.slots[chunk.slot], chunk.end - len(chunk.drafts)
        assert chunk.reads_last_token == (chunk.start >= slot.num_start_tokens)
        if chunk.reads_last_token:
            assert slot.last_sampled == chunk.start, "the first token is not the one sampled last in the slot"
        assert known <= max(slot.num_start_tokens, chunk.start + 1), "a chunk has tokens that the device does not know"
        assert not chunk.drafts or (chunk.samples and known == chunk.start + 1), "drafts follow the first token"
        contents = expected.numbers[chunk.start : known]
        for token in chunk.drafts:
            contents.append(expected.prefixes.number(contents[-1], token, None))
        for index, content in enumerate(contents, chunk.start):
            self.pages[slot.pages[index // self.page_size]][index % self.page_size] = content

    def _check_pages(self, chunk: Chunk, expected: Expected) -> None:
        known = chunk.end - len(chunk.drafts)
        held: list[int | None] = []
        for page in self.slots[chunk.slot].pages:
            held += self.pages[page]
        if held[:known] != expected.numbers[:known]:
            wrong = next(index for index in range(known) if held[index : index + 1] != [expected.numbers[index]])
            raise AssertionError(f"token {wrong} of request {chunk.request_id} is not in the page that it attends to")

    def _check_images(self, chunk: Chunk, expected: Expected) -> None:
        spans = expected.request.images
        within = [index for index, span in enumerate(spans) if span.start < chunk.end and span.end > chunk.start]
        assert [image.image_index for image in chunk.images] == within, f"images of a chunk of {chunk.request_id}"
        for image in chunk.images:
            assert len(image.slots) == -(-spans[image.image_index].num_tokens // ENCODER_SLOT_TOKENS)
            for number, slot in enumerate(image.slots):
                found = self.encoder_slots[slot]
                assert found is not None, f"{chunk.request_id} reads encoder-cache slot {slot}, which was not written"
                assert found[:2] == (expected.image_keys[image.image_index], number), (
                    f"{chunk.request_id} reads another image in encoder-cache slot {slot}"
                )
                if found.failure is not None:
                    is_unreported = any(result.key == found.key for result in self.encoded)
                    assert is_unreported or chunk.request_id in self.failed, "an image that failed is read"
                    self.failed.setdefault(chunk.request_id, found.failure)

    def _sample(self, chunk: Chunk, expected: Expected, masks: dict[str, int]) -> ChunkResult:
        """Sample after a chunk, as far as its drafts are accepted."""
        if chunk.request_id in self.failed:
            return ChunkResult(chunk.request_id, failure=self.failed[chunk.request_id])
        tokens: list[int] = []
        end = chunk.end - len(chunk.drafts)
        if chunk.samples:
            slot, banned = self.slots[chunk.slot], masks.get(chunk.request_id)
            tokens.append(expected.prefixes.next_token(expected.numbers[end - 1], slot.counted, banned))
            if slot.request.sampling.has_penalties:
                slot.counted += count(tokens)
            for draft in chunk.drafts:
                if draft != tokens[-1]:
                    break
                tokens.append(expected.tokens[end + len(tokens)])
            slot.last_sampled = end + len(tokens) - 1
        request, prompt_logprobs = expected.request, []
        if request.prompt_logprobs is not None:
            followed = request.token_ids[chunk.start + 1 : min(end + 1, request.num_prompt_tokens)]
            prompt_logprobs = [TokenLogprobs(token, -1.0) for token in followed]
        return ChunkResult(chunk.request_id, tuple(tokens), prompt_logprobs=tuple(prompt_logprobs))


@dataclass(eq=False)
class Launched:
    """A step in flight."""

    plan: StepPlan
    pickled: bytes
    """The plan as it was at its launch."""
    results: tuple[ChunkResult, ...] | None = None
    """None until the step is sampled."""


class Trace:
    """One random trace. `run` raises AssertionError at the first error."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed + 1_000_003)
        self.setting = setting = draw_setting(seed)
        self.device = Device(setting)
        self.pages = PagePool(setting.num_pages, setting.page_size, setting.keeps_prefixes)
        encoder_cache = EncoderCache(setting.image_tokens, setting.keeps_images)
        self.scheduler = Scheduler(setting.limits, self.pages, encoder_cache, drafter=self)
        self.prefixes = Prefixes(seed)
        self.expected: dict[str, Expected] = {}
        self.live: dict[str, Request] = {}
        self.ended: set[str] = set()
        self.received: dict[str, list[int]] = {}
        self.prompt_logprobs: dict[str, list[int]] = {}
        self.drafting: set[str] = set()
        self.deferring: set[str] = set()
        """Requests that steps leave out while one of their tokens is not read; used in a third of the traces."""
        self.deferring_rng = random.Random(seed + 2_000_003)
        self.may_defer = self.deferring_rng.random() < 1 / 3
        self.turn_rng = random.Random(seed + 3_000_003)
        self.unread: dict[str, int] = {}
        """Number of steps in flight that sample a token of a request, by request id."""
        self.encoding: dict[bytes, tuple[int | None, int]] = {}
        """Plan number and patches of images whose encoding result is not reported, by salted key. Images whose features
        are loaded have no plan number."""
        self.parts_left = 0
        """Parts of the pass in progress that are not launched."""
        self.in_progress: int | None = None
        """Plan number of the pass in progress."""
        self.quarantined: set[bytes] = set()
        self.in_flight: deque[Launched] = deque()
        self.mask_rng = random.Random(seed + 4_000_003)
        self.continuing_rng = random.Random(seed + 5_000_003)
        self.without_chunk: set[str] = set()
        """Requests that started and have no chunk yet."""
        self.num_steps = 0
        self.num_chunks = 0
        self.num_stalled = 0
        self.seen: set[str] = set()
        """Rare events that occurred."""

    def run(self) -> int:
        """Run to the end; returns the number of steps."""
        arrivals = deque(self.setting.requests)
        while arrivals or self.live or self.in_flight or self.encoding:
            while arrivals and self.rng.random() < self.setting.rate:
                self._add(arrivals.popleft())
                if self.rng.random() < 0.5:
                    break
            self._inject_fault()
            self._encode_some()
            if self.unsampled is not None:  # the tokens that its masks depend on are read by now
                while len(self.in_flight) > 1:
                    self._update(self.in_flight.popleft())
            plan = self._plan()
            self._inject_fault()
            if plan is not None:
                self._launch(plan)
            if arrivals and self.rng.random() < 0.2:  # a message while the host waits
                self._add(arrivals.popleft())
            self._inject_fault()
            if self.in_flight and (plan is None or len(self.in_flight) > self.setting.depth):
                self._update(self.in_flight.popleft())
            elif plan is None and self.device.passes:  # the host waits
                assert self.device.passes[0].parts_left == 0, "the host waits for a pass that is not launched"
                self.device.end_pass()
        assert self.ended == self.expected.keys(), "a request has not ended"
        assert self.scheduler.is_idle_clean(), "ended requests hold resources"
        assert not self.scheduler.images.is_encoding, "an encoding was not reported"
        return self.num_steps

    def _add(self, request: Request) -> None:
        if any(image.key in self.quarantined for image in request.images):
            try:
                self.scheduler.add(request)
            except ImageError:
                self.seen.add("refused image")
                return
            raise AssertionError("a request with a quarantined image was added")
        limits = self.setting.limits
        limit = min(request.num_prompt_tokens + request.sampling.max_tokens, limits.max_length)
        expected = self.expected[request.id] = Expected(request, self.prefixes, limit)
        request = expected.request = self._continued(request, expected.output()[0])
        self.live[request.id] = request
        self.received[request.id] = list(request.output_ids)
        self.prompt_logprobs[request.id] = []
        ended = self.scheduler.add(request)
        self.num_stalled = 0
        assert (ended is not None) == (self.received[request.id] == expected.output()[0])
        if ended is not None:
            assert not ended.token_ids, "known tokens are sent again"
            self._take([ended])
            self.seen.add("ended by known tokens")

    def _continued(self, request: Request, output: list[int]) -> Request:
        """The request; a fifth of the time after some of its output tokens."""
        if self.continuing_rng.random() < 0.8:
            return request
        num_known = self.continuing_rng.choice([1, len(output), self.continuing_rng.randint(0, len(output))])
        return replace(request, output_ids=tuple(output[:num_known]))

    # ---- plan

    def _state(self, request_id: str) -> RequestState:
        state = self.scheduler.find(request_id)
        assert state is not None, f"{request_id} is not open"
        return state

    def _plan(self) -> StepPlan | None:
        budget = self.rng.choice([None, 0, 1, 16]) if self.setting.has_target else None
        self._draw_drafting()
        states = [self._state(name) for name in self.live]
        decoding = [state for state in states if state.slot is not None and self._is_decoding(state)]
        late = [state for state in states if state.slot is not None and self._has_computed_prompt(state)]
        is_idle, num_preemptions = not self.in_flight and not self.encoding, self.scheduler.num_preemptions
        turn = self._draw_turn()
        plan = self.scheduler.plan(budget, self.deferring, turn)
        self.scheduler.check()
        if self.scheduler.num_preemptions > num_preemptions:
            self.seen.add("preemption")
        if plan is None:
            assert not (self.live and is_idle), "there is work, but no plan"
            assert self.num_parts_left == 0 or turn.num_parts == 0, "a pass is not continued"
            return None
        self.num_steps += 1
        self.num_chunks += len(plan.chunks)
        is_late = any(state.slot is not None for state in late) or self.scheduler.num_preemptions > num_preemptions
        self._check_encodings(plan, turn if is_late else EncoderTurn(), is_late=is_late)
        self._check_waits(plan, is_late=is_late)
        self._check_budgets(plan, budget)
        self._check_fairness(plan, decoding)
        self.without_chunk |= {start.request_id for start in plan.started}
        for chunk in plan.chunks:
            self._check_chunk(chunk)
        self._check_starts(plan)
        self._record_events(plan)
        for chunk in plan.chunks:
            self.unread[chunk.request_id] = self.unread.get(chunk.request_id, 0) + chunk.samples
        return plan

    def _check_starts(self, plan: StepPlan) -> None:
        sources, targets = {source for source, _ in plan.page_copies}, [target for _, target in plan.page_copies]
        assert len(set(targets)) == len(targets), "two copies into one page"
        assert not sources & set(targets), "a page is copied from and into"
        for start in plan.started:
            state = self._state(start.request_id)
            assert state.slot == start.slot
            known = state.token_ids[state.request.num_prompt_tokens :]
            assert list(start.output_token_ids) == known, "a start without known tokens"

    def _is_decoding(self, state: RequestState) -> bool:
        """Whether the request needs one token without an image, and need not wait until its tokens are read."""
        name, request = state.request.id, state.request
        if self.unread.get(name, 0) and (self._must_wait(state) or self._has_drafts_in_flight(name)):
            return False
        needs_one = state.num_computed_tokens + 1 == state.num_tokens < self.expected[name].limit
        return needs_one and (not request.images or state.num_computed_tokens >= request.images[-1].end)

    def _has_drafts_in_flight(self, name: str) -> bool:
        return any(chunk.request_id == name and chunk.drafts for step in self.in_flight for chunk in step.plan.chunks)

    @staticmethod
    def _has_computed_prompt(state: RequestState) -> bool:
        return state.num_computed_tokens >= state.request.num_prompt_tokens

    def _draw_turn(self) -> EncoderTurn:
        if self.turn_rng.random() < 0.5:
            return EncoderTurn()
        return EncoderTurn(
            self.turn_rng.randint(0, ENCODER_PARTS), self.turn_rng.choice([None, self.setting.max_patches])
        )

    @property
    def num_parts_left(self) -> int:
        """Parts of the pass in progress that the scheduler has yet to plan, as far as it can know."""
        is_open = any(number == self.in_progress for number, _ in self.encoding.values())
        return self.parts_left if is_open else 0

    def _check_encodings(self, plan: StepPlan, turn: EncoderTurn, *, is_late: bool) -> None:
        """Only images of requests are encoded, within the limits of a pass, and passes do not overlap."""
        most = min(self.setting.limits.max_encoder_patches, turn.max_patches or 10**9)
        patches = []
        for image in plan.images:
            span = self.live[image.request_id].images[image.image_index]
            assert image.key == self.expected[image.request_id].image_keys[image.image_index]
            assert len(image.slots) == -(-span.num_tokens // ENCODER_SLOT_TOKENS)
            assert image.key not in self.encoding, "an image is encoded while it is being encoded"
            assert span.num_patches, "an image with features is encoded"
            patches.append(span.num_patches)
        assert sum(patches) <= most or len(patches) == 1, "a pass encodes too many patches"
        most_patches = self.setting.limits.max_encoder_patches
        is_large = sum(patches) > most_patches
        numbers = {number for number, _ in self.encoding.values()} - {None}
        if patches:
            assert self.num_parts_left == 0, "a pass begins before the parts of another one are launched"
            assert plan.pass_parts == ENCODER_PARTS * (1 if not is_large else -(-sum(patches) // most_patches))
            self.in_progress, self.parts_left = plan.number, plan.pass_parts
        else:
            assert plan.pass_parts == 0
        for image, num_patches in zip(plan.images, patches, strict=True):
            self.encoding[image.key] = plan.number, num_patches
        for image in plan.loads:
            assert not self.live[image.request_id].images[image.image_index].num_patches, "there are no features"
            assert image.key == self.expected[image.request_id].image_keys[image.image_index]
            assert image.key not in self.encoding, "an image is loaded while it is being encoded"
            self.encoding[image.key] = None, 0
            self.seen.add("loaded image" if self.num_parts_left == 0 else "loaded image during a pass")
        assert plan.encoder_parts <= self.num_parts_left, "parts are run of a pass that is over"
        assert plan.encoder_parts <= turn.num_parts, "the encoder delays others by more than it may"
        self.parts_left -= plan.encoder_parts
        if is_large:
            self.seen.add("large image")
        if plan.encoder_parts and self.parts_left:
            self.seen.add("pass in parts")
        if plan.encoder_parts and is_late:
            self.seen.add("encoded before decoding")
        if len(numbers | {plan.number}) > 1 and patches:
            self.seen.add("two passes")

    def _check_waits(self, plan: StepPlan, *, is_late: bool) -> None:
        """Chunks read only images whose pass is launched completely."""
        for chunk in plan.chunks:
            for image in chunk.images:
                key = self.expected[chunk.request_id].image_keys[image.image_index]
                if key not in self.encoding:
                    if is_late:
                        self.seen.add("image read while others decode")
                    continue
                number = self.encoding[key][0]
                assert number is None or number != self.in_progress or self.parts_left == 0, (
                    "a chunk reads an image of a pass in progress"
                )
                self.seen.add("wait on the device" if number is not None else "image read as it is loaded")

    def _check_budgets(self, plan: StepPlan, budget: int | None) -> None:
        limits = self.setting.limits
        num_tokens = [chunk.num_tokens for chunk in plan.chunks]
        assert sum(num_tokens) <= limits.max_step_tokens, "a step has too many tokens"
        num_prompt_tokens = sum(chunk.num_tokens for chunk in plan.chunks if chunk.num_tokens > 1 + len(chunk.drafts))
        assert budget is None or num_prompt_tokens <= max(1, budget), "prompts got too many tokens"
        assert sum(n > 1 for n in num_tokens) <= limits.max_step_chunks, "a step has too many chunks"
        slots = [chunk.slot for chunk in plan.chunks]
        assert len(set(slots)) == len(slots), "two chunks have one slot"

    def _check_fairness(self, plan: StepPlan, decoding: list[RequestState]) -> None:
        """Decoding requests get their token within the budget, and the first request in order does not starve."""
        served = {chunk.request_id for chunk in plan.chunks}
        is_full = sum(chunk.num_tokens for chunk in plan.chunks) == self.setting.limits.max_step_tokens
        for state in decoding:
            assert state.request.id in served or state.slot is None or is_full, (
                f"decoding request {state.request.id} was left out"
            )
        if not self.live:  # a pass runs to its end without requests
            return
        first = min((self._state(name) for name in self.live), key=lambda state: state.order)
        is_encoding = not self.encoding.keys().isdisjoint(first.image_keys)
        self.num_stalled = 0 if first.request.id in served else self.num_stalled + (not is_encoding)
        most = 10 + 2 * sum(self.expected[name].limit for name in self.live)
        assert self.num_stalled <= most, f"request {first.request.id} starves"

    def _check_chunk(self, chunk: Chunk) -> None:
        state = self._state(chunk.request_id)
        assert chunk.num_tokens >= 1
        assert state.slot == chunk.slot
        assert state.num_computed_tokens == chunk.end
        assert chunk.end == state.num_tokens - 1 or (not chunk.samples and chunk.end < state.num_tokens)
        is_waiting = self.unread.get(chunk.request_id, 0) > 0
        assert not (is_waiting and self._must_wait(state)), (
            "a request that drafts or is deferred did not wait for its tokens"
        )
        assert not chunk.drafts or self.is_drafting(state)
        for index in range(chunk.start // self.pages.page_size, (chunk.end - 1) // self.pages.page_size + 1):
            page = state.pages[index]
            is_writable = self.pages.num_owners(page) == 1 and page not in self.pages._key_of
            assert is_writable, f"page {page} is written but shared or cached"
        if chunk.request_id in self.without_chunk:
            self.without_chunk.remove(chunk.request_id)
            if state.request.prompt_logprobs is not None or not self.setting.keeps_prefixes:
                assert chunk.start == 0, "a prompt must be computed from its first token"

    def _record_events(self, plan: StepPlan) -> None:
        """Record rare events, so that tests can check the coverage of traces."""
        if plan.page_copies:
            self.seen.add("copy")
        started = [self._state(start.request_id) for start in plan.started]
        assert all(state.num_cached_tokens <= state.num_prompt_tokens for state in started), (
            "cached tokens of an output"
        )
        if any(state.num_cached_tokens for state in started):
            self.seen.add("cached prefix")
        if any(state.request.output_ids and not state.num_preemptions for state in started):
            self.seen.add("started after known tokens")
        served = {chunk.request_id for chunk in plan.chunks}
        if any(image.request_id not in served for image in plan.images):
            self.seen.add("encoded ahead")
        keys: set[bytes] = set()
        for chunk in plan.chunks:
            if chunk.reads_last_token and self.unread.get(chunk.request_id, 0):
                self.seen.add("pending")
            if chunk.drafts:
                self.seen.add("draft")
            expected = self.expected[chunk.request_id]
            for image in chunk.images:
                key = expected.image_keys[image.image_index]
                if expected.request.images[image.image_index].end > chunk.end:
                    self.seen.add("image in chunks")
                if key in keys:
                    self.seen.add("shared image")
                keys.add(key)

    # ---- encodings

    def _encode_some(self) -> None:
        """End encoder passes at random, and report some of the results."""
        if self.device.passes and self.rng.random() < self.setting.encoder_rate:
            is_over_early = self.turn_rng.random() < 0.2  # it is not divided, or has failed
            if self.device.passes[0].parts_left == 0 or is_over_early:
                self.device.end_pass()
        if self.rng.random() < 0.7:
            self._take(self.scheduler.finish_encoding(self._encode_results()))

    def _encode_results(self) -> tuple[EncodeResult, ...]:
        """Take the results of the encodings that ended, to report them."""
        results, self.device.encoded = tuple(self.device.encoded), []
        for key, failure in results:
            del self.encoding[key]
            if failure is BAD_IMAGE:
                unsalted = [
                    expected.request.images[expected.image_keys.index(key)].key
                    for expected in self.expected.values()
                    if key in expected.image_keys
                ]
                self.quarantined.add(unsalted[0])
            in_use = any(key in self._state(name).images_in_use for name in self.live)
            if failure is not None:
                self.seen.add("failed image")
            elif not in_use:
                self.seen.add("image encoded without a user")
        return results

    # ---- run and read

    @property
    def unsampled(self) -> StepPlan | None:
        """The plan that is launched but waits for masks to be sampled."""
        return self.in_flight[-1].plan if self.in_flight and self.in_flight[-1].results is None else None

    def _launch(self, plan: StepPlan) -> None:
        """Run a step once the previous one is sampled. It is sampled at once unless its masks are not ready."""
        if self.unsampled is not None:
            self._sample(self.in_flight[-1])
        self.in_flight.append(Launched(plan, self._run(plan)))
        states = [self.scheduler.find(name) for name in self._with_grammar(plan)]
        are_known = all(state.num_pending == 1 for state in states if state is not None)
        if are_known and (not states or self.mask_rng.random() < 0.5):
            self._sample(self.in_flight[-1])
        else:
            self.seen.add("wait for masks")

    def _with_grammar(self, plan: StepPlan) -> list[str]:
        names = [chunk.request_id for chunk in plan.chunks if chunk.samples]
        return [name for name in names if self.expected[name].request.sampling.structured is not None]

    def _sample(self, step: Launched) -> None:
        """Sample a step. Masks depend on the tokens that were read; ended requests have none."""
        masks = {}
        for name in self._with_grammar(step.plan):
            if (state := self.scheduler.find(name)) is not None:
                masks[name] = banned_after(state.token_ids[state.request.num_prompt_tokens :])
        step.results = self.device.sample(step.plan, self.expected, masks)

    def _run(self, plan: StepPlan) -> bytes:
        """Run a plan on the device; returns the plan in its pickled form."""
        sent = pickle.dumps(plan)
        plan_there = pickle.loads(sent)  # as if in another process
        assert plan_there == plan
        assert hash(plan_there) == hash(plan)
        failures: dict[bytes, Failure] = {}
        failing: set[str] = set()
        if plan.images:
            if self.setting.fault_rate and self.rng.random() < 0.05:
                failures[self.rng.choice(plan.images).key] = self.rng.choice([BAD_IMAGE, NO_MEMORY])
            self.device.encode(EncoderPass(plan_there.images, plan_there.pass_parts, failures))
        if plan.loads:
            if self.setting.fault_rate and self.turn_rng.random() < 0.05:
                failures[self.turn_rng.choice(plan.loads).key] = self.turn_rng.choice([BAD_IMAGE, NO_MEMORY])
            self.device.load(plan_there.loads, failures)
        self.device.launch_parts(plan.encoder_parts)
        if plan.chunks and self.rng.random() < self.setting.fault_rate:
            failing.add(self.rng.choice(plan.chunks).request_id)
        self.device.run(plan_there, self.expected, failing)
        for chunk in plan.chunks:
            state = self.scheduler.find(chunk.request_id)
            if state is not None and state.slot == chunk.slot:
                assert self.device.slots[chunk.slot].pages == state.pages, f"pages of {chunk.request_id} were not sent"
        return sent

    def _update(self, step: Launched) -> None:
        if step.results is None:
            self._sample(step)
        assert step.results is not None
        plan, results = step.plan, step.results
        assert pickle.dumps(plan) == step.pickled, "a plan has changed"
        for chunk in plan.chunks:
            self.unread[chunk.request_id] -= chunk.samples
            state = self.scheduler.find(chunk.request_id)
            if (
                state is not None
                and state.num_preemptions
                and (state.slot is None or state.num_computed_tokens < chunk.end)
            ):
                self.seen.add("result of a preempted request")
            failed = results[plan.chunks.index(chunk)].failure
            if failed is not None and state is not None:
                self.seen.add("failed chunk")
        images = self._encode_results() if self.rng.random() < 0.5 else ()
        outputs = self.scheduler.update(plan, StepResult(number=plan.number, chunks=results, images=images))
        self._take(outputs)
        if any(output.finish_reason for output in outputs):  # else the next plan is soon enough
            self.scheduler.check()
        for chunk in plan.chunks:
            state = self.scheduler.find(chunk.request_id)
            if state is not None:
                self._check_received(state)

    def _check_received(self, state: RequestState) -> None:
        """All known output tokens were sent, but the last ones within `stream_interval`; the first is sent at once."""
        request, received = state.request, self.received[state.request.id]
        known = state.token_ids[request.num_prompt_tokens :]
        assert known[: len(received)] == received
        assert len(known) - len(received) < request.stream_interval, f"an output of {request.id} is late"
        num_new = len(known) - len(request.output_ids)
        assert len(known) - len(received) < max(1, num_new), f"the first token of {request.id} is late"

    def _take(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            name = output.request_id
            assert name in self.live, f"{name} has ended and gets another output"
            expected, received = self.expected[name], self.received[name]
            received += output.token_ids
            self.prompt_logprobs[name] += [entry.token_id for entry in output.prompt_logprobs]
            assert received == expected.output()[0][: len(received)], f"the output of {name} is wrong"
            prompt = list(expected.request.token_ids[1 : 1 + len(self.prompt_logprobs[name])])
            assert self.prompt_logprobs[name] == prompt, f"prompt log-probabilities of {name} are wrong"
            if output.finish_reason is not None:
                self._end(output)

    def _end(self, output: RequestOutput) -> None:
        name = output.request_id
        expected = self.expected[name]
        if output.failure is None:
            assert (self.received[name], output.finish_reason) == expected.output(), f"{name} ended too early"
            if expected.request.prompt_logprobs is not None:
                assert len(self.prompt_logprobs[name]) == expected.request.num_prompt_tokens - 1
        else:
            assert output.finish_reason == "failed"
            if output.failure is FAILURE:
                assert self.device.failed[name] is FAILURE, f"{name} failed without a reason"
            else:
                assert expected.image_keys, f"{name} failed by an image that it does not have"
        self._close(name)

    def _close(self, name: str) -> None:
        assert name not in self.ended, f"{name} ends twice"
        assert self.scheduler.find(name) is None
        self.ended.add(name)
        del self.live[name]
        self.without_chunk.discard(name)
        self.num_stalled = 0

    def _inject_fault(self) -> None:
        """Cancel, fail or finish a random request."""
        if self.live and self.rng.random() < self.setting.fault_rate:
            request = self.rng.choice(list(self.live.values()))
            reason = self.rng.choice(["cancelled", "failed", "stop"])
            failure = FAILURE if reason == "failed" else None
            known = self.scheduler.find(request.id).token_ids[request.num_prompt_tokens :]
            output = self.scheduler.end(request.id, reason, failure)
            assert (output.request_id, output.finish_reason, output.failure) == (request.id, reason, failure)
            assert [*self.received[request.id], *output.token_ids] == known, "tokens are lost at the end"
            assert self.scheduler.end(request.id, "cancelled") is None
            self._close(request.id)
            self.scheduler.check()
            if self.in_flight:
                self.seen.add("ended in flight")

    # ---- drafts

    def _draw_drafting(self) -> None:
        """Let requests start and stop drafting, and being deferred, at random."""
        for name in self.live:
            if self.rng.random() < 0.2:
                self.drafting ^= {name}
            if self.may_defer and self.deferring_rng.random() < 0.2:
                self.deferring ^= {name}

    def _must_wait(self, state: RequestState) -> bool:
        return self.is_drafting(state) or state.request.id in self.deferring

    def is_drafting(self, state: RequestState) -> bool:
        sampling = state.request.sampling
        may_draft = (
            self.setting.limits.max_draft_tokens > 0 and not sampling.has_penalties and sampling.structured is None
        )
        return may_draft and state.request.id in self.drafting

    def propose(self, state: RequestState, num_tokens: int) -> list[int]:
        """Draft tokens, two thirds of which are right."""
        if not self.is_drafting(state):
            return []
        assert self.unread.get(state.request.id, 0) == 0, "drafts are proposed before all tokens are known"
        known = len(state.token_ids)
        right = self.expected[state.request.id].tokens[known : known + self.rng.randint(0, num_tokens)]
        return [token if self.rng.random() < 0.67 else self.rng.randrange(VOCABULARY) for token in right]
