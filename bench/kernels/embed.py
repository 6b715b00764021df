"""Input rows of decode and prefill steps, width 2048, as CUDA-graph replay; `--tune` sweeps columns per program."""

from collections.abc import Iterator

import torch

from bench.kernels.timing import Row, Work, compare, graph_ms, main, sweep, through
from saccade.kernels import embed as module
from saccade.kernels.embed import ImageRows, StepTokens, embed, embed_reference

WIDTH, VOCAB, NUM_SLOTS, NUM_FEATURES = 2048, 151936, 256, 8192


def inputs(num_tokens: int, *, has_images: bool) -> tuple[StepTokens, torch.Tensor, ImageRows | None]:
    """Decode tokens are the last of their slots; of prefill tokens half have features."""
    device = torch.device("cuda")
    tokens = StepTokens(
        torch.randint(VOCAB, (num_tokens,), dtype=torch.int32, device=device),
        torch.full((num_tokens,), NUM_SLOTS if has_images else 0, dtype=torch.int32, device=device),
        torch.randint(VOCAB, (NUM_SLOTS + 1,), device=device),
    )
    embedding = torch.randn(VOCAB, WIDTH, device=device).bfloat16()
    if not has_images:
        return tokens, embedding, None
    rows = torch.randint(2 * NUM_FEATURES, (num_tokens,), dtype=torch.int32, device=device).clamp(max=NUM_FEATURES)
    return tokens, embedding, ImageRows(torch.randn(NUM_FEATURES + 1, WIDTH, device=device).bfloat16(), rows)


def rows() -> Iterator[Row]:
    """1 and 256 decode tokens, 4096 prefill tokens."""
    paths = {"triton": through("triton", embed), "torch": embed_reference}
    for num_tokens in (1, 256, 4096):
        made = inputs(num_tokens, has_images=num_tokens > NUM_SLOTS)
        work = Work(num_tokens * WIDTH * 4)
        yield from compare("embed", f"{num_tokens} x {WIDTH}", paths, made, work, clock=graph_ms)


def tune() -> Iterator[Row]:
    """Columns of a program, for 4096 tokens."""
    settings = [{"_BLOCK": block} for block in (512, 1024, 2048)]
    made, work = inputs(4096, has_images=True), Work(4096 * WIDTH * 4)
    yield from sweep("embed", f"4096 x {WIDTH}", through("triton", embed), vars(module), settings, made, work)


if __name__ == "__main__":
    main(rows, tune)
