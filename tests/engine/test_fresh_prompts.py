"""A prompt that begins in a step attends to the step's own keys instead of to pages: the results are the same."""

import copy
import dataclasses
import itertools
import random
import warnings

import pytest
import torch
from closeness import BOUNDS, assert_close
from engine.tiny import make_core, plain, request_of, run_all
from model.hugging_face import SHAPES, make_checkpoint

from saccade.engine.config import EngineConfig
from saccade.engine.kv_cache import KVCache, PagedAttention, fresh_at_end
from saccade.engine.request import SamplingParams
from saccade.engine.runner import Runner
from saccade.kernels import launch
from saccade.kernels.rope import text_angles


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("engine") / "checkpoint", SHAPES[0])


@dataclasses.dataclass
class Heads:
    """What `KVCache` reads of a `LanguageConfig`, and the query heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int = 2


class Step:
    """Requests (tokens before, new tokens) in pages of random numbers; those at the end that have none before are fresh."""

    def __init__(self, requests, heads, page_size, device="cpu", dtype=torch.float32):
        random_numbers = torch.Generator().manual_seed(0)
        self.new, self.context = [new for _, new in requests], [before + new for before, new in requests]
        num_tokens, width = sum(self.new), max(-(-length // page_size) for length in self.context)
        self.cache = KVCache(
            heads, num_pages=len(requests) * width, page_size=page_size, kv_format="model", dtype=dtype,
            device=torch.device(device),
        )  # fmt: skip
        self.cache.entries.copy_(torch.randn(self.cache.entries.shape, generator=random_numbers))
        table = torch.randperm(len(requests) * width, generator=random_numbers).reshape(len(requests), width)
        slots = [
            table[row, index // page_size] * page_size + index % page_size
            for row, (before, new) in enumerate(requests)
            for index in [torch.arange(before, before + new)]
        ]
        positions = torch.cat([torch.arange(before, before + new) for before, new in requests]).expand(3, -1)
        sections = (heads.head_dim // 8, heads.head_dim // 8, heads.head_dim // 4)
        self.angles = text_angles(positions.to(device), 1e4, sections)
        self.slots = torch.cat(slots).int().to(device)
        self.table = table.int().to(device)
        self.starts = torch.tensor([0, *itertools.accumulate(self.new)], dtype=torch.int32, device=device)
        self.lengths = torch.tensor(self.context, dtype=torch.int32, device=device)
        self.sizes = [heads.num_heads * heads.head_dim] + [heads.num_kv_heads * heads.head_dim] * 2
        self.head_dim = heads.head_dim
        self.qkv = torch.randn(num_tokens, sum(self.sizes), generator=random_numbers).to(device, dtype)

    def attend(self, num_fresh):
        """The result of a layer with the last requests taken for fresh, and the pages as it leaves them."""
        cache = copy.copy(self.cache)
        cache.entries = self.cache.entries.clone()
        reading = len(self.new) - num_fresh
        context = PagedAttention(
            cache, self.angles, self.slots, self.table[:reading], self.starts[: reading + 1], self.lengths[:reading],
            max(self.new[:reading], default=0), max(self.context[:reading], default=0),
            fresh_at_end(self.starts, len(self.qkv), self.new[reading:]),
        )  # fmt: skip
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv.clone().split(self.sizes, dim=-1))
        with torch.inference_mode():
            return context(1, q, k, v), cache.entries


MIXES = {
    "all fresh": ([(0, 9), (0, 33), (0, 2)], 3),
    "all fresh, of one length": ([(0, 16), (0, 16)], 2),
    "none fresh": ([(5, 1), (30, 1), (17, 12)], 0),
    "mixed": ([(5, 1), (30, 1), (17, 12), (0, 21), (0, 40), (0, 3)], 3),
    "answers and one prompt": ([(31, 1), (1, 1), (0, 17)], 1),
    "prompts of one token": ([(15, 1), (16, 4), (0, 1), (0, 1), (0, 18), (0, 1)], 4),
    "one prompt of one token": ([(0, 1)], 1),
}
MIX = pytest.mark.parametrize(("requests", "num_fresh"), MIXES.values(), ids=MIXES)


@pytest.mark.parametrize("page_size", [1, 16])
@MIX
def test_fresh_prompts_get_what_reading_their_pages_gives(requests, num_fresh, page_size):
    step = Step(requests, Heads(4, 2, 32), page_size)
    expected, expected_pages = step.attend(0)
    actual, pages = step.attend(num_fresh)
    assert_close("out", actual, expected, 1e-5)
    assert torch.equal(pages, expected_pages)


@pytest.mark.parametrize("path", ["triton", "reference"])
def test_every_path_gives_the_same(path):
    requests, num_fresh = MIXES["mixed"]
    step = Step(requests, Heads(4, 2, 32), 16, device="cuda" if torch.cuda.is_available() else "cpu")
    expected, _ = step.attend(0)
    with launch.forced(path):
        actual, _ = step.attend(num_fresh)
    assert_close("out", actual, expected, BOUNDS[torch.float32])


def test_fresh_prompts_read_no_pages():
    step = Step([(0, 9), (0, 33)], Heads(4, 2, 32), 16)
    expected, _ = step.attend(0)
    step.cache.entries.fill_(float("nan"))
    step.slots.fill_(step.cache.num_slots)  # nothing is stored either
    assert_close("out", step.attend(2)[0], expected, 1e-5)


RAGGED = [(n * 37, 1) for n in range(1, 65)] + [(512, 700), (1024, 300)] + [(0, n) for n in (640, 1, 17, 2000, 128)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("requests", "num_fresh"),
    [(RAGGED, 5), (RAGGED[:64] + [(0, 640)] * 12, 12), ([(0, 640)] * 12, 12), (RAGGED[64:], 5)],
    ids=["ragged", "answers and equal prompts", "equal prompts", "no answers"],
)
def test_a_large_step_in_bf16_equals_reading_all_from_pages_and_waits_for_nothing(requests, num_fresh):
    step = Step(requests, Heads(16, 2, 128), 16, device="cuda", dtype=torch.bfloat16)
    expected, expected_pages = step.attend(0)
    step.attend(num_fresh)  # compiles
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
        try:
            actual, pages = step.attend(num_fresh)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    starts = step.starts.tolist()
    for row, (start, end) in enumerate(itertools.pairwise(starts)):
        assert_close(f"request {row}: {requests[row]}", actual[start:end], expected[start:end], BOUNDS[torch.bfloat16])
    assert torch.equal(pages, expected_pages)


# ---- in the engine


CONFIG = EngineConfig(
    num_pages=500, page_size=8, max_length=550, max_requests=12, max_step_tokens=160, image_pool_tokens=2048,
    cuda_graphs=False,
)  # fmt: skip


class Watched(Runner):
    """Keeps what kinds of chunks its steps had, and how many requests of each were taken for fresh. Chunks come in any order."""

    def run(self, chunks, began):
        return super().run(random.Random(chunks[0].start).sample(chunks, len(chunks)), began)

    def _run(self, chunks):
        self.__dict__.setdefault("kinds", []).append([kind_of(chunk) for chunk in chunks])
        return super()._run(chunks)

    def _decode(self, step, *, fresh=None, **fields):
        num_fresh = 0 if fresh is None else len(fresh.cu_seqlens) - 1
        self.__dict__.setdefault("num_fresh", []).append(num_fresh)
        return super()._decode(step, fresh=fresh, **fields)


def kind_of(chunk):
    if chunk.start == 0:
        return "fresh"
    if chunk.start >= chunk.request.num_prompt_tokens:
        return "answer"
    return "behind a cached prefix" if chunk.start == chunk.request.num_cached else "continued"


class ReadsPages(Watched):
    def _is_fresh(self, chunk):
        return False


def serve(folder, runner_class, sampling, config=CONFIG):
    """Two requests a step, so that they are at different places. Of three, one shares what is cached and two begin anew."""
    prompts, _ = plain(folder, 0, 40, 16)
    core = make_core(folder, config, runner_class=runner_class)
    requests = [
        (request_of(f"r{i}", prompt, dataclasses.replace(sampling, seed=i), salt=bytes([i if i % 3 else 0])), prompt)
        for i, prompt in enumerate(prompts[:20])
    ]
    return run_all(core, requests, at_once=2), core._runner


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=14, logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=14, logprobs=2, temperature=1.0, presence_penalty=0.5, ignore_eos=True),
        SamplingParams(max_tokens=6, logprobs=0, prompt_logprobs=1, ignore_eos=True),
    ],
    ids=["greedy", "sampled", "log-probabilities of prompts"],
)
@pytest.mark.parametrize("max_draft_tokens", [0, 3])
def test_a_mix_of_all_kinds_of_chunks_gives_what_reading_pages_gives(folder, sampling, max_draft_tokens):
    config = dataclasses.replace(CONFIG, max_draft_tokens=max_draft_tokens)
    expected, before = serve(folder, ReadsPages, sampling, config)
    actual, runner = serve(folder, Watched, sampling, config)
    assert not any(before.num_fresh)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        for entry, other in zip(
            ours.logprobs + ours.prompt_logprobs, theirs.logprobs + theirs.prompt_logprobs, strict=True
        ):
            assert entry.token_id == other.token_id
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [value for _, value in entry.top] == pytest.approx([value for _, value in other.top], abs=1e-4)
    expect_all_kinds(runner, has_cached=sampling.prompt_logprobs is None)


def expect_all_kinds(runner, has_cached):
    """Fresh chunks alone, others alone, fresh ones behind others; and all kinds of others."""
    for kinds, num_fresh in zip(runner.kinds, runner.num_fresh, strict=True):
        num_others = len(kinds) - num_fresh
        assert "fresh" not in kinds[:num_others]
        assert set(kinds[num_others:]) <= {"fresh"}
    mixes = {frozenset(kind == "fresh" for kind in kinds) for kinds in runner.kinds}
    assert mixes == {frozenset({True}), frozenset({False}), frozenset({True, False})}
    seen = {kind for kinds in runner.kinds for kind in kinds}
    assert seen == {"fresh", "answer", "continued"} | ({"behind a cached prefix"} if has_cached else set())


def test_tokens_are_those_of_plain_generation(folder):
    prompts, answers = plain(folder, 0, 40, 16)
    core = make_core(folder, CONFIG, runner_class=Watched)
    requests = [
        (request_of(f"r{i}", prompt, SamplingParams(max_tokens=len(answer)), salt=bytes([i % 8])), prompt)
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    heard = run_all(core, requests, at_once=3)
    assert [collected.token_ids for collected in heard] == answers
    expect_all_kinds(core._runner, has_cached=True)


@pytest.mark.parametrize("kv_format", ["int8", "fp8"])
def test_with_a_compressed_cache_every_prompt_reads_its_pages(folder, kv_format):
    """What its first chunk sees must not depend on where the prompt is cut."""
    config = dataclasses.replace(CONFIG, kv_format=kv_format)
    _, runner = serve(folder, Watched, SamplingParams(max_tokens=3), config)
    assert not any(runner.num_fresh)


@pytest.mark.parametrize("kv_format", ["model", "int8"])
@pytest.mark.parametrize("max_step_tokens", [1, 2, 160])
def test_a_rehearsal_runs_both_kinds_and_stores_nothing(folder, kv_format, max_step_tokens):
    config = dataclasses.replace(CONFIG, kv_format=kv_format, max_step_tokens=max_step_tokens, max_step_patches=64)
    runner = make_core(folder, config, runner_class=Watched)._runner
    runner.rehearse()
    assert runner.num_fresh == ([1, 0] if kv_format == "model" else [0, 0])
    assert not runner.cache.entries.view(torch.uint8).any()
