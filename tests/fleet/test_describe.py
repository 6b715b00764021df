"""Requests as routing sees them: equal content has equal keys, whatever the process that computes them."""

from saccade.engine.request import ImageSpan, Request
from saccade.engine.sampling_params import SamplingParams
from saccade.fleet.describe import ExpectedLength, prefix_keys, routed
from saccade.fleet.replicas import PREFIX_BLOCK

TOKENS = list(range(3 * PREFIX_BLOCK + 5))


def image(start, key=b"picture"):
    return ImageSpan(key=key, start=start, num_tokens=16, num_patches=64)


def test_prompts_share_the_keys_of_the_blocks_that_they_share():
    keys = prefix_keys(TOKENS, (), b"")
    assert len(keys) == 3
    longer = prefix_keys([*TOKENS, *TOKENS], (), b"")
    assert longer[:3] == keys
    changed = TOKENS.copy()
    changed[PREFIX_BLOCK] = 99_999
    assert prefix_keys(changed, (), b"")[0] == keys[0]
    assert set(prefix_keys(changed, (), b"")[1:]).isdisjoint(keys)


def test_images_and_tenants_are_part_of_the_keys():
    keys = prefix_keys(TOKENS, (image(300),), b"")
    assert keys[0] == prefix_keys(TOKENS, (), b"")[0]
    for other in (image(300, b"other"), image(301)):
        assert prefix_keys(TOKENS, (other,), b"")[1] != keys[1]
    assert prefix_keys(TOKENS, (image(300),), b"tenant")[0] != keys[0]


def test_a_continued_request_is_longer_and_expects_fewer_tokens():
    whole = Request(id="a", token_ids=TOKENS, images=(image(3),), sampling=SamplingParams(max_tokens=40))
    continued = Request(
        id="b", token_ids=TOKENS, images=(image(3),), sampling=SamplingParams(max_tokens=40), output_ids=(1,) * 30
    )
    expected = ExpectedLength()
    first, second = routed(whole, "may", expected), routed(continued, "may", expected)
    assert (first.output_tokens, second.output_tokens) == (40, 10)
    assert second.prompt_tokens == first.prompt_tokens + 30
    assert second.images == first.images
    assert second.prefix[: len(first.prefix)] == first.prefix


def test_the_expected_length_follows_the_answers():
    expected = ExpectedLength()
    for _ in range(200):
        expected.observe(32)
    assert abs(expected.of(Request(id="a", token_ids=(1,), sampling=SamplingParams(max_tokens=1000))) - 32) <= 1
