"""LoRA adapters served with the base model: an adapter that is served equals the merged one in any batch."""

import json
import os
import shutil
import signal
import threading
import time
from dataclasses import replace

import pytest
import torch
from engine.making_adapters import write_adapters
from engine.test_engine_equals_generate import EagerGraphs
from engine.tiny import core_of
from model.hugging_face import SHAPES, make_checkpoint, picture
from safetensors.torch import load_file, save_file

from saccade.engine import Engine, RequestOptions, SamplingParams
from saccade.engine.config import EngineConfig
from saccade.engine.core.adapters import AdapterTable
from saccade.engine.device import loading
from saccade.errors import RequestError
from saccade.model import adapters as model_adapters

CONFIG = EngineConfig(num_workers=0, num_pages=200, page_size=8, max_length=400, max_step_tokens=48, max_adapters=4)
GREEDY = SamplingParams(max_tokens=8, logprobs=1, ignore_eos=True)
CONVERSATIONS = [
    [{"role": "user", "content": "Hello, who are you?"}],
    [{"role": "user", "content": "Tell me a long story about ships, and the sea, and what lives in it."}],
    [
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": picture(90, 60)}, {"type": "text", "text": "What?"}],
        }
    ],
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("base") / "model", SHAPES[1])


@pytest.fixture(scope="module")
def folders(base, tmp_path_factory):
    return write_adapters(base, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def engine(base, folders):
    with Engine.load(base, device="cpu", config=CONFIG, adapters=folders) as engine:
        assert engine.adapters.keys() == folders.keys()
        yield engine


@pytest.fixture(scope="module")
def expected(base, folders):
    """Completions of engines of the merged checkpoints, by adapter."""
    found = {}
    for name, folder in {None: base, **{n: f.with_name(f"{n}-merged") for n, f in folders.items()}}.items():
        with Engine.load(folder, device="cpu", config=CONFIG) as merged:
            found[name] = merged.generate(CONVERSATIONS, GREEDY)
    return found


def submit(engine, conversation, adapter, sampling=GREEDY):
    """A thread that generates one completion, which `result()` returns."""
    done = []
    thread = threading.Thread(
        target=lambda: done.extend(engine.generate([conversation], sampling, options=RequestOptions(adapter=adapter)))
    )
    thread.start()
    return lambda: (thread.join(), done[0])[1]


def wait_until_running(engine):
    deadline = time.monotonic() + 300
    while engine.statistics.num_running == 0:
        assert time.monotonic() < deadline, "it does not start"


def assert_equal(completion, expected):
    assert completion.failure is None, completion.failure
    assert completion.token_ids == expected.token_ids
    actual, wanted = ([one.logprob for one in c.logprobs] for c in (completion, expected))
    assert torch.allclose(torch.tensor(actual), torch.tensor(wanted), atol=1e-4)


def assert_one_batch_equals(engine, expected):
    """All conversations with all adapters and the base model at once."""
    running = [
        (name, number, submit(engine, conversation, name))
        for number, conversation in enumerate(CONVERSATIONS)
        for name in expected
    ]
    for name, number, result in running:
        assert_equal(result(), expected[name][number])


def test_three_adapters_and_the_base_in_one_batch_are_the_merged_models(engine, expected):
    assert len({tuple(completions[0].token_ids) for completions in expected.values()}) == 4, "they do differ"
    for _ in ("without a cached prefix", "with one"):
        assert_one_batch_equals(engine, expected)


def test_steps_padded_to_a_captured_size_have_the_same_adapters(base, folders, expected):
    with Engine.load(base, device="cpu", config=CONFIG, adapters=folders) as engine:
        runner = core_of(engine)._runner
        runner.forward_pass.graphs = EagerGraphs(runner)
        running = [(name, submit(engine, CONVERSATIONS[0], name)) for name in expected]
        for name, result in running:
            assert_equal(result(), expected[name][0])


def test_matrices_stored_below_plain_weights_give_the_merged_models(base, folders, expected, monkeypatch):
    """Weights are not prepacked, as on a GPU: one product computes the outputs and A x of all adapters."""
    monkeypatch.setattr(loading, "prepack_storage", lambda _: None)
    monkeypatch.setattr(model_adapters, "_MAX_LOW_SHARE", 100)
    with Engine.load(base, device="cpu", config=CONFIG, adapters=folders) as engine:
        bank = core_of(engine)._runner.adapters
        for stack, _ in bank._stacks.values():
            assert stack.low is not None
            stack.add = None  # the prepacked form computes A x separately
        assert_one_batch_equals(engine, expected)
        engine.remove_adapter("mlp")
        engine.add_adapter("again", folders["attention"])
        assert_equal(
            engine.generate(CONVERSATIONS[0], GREEDY, options=RequestOptions(adapter="again"))[0],
            expected["attention"][0],
        )


def test_adapters_are_served_by_a_core_in_a_process_of_its_own(base, folders, expected):
    config = replace(CONFIG, core_process=True)
    with Engine.load(base, device="cpu", config=config, adapters={"mlp": folders["mlp"]}) as engine:
        engine.add_adapter("attention", folders["attention"])
        with pytest.raises(RequestError, match="already"):
            engine.add_adapter("attention", folders["attention"])
        for name in (None, "mlp", "attention"):
            assert_equal(
                engine.generate(CONVERSATIONS[0], GREEDY, options=RequestOptions(adapter=name))[0], expected[name][0]
            )
        os.kill(engine.core_pid, signal.SIGKILL)
        assert engine.wait_until_stopped(300)
        engine.restart()
        assert engine.adapters.keys() == {"mlp", "attention"}
        assert_equal(
            engine.generate(CONVERSATIONS[0], GREEDY, options=RequestOptions(adapter="mlp"))[0], expected["mlp"][0]
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_cuda_graphs_follow_the_adapters_of_their_requests(base, folders, expected, dtype):
    """In fp32 the log-probabilities are those of the merged models; in bf16 every request gets an answer."""
    with Engine.load(base, device="cuda", dtype=dtype, config=CONFIG, adapters=folders) as engine:
        for _ in range(2):
            running = [(name, submit(engine, CONVERSATIONS[1], name)) for name in expected]
            for name, result in running:
                completion, wanted = result(), expected[name][1]
                assert completion.failure is None
                if dtype == "fp32":
                    difference = completion.logprobs[0].logprob - wanted.logprobs[0].logprob
                    assert abs(difference) < 1e-3, name


def test_cached_prefixes_are_never_shared_between_adapters(base, folders):
    with Engine.load(base, device="cpu", config=CONFIG, adapters=folders) as engine:
        for name in (None, *folders):
            first, second = (
                engine.generate(CONVERSATIONS[1], GREEDY, options=RequestOptions(adapter=name))[0] for _ in range(2)
            )
            assert first.num_cached_tokens == 0, name
            assert second.num_cached_tokens > 0, name


def test_preempted_requests_keep_their_adapters(base, folders, expected):
    config = EngineConfig(
        num_workers=0, num_pages=80, page_size=2, max_length=120, max_step_tokens=48, prefix_cache=False
    )
    with Engine.load(base, device="cpu", config=config, adapters=folders) as engine:
        running = [(name, submit(engine, CONVERSATIONS[0], name)) for name in expected for _ in range(2)]
        for name, result in running:
            assert_equal(result(), expected[name][0])
        assert engine.statistics.num_preemptions > 0


def test_an_adapter_is_removed_and_another_added_while_requests_run(base, folders, expected):
    config = EngineConfig(num_workers=0, num_pages=200, page_size=8, max_length=400, max_adapters=2, max_draft_tokens=0)
    long = SamplingParams(max_tokens=200, ignore_eos=True)
    with Engine.load(base, device="cpu", config=config, adapters={"a": folders["mlp"]}) as engine:
        alone = engine.generate(CONVERSATIONS[0], long, options=RequestOptions(adapter="a"))[0]
        running = submit(engine, CONVERSATIONS[0], "a", long)
        wait_until_running(engine)
        engine.remove_adapter("a")
        with pytest.raises(RequestError, match="'a' is not loaded"):
            engine.remove_adapter("a")
        refused = engine.generate(CONVERSATIONS[0], GREEDY, options=RequestOptions(adapter="a"))[0]
        assert refused.failure.kind == "invalid_request"
        assert "adapter 'a' is not loaded" in refused.failure.message
        engine.add_adapter("a", folders["attention"])  # the name again, another slot
        assert_equal(
            engine.generate(CONVERSATIONS[0], GREEDY, options=RequestOptions(adapter="a"))[0], expected["attention"][0]
        )
        assert running().token_ids == alone.token_ids, "a running request keeps the adapter it began with"
        engine.add_adapter("b", folders["everything"])  # into the slot that is free now
        assert_equal(
            engine.generate(CONVERSATIONS[0], GREEDY, options=RequestOptions(adapter="b"))[0], expected["everything"][0]
        )
        assert engine.adapters.keys() == {"a", "b"}
        with pytest.raises(RequestError, match="all 2 slots"):
            engine.add_adapter("c", folders["mlp"])


def test_cancelled_requests_give_their_adapters_back(base, folders, expected):
    config = EngineConfig(num_workers=0, num_pages=200, page_size=8, max_length=400, max_draft_tokens=0)
    with Engine.load(base, device="cpu", config=config, adapters={"a": folders["mlp"]}) as engine:
        prompt = engine.preprocess(CONVERSATIONS[0])
        ended = threading.Event()
        request_id = engine.submit(
            prompt, SamplingParams(max_tokens=300, ignore_eos=True),
            lambda delta: ended.set() if delta.completion else None, options=RequestOptions(adapter="a"),
        )  # fmt: skip
        wait_until_running(engine)
        engine.remove_adapter("a")
        engine.cancel(request_id)
        assert ended.wait(300)
        engine.add_adapter("b", folders["everything"])  # the only slot
        assert_equal(
            engine.generate(CONVERSATIONS[0], GREEDY, options=RequestOptions(adapter="b"))[0], expected["everything"][0]
        )


def broken(folders, tmp_path, **changes):
    folder = tmp_path / "broken"
    shutil.copytree(folders["mlp"], folder)
    config = json.loads((folder / "adapter_config.json").read_text()) | changes
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"rank_pattern": {"q_proj": 3}}, "rank_pattern"),
        ({"peft_type": "IA3"}, "only LORA"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"r": 5}, r"expected \[5, 192\]"),
        ({"r": "x"}, "both must be numbers"),
    ],
)
def test_a_broken_adapter_is_refused_alone(engine, folders, tmp_path, expected, changes, message):
    with pytest.raises(RequestError, match=message):
        engine.add_adapter("broken", broken(folders, tmp_path, **changes))
    assert "broken" not in engine.adapters
    assert_equal(
        engine.generate(CONVERSATIONS[0], GREEDY, options=RequestOptions(adapter="mlp"))[0], expected["mlp"][0]
    )


def test_weights_that_do_not_fit_are_refused(engine, folders, tmp_path):
    folder = broken(folders, tmp_path)
    tensors = load_file(folder / "adapter_model.safetensors")
    first = next(iter(tensors))

    def refused(changed, message):
        save_file(changed, folder / "adapter_model.safetensors")
        with pytest.raises(RequestError, match=message):
            engine.add_adapter("broken", folder)

    refused(tensors | {first: torch.full_like(tensors[first], float("nan"))}, "NaN")
    refused({name: tensor for name, tensor in tensors.items() if name != first}, "None")
    renamed = {name.replace("language_model.layers.1", "visual.blocks.1"): t for name, t in tensors.items()}
    refused(renamed, "the vision tower")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(RequestError, match="Only safetensors"):
        engine.add_adapter("broken", folder)
    with pytest.raises(RequestError, match=r"no adapter_config\.json"):
        engine.add_adapter("broken", tmp_path)


def test_a_broken_adapter_at_the_start_leaves_the_others(base, folders, tmp_path, expected):
    adapters = {"broken": broken(folders, tmp_path, use_dora=True), "mlp": folders["mlp"]}
    with Engine.load(base, device="cpu", config=CONFIG, adapters=adapters) as engine:
        assert engine.adapters.keys() == {"mlp"}
        assert "use_dora" in engine.refused_adapters["broken"]
        assert_equal(
            engine.generate(CONVERSATIONS[0], GREEDY, options=RequestOptions(adapter="mlp"))[0], expected["mlp"][0]
        )


def test_an_engine_without_slots_says_how_to_get_some(base, folders):
    config = EngineConfig(num_workers=0, num_pages=50, page_size=8, max_length=100)
    with Engine.load(base, device="cpu", config=config) as engine:
        with pytest.raises(RequestError, match="max_adapters"):
            engine.add_adapter("mlp", folders["mlp"])
        assert (
            engine.generate(CONVERSATIONS[0], GREEDY, options=RequestOptions(adapter="x"))[0].failure.kind
            == "invalid_request"
        )


def test_slots_are_never_lost_or_owned_twice():
    table = AdapterTable(2)
    first, second = table.reserve("a"), table.reserve("b")
    table.activate(first, b"1")
    table.acquire(first)
    table.remove(first)
    table.remove(second)
    table.check()
    third = table.reserve("a")
    assert third.slot == second.slot
    with pytest.raises(RequestError, match="1 of them until their last requests end"):
        table.reserve("d")
    table.release(first)
    table.check()
    assert table.reserve("d").slot == first.slot
    assert first.salt(b"x") != first.salt(b"y")
