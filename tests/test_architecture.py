"""Structure: import layers, the public API of each package, and documents that match the code."""

import ast
import functools
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "saccade").rglob("*.py"))


@functools.cache
def nodes_of(path):
    """All nodes of the syntax tree of a module."""
    return list(ast.walk(ast.parse(path.read_text())))


def test_imports_point_down():
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    "module",
    [
        "saccade",
        "saccade.errors",
        "saccade.config",
        "saccade.log",
        "saccade.cli",
        "saccade.model",
        "saccade.processor",
        "saccade.processor.positions",
        "saccade.processor.image",
        "saccade.engine.frontend.front_end",
        "saccade.engine.frontend.preprocessing.preprocessor",
        "saccade.data",
        "saccade.data.batch_sampler",
        "saccade.data.index",
        "saccade.train.config",
        "saccade.evaluate.report",
    ],
)
def test_importing_a_light_module_loads_no_torch(module):
    script = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0, f"{module} loads torch"


def test_policies_of_fleets_need_neither_torch_nor_ray():
    """Only `saccade.fleet.cluster` runs on a cluster; the contract about torch names every other module."""
    modules = [f"saccade.fleet.{path.stem}" for path in (ROOT / "saccade/fleet").glob("[!_]*.py")]
    contract = (ROOT / "pyproject.toml").read_text()
    assert [module for module in modules if f'"{module}"' not in contract] == []
    script = f"import sys, {', '.join(modules)}; sys.exit(bool({{'torch', 'ray'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0


def test_every_package_and_top_level_module_is_in_the_architecture_table():
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "ARCHITECTURE.md").read_text(), re.M)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    modules = [path for path in (ROOT / "saccade").iterdir() if path.suffix in ("", ".py")]
    top_level = {path.stem for path in modules if path.stem.strip("_") == path.stem}
    assert top_level <= named, f"missing in ARCHITECTURE.md: {top_level - named}"


def lazy_exports_of(package):
    """The names a package exports lazily, read from the call in its `__init__.py`."""
    for node in nodes_of(package):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "lazy_exports":
            return ast.literal_eval(node.args[1])
    return {}


PACKAGES = [path for path in MODULES if path.name == "__init__.py" and lazy_exports_of(path)]


@pytest.mark.parametrize("path", PACKAGES, ids=lambda path: path.parent.name)
def test_lazy_exports_resolve_and_match_the_imports_for_type_checkers(path):
    name = ".".join(path.parent.relative_to(ROOT).parts)
    package, exports = importlib.import_module(name), lazy_exports_of(path)
    for export in exports:
        assert callable(getattr(package, export))
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nothing_like_this'"):
        _ = package.nothing_like_this
    imports = [node for node in nodes_of(path) if isinstance(node, ast.ImportFrom)]
    typed = {alias.asname: node.module for node in imports for alias in node.names if alias.asname}
    assert typed == {export: f"{name}.{module}" for export, module in exports.items()}


def test_every_public_name_is_on_the_reference_page():
    page = (ROOT / "docs" / "reference.md").read_text().splitlines()
    for path in PACKAGES:
        name = ".".join(path.parent.relative_to(ROOT).parts)
        missing = [export for export in lazy_exports_of(path) if f"::: {name}.{export}" not in page]
        assert not missing or "." in name.removeprefix("saccade."), f"{name}: {missing}"


def test_every_command_is_in_the_readme_and_has_help():
    from typer.main import get_command

    from saccade.cli import app

    readme = (ROOT / "README.md").read_text()
    commands = dict(get_command(app).commands)
    for group in [name for name, command in commands.items() if hasattr(command, "commands")]:
        commands |= {f"{group} {name}": command for name, command in commands.pop(group).commands.items()}
    for name, command in commands.items():
        assert f"saccade {name}" in readme or f"make {name}" in readme, f"{name} is not in the README"
        assert command.help, name
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{name}: {parameter.name} has no help"


def test_every_config_field_has_a_docstring():
    """In frozen keyword-only dataclasses the line after a field says what it means."""
    for path in MODULES:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef) and any("kw_only" in ast.unparse(d) for d in node.decorator_list):
                for field, after in zip(node.body, [*node.body[1:], None], strict=True):
                    if isinstance(field, ast.AnnAssign):
                        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                        assert is_text, f"{path.name}: {node.name}.{ast.unparse(field.target)} has no docstring"


def test_every_kernel_has_a_reference_a_test_and_a_bench():
    for path in sorted((ROOT / "saccade" / "kernels").glob("*.py")):
        if path.stem.startswith("_") or path.stem == "launch":
            continue
        assert re.search(r"^(def \w+_reference\(|\w+_reference = )", path.read_text(), re.M), (
            f"{path.stem} has no reference"
        )
        assert (ROOT / "tests" / "kernels" / f"test_{path.stem}.py").exists(), f"{path.stem} has no test"
        assert (ROOT / "bench" / "kernels" / f"{path.stem}.py").exists(), f"{path.stem} has no bench"


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # in Ray
@pytest.mark.parametrize("path", sorted((ROOT / "bench").rglob("*.py")), ids=lambda path: path.stem)
def test_what_a_benchmark_imports_from_the_package_exists(path):
    """Benchmarks run on a GPU machine only, so a renamed function would be noticed late."""
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("saccade"):
            module = importlib.import_module(node.module)
            missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
            for name in missing:
                importlib.import_module(f"{node.module}.{name}")


def test_library_code_never_prints_and_imports_no_oracle_or_pickle():
    for path in MODULES:
        source = path.read_text()
        assert path.parent.name == "cli" or not re.search(r"\bprint\(", source), path
        assert not re.search(r"^\s*(import|from) (pickle|transformers|vllm)\b", source, re.M), path


def test_files_named_in_the_documents_exist():
    for document in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / document).read_text()):
            assert (ROOT / target).exists(), f"{document} links to {target}"


STORAGE = {
    "model/linear.py", "model/merged_projections.py", "model/lora_linear.py", "model/prepacked_linear.py",
    "model/quantized_linear.py", "model/fake_quantized_linear.py",  # the storage forms
    "model/weights.py", "train/weights.py",  # loading and export
    "train/optimizer.py",
}  # fmt: skip
"""Modules that may read the weight of a projection."""


def weights_read(path):
    """What has a `weight` read in a module, except embeddings, norms (`self.weight`) and weights of data sources."""
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and re.fullmatch(
            r"weight(_bits|_scale|_packed|_zero_point)?|lora_[AB]", node.attr
        ):
            owner = ast.unparse(node.value)
            is_norm = path.name == "layers.py" and owner == "self"
            is_source = owner in ("source", "one") or path.parent.name in ("data", "curate", "kernels")
            if not (is_norm or is_source or owner.endswith("embed_tokens")):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {owner}.{node.attr}"


def test_only_storage_forms_loading_export_and_the_optimizer_read_the_weight_of_a_projection():
    """Everyone else says what is computed, so that a weight may be stored in any form."""
    readers = [path for path in MODULES if str(path.relative_to(ROOT / "saccade")) not in STORAGE]
    assert not (found := [read for path in readers for read in weights_read(path)]), found


def test_no_projection_is_a_layer_of_torch():
    found = [path for path in MODULES if re.search(r"\bnn\.(Linear|Conv\dd)\(", path.read_text())]
    assert not found, found


def test_no_module_outside_the_families_folders_names_a_family():
    """Model, processor, engine, trainer and planner ask the family; a new one touches its own files alone."""
    from saccade.model.families import VISION_LANGUAGE

    names = [r"qwen[\d._]*[-_ ]?vl", r"llava[-_ ]?(next|onevision)"]
    names += [
        re.escape(name) for one in VISION_LANGUAGE.values() for name in (one.model_type, one.name, one.architecture)
    ]
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in MODULES
        if path.parent.name != "families"
        for match in re.finditer("|".join(names), path.read_text(), re.IGNORECASE)
    ]
    assert not found, found


def test_every_family_has_both_of_its_sides():
    from saccade.model.families import TEXT, VISION_LANGUAGE
    from saccade.processor import families

    assert set(VISION_LANGUAGE) == set(families._FAMILIES)
    assert set(TEXT) == set(families.TEXT_TYPES)
    for model_type in VISION_LANGUAGE:
        for package in ("model", "processor"):
            assert (ROOT / "saccade" / package / "families" / f"{model_type}.py").is_file()


def test_only_the_world_reads_the_number_of_ranks():
    """Everything else asks the layout: data ranks, loss ranks, groups of axes."""
    for path in MODULES:
        if path.name != "world.py":
            for node in nodes_of(path):
                is_size = isinstance(node, ast.Attribute) and node.attr == "size"
                assert not (is_size and ast.unparse(node.value).endswith("world")), f"{path.name} reads world.size"
