"""Sampling from 151936 logits per request, as CUDA-graph replay, compared with torch's operations and FlashInfer."""

from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor

from bench.kernels.timing import Row, Work, failed, gpu_ms, graph_ms, main, row
from saccade.kernels import launch
from saccade.kernels.sampler import sample

VOCAB = 151936
KINDS = {
    "greedy": (0.0, VOCAB, 1.0, 0.0),
    "temperature": (0.7, VOCAB, 1.0, 0.0),
    "top-k 20, top-p 0.8": (0.7, 20, 0.8, 0.0),
    "top-p 0.95": (1.0, VOCAB, 0.95, 0.0),
    "min-p 0.05": (1.0, VOCAB, 1.0, 0.05),
}


def logits_like_a_model(num_requests: int) -> Tensor:
    """A few likely tokens above a broad floor."""
    logits = torch.randn(num_requests, VOCAB, device="cuda") * 2.5
    logits.scatter_(
        1, torch.randint(VOCAB, (num_requests, 20), device="cuda"), 12 + 4 * torch.rand(num_requests, 20).cuda()
    )
    return logits.bfloat16()


def ours(logits: Tensor, kind: str) -> Callable[[], object]:
    """One call of `sample`, all requests alike."""
    temperature, top_k, top_p, min_p = KINDS[kind]
    count = len(logits)
    parameters = (
        torch.full((count,), temperature, device="cuda"),
        torch.full((count,), top_k, dtype=torch.int32, device="cuda"),
        torch.full((count,), top_p, device="cuda"),
        torch.full((count,), min_p, device="cuda"),
        torch.arange(count, device="cuda"),
        torch.arange(count, device="cuda"),
    )
    return lambda: sample(logits, *parameters)


def plain(logits: Tensor, kind: str) -> Callable[[], object]:
    """Sort, mask, softmax, multinomial."""
    temperature, top_k, top_p, min_p = KINDS[kind]
    if temperature == 0:
        return lambda: logits.argmax(1)

    def run() -> Tensor:
        values, order = (logits.float() / temperature).sort(1, descending=True)
        p = values.softmax(1)
        p = p.where(torch.arange(VOCAB, device="cuda") < top_k, 0)
        p = p.where(p.cumsum(1) - p < top_p * p.sum(1, keepdim=True), 0)
        p = p.where(p >= min_p * p[:, :1], 0)
        return order.gather(1, torch.multinomial(p, 1))

    return run


def flashinfer_sampling(logits: Tensor, kind: str) -> Callable[[], object]:
    """FlashInfer's rejection samplers, softmax included."""
    import flashinfer

    temperature, top_k, top_p, min_p = KINDS[kind]
    sampling = flashinfer.sampling
    if temperature == 0:
        raise ValueError("no greedy sampler")

    def run() -> Tensor:
        p = (logits.float() / temperature).softmax(1)
        if min_p:
            return sampling.min_p_sampling_from_probs(p, min_p)
        if top_k < VOCAB:
            return sampling.top_k_top_p_sampling_from_probs(p, top_k, top_p)
        return sampling.top_p_sampling_from_probs(p, top_p) if top_p < 1 else sampling.sampling_from_probs(p)

    return run


def rows() -> Iterator[Row]:
    """Bytes are one reading of the logits."""
    paths = {"triton": (ours, graph_ms), "torch": (plain, gpu_ms), "flashinfer": (flashinfer_sampling, gpu_ms)}
    for num_requests in (1, 16, 256):
        logits = logits_like_a_model(num_requests)
        for kind, (path, (make, clock)) in product(KINDS, paths.items()):
            op, shape = f"sample {kind}", f"{num_requests} x {VOCAB}"
            try:
                with launch.forced("triton"):
                    yield row(op, shape, path, clock(make(logits, kind)), Work(logits.nbytes))
            except (RuntimeError, ValueError, TypeError, ImportError) as error:
                yield failed(op, shape, path, error)


if __name__ == "__main__":
    main(rows)
