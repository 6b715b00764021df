"""Configuration: strict decoding with errors that name the key, overrides, and a file that loads back equal."""

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from saccade.config import decode, encode, load_config, override_config, write_config
from saccade.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Data:
    """A section with a renamed key."""

    max_seq_len: int = 1
    RENAMED: ClassVar[dict[str, str]] = {"token_budget": "max_seq_len"}


@dataclass(frozen=True, kw_only=True)
class Renamed:
    """A section in it, itself renamed."""

    data: Data = Data()
    validation: Data = Data()
    RENAMED: ClassVar[dict[str, str]] = {"probe": "validation"}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"data": {"token_budget": 3}}, "config: data.token_budget is now called max_seq_len. Rename the key"),
        ({"probe": {"max_seq_len": 3}}, "config: probe is now called validation. Rename the key"),
    ],
)
def test_a_renamed_key_is_refused_with_its_new_name(tree, message):
    with pytest.raises(ConfigError) as refused:
        decode(Renamed, tree)
    assert str(refused.value) == message


repeatable = settings(deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """A section with defaults."""

    lr: float = 1e-3
    betas: tuple[float, ...] = (0.9, 0.95)
    kind: Literal["adamw", "muon"] = "adamw"
    clip: float | None = None

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ConfigError(f"lr is {self.lr}; use a positive number")


@dataclass(frozen=True, kw_only=True)
class Source:
    """One of several."""

    path: Path
    weight: float = 1.0
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything a config may hold."""

    name: str
    steps: int
    resume: bool = False
    optimizer: Optimizer = field(default_factory=Optimizer)
    sources: tuple[Source, ...] = ()
    scales: dict[str, float] = field(default_factory=dict)
    stages: dict[str, Optimizer] = field(default_factory=dict)
    notes: Path | None = None
    validation: Optimizer | None = None
    level: Literal[1, 2, 3] = 1
    limit: int | str = 0


MINIMAL = {"name": "a", "steps": 3}


def written(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


# ------------------------------------------------------------------ decoding


def test_every_kind_of_value_is_decoded(tmp_path):
    path = written(
        tmp_path,
        """
        name = "été"
        steps = 10
        resume = true
        notes = "notes/a.md"
        level = 2
        limit = "none"
        scales = { a = 1, "b c" = 0.5 }
        [optimizer]
        lr = 1
        betas = [0.5, 1, 0.25]
        kind = "muon"
        clip = 2
        [[sources]]
        path = "data/a"
        [[sources]]
        path = "/data/b"
        weight = 2.5
        labels = { x = "y" }
        [stages.first]
        lr = 2
        [validation]
        """,
    )
    run = load_config(Run, path)
    assert run == Run(
        name="été",
        steps=10,
        resume=True,
        notes=Path("notes/a.md"),
        level=2,
        limit="none",
        scales={"a": 1.0, "b c": 0.5},
        optimizer=Optimizer(lr=1.0, betas=(0.5, 1.0, 0.25), kind="muon", clip=2.0),
        sources=(Source(path=Path("data/a")), Source(path=Path("/data/b"), weight=2.5, labels={"x": "y"})),
        stages={"first": Optimizer(lr=2.0)},
        validation=Optimizer(),
    )
    assert type(run.optimizer.lr) is float, "an int is accepted for a float and becomes one"
    assert type(run.scales["a"]) is float
    assert isinstance(run.sources, tuple)


def test_defaults_fill_what_is_not_said(tmp_path):
    assert load_config(Run, written(tmp_path, 'name = "a"\nsteps = 3\n')) == Run(name="a", steps=3)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (MINIMAL | {"stpes": 4}, "run: unknown key stpes. Did you mean steps?"),
        (MINIMAL | {"optimizer": {"lrr": 1}}, "run: unknown key optimizer.lrr. Did you mean lr?"),
        (MINIMAL | {"optimiser": {}}, "run: unknown key optimiser. Did you mean optimizer?"),
        (MINIMAL | {"zzz": 1}, "run: unknown key zzz. Known keys: level, limit, name"),
        (MINIMAL | {"validation": {"betta": 1}}, "run: unknown key validation.betta. Did you mean betas?"),
        (
            MINIMAL | {"sources": [{"path": "a"}, {"path": "b", "wieght": 1}]},
            "unknown key sources[1].wieght. Did you mean weight?",
        ),
        (MINIMAL | {"stages": {"one": {"lrr": 1}}}, "unknown key stages.one.lrr. Did you mean lr?"),
        ({}, "run: missing name, steps. Add what is missing"),
        ({"name": "a"}, "run: missing steps"),
        (MINIMAL | {"sources": [{}]}, "run: missing sources[0].path"),
        (MINIMAL | {"steps": "3"}, "run: steps = '3' has type str, expected int"),
        (MINIMAL | {"steps": 3.0}, "run: steps = 3.0 has type float, expected int"),
        (MINIMAL | {"steps": True}, "run: steps = True has type bool, expected int"),
        (MINIMAL | {"resume": 1}, "run: resume = 1 has type int, expected bool"),
        (MINIMAL | {"resume": "true"}, "run: resume = 'true' has type str, expected bool"),
        (MINIMAL | {"name": 5}, "run: name = 5 has type int, expected str"),
        (MINIMAL | {"name": None}, "run: name = None has type NoneType, expected str"),
        (MINIMAL | {"optimizer": {"lr": "1"}}, "run: optimizer.lr = '1' has type str, expected float"),
        (MINIMAL | {"optimizer": {"lr": True}}, "run: optimizer.lr = True has type bool, expected float"),
        (MINIMAL | {"optimizer": {"clip": "x"}}, "run: optimizer.clip = 'x' has type str, expected float"),
        (
            MINIMAL | {"optimizer": {"betas": 0.9}},
            "run: optimizer.betas = 0.9 has type float, expected a list of float",
        ),
        (MINIMAL | {"optimizer": {"betas": [0.9, "x"]}}, "run: optimizer.betas[1] = 'x' has type str, expected float"),
        (MINIMAL | {"optimizer": {"kind": "sgd"}}, "run: optimizer.kind = 'sgd' is not one of 'adamw', 'muon'"),
        (MINIMAL | {"level": 4}, "run: level = 4 is not one of 1, 2, 3"),
        (MINIMAL | {"optimizer": 5}, "run: optimizer must be a section with keys, not 5"),
        (MINIMAL | {"optimizer": [{}]}, "run: optimizer must be a section with keys, not [{}]"),
        ([], "run: the file must be a section with keys, not []"),
        (MINIMAL | {"scales": {"a": "b"}}, "run: scales.a = 'b' has type str, expected float"),
        (MINIMAL | {"scales": [1]}, "run: scales = [1] has type list, expected a table of float"),
        (MINIMAL | {"sources": 3}, "run: sources = 3 has type int, expected a list of sections"),
        (MINIMAL | {"stages": 3}, "run: stages = 3 has type int, expected a table of sections"),
        (MINIMAL | {"notes": 5}, "run: notes = 5 has type int, expected Path"),
        (MINIMAL | {"limit": 1.5}, "run: limit = 1.5 has type float"),
    ],
    ids=lambda value: value[:50] if isinstance(value, str) else "",
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_its_path(tree, words):
    with pytest.raises(ConfigError) as caught:
        decode(Run, tree, "run")
    assert words in str(caught.value)


@pytest.mark.parametrize("value", [True, 1.0])
def test_a_literal_number_is_that_number_and_nothing_that_compares_equal(value):
    with pytest.raises(ConfigError, match="level"):
        decode(Run, MINIMAL | {"level": value})


def test_a_check_of_the_section_gets_its_place():
    with pytest.raises(ConfigError) as caught:
        decode(Run, MINIMAL | {"optimizer": {"lr": -1.0}}, "run.toml")
    assert str(caught.value) == "run.toml: optimizer: lr is -1.0; use a positive number"
    with pytest.raises(ConfigError) as caught:
        decode(Run, MINIMAL | {"stages": {"two": {"lr": 0}}}, "run.toml")
    assert str(caught.value) == "run.toml: stages.two: lr is 0.0; use a positive number"
    with pytest.raises(ConfigError) as caught:
        decode(Optimizer, {"lr": -1.0}, "run.toml")
    assert str(caught.value) == "run.toml: lr is -1.0; use a positive number"


# ------------------------------------------------------------------ files


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.toml: no such file"):
        load_config(Run, tmp_path / "nothing.toml")


def test_a_folder_instead_of_a_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=tmp_path.name):
        load_config(Run, tmp_path)


@pytest.mark.parametrize("text", ["name = ", "[a", "name = 'a'\nname = 'b'", "a = 1\n[a]\n", "{}"])
def test_invalid_toml_is_refused_with_its_line(tmp_path, text):
    with pytest.raises(ConfigError, match=r"run\.toml: not valid TOML: .*(at line \d|at end)"):
        load_config(Run, written(tmp_path, text))


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "run.toml").write_bytes(b"name = '\xff'")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(Run, tmp_path / "run.toml")


def test_a_typo_in_the_file_names_the_file_and_the_nearest_key(tmp_path):
    path = written(tmp_path, 'name = "a"\nsteps = 1\n[optimizer]\nlearning = 1\nbetsa = [1]\n')
    with pytest.raises(ConfigError, match=r"run\.toml: unknown key optimizer\.(learning|betsa)"):
        load_config(Run, path)


# ------------------------------------------------------------------ overrides


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.lr=3e-4", {"optimizer": Optimizer(lr=3e-4)}),
        ("optimizer.lr = 3", {"optimizer": Optimizer(lr=3.0)}),
        ("optimizer.kind=muon", {"optimizer": Optimizer(kind="muon")}),
        ('optimizer.kind="muon"', {"optimizer": Optimizer(kind="muon")}),
        ("optimizer.betas=[0.1, 0.2]", {"optimizer": Optimizer(betas=(0.1, 0.2))}),
        ("resume=true", {"resume": True}),
        ("name=two words", {"name": "two words"}),
        ("name=a=b", {"name": "a=b"}),
        ("name=", {"name": ""}),
        ("notes=runs/a", {"notes": Path("runs/a")}),
        ("scales.new=2", {"scales": {"new": 2.0}}),
        ("validation.lr=2", {"validation": Optimizer(lr=2.0)}),
        ('sources=[{path = "a"}]', {"sources": (Source(path=Path("a")),)}),
    ],
)
def test_an_override_is_read_as_toml_and_else_as_text(tmp_path, override, expected):
    base = Run(name="a", steps=3)
    wanted = dataclasses.replace(base, **expected)
    assert load_config(Run, written(tmp_path, 'name = "a"\nsteps = 3\n'), [override]) == wanted
    assert override_config(base, [override], "base") == wanted


def test_later_overrides_win():
    assert override_config(Run(name="a", steps=3), ["steps=4", "steps=5"], "base").steps == 5


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("steps", "--set 'steps': write it as section.key=value"),
        ("=5", "--set '=5': write it as section.key=value"),
        ("optimizer.=5", "write it as section.key=value"),
        (".lr=5", "write it as section.key=value"),
        ("", "write it as section.key=value"),
        ("steps.more=5", "--set 'steps.more=5': steps is a value, not a section"),
        ("optimizer.lrr=5", "unknown key optimizer.lrr. Did you mean lr?"),
        ("optimzer.lr=5", "unknown key optimzer. Did you mean optimizer?"),
        ("steps=many", "steps = 'many' has type str, expected int"),
        ("name=123", "name = 123 has type int, expected str"),
        ("steps=2024-01-01", "steps = datetime.date(2024, 1, 1) has type date, expected int"),
        ("optimizer.lr=-1", "optimizer: lr is -1.0"),
    ],
)
def test_an_override_that_does_not_fit_is_refused(override, words):
    with pytest.raises(ConfigError) as caught:
        override_config(Run(name="a", steps=3), [override], "base")
    assert words in str(caught.value)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A list whose items have names."""

    stages: tuple["Stage", ...]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One of them."""

    name: str
    optimizer: Optimizer = field(default_factory=Optimizer)


TWO_STAGES = Recipe(stages=(Stage(name="align"), Stage(name="learn")))


@pytest.mark.parametrize("override", ["stages.1.optimizer.lr=2", "stages.learn.optimizer.lr=2"])
def test_an_override_finds_an_item_of_a_list_by_number_or_name(override):
    changed = override_config(TWO_STAGES, [override], "base")
    assert changed == Recipe(stages=(Stage(name="align"), Stage(name="learn", optimizer=Optimizer(lr=2.0))))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stages.2.name=x", "--set 'stages.2.name=x': no item 2 in a list of 2. Use its number from 0, or its name"),
        ("stages.tune.optimizer.lr=2", "no item tune in a list of 2"),
        ("stages.0=5", "--set 'stages.0=5': 0 is an item of a list; name the key of it that is to change"),
        ("stages.0.nmae=x", "unknown key stages[0].nmae. Did you mean name?"),
    ],
)
def test_an_override_of_a_list_that_does_not_fit_is_refused(override, words):
    with pytest.raises(ConfigError) as caught:
        override_config(TWO_STAGES, [override], "base")
    assert words in str(caught.value)


def test_an_override_holds_one_value_and_nothing_behind_it():
    with pytest.raises(ConfigError):
        override_config(Run(name="a", steps=3), ["steps=1\nname='b'"], "base")


def test_an_override_leaves_the_config_it_came_from(tmp_path):
    base = Run(name="a", steps=3, scales={"x": 1.0})
    override_config(base, ["scales.x=2", "optimizer.lr=5"], "base")
    assert base == Run(name="a", steps=3, scales={"x": 1.0})


# ------------------------------------------------------------------ writing

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
finite = st.floats(allow_nan=False)
positive = st.floats(min_value=0, exclude_min=True, allow_nan=False)
# pathlib joins and shortens, so only paths that stay as they are written
paths = (
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=6),
        min_size=1,
        max_size=3,
    )
    .map("/".join)
    .map(Path)
)
optimizers = st.builds(
    Optimizer,
    lr=positive,
    betas=st.lists(finite, max_size=3).map(tuple),
    kind=st.sampled_from(["adamw", "muon"]),
    clip=st.none() | finite,
)
sources = st.builds(Source, path=paths, weight=finite, labels=st.dictionaries(texts, texts, max_size=3))
runs = st.builds(
    Run,
    name=texts,
    steps=st.integers(-(2**63), 2**63 - 1),
    resume=st.booleans(),
    optimizer=optimizers,
    sources=st.lists(sources, max_size=2).map(tuple),
    scales=st.dictionaries(texts, finite, max_size=3),
    stages=st.dictionaries(texts, optimizers, max_size=2),
    notes=st.none() | paths,
    validation=st.none() | optimizers,
    level=st.sampled_from([1, 2, 3]),
    limit=st.integers(-9, 9) | texts,
)


@settings(repeatable, max_examples=200)
@given(run=runs)
def test_a_written_config_loads_back_equal(tmp_path_factory, run):
    path = tmp_path_factory.getbasetemp() / "written.toml"
    write_config(run, path)
    assert load_config(Run, path) == run


def test_numbers_without_an_end_are_written_and_read(tmp_path):
    run = Run(name="a", steps=1, scales={"up": math.inf, "down": -math.inf, "none": math.nan})
    write_config(run, tmp_path / "run.toml")
    scales = load_config(Run, tmp_path / "run.toml").scales
    assert (scales["up"], scales["down"]) == (math.inf, -math.inf)
    assert math.isnan(scales["none"])


@pytest.mark.parametrize("key", ["a b", "a.b", "é", "", '"', "a=b", "#", "\n", "[x]"])
def test_any_key_of_a_table_is_written_so_that_it_is_read_again(tmp_path, key):
    run = Run(name="a", steps=1, scales={key: 1.0}, stages={key: Optimizer()})
    write_config(run, tmp_path / "run.toml")
    assert load_config(Run, tmp_path / "run.toml") == run


def test_every_character_is_written_so_that_it_is_read_again(tmp_path):
    run = Run(name="".join(chr(code) for code in [*range(0x250), 0x2028, 0xFEFF, 0xFFFF, 0x1F642]), steps=1)
    write_config(run, tmp_path / "run.toml")
    assert load_config(Run, tmp_path / "run.toml") == run


@dataclass(frozen=True, kw_only=True)
class Switched:
    """A field that can be switched off, on unless said otherwise."""

    window: int | None = 5


def test_a_none_that_a_file_could_not_say_is_refused(tmp_path):
    """TOML has no null: leaving the field out would bring its default back."""
    with pytest.raises(ConfigError, match="window cannot be None"):
        write_config(Switched(window=None), tmp_path / "run.toml")
    with pytest.raises(ConfigError, match="window cannot be None"):
        override_config(Switched(window=None), [], "base")


def test_encoding_leaves_out_what_is_none_and_turns_the_rest_plain():
    run = Run(name="a", steps=1, sources=(Source(path=Path("x/y")),), notes=Path("n"))
    encoded = encode(run)
    assert "validation" not in encoded
    assert "clip" not in encoded["optimizer"]
    assert encoded["notes"] == "n"
    assert encoded["sources"] == [{"path": "x/y", "weight": 1.0, "labels": {}}]
