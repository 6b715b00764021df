import numpy as np
import pytest
import torch

from saccade.kernels import launch
from saccade.kernels.token_mask import apply_token_mask, apply_token_mask_reference


def random_mask(is_allowed_NV):
    """Pack a mask as the grammar library does: bit v % 32 of word v // 32."""
    num_rows, vocab_size = is_allowed_NV.shape
    padded = np.zeros((num_rows, -(-vocab_size // 32) * 32), bool)
    padded[:, :vocab_size] = is_allowed_NV
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))


def make(num_logits, rows, vocab_size, device, dtype, share=0.3):
    logits = torch.randn(num_logits, vocab_size, device=device).to(dtype)
    is_allowed = np.random.default_rng(0).random((len(rows), vocab_size)) < share
    return logits, is_allowed, random_mask(is_allowed).to(device), torch.tensor(rows, dtype=torch.int64, device=device)


def apply_triton(*arguments):
    with launch.forced("triton"):
        apply_token_mask(*arguments)


@pytest.mark.parametrize("vocab_size", [1, 7, 32, 129, 5000])
@pytest.mark.parametrize("rows", [[], [0], [4, 1], [3, 0, 4, 2, 1]], ids=str)
def test_disallowed_tokens_of_the_named_rows_and_nothing_else_become_minus_infinity(rows, vocab_size, device, dtype):
    logits, is_allowed, mask, row_ids = make(5, rows, vocab_size, device, dtype)
    expected = logits.clone()
    for row, allowed in zip(rows, is_allowed, strict=True):
        expected[row, torch.from_numpy(~allowed).to(device)] = float("-inf")
    reference = logits.clone()
    apply_token_mask_reference(reference, mask, row_ids)
    apply_triton(logits, mask, row_ids)
    assert torch.equal(reference, expected)
    assert torch.equal(logits, expected)


def test_every_bit_of_a_word_counts_the_sign_included(device):
    for bit in range(32):
        word = 1 << bit
        mask = torch.tensor([[word - 2**32 if bit == 31 else word, 0]], dtype=torch.int32, device=device)
        logits, row_ids = torch.zeros(1, 40, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        apply_triton(logits, mask, row_ids)
        assert logits[0].isfinite().nonzero().flatten().tolist() == [bit]


def test_strided_rows_are_written_in_place(device, dtype):
    wide = torch.randn(4, 600, device=device).to(dtype)
    expected = wide.clone()
    _, _, mask, row_ids = make(4, [2, 0], 300, device, dtype)
    apply_token_mask_reference(expected[:, :300], mask, row_ids)
    apply_triton(wide[:, :300], mask, row_ids)
    assert torch.equal(wide, expected)


def test_what_does_not_fit_is_refused(device):
    logits, _, mask, rows = make(3, [0, 1], 100, device, torch.float32)
    for bad in [(mask[:, :3], rows), (mask, rows[:1]), (mask.long(), rows), (mask, rows.int()), (mask.T, rows)]:
        with pytest.raises(ValueError, match="int32 words"):
            apply_token_mask(logits, *bad)


def test_a_flipped_bit_is_noticed(device):
    logits, _, mask, row_ids = make(2, [1], 100, device, torch.float32)
    expected = logits.clone()
    apply_token_mask_reference(expected, mask, row_ids)
    mask[0, 1] ^= 1 << 5
    apply_triton(logits, mask, row_ids)
    assert (logits != expected).nonzero().tolist() == [[1, 37]]


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [151936, 151665])
def test_real_vocabularies_equal_the_reference_without_synchronisation(vocab_size, device, dtype):
    logits, _, mask, row_ids = make(256, list(range(0, 256, 4)), vocab_size, device, dtype)
    expected = logits.clone()
    apply_token_mask_reference(expected, mask, row_ids)
    torch.cuda.set_sync_debug_mode("error")
    apply_triton(logits, mask, row_ids)
    torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(logits, expected)


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_rows_beyond_two_to_the_31_elements_are_found(device):
    wide = torch.zeros(3, 2**30 + 8, dtype=torch.float16, device=device)
    _, _, mask, row_ids = make(3, [2], 1000, device, torch.float16)
    apply_triton(wide[:, :1000], mask, row_ids)
    expected = torch.zeros(3, 1000, dtype=torch.float16, device=device)
    apply_token_mask_reference(expected, mask, row_ids)
    assert torch.equal(wide[:, :1000], expected)
