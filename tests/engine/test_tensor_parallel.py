"""One engine on several ranks: the tokens of one rank, whatever is requested, and whatever fails."""

import dataclasses
import os
import random
import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from engine import gathered_peers, mixed_requests
from engine.making_adapters import write_adapters
from engine.shared_ranks import SharedRanks, checked_collectives, planted
from engine.tiny import core_of, make_core, plain, request_of, requests_of, run_all
from model import llava_next, llava_onevision
from model.hugging_face import OTHER_SHAPES, SHAPES, make_checkpoint

from saccade.engine import Engine, EngineConfig, SamplingParams
from saccade.engine.device.divided_encoder import DividedEncoder, divide
from saccade.engine.device.rank_exchange import RankExchange
from saccade.engine.ranks.launch import rank_devices
from saccade.errors import ConfigError

FAMILIES = [
    SHAPES[0], SHAPES[2 - 1], OTHER_SHAPES[0], OTHER_SHAPES[4], OTHER_SHAPES[5], llava_next.SHAPES[0],
    llava_next.SHAPES[2], llava_onevision.SHAPES[0],
]  # fmt: skip
"""Shapes with 4 query heads and 1, 2 or 4 key/value heads; with and without tied embeddings, windows, deepstack."""
SLOW = pytest.mark.slow
ALWAYS = FAMILIES[0], FAMILIES[3], FAMILIES[5]
"""Shapes of three families; the others are slow."""
LOGPROB_BOUND = 1e-5
ROUNDED_BOUND = 0.1
"""With dynamic 8-bit inputs, where sums in another order are rounded to other values."""


@pytest.fixture(scope="module")
def ranks():
    """Two ranks; requests with some names fail on rank 1 (`planted_faults.py`)."""
    threads, tests = torch.get_num_threads(), str(Path(__file__).parents[1])
    torch.set_num_threads(1)
    plant = "from engine import gathered_peers, planted_faults; gathered_peers.plant(); planted_faults.plant()"
    with planted(f"import sys; sys.path.insert(0, {tests!r}); {plant}"):
        shared = SharedRanks(2)
    with shared, gathered_peers.planted():
        yield shared
        pids = shared.pids
    assert not shared.deaths
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "followers end with the engine"
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("ranks") / "checkpoint", SHAPES[1])


def drawn_config(rng, prompts):
    """Few pages, small steps and caches: chunks, preemptions, images that wait."""
    page_size, most = rng.choice([1, 4, 8, 16]), max(len(prompt.token_ids) for prompt in prompts) + 24
    num_features = max(sum(image.span.num_tokens + 16 for image in prompt.images) for prompt in prompts)
    return EngineConfig(
        page_size=page_size, num_pages=(most + rng.choice([0, most // 2])) // page_size + 1, max_length=most,
        max_requests=rng.choice([3, 6, 9]), max_step_tokens=rng.choice([24, 64, 256]),
        max_encoder_patches=rng.choice([64, 256, 4096]), encoder_cache_tokens=num_features + rng.choice([128, 800]),
        prefix_cache=rng.random() < 0.7, max_draft_tokens=rng.choice([0, 3]),
    )  # fmt: skip


def furthest(ours, theirs):
    """Largest difference of log-probabilities, of outputs and prompts."""
    pairs = [
        (one.logprob, other.logprob)
        for a, b in zip(ours, theirs, strict=True)
        for name in ("logprobs", "prompt_logprobs")
        for one, other in zip(getattr(a, name), getattr(b, name), strict=True)
    ]
    return max(abs(one - other) for one, other in pairs)


def check_family(ranks, folder, seed, *, count=10):
    """Tokens are those of plain generation, and log-probabilities those of one rank with the same steps."""
    rng = random.Random(seed)
    prompts, outputs = plain(folder, seed, count, 16)
    requests, config, at_once = (
        requests_of(prompts, outputs, logprobs=1, prompt_logprobs=0),
        drawn_config(rng, prompts),
        3,
    )
    with checked_collectives() as checked:
        core = ranks.core(folder, config)
        ours = run_all(core, requests, at_once=at_once)
        assert checked.num_checked
    core.close()
    alone = make_core(folder, config)
    theirs = run_all(alone, requests, at_once=at_once)
    assert not [one.last.failure for one in ours if one.last.failure]
    assert [one.token_ids for one in ours] == outputs, config
    assert [one.token_ids for one in theirs] == outputs
    assert furthest(ours, theirs) < LOGPROB_BOUND


@pytest.mark.parametrize(
    "shape", [pytest.param(one, id=one.name, marks=[SLOW] * (one not in ALWAYS)) for one in FAMILIES]
)
def test_tokens_of_every_family_are_those_of_one_rank(ranks, tmp_path, shape):
    check_family(ranks, make_checkpoint(tmp_path / "checkpoint", shape), seed=len(shape.name))


@pytest.mark.slow
def test_sums_that_the_next_norm_computes_give_the_tokens_of_one_rank(ranks, tmp_path):
    """Those of few tokens; prompts are longer. Features of images are added between a sum and its norm (deepstack)."""
    with gathered_peers.used():
        check_family(ranks, make_checkpoint(tmp_path / "checkpoint", OTHER_SHAPES[4]), seed=5)


def mixed_round(ranks, tmp_path, family, seeds, num_requests):
    checkpoint = make_checkpoint(tmp_path / family, mixed_requests.FAMILIES[family])
    adapters = write_adapters(checkpoint, tmp_path / f"{family}-adapters", merges=False, **mixed_requests.ADAPTERS)
    report = mixed_requests.Report()
    with Engine.load(checkpoint, device="cpu", dtype="fp32", config=mixed_requests.ALONE, adapters=adapters) as alone:
        for seed in seeds:
            with ranks.engines():
                report.add(mixed_requests.run_round(checkpoint, adapters, alone, seed=seed, num_requests=num_requests))
    assert not report.differences, report.differences[:3]
    return report.events


@pytest.mark.slow
def test_grammars_adapters_penalties_and_cancelled_streams_in_one_batch_give_the_results_of_one_rank(ranks, tmp_path):
    events = mixed_round(ranks, tmp_path, "qwen3_vl", [3], 28)
    assert all(events[name] for name in ("with a grammar", "with an adapter", "with penalties", "left")), events


@pytest.mark.parametrize(
    ("preset", "is_exact"), [("W4A16", True), pytest.param("FP8", True, marks=SLOW), ("W8A8", False)]
)
def test_quantized_folders_give_the_tokens_of_one_rank(ranks, tmp_path, preset, is_exact):
    """The scales of W8A8's inputs are dynamic: of the largest channel of all ranks, so that they are the same."""
    from model.compressed import write_quantized  # the tests on a GPU import this module where its package is not

    source = make_checkpoint(tmp_path / "source", SHAPES[1])

    def smaller_groups(weights):
        if weights.group_size:
            weights.group_size = 32

    with patch("torch.distributed.is_initialized", lambda: False):  # the package would use these ranks
        folder = write_quantized(source, tmp_path / "quantized", preset, change=smaller_groups)
    prompts, outputs = plain(source, 5, 6, 12)
    requests, config = requests_of(prompts, outputs, logprobs=0), drawn_config(random.Random(0), prompts)
    core = ranks.core(folder, config)
    ours = run_all(core, requests)
    core.close()
    theirs = run_all(make_core(folder, config), requests)
    assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
    assert furthest(ours, theirs) < (LOGPROB_BOUND if is_exact else ROUNDED_BOUND)


# ------------------------------------------------------------------ mistakes in the division are noticed


def swapped_parts(monkeypatch):
    gather = RankExchange._all_gather
    monkeypatch.setattr(RankExchange, "_all_gather", lambda self, x: gather(self, x)[::-1])


def one_sum_less(monkeypatch):
    leave = RankExchange.leave

    def forgetful(self, x_TD):
        kept = x_TD.clone()
        total = leave(self, x_TD)
        return kept if len(self.done) == 4 else total

    monkeypatch.setattr(RankExchange, "leave", forgetful)


def tokens_not_sent(monkeypatch):
    broadcast = RankExchange.broadcast
    monkeypatch.setattr(RankExchange, "broadcast", lambda self, tokens: broadcast(self, torch.zeros_like(tokens)))


def features_of_other_tokens(monkeypatch):
    own = DividedEncoder._own_features
    monkeypatch.setattr(DividedEncoder, "_own_features", lambda self: own(self).roll(1, 0))


@pytest.mark.parametrize(
    "mistake",
    [
        swapped_parts,
        one_sum_less,
        pytest.param(tokens_not_sent, marks=SLOW),
        pytest.param(features_of_other_tokens, marks=SLOW),
    ],
)
def test_a_mistake_of_one_rank_changes_tokens_or_log_probabilities(ranks, folder, monkeypatch, mistake):
    prompts, outputs = plain(folder, 2, 8, 12)
    requests, config = (
        requests_of(prompts, outputs, logprobs=0, prompt_logprobs=0),
        drawn_config(random.Random(1), prompts),
    )
    theirs = run_all(make_core(folder, config), requests)
    with monkeypatch.context() as patched:
        mistake(patched)
        core = ranks.core(folder, config)
        ours = run_all(core, requests)
        core.close()
    assert [one.token_ids for one in ours] != outputs or furthest(ours, theirs) > 100 * LOGPROB_BOUND


# ------------------------------------------------------------------ failures


CONFIG = EngineConfig(
    num_pages=200, page_size=8, max_length=550, max_requests=12, max_step_tokens=96, encoder_cache_tokens=512
)


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("inputs", marks=SLOW), "layer", pytest.param("late layer", marks=SLOW),
        pytest.param("start of a pass", marks=SLOW), "pass", "register",
    ],
)  # fmt: skip
def test_a_request_that_fails_on_one_rank_alone_fails_and_the_others_get_their_tokens(ranks, folder, place):
    prompts, outputs = plain(folder, 1, 12, 12)
    requests, doomed = [], f"doomed-{place}-1"
    # Doomed images are largest or second largest in their pass, so that rank 1 encodes one of them.
    with_images = [index for index, prompt in enumerate(prompts) if len(prompt.images) > 1]
    for number, (prompt, tokens) in enumerate(zip(prompts, outputs, strict=True)):
        name = doomed if number == with_images[0] else str(number)
        if name == doomed:
            images = tuple(
                dataclasses.replace(one, span=dataclasses.replace(one.span, key=b"doomed" + one.span.key))
                for one in prompt.images
            )
            prompt = dataclasses.replace(prompt, images=images)
        requests.append((request_of(name, prompt, SamplingParams(max_tokens=len(tokens))), prompt))
    core = ranks.core(folder, CONFIG)
    found = run_all(core, requests, at_once=3)
    for (request, _), one, tokens in zip(requests, found, outputs, strict=True):
        if request.id == doomed:
            assert one.last.finish_reason == "failed"
            assert "bad" not in one.last.failure.message
        else:
            assert one.token_ids == tokens, request.id
    assert core.statistics.finished["failed"] == 1
    assert core.scheduler.is_idle_clean()
    core.close()


def test_a_request_that_fails_before_a_norm_computes_its_sum_fails_alone(ranks, folder):
    with gathered_peers.used():
        test_a_request_that_fails_on_one_rank_alone_fails_and_the_others_get_their_tokens(ranks, folder, "late layer")


def test_a_request_that_fails_on_the_leader_alone_fails_and_the_others_get_their_tokens(ranks, folder, monkeypatch):
    prompts, outputs = plain(folder, 1, 12, 12)
    requests = requests_of(prompts, outputs)
    core = ranks.core(folder, CONFIG)
    builder = core._runner.forward_pass._builder
    fill = builder.fill

    def failing(out, num_decode, decode, prefill, inputs):
        if any(chunk.request_id == "3" and chunk.end > len(prompts[3].token_ids) for chunk in [*decode, *prefill]):
            raise RuntimeError("bad inputs")
        fill(out, num_decode, decode, prefill, inputs)

    monkeypatch.setattr(builder, "fill", failing)
    found = run_all(core, requests, at_once=3)
    assert [one.token_ids for number, one in enumerate(found) if number != 3] == [
        tokens for number, tokens in enumerate(outputs) if number != 3
    ]
    assert len(outputs[3]) == 1 or found[3].last.finish_reason == "failed"
    core.close()


def test_a_checkpoint_that_cannot_be_loaded_is_refused_and_the_next_one_is_loaded(ranks, folder):
    with pytest.raises(ConfigError, match="max_length is 10000000"):
        ranks.core(folder, dataclasses.replace(CONFIG, max_length=10_000_000))


# ------------------------------------------------------------------ addresses


def listening(pids):
    """(address in hexadecimal, port) of every TCP socket on which these processes listen."""
    inodes = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes |= set(re.findall(r"socket:\[(\d+)\]", str(file.readlink())))
            except OSError:
                continue
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(tuple(fields[1].split(":")))
    return found


def test_ranks_listen_on_the_loopback_interface_alone(ranks):
    addresses = {address for address, _ in listening([os.getpid(), *ranks.pids])}
    assert addresses <= {"0100007F"}


# ------------------------------------------------------------------ decisions


def test_images_are_divided_so_that_no_rank_has_more_than_the_others_and_one_image():
    rng = random.Random(0)
    for _ in range(200):
        patches = [rng.randint(1, 4000) for _ in range(rng.randint(1, 12))]
        size = rng.randint(2, 8)
        shares = divide(patches, size)
        assert sorted(image for share in shares for image in share) == list(range(len(patches)))
        totals = [sum(patches[image] for image in share) for share in shares]
        assert max(totals) - min(totals) <= max(patches)


def test_more_ranks_than_gpus_are_refused():
    if torch.cuda.is_available():
        with pytest.raises(ConfigError, match="GPUs are visible"):
            rank_devices("cuda", torch.cuda.device_count() + 1)
    assert rank_devices("cpu", 3) == ["cpu"] * 3


def test_one_engine_on_one_rank_starts_no_followers(folder):
    with Engine.load(folder, device="cpu", config=dataclasses.replace(CONFIG, num_workers=0)) as engine:
        assert type(core_of(engine)._runner).__name__ == "Runner"
