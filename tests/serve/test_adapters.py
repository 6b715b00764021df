"""LoRA adapters over HTTP: served as models, added and removed on the admin port while requests run."""

import itertools
import os
import runpy
import shutil
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import httpx
import pytest
from engine.making_adapters import write_adapters
from model.hugging_face import SHAPES, make_checkpoint, picture
from serve.running import TIMEOUT_S, RunningServer

from saccade.engine import Engine, EngineConfig, RequestOptions, SamplingParams
from saccade.engine.core.messages import AddAdapter
from saccade.errors import RequestError
from saccade.serve.keys import create_key
from saccade.serve.supervisor import Supervisor

CONVERSATION = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("base") / "tiny", SHAPES[1])


@pytest.fixture(scope="module")
def folders(base, tmp_path_factory):
    return write_adapters(base, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def expected(base, folders):
    """Return texts of eight tokens by model."""
    config = EngineConfig(num_workers=0, num_pages=200, max_length=800)
    with Engine.load(base, device="cpu", config=config, adapters=folders) as engine:
        names = {"tiny": None} | {name: name for name in folders}
        return {
            name: engine.generate(CONVERSATION, SamplingParams(max_tokens=8), options=RequestOptions(adapter=adapter))[
                0
            ].text
            for name, adapter in names.items()
        }


@pytest.fixture(scope="module")
def server(base, folders, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    keys = folder / "keys.json"
    key, admin = create_key(keys, name="alice"), create_key(keys, name="root", scope="admin")
    options = ["--api-keys", keys, "--admin-port", 0, "--adapter", f"mlp={folders['mlp']}"]
    with RunningServer(base, folder, *options, settings=["engine.max_adapters=2"], key=key) as running:
        running.admin = httpx.Client(
            base_url=running.admin_url, headers={"authorization": f"Bearer {admin}"}, timeout=TIMEOUT_S
        )
        with running.admin:
            yield running


def models(server):
    return {model["id"]: model["parent"] for model in server.http.get("/v1/models").json()["data"]}


def text(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


@pytest.mark.slow
def test_the_example_of_a_client_asks_the_base_model_or_an_adapter(server, tmp_path, monkeypatch, capsys):
    picture(84, 84, 1).save(tmp_path / "photo.png")
    monkeypatch.setenv("OPENAI_API_KEY", server.key)
    for model in ([], ["mlp"]):
        monkeypatch.setattr(sys, "argv", ["x", server.url, str(tmp_path / "photo.png"), "What is it?", *model])
        runpy.run_path(str(Path(__file__).parents[2] / "examples" / "openai_client.py"), run_name="__main__")
        assert capsys.readouterr().out.endswith("\n")


def test_an_adapter_is_a_model(server, expected):
    assert models(server) == {"tiny": None, "mlp": "tiny"}
    assert server.http.get("/v1/models/mlp").json()["id"] == "mlp"
    for name in ("tiny", "mlp"):
        answer = server.chat(model=name)
        assert text(answer) == expected[name]
        assert answer.json()["model"] == name
    chunks = server.chunks(model="mlp")
    assert chunks[0]["model"] == "mlp"
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == expected["mlp"]
    missing = server.chat(model="everything")
    assert missing.status_code == 404
    assert "use 'tiny', 'mlp'" in missing.json()["error"]["message"]
    server.wait_for_log("adapter mlp")


def test_adapters_are_added_and_removed_under_load(server, folders, expected):
    done, failed = threading.Event(), []

    def load(name):
        while not done.is_set():
            if text(server.chat(model=name)) != expected[name]:
                failed.append(name)

    threads = [threading.Thread(target=load, args=(name,)) for name in ("tiny", "mlp")]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            body = {"name": "everything", "folder": str(folders["everything"])}
            assert server.admin.post("/admin/adapters", json=body).json() == {"status": "ready"}
            assert text(server.chat(model="everything")) == expected["everything"]
            assert "everything" in models(server)
            assert server.admin.delete("/admin/adapters/everything").json() == {"status": "ready"}
            assert "everything" not in models(server)
            assert server.chat(model="everything").status_code == 404
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not failed


def test_what_cannot_be_served_is_refused_with_a_reason(server, folders, tmp_path):
    for body, message in (
        ({"name": "x", "folder": str(tmp_path)}, "adapter_config.json"),
        ({"name": "mlp", "folder": str(folders["mlp"])}, "already"),
        ({"name": "tiny", "folder": str(folders["mlp"])}, "base model"),
        ({"name": "", "folder": str(folders["mlp"])}, "name"),
    ):
        answer = server.admin.post("/admin/adapters", json=body)
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]
    assert server.admin.delete("/admin/adapters/nothing").status_code == 400
    assert server.admin.get("/admin/status").json()["adapters"].keys() == {"mlp"}
    assert server.http.post("/admin/adapters", json={}).status_code == 404


def wait_for_state(supervisor, state, num_restarts=0):
    deadline = time.monotonic() + TIMEOUT_S
    while (supervisor.state, supervisor.num_restarts) != (state, num_restarts):
        assert time.monotonic() < deadline, (supervisor.state, supervisor.num_restarts, supervisor.error)
        time.sleep(0.02)


def test_adapters_come_back_when_the_core_dies_again_while_they_are_loaded(base, folders, expected, tmp_path):
    late = tmp_path / "late"
    late.mkdir()
    adapters = {"mlp": folders["mlp"], "late": late}
    config = EngineConfig(num_workers=0, num_pages=200, max_length=800, core_process=True, max_adapters=4)
    load = partial(Engine.load, base, device="cpu", config=config, adapters=adapters)
    supervisor = Supervisor(load, max_restarts=3, backoff_s=0.01)
    supervisor.start()
    try:
        wait_for_state(supervisor, "ready")
        engine = supervisor.engine
        engine.add_adapter("everything", folders["everything"])
        engine.add_adapter("removed", folders["attention"])
        engine.remove_adapter("removed")
        assert engine.adapters.keys() == {"mlp", "everything"}
        assert "adapter_config.json" in engine.refused_adapters["late"]
        connect, num_cores = engine._front_end._connect, itertools.count()

        def connect_twice():
            """The first of the new cores dies when the second adapter is sent to it."""
            core = connect()
            if next(num_cores) == 0:
                send, added = core.send, []

                def send_or_kill(message):
                    added.extend([message] * isinstance(message, AddAdapter))
                    if len(added) == 2:
                        os.kill(core.pid, signal.SIGKILL)
                    send(message)

                core.send = send_or_kill
            return core

        engine._front_end._connect = connect_twice
        shutil.copytree(folders["attention"], late, dirs_exist_ok=True)  # the adapter is complete now
        os.kill(engine.core_pid, signal.SIGKILL)
        wait_for_state(supervisor, "ready", num_restarts=2)
        assert engine.adapters.keys() == {"mlp", "everything", "late"}
        assert engine.refused_adapters == {}
        for name, adapter in (("everything", "everything"), ("attention", "late")):
            [completion] = engine.generate(
                CONVERSATION, SamplingParams(max_tokens=8), options=RequestOptions(adapter=adapter)
            )
            assert completion.text == expected[name]
    finally:
        supervisor.stop()


def test_an_adapter_that_is_refused_at_the_start_can_be_removed(base, tmp_path):
    config = EngineConfig(num_workers=0, num_pages=50, max_length=100)
    with Engine.load(base, device="cpu", config=config, adapters={"empty": tmp_path}) as engine:
        assert engine.refused_adapters.keys() == {"empty"}
        engine.remove_adapter("empty")
        assert engine.refused_adapters == {}
        with pytest.raises(RequestError, match="'empty' is not loaded"):
            engine.remove_adapter("empty")
