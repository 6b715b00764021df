"""Schemes: which projection is stored how."""

import pytest

from saccade.compress.calibration import CalibrationConfig
from saccade.compress.scheme import BUILT_IN, Rule, Scheme, check_scheme, load_scheme
from saccade.errors import ConfigError
from saccade.model.quantization import fitting_group

NAMES = [
    "vision.patch_embed.proj",
    *(f"vision.blocks.{i}.mlp.down_proj" for i in range(4)),
    "projector.mlp.0",
    *(f"language.layers.{i}.{name}" for i in range(4) for name in ("self_attn.q_proj", "mlp.down_proj")),
    "head",
]


def test_the_first_rule_that_matches_decides():
    scheme = Scheme(
        rules=(
            Rule(part="language", layers="0-1,3", projections=("down_proj",), form="int8"),
            Rule(part="language", layers="2", form="keep"),
            Rule(part="language", form="int4"),
        )
    )
    forms = {name: rule.form if (rule := scheme.rule(name)) else "keep" for name in NAMES}
    assert [forms[f"language.layers.{i}.mlp.down_proj"] for i in range(4)] == ["int8", "int8", "keep", "int8"]
    assert [forms[f"language.layers.{i}.self_attn.q_proj"] for i in range(4)] == ["int4", "int4", "keep", "int4"]
    assert forms["vision.blocks.0.mlp.down_proj"] == forms["projector.mlp.0"] == forms["head"] == "keep"


@pytest.mark.parametrize(
    ("num_inputs", "wanted", "group"),
    [
        (2048, 128, 128),
        (3420, 128, None),
        (4304, 128, None),
        (1152, 128, 128),
        (1280, 512, 128),
        (96, 128, 32),
        (320, 64, 64),
        (80, 16, 16),
    ],
)
def test_a_group_size_divides_the_inputs_or_is_replaced(num_inputs, wanted, group):
    assert fitting_group(num_inputs, wanted) == group


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_schemes_compress_tower_and_decoder(name):
    scheme = load_scheme(name)
    check_scheme(scheme, NAMES)
    assert scheme.rule("vision.blocks.0.mlp.down_proj").form == scheme.rule("language.layers.3.mlp.down_proj").form
    assert scheme.rule("head") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[rules]]\npart = "language"\nform = "int3"', "form"),
        ('[[rules]]\npart = "language"\nform = "fp8"\nmethod = "gptq"', "does not go with form 'fp8'"),
        ('[[rules]]\npart = "language"\nform = "int8"\ngroup_size = 64', "group_size is for form int4"),
        ('[[rules]]\npart = "language"\nform = "int8"\nsymmetric = false', "int8 with static = true"),
        (
            '[[rules]]\npart = "language"\nform = "fp8"\nstatic = true\nsymmetric = false',
            "form 'fp8' has no zero point",
        ),
        ('[[rules]]\npart = "language"\nform = "int4"\ngroup_size = 100', "16, 32, 64 or a multiple of 128"),
        ('[[rules]]\npart = "language"\nform = "int4"\nlayers = "3-1"', "write ranges and numbers"),
        ('[[rules]]\npart = "language"\nform = "int4"\nlayers = "0-99999999999"', "no model has so many blocks"),
        ('[[rules]]\npart = "decoder"\nform = "int4"', "part"),
        ('[[rules]]\npart = "language"\nform = "int4"\nlayer = "3"', "layers"),
        ("rules = []", "everything would be kept"),
    ],
)
def test_a_file_with_a_mistake_is_refused(text, message, tmp_path):
    (tmp_path / "scheme.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_scheme(tmp_path / "scheme.toml")


def test_a_rule_that_matches_nothing_is_refused():
    for rule in (
        Rule(part="language", layers="7", form="int4"),
        Rule(part="vision", projections=("fc9",), form="int8"),
    ):
        expected = r"matches no projection. Correct it: its blocks are 0-\d+, its projections \w+"
        with pytest.raises(ConfigError, match=expected) as caught:
            check_scheme(Scheme(rules=(rule,)), NAMES)
        assert "Rule(" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"with layers 2-9 goes beyond the model\. Correct it: its blocks are 0-3"):
        check_scheme(Scheme(rules=(Rule(part="language", layers="2-9", form="int4"),)), NAMES)


@pytest.mark.parametrize("group_size", [0, -128, 7, 100])
def test_a_group_size_that_no_kernel_has_is_refused(group_size):
    with pytest.raises(ConfigError, match=f"group_size is {group_size}; it may be 16, 32, 64 or a multiple of 128"):
        BUILT_IN["w4a16-rtn"].with_group_size(group_size)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_of_image_tokens_is_a_finite_number(weight):
    with pytest.raises(ConfigError, match="give a number from 0, or balanced"):
        CalibrationConfig(shards=("shards",), image_weight=weight)


def test_an_unknown_scheme_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="w4a16-gptq"):
        load_scheme("int5")
