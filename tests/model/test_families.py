"""What every family has: sizes for `saccade init` that load in `transformers`, names, adapters, and a memory plan."""

import dataclasses

import pytest
import torch
from model.hugging_face import CLASSES, CONVERSATIONS, Oracle

from saccade.errors import ConfigError
from saccade.model import load_model, save_model
from saccade.model.families import DEFAULT_FAMILY, VISION_LANGUAGE, named_size, named_sizes
from saccade.model.initialize import initialize_random
from saccade.model.linear import checkpoint_shapes
from saccade.model.vlm import VLM
from saccade.processor import Processor

pytestmark = pytest.mark.filterwarnings("ignore:.*pad_token_id.*")


@pytest.fixture(scope="module", params=VISION_LANGUAGE.values(), ids=VISION_LANGUAGE)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def made(family, tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "checkpoint"
    initialize_random(folder, family.sizes["tiny"], dtype=torch.float32)
    return folder


def test_a_checkpoint_of_random_weights_loads_in_transformers_with_the_same_logits(family, made):
    _, report = CLASSES[family.model_type][1].from_pretrained(made, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    messages, oracle = CONVERSATIONS["multi-image"], Oracle(made)
    with torch.no_grad():
        ours = load_model(made, device="cpu")(Processor.load(made)([messages]))
    assert torch.allclose(ours, oracle.logits(oracle.inputs(messages)), atol=1e-4)


def test_what_is_saved_is_what_was_loaded(made, tmp_path):
    model = load_model(made, device="cpu")
    save_model(model, tmp_path / "copy", like=made)
    again = load_model(tmp_path / "copy", device="cpu")
    assert again.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_names_on_disk_lead_back_to_the_parameters(family):
    for config in family.sizes.values():
        with torch.device("meta"):
            names = checkpoint_shapes(VLM(dataclasses.replace(config, vision=config.vision.with_few_layers())))
        for name in names:
            assert family.name_in_model(family.name_on_disk(name)) == name
            assert family.name_in_model(family.name_in_transformers(name)) == name


def test_sizes_are_named_by_family_and_those_of_the_default_family_without(family):
    for name, config in family.sizes.items():
        assert named_size(name if family is DEFAULT_FAMILY else f"{family.model_type}/{name}") == config
        assert config.family == family.model_type
    assert len(named_sizes()) == sum(len(one.sizes) for one in VISION_LANGUAGE.values())
    with pytest.raises(ConfigError, match="unknown size 'none'"):
        named_size("none")


def test_config_json_says_the_sizes_back(family, tmp_path):
    for config in family.sizes.values():
        token_ids = {name: number for number, name in enumerate(family.vision_tokens)}
        assert family.parse_config(family.describe_config(config, token_ids)) == config
