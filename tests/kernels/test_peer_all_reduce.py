"""The ranks are virtual: all of them are in this process, and their buffers in its memory.

Under the interpreter they run one after another, so what the later ones would have written is there before.
"""

import pytest
import torch
from closeness import BOUNDS, assert_close, perturbed

from saccade.kernels.peer_all_reduce import (
    MAX_RANKS,
    PeerBuffers,
    peer_all_reduce,
    peer_all_reduce_norm,
    peer_all_reduce_norm_reference,
    peer_all_reduce_reference,
)

EPS = 1e-6
COLUMNS, ROWS = 128, 8
FEW_POLLS = 2**20
"""About a second on a GPU."""


class VirtualRanks:
    """Buffers of ranks that are all in this process."""

    def __init__(self, size, dtype, device, *, columns=COLUMNS, rows=ROWS, max_polls=FEW_POLLS):
        num_bytes = PeerBuffers.num_bytes(rows, columns, dtype)
        self.memory = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(size)]
        addresses = torch.tensor([memory.data_ptr() for memory in self.memory], device=device)
        self.flags = [memory[: rows * MAX_RANKS * 8].view(torch.int64).view(rows, MAX_RANKS) for memory in self.memory]
        self.slots = [memory[rows * MAX_RANKS * 8 :].view(dtype).view(2, rows, columns) for memory in self.memory]
        self.buffers = [
            PeerBuffers(
                rank=rank, addresses=addresses, uses=torch.zeros(rows + 1, dtype=torch.int64, device=device),
                max_columns=columns, dtype=dtype, max_polls=max_polls,
            )
            for rank in range(size)
        ]  # fmt: skip
        self.device, self.streams = device, []
        if device == "cuda":
            self.streams = [torch.cuda.Stream() for _ in range(size)]
            for stream in self.streams:
                with torch.cuda.stream(stream):
                    torch.zeros(1, device=device)  # allocates for later: allocations can wait for running kernels

    def write(self, rank, part):
        """What a rank that is not run yet will write into its own slots and into everybody's flags."""
        for row, values in enumerate(part):
            use = int(self.buffers[rank].uses[row]) + 1
            self.slots[rank][use % 2, row, : len(values)] = values
            for flags in self.flags:
                flags[row, rank] = use

    def run(self, function, parts, *others):
        """The results of all ranks, one after another."""
        if self.streams:
            pytest.skip("on a GPU, where ranks wait for each other, virtual ones run as CUDA graphs")
        for rank, part in enumerate(parts):
            self.write(rank, part)
        return [function(part, *others, one) for part, one in zip(parts, self.buffers, strict=True)]


@pytest.fixture
def ranks(device):
    """Makes virtual ranks for one function and dtype.

    On a GPU its kernel is loaded before: a first launch could wait for the kernels that wait for it.
    """

    def make(size, function, dtype, *, width=48, **settings):
        if device == "cuda":
            [lone, *_] = VirtualRanks(size, dtype, device, **settings, max_polls=0).buffers
            part = torch.zeros(1, width, dtype=dtype, device=device)
            others = (part, part[0], EPS) if function is peer_all_reduce_norm else ()
            function(part, *others, lone)
        return VirtualRanks(size, dtype, device, **settings)

    return make


def drawn(size, num_rows, dim, device, dtype):
    return [torch.randn(num_rows, dim, device=device).to(dtype) for _ in range(size)]


@pytest.mark.parametrize("size", [2, 3])
def test_the_sum_is_the_reference_on_every_rank_with_the_same_bits(size, ranks, device, dtype):
    together = ranks(size, peer_all_reduce, dtype)
    for num_rows in (1, 7, 2, 8, 0):
        parts = drawn(size, num_rows, 48, device, dtype)
        expected = peer_all_reduce_reference(parts)
        for found in together.run(peer_all_reduce, [part.clone() for part in parts]):
            assert torch.equal(found, expected)
    assert [int(use) for use in together.buffers[0].uses] == [4, 3, 2, 2, 2, 2, 2, 1, 0]


def test_the_norm_of_the_sum_and_the_residual_is_the_reference(ranks, device, dtype):
    size = 2
    together, weight = ranks(size, peer_all_reduce_norm, dtype), torch.randn(48, device=device).to(dtype)
    for num_rows in (1, 7, 3):
        parts, [residual] = drawn(size, num_rows, 48, device, dtype), drawn(1, num_rows, 48, device, dtype)
        expected, total = peer_all_reduce_norm_reference(parts, residual, weight, EPS)
        for y, found in together.run(peer_all_reduce_norm, parts, residual, weight, EPS):
            assert torch.equal(found, total)
            assert_close("y", y, expected, BOUNDS[dtype])
            with pytest.raises(AssertionError, match="y"):
                assert_close("y", perturbed(y, BOUNDS[dtype]), expected, BOUNDS[dtype])


def test_strided_rows_are_summed_in_place_whatever_their_width(ranks, device, one_dtype):
    widths = (48, 7) if device == "cuda" else (48, 128, 7, 100)
    *_, together = [ranks(2, peer_all_reduce, one_dtype, width=width) for width in widths]
    for width in widths:
        wide = drawn(2, 5, 2 * width, device, one_dtype)
        expected = peer_all_reduce_reference([part[:, :width].clone() for part in wide])
        others = [part[:, width:].clone() for part in wide]
        for found, whole, other in zip(
            together.run(peer_all_reduce, [part[:, :width] for part in wide]), wide, others, strict=True
        ):
            assert torch.equal(found, expected)
            assert torch.equal(whole[:, width:], other), "in place, and nothing else"


def test_each_rank_adds_up_the_slots_of_the_same_use(device, dtype):
    """The slot of the counted use is read, also after another row was used more often."""
    if device == "cuda":
        pytest.skip("it plants what the other rank writes")
    together = VirtualRanks(2, dtype, device)
    first, second = drawn(2, 4, 48, device, dtype)
    for rows in (4, 1, 2, 4):
        together.slots[1].fill_(float("nan"))
        together.write(1, second[:rows])
        found = peer_all_reduce(first[:rows].clone(), together.buffers[0])
        together.buffers[1].uses[:rows] += 1
        assert torch.equal(found, peer_all_reduce_reference([first[:rows], second[:rows]]))
        for row in range(rows):
            slot = together.slots[0][int(together.buffers[0].uses[row]) % 2, row, :48]
            assert torch.equal(slot, first[row]), "what the other rank will read"
        assert torch.equal(together.flags[1][:, 0], together.buffers[0].uses[:-1]), "what it waits for"


def test_a_rank_that_never_comes_makes_all_later_sums_nan(device, dtype):
    together, parts = VirtualRanks(2, dtype, device, max_polls=50), drawn(2, 3, 48, device, dtype)
    assert peer_all_reduce(parts[0].clone(), together.buffers[0]).isnan().all()
    for _ in range(2):
        together.write(1, parts[1])
        together.buffers[1].uses[:3] += 1
    normed, total = peer_all_reduce_norm(parts[0], parts[0], parts[0][0], EPS, together.buffers[0])
    assert normed.isnan().all()
    assert total.isnan().all()


def test_what_does_not_fit_the_buffers_is_refused(device, one_dtype):
    [one, _] = VirtualRanks(2, one_dtype, device).buffers
    for shape in ((ROWS + 1, 48), (1, COLUMNS + 1)):
        x = torch.zeros(shape, device=device, dtype=one_dtype)
        assert not one.fit(x)
        with pytest.raises(ValueError, match="does not fit buffers of 8 x 128"):
            peer_all_reduce(x, one)
    assert not one.fit(torch.zeros(1, 48, device=device, dtype=torch.float64))
    x = torch.zeros(2, 48, device=device, dtype=one_dtype)
    with pytest.raises(ValueError, match="residual"):
        peer_all_reduce_norm(x, x[:1], x[0], EPS, one)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_rows", "dim"), [(1, 8192), (16, 8192), (64, 2048), (5, 3584)])
def test_real_shapes_in_cuda_graphs(num_rows, dim, ranks, device, one_dtype):
    """Each rank replays a graph of several sums that follow each other, on a stream of its own."""
    size, num_calls, dtype = 4, 8, one_dtype
    together = ranks(size, peer_all_reduce_norm, dtype, columns=-(-dim // 128) * 128, rows=num_rows, width=dim)
    parts, weight = drawn(size, num_rows, dim, device, dtype), torch.randn(dim, device=device).to(dtype)
    [residual] = drawn(1, num_rows, dim, device, dtype)
    graphs, results = [], []
    for part, one, stream in zip(parts, together.buffers, together.streams, strict=True):
        graph, total, own = torch.cuda.CUDAGraph(), residual, []
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(num_calls):
                y, total = peer_all_reduce_norm(part, total, weight, EPS, one)
                own += [y, total]
        graphs.append(graph)
        results.append(own)
    for _ in range(3):
        for graph, stream in zip(graphs, together.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        total = residual
        for number in range(num_calls):
            expected, total = peer_all_reduce_norm_reference(parts, total, weight, EPS)
            for own in results:
                assert torch.equal(own[2 * number + 1], total)
                assert_close("y", own[2 * number], expected, BOUNDS[dtype])
