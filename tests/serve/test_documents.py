"""The guide and the API page agree with the code; the example of a client works."""

import dataclasses
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from documents import DOCUMENTS, SERVED, code_blocks, run_python
from model.hugging_face import picture

from saccade.data.toy import write_toy_shards
from saccade.serve import errors
from saccade.serve.config import ServeConfig

DOCS = Path(__file__).parents[2] / "docs"


def test_limits_in_the_guide_have_the_values_of_the_code():
    guide = (DOCS / "serving.md").read_text()
    fields = {field.name: field.default for field in dataclasses.fields(ServeConfig)}
    stated = re.findall(r"`((?:max|header|body|keep|write|queue|request)_\w+)` (\d+)( [KM]iB)?", guide)
    assert len(stated) >= 12
    for name, value, unit in stated:
        if name in fields:
            assert int(value) * {"": 1, " KiB": 2**10, " MiB": 2**20}[unit] == fields[name], name


def test_every_error_code_is_on_the_api_page():
    page = (DOCS / "api.md").read_text()
    listed = set(re.findall(r"`(\w+)`", page.split("## Errors")[1]))
    sources = "".join(path.read_text() for path in (DOCS.parent / "saccade" / "serve").rglob("*.py"))
    used = set(re.findall(r'code="(\w+)"', sources)) | set(errors._STATUS_OF_FAILURE)
    used |= {code for _, code in errors._WORDS.values()}
    assert used <= listed, used - listed


def test_the_example_of_openai_client_prints_the_streamed_answer(server, tmp_path, monkeypatch, capsys):
    picture(84, 84, 1).save(tmp_path / "photo.png")
    monkeypatch.setattr(sys, "argv", ["openai_client.py", server.url, str(tmp_path / "photo.png"), "What is it?"])
    runpy.run_path(str(DOCS.parent / "examples" / "openai_client.py"), run_name="__main__")
    assert capsys.readouterr().out.endswith("\n")


REQUESTS = [
    block for path in DOCUMENTS for block in code_blocks(path) if SERVED.search(block.source) and not block.not_run
]


@pytest.mark.parametrize("block", REQUESTS, ids=str)
def test_requests_in_documents_are_answered(block, server, tmp_path, monkeypatch):
    """The address and the model's name are those of the server of the tests."""
    monkeypatch.chdir(tmp_path)
    picture(84, 84, 1).save(tmp_path / "cat.jpg")
    write_toy_shards(tmp_path / "test", first=0, count=2)
    source = SERVED.sub(server.url, block.source).replace("NAME", "tiny")
    if block.language == "python":
        run_python(block, {}, source)
        return
    run = subprocess.run(["bash", "-c", source], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "choices" in run.stdout
