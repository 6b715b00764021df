"""Files users look for in a repository agree with each other."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from saccade import __version__

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def test_citation_and_changelog_name_the_version_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(citation["version"]) == __version__
    assert citation["license"] == PROJECT["license"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest[1] == __version__


def test_the_project_has_one_address():
    host = PROJECT["urls"]["Homepage"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    for url in (*PROJECT["urls"].values(), citation["url"], citation["repository-code"]):
        assert url.startswith(host)


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "saccade" / "py.typed").exists()
    assert "Typing :: Typed" in PROJECT["classifiers"]


def test_workflows_and_templates_are_valid_and_the_workflow_runs_the_test_command():
    files = [*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml"]
    contents = {path.name: yaml.safe_load(path.read_text()) for path in files}
    commands = [step.get("run") for job in contents["ci.yml"]["jobs"].values() for step in job["steps"]]
    assert "make test" in commands
    assert "make docs" in commands
    for name in ("bug.yml", "feature.yml"):
        assert {"name", "description", "body"} <= set(contents[name])


def test_commands_of_workflow_and_hooks_are_targets_of_the_makefile_or_files():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    sources = (ROOT / ".github" / "workflows" / "ci.yml").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    assert set(re.findall(r"\bmake ([a-z-]+)", sources)) <= targets
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    scripts = [word for hook in hooks for word in hook["entry"].split() if word.endswith(".py")]
    assert scripts
    assert all((ROOT / script).exists() for script in scripts)


@pytest.mark.parametrize("script", ["results.py", "figures.py"])
def test_tables_of_results_and_figures_are_current(script):
    command = [sys.executable, str(ROOT / "docs" / "scripts" / script), "--check"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout


def test_the_layers_in_the_guide_are_those_of_the_contract():
    block = (ROOT / "CONTRIBUTING.md").read_text().split("## Layers")[1].split("```")[1]
    documented = [re.split(r"\s{2,}", line)[0].split(" | ") for line in block.strip().splitlines()[1:]]
    [contract] = [one for one in PYPROJECT["tool"]["importlinter"]["contracts"] if one.get("containers") == ["saccade"]]
    assert [set(line) for line in documented] == [set(re.findall(r"\w+", layer)) for layer in contract["layers"]]


def files_below(folder):
    """Paths of files, without those of environments and caches."""
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not re.match(r"\.(?!github)|node_modules|site$|quickstart$", name)]
        yield from (Path(parent, file) for file in files)


def test_files_that_the_documents_name_exist():
    parts = [path.relative_to(ROOT).parts for path in files_below(ROOT)]
    files = {"/".join(part[-number:]) for part in parts for number in range(1, len(part) + 1)}
    for document in ("ARCHITECTURE.md", "CONTRIBUTING.md", "docs/engine.md", "docs/kernels.md"):
        named = set(re.findall(r"`([\w./*-]+\.(?:py|md|toml))`", (ROOT / document).read_text()))
        assert {name for name in named if not re.search(r"\*|NAME|FAMILY|recipe", name)} <= files, document


def test_functions_that_the_overview_names_exist():
    sources = "\n".join(path.read_text() for path in sorted((ROOT / "saccade").rglob("*.py")))
    classes = set(re.findall(r"^class (\w+)", sources, re.M))
    defined = set(re.findall(r"\b(?:class|def) (\w+)", sources))
    defined |= set(re.findall(r"^(\w+)\b.*=", sources, re.M)) | set(re.findall(r"^    (\w+): ", sources, re.M))
    named = set(re.findall(r"`((?:[A-Z]\w+\.)?\w+)`", (ROOT / "ARCHITECTURE.md").read_text().split("## Packages")[0]))
    for name in named:
        holder, _, attribute = name.rpartition(".")
        assert attribute in defined or (ROOT / "saccade" / name).is_dir(), f"{name} is not in the package"
        assert not holder or holder in classes, f"{name}: no class {holder}"


def test_every_extra_is_on_the_page_about_installing():
    page = (ROOT / "docs" / "install.md").read_text()
    assert [extra for extra in PROJECT["optional-dependencies"] if f"`{extra}`" not in page] == []
