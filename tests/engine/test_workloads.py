"""Workloads of the benchmarks: prompts that every family accepts, and arrivals that a seed determines."""

import numpy as np
import pytest

from bench.open_loop import BURST, Requests, bursts, poisson
from saccade.model.families import VISION_LANGUAGE
from saccade.model.initialize import initialize_random
from saccade.processor import Processor


@pytest.mark.parametrize("family", VISION_LANGUAGE)
def test_prompts_have_one_placeholder_per_image_in_every_family(family, tmp_path):
    initialize_random(tmp_path / "tiny", VISION_LANGUAGE[family].sizes["tiny"])
    requests, image_id = Requests(tmp_path / "tiny"), Processor.load(tmp_path / "tiny").rules.image_id
    for arrival in poisson(32, 1, seed=0):
        ids, images = requests.make(arrival)
        assert ids.count(image_id) == len(images) == len(arrival.images)
        assert [image.size[::-1] for image in images] == list(arrival.images)


def test_bursts_are_the_requests_of_poisson_arrivals_at_the_same_mean_rate():
    drawn = bursts(36, 400, seed=0)
    assert drawn == bursts(36, 400, seed=0)
    assert drawn != bursts(36, 400, seed=1)
    assert [one._replace(arrival_s=0) for one in drawn] == [one._replace(arrival_s=0) for one in poisson(36, 400, 0)]
    moments, sizes = np.unique([one.arrival_s for one in drawn], return_counts=True)
    assert sizes.mean() == pytest.approx(BURST, rel=0.05)
    assert len(drawn) / moments[-1] == pytest.approx(36, rel=0.05)
