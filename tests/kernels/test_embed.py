import pytest
import torch

from saccade.kernels import launch
from saccade.kernels.embed import ImageRows, StepTokens, embed, embed_reference

NUM_SLOTS, VOCABULARY = 5, 60


def step(num_tokens, device):
    """Tokens that the host knows, and tokens that are the last of a slot."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (num_tokens,), generator=generator, dtype=torch.int32)
    slots = torch.randint(NUM_SLOTS + 1, (num_tokens,), generator=generator, dtype=torch.int32)
    last = torch.randint(VOCABULARY, (NUM_SLOTS + 1,), generator=generator)
    return StepTokens(ids.to(device), slots.to(device), last.to(device))


def rows(num_tokens, width, device, dtype):
    """Features of about half of the tokens; the last row belongs to no token."""
    features = torch.randn(12, width).to(device, dtype)
    return ImageRows(features, torch.randint(12, (num_tokens,), dtype=torch.int32).clamp(min=4).to(device))


def by_hand(tokens, embedding, images):
    out = []
    for t, (token, slot) in enumerate(zip(tokens.token_ids.tolist(), tokens.last_token_slots.tolist(), strict=True)):
        row = embedding[tokens.last_tokens[slot] if slot < NUM_SLOTS else token]
        if images is not None and images.rows[t] < len(images.features) - 1:
            row = images.features[images.rows[t], : embedding.shape[1]]
        out.append(row)
    return torch.stack(out)


@pytest.mark.parametrize("width", [16, 100, 2048, 2304])
@pytest.mark.parametrize("with_images", [False, True], ids=["text", "images"])
@pytest.mark.parametrize("feature_sets", [1, 3])
def test_rows_are_embeddings_of_known_and_last_tokens_or_features(width, with_images, feature_sets, device, dtype):
    tokens, embedding = step(23, device), torch.randn(VOCABULARY, width).to(device, dtype)
    images = rows(23, feature_sets * width, device, dtype) if with_images else None
    expected = by_hand(tokens, embedding, images)
    with launch.forced("triton"):
        assert torch.equal(embed(tokens, embedding, images), expected)
    assert torch.equal(embed_reference(tokens, embedding, images), expected)


def test_features_of_another_dtype_take_the_reference(device):
    tokens, embedding = step(7, device), torch.randn(VOCABULARY, 16).to(device)
    images = rows(7, 16, device, torch.float64)
    assert embed(tokens, embedding, images).dtype == torch.float64


def test_no_token_has_no_row(device):
    embedding = torch.randn(VOCABULARY, 16).to(device)
    with launch.forced("triton"):
        assert embed(step(0, device), embedding).shape == (0, 16)
