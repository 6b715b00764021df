import os

import pytest
import torch
import torch.distributed as dist
from closeness import assert_close, perturbed

from saccade.kernels import launch
from saccade.kernels import linear_cross_entropy as module
from saccade.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference

# Logits are rounded to the dtype before the softmax, their gradients again before the matmuls.
BOUNDS = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
IGNORED = -100


def inputs(num_tokens, hidden_size, vocab_size, device, dtype, ignored=0.3):
    """hidden, weight (logits of size about 2) and labels, of which a share is ignored."""
    hidden = torch.randn(num_tokens, hidden_size, device=device).to(dtype)
    weight = (torch.randn(vocab_size, hidden_size, device=device) * 2 * hidden_size**-0.5).to(dtype)
    labels = torch.randint(vocab_size, (num_tokens,), device=device)
    labels[torch.rand(num_tokens, device=device) < ignored] = IGNORED
    return hidden, weight, labels


def loss_and_gradients(run, hidden, weight, labels, **options):
    """Loss, d hidden, d weight, for an upstream gradient that is not one."""
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    loss = run(hidden, weight, labels, count=3.0, **options)
    return loss, *torch.autograd.grad(loss, (hidden, weight), torch.tensor(0.5, device=loss.device))


def expect_equal(hidden, weight, labels, dtype, **options):
    with launch.forced("triton"):
        actual = loss_and_gradients(linear_cross_entropy, hidden, weight, labels, **options)
    expected = loss_and_gradients(linear_cross_entropy_reference, hidden.float(), weight.float(), labels, **options)
    assert actual[0].dtype == torch.float32
    for name, a, e in zip(("loss", "d_hidden", "d_weight"), actual, expected, strict=True):
        assert_close(name, a, e, BOUNDS[dtype])
    return actual, expected


@pytest.mark.parametrize("shape", [(1, 16, 7), (7, 32, 129), (129, 16, 304)], ids=str)
def test_loss_and_gradients_equal_the_reference(shape, device, dtype):
    hidden, weight, labels = inputs(*shape, device, dtype)
    labels[0] = 3
    expect_equal(hidden, weight, labels, dtype)


@pytest.mark.parametrize("rows_at_once", [1, 8, 1000])
def test_chunks_of_any_size_give_the_same(rows_at_once, device, dtype):
    hidden, weight, labels = inputs(27, 16, 136, device, dtype)
    expect_equal(hidden, weight, labels, dtype, max_bytes=rows_at_once * 136 * hidden.element_size())


def test_a_row_longer_than_a_block_is_summed_over_blocks(device, dtype, monkeypatch):
    monkeypatch.setattr(module, "_LOSS_BLOCK", 64)
    expect_equal(*inputs(5, 16, 301, device, dtype), dtype)


@pytest.mark.parametrize("options", [{"softcap": 3.0}, {"z_loss": 0.1}, {"softcap": 3.0, "z_loss": 0.1}], ids=str)
def test_softcap_and_z_loss_equal_the_reference(options, device, dtype):
    expect_equal(*inputs(20, 16, 129, device, dtype), dtype, **options)


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "z_loss": 0.1}], ids=str)
def test_smoothed_labels_equal_the_reference_and_torch(options, device, dtype, monkeypatch):
    monkeypatch.setattr(module, "_LOSS_BLOCK", 64)
    hidden, weight, labels = inputs(20, 16, 129, device, dtype)
    (_, expected) = expect_equal(hidden, weight, labels, dtype, label_smoothing=0.1, **options)
    if not options:
        logits = hidden.float() @ weight.float().T
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.1)
        assert expected[0].item() == pytest.approx(loss.item() / 3.0, rel=1e-5)


def test_ignored_tokens_never_enter_the_matmul(device, dtype):
    """NaN in a row that is not learned does not reach the loss or other gradients."""
    hidden, weight, labels = inputs(33, 16, 64, device, dtype, ignored=0.5)
    hidden[labels == IGNORED] = float("nan")
    (_, d_hidden, _), _ = expect_equal(hidden, weight, labels, dtype)
    assert (d_hidden[labels == IGNORED] == 0).all()


def test_no_learned_token_gives_zero(device, dtype):
    hidden, weight, labels = inputs(7, 16, 64, device, dtype, ignored=1.0)
    for hint in (None, 0, 3, 7):
        with launch.forced("triton"):
            results = loss_and_gradients(linear_cross_entropy, hidden, weight, labels, num_labels=hint)
        assert all((x == 0).all() for x in results), hint


@pytest.mark.parametrize("more", [0, 5, 100])
def test_a_promised_count_may_be_too_high(more, device, dtype):
    hidden, weight, labels = inputs(20, 16, 64, device, dtype)
    num_labels = int((labels != IGNORED).sum())
    expect_equal(hidden, weight, labels, dtype, num_labels=num_labels + more)


def test_a_promised_count_that_is_too_low_gives_nan(device):
    hidden, weight, labels = inputs(45, 16, 64, device, torch.float32)
    with launch.forced("triton"):
        assert linear_cross_entropy(hidden, weight, labels, count=1.0, num_labels=3).isnan()


def test_count_may_be_a_tensor(device):
    hidden, weight, labels = inputs(9, 16, 64, device, torch.float32)
    with launch.forced("triton"):
        by_number = linear_cross_entropy(hidden, weight, labels, count=7.0)
        by_tensor = linear_cross_entropy(hidden, weight, labels, count=torch.tensor(7, device=device))
    assert by_number == by_tensor


def test_strided_inputs_give_the_same(device, dtype):
    hidden, weight, labels = inputs(20, 16, 64, device, dtype)
    strided = torch.cat([hidden, hidden], dim=1)[:, :16]
    transposed = weight.T.contiguous().T
    assert not strided.is_contiguous()
    assert not transposed.is_contiguous()
    expect_equal(strided, transposed, labels, dtype)


def test_only_what_needs_a_gradient_gets_one(device):
    hidden, weight, labels = inputs(9, 16, 64, device, torch.float32)
    with launch.forced("triton"):
        hidden.requires_grad_()
        linear_cross_entropy(hidden, weight, labels, count=1.0).backward()
        assert hidden.grad is not None
        with torch.no_grad():
            assert not linear_cross_entropy(hidden, weight, labels, count=1.0).requires_grad


def test_a_second_backward_is_refused(device):
    hidden, weight, labels = inputs(9, 16, 64, device, torch.float32)
    hidden.requires_grad_()
    with launch.forced("triton"):
        loss = linear_cross_entropy(hidden, weight, labels, count=1.0)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        loss.backward()


@pytest.mark.parametrize("num_rows", [0, 1, 127, 1000, 16384])
@pytest.mark.parametrize("max_bytes", [1, 10_000, 320 * 2**20])
def test_chunks_cover_every_row_within_the_budget(num_rows, max_bytes):
    chunks = list(module._chunks(num_rows, 300, max_bytes))
    assert [i for chunk in chunks for i in range(chunk.start, chunk.stop)] == list(range(num_rows))
    assert all(chunk.stop - chunk.start == 1 or (chunk.stop - chunk.start) * 300 <= max_bytes for chunk in chunks)


def test_a_result_off_by_twice_the_bound_is_refused(device, dtype):
    actual, expected = expect_equal(*inputs(20, 16, 64, device, dtype), dtype)
    for a, e in zip(actual, expected, strict=True):
        with pytest.raises(AssertionError, match="relative RMS"):
            assert_close("result", perturbed(a, BOUNDS[dtype]), e, BOUNDS[dtype])


def _paths():
    """The paths that run on CPU tensors: the kernels too, if they are interpreted."""
    return ("reference", "triton") if launch.is_interpreting() else ("reference",)


def _run_rank(rank, folder):
    """Run one of two ranks, each with a part of the vocabulary."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    saved = torch.load(f"{folder}/inputs.pt")
    start, end = ((0, 41), (41, 96))[rank]  # shards need not be equal
    options = saved["options"] | {"group": dist.group.WORLD, "vocab_start": start}
    results = {}
    for path in _paths():
        with launch.forced(path):
            results[path] = loss_and_gradients(
                linear_cross_entropy, saved["hidden"], saved["weight"][start:end], saved["labels"], **options
            )
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12 warns of a fork with threads
def test_a_sharded_vocabulary_equals_one_device(tmp_path):
    hidden, weight, labels = inputs(20, 16, 96, "cpu", torch.float32)
    options = {"z_loss": 0.1, "softcap": 4.0}
    torch.save({"hidden": hidden, "weight": weight, "labels": labels, "options": options}, tmp_path / "inputs.pt")
    method = "spawn" if torch.cuda.is_available() else "fork"  # a fork imports nothing again; CUDA does not survive it
    torch.multiprocessing.start_processes(_run_rank, args=(str(tmp_path),), nprocs=2, start_method=method)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    expected = loss_and_gradients(linear_cross_entropy_reference, hidden, weight, labels, **options)
    for path in _paths():
        for rank in ranks:
            assert_close("loss", rank[path][0], expected[0], 1e-5)
            assert_close("d_hidden", rank[path][1], expected[1], 1e-5)
        assert_close("d_weight", torch.cat([rank[path][2] for rank in ranks]), expected[2], 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("ignored", [0.0, 0.75])
def test_real_sizes_stay_within_one_gibibyte_and_close(ignored):
    hidden, weight, labels = inputs(16384, 2048, 151936, "cuda", torch.bfloat16, ignored)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    linear_cross_entropy(hidden[:256], weight, labels[:256], count=1.0)  # workspaces of the matrix library
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = linear_cross_entropy(hidden, weight, labels, count=1.0)
    loss.backward()
    assert torch.cuda.max_memory_allocated() - before <= 2**30
    rows = torch.randperm(16384, device="cuda")[:512]
    part = labels.clone().fill_(IGNORED)
    part[rows] = labels[rows]
    with launch.forced("triton"):
        actual = loss_and_gradients(linear_cross_entropy, hidden, weight, part)
    expected = loss_and_gradients(linear_cross_entropy_reference, hidden.float(), weight.float(), part)
    for name, a, e in zip(("loss", "d_hidden", "d_weight"), actual, expected, strict=True):
        assert_close(name, a, e, BOUNDS[torch.bfloat16])


@pytest.mark.gpu
def test_the_weight_gradient_of_many_chunks_stays_close():
    """The error grows with the number of chunks added in bf16, as stated."""
    hidden, weight, labels = inputs(4096, 512, 8192, "cuda", torch.bfloat16, ignored=0.0)
    expected = loss_and_gradients(linear_cross_entropy_reference, hidden.float(), weight.float(), labels)[2]
    for num_chunks in (1, 4, 32):
        with launch.forced("triton"):
            options = {"max_bytes": 4096 // num_chunks * 8192 * 2}
            actual = loss_and_gradients(linear_cross_entropy, hidden, weight, labels, **options)[2]
        assert_close(f"d_weight in {num_chunks} chunks", actual, expected, 0.005 + 0.0015 * num_chunks**0.5)


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_logits_beyond_two_to_the_31_elements_are_found():
    hidden, weight, labels = inputs(16384, 256, 151936, "cuda", torch.bfloat16)
    with launch.forced("triton"):
        whole = loss_and_gradients(linear_cross_entropy, hidden, weight, labels, max_bytes=2**40, num_labels=16384)
        chunked = loss_and_gradients(linear_cross_entropy, hidden, weight, labels)
    for name, a, e in zip(("loss", "d_hidden", "d_weight"), whole, chunked, strict=True):
        assert_close(name, a, e, BOUNDS[torch.bfloat16])
