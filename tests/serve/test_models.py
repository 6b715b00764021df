"""Several models behind one application, one of them in two versions, each with an engine of its own."""

import asyncio
import threading
from functools import partial

import httpx
import pytest
from model.hugging_face import SHAPES, make_checkpoint
from serve.running import TIMEOUT_S, chat_body, events
from serve.scraping import Metrics

from saccade.engine import Engine, EngineConfig, SamplingParams
from saccade.serve import ServeConfig, create_app
from saccade.serve.admission import Demand
from saccade.serve.engine_owner import refusal_of
from saccade.serve.front import Front
from saccade.serve.keys import KeyRing, create_key
from saccade.serve.models import Chosen, Models
from saccade.serve.server import Listener, listen
from saccade.serve.service import Service
from saccade.serve.supervisor import Supervisor

ENGINE = EngineConfig(num_workers=1, num_pages=1200, max_length=16_000)
QUESTION = [{"role": "user", "content": "hello"}]


class Directory(Models):
    """Models by name; users in `moved` have the version june of the model "right", all others may."""

    def __init__(self):
        self.by_name = {}
        self.moved = set()

    @property
    def services(self):
        return [service for versions in self.by_name.values() for service in versions.values()]

    def choose(self, name, user):
        if name not in self.by_name:
            raise self.unknown(name)
        versions = self.by_name[name]
        version = "june" if user in self.moved and "june" in versions else "may"
        if version not in versions:
            raise refusal_of("loading")
        variant = version if len(versions) > 1 else None
        return Chosen(versions[version], None, variant and "months", variant)


class App:
    """The application on a free port, in a thread of its own."""

    def __init__(self, front, models):
        self.front, self.models = front, models
        self.socket = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.listener = Listener(front.config, create_app(front, models), self.socket)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.listener.listen()))

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.listener.should_exit = True
        self.thread.join()
        self.socket.close()


@pytest.fixture(scope="module")
def folders(checkpoint, tmp_path_factory):
    return [checkpoint, make_checkpoint(tmp_path_factory.mktemp("serve") / "other", SHAPES[1])]


@pytest.fixture(scope="module")
def owners(folders):
    loads = [partial(Engine.load, folder, device="cpu", config=ENGINE) for folder in folders]
    owners = [Supervisor(load, max_restarts=0, backoff_s=1) for load in loads]
    for owner in owners:
        owner.start()
    yield owners
    for owner in owners:
        owner.stop()


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    return file, {name: create_key(file, name=name) for name in ("alice", "bob")}


@pytest.fixture(scope="module")
def app(owners, keys):
    front, models = Front(config=ServeConfig(), keys=KeyRing(keys[0]), has_versions=True), Directory()
    with App(front, models) as app:
        app.http = httpx.Client(
            base_url=app.url, timeout=TIMEOUT_S, headers={"authorization": f"Bearer {keys[1]['alice']}"}
        )
        with app.http:
            assert app.http.get("/ready").json() == {"status": "loading"}
            assert app.http.post("/v1/chat/completions", json=chat_body()).status_code == 503
            for name, version, owner in (("left", "may", 0), ("right", "may", 0), ("right", "june", 1)):
                add(app, name, version, owners[owner])
            while app.http.get("/ready").status_code != 200 or any(one.state != "ready" for one in owners):
                threading.Event().wait(0.05)
            yield app


def add(app, name, version, owner):
    service = Service(front=app.front, engine_config=ENGINE, model_name=name, version=version, owner=owner)
    app.models.by_name.setdefault(name, {})[version] = service
    return service


def fill(service):
    """Leave no room for another request."""
    service.set_capacity(num_engines=1, num_fronts=1000)
    return service.admission.admit(Demand(num_completions=2, num_prompt_tokens=1, max_tokens=1))


@pytest.fixture(scope="module")
def texts(app, owners):
    """Return what each engine answers by itself."""
    return [owner.engine.generate(QUESTION, SamplingParams(temperature=0, max_tokens=8))[0].text for owner in owners]


def ask(app, model, **fields):
    response = app.http.post("/v1/chat/completions", json=chat_body(model=model, **fields))
    assert response.status_code == 200, response.text
    return response


def text(response):
    return response.json()["choices"][0]["message"]["content"]


def scrape(app):
    return Metrics(app.http.get("/metrics").text)


def test_a_request_is_answered_by_the_model_it_names(app, texts):
    assert texts[0] != texts[1]
    app.models.moved = {"carol"}
    for model, user, expected in (("left", "carol", texts[0]), ("right", "carol", texts[1]), ("right", "x", texts[0])):
        answer = ask(app, model, user=user)
        assert text(answer) == expected
        assert answer.json()["model"] == model


def test_the_version_follows_the_user_or_else_the_key_and_is_named_in_a_header(app, keys):
    app.models.moved = {"carol", "bob"}
    as_bob = {"authorization": f"Bearer {keys[1]['bob']}"}
    for user, headers, version in (
        ("carol", {}, "june"), ("dave", {}, "may"), (None, {}, "may"), (None, as_bob, "june"), ("dave", as_bob, "may")
    ):  # fmt: skip
        body = chat_body(model="right", user=user)
        answer = app.http.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.headers["saccade-version"] == version
    with app.http.stream("POST", "/v1/completions", json={"model": "right", "prompt": "hello", "stream": True}) as sent:
        assert sent.headers["saccade-version"] == "may"
        assert events(sent.iter_lines())[-1]["choices"][0]["finish_reason"]
    assert "saccade-version" not in app.http.get("/v1/models").headers


def test_versions_have_fingerprints_of_their_own(app):
    app.models.moved = {"carol"}
    fingerprints = {ask(app, "right", user=user).json()["system_fingerprint"] for user in ("carol", "dave")}
    assert len(fingerprints) == 2


def test_every_endpoint_knows_every_model(app, texts):
    for model in ("left", "right"):
        answer = app.http.post("/v1/responses", json={"model": model, "input": "hello", "max_output_tokens": 4})
        assert answer.json()["model"] == model
        tokens = app.http.post("/tokenize", json={"model": model, "prompt": "hello"}).json()["tokens"]
        assert app.http.post("/detokenize", json={"model": model, "tokens": tokens}).json()["prompt"] == "hello"
        assert app.http.get(f"/v1/models/{model}").json()["id"] == model
    assert [model["id"] for model in app.http.get("/v1/models").json()["data"]] == ["left", "right"]


def test_a_model_that_is_not_served_or_not_named_is_refused_with_the_names(app):
    for answer in (app.http.get("/v1/models/up"), app.http.post("/v1/chat/completions", json=chat_body(model="up"))):
        assert answer.status_code == 404
        assert "use 'left', 'right'" in answer.json()["error"]["message"]
    unnamed = app.http.post("/tokenize", json={"prompt": "hello"})
    assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (400, "model")


def test_observers_see_who_was_served_by_what(app):
    app.models.moved, seen = {"carol"}, []
    app.front.observers.append(seen.append)
    ask(app, "right", user="carol")
    ask(app, "left")
    app.http.post("/v1/chat/completions", json=chat_body(model="right", user="carol", top_logprobs=1))
    app.http.post("/v1/chat/completions", json=chat_body(model="up", user="carol"))
    app.http.get("/health")  # a request has ended for its observers before the next one is served
    app.front.observers.remove(seen.append)
    found = [(one.sticky_user, one.model, one.version, one.error_code) for one in seen]
    assert found == [
        ("carol", "right", "june", None),
        ("alice", "left", "may", None),
        ("carol", "right", "june", "invalid_value"),
        ("carol", "", None, "model_not_found"),
    ]
    assert seen[0].log_fields()["version"] == "june"
    assert [(one.experiment, one.variant) for one in seen[:2]] == [("months", "june"), (None, None)]
    assert seen[0].log_fields()["variant"] == "june"


def test_a_full_version_refuses_alone_and_observers_see_it(app):
    app.models.moved, seen = {"carol"}, []
    full = app.models.by_name["right"]["june"]
    admitted = fill(full)
    app.front.observers.append(seen.append)
    refused = app.http.post("/v1/chat/completions", json=chat_body(model="right", user="carol"))
    assert refused.json()["error"]["code"] == "overloaded"
    assert refused.headers["retry-after"]
    assert ask(app, "right", user="dave", ignore_eos=True).headers["saccade-version"] == "may"
    full.set_capacity(num_engines=1, num_fronts=1)
    assert ask(app, "right", user="carol").headers["saccade-version"] == "june"
    full.admission.close(admitted, 0.0)
    app.front.observers.remove(seen.append)
    found = [(one.version, one.error_code, one.error_status) for one in seen]
    assert found == [("june", "overloaded", 429), ("may", None, 0), ("june", None, 0)]
    assert 0 < seen[1].first_token_s < seen[1].duration_s
    assert seen[1].ms_per_token > 0


def test_a_request_is_refused_before_its_body_only_if_every_version_is_full(app):
    app.models.moved = set()
    versions = app.models.by_name["right"]
    full = [app.models.by_name["left"]["may"], versions["june"]]
    opened = [fill(service) for service in full]
    before = [dict(service.admission.num_refused) for service in full]
    assert app.http.post("/tokenize", json={"model": "right", "prompt": "hello"}).status_code == 200
    assert [service.admission.num_refused for service in full] == before, "no request was for these"
    full, opened = [*full, versions["may"]], [*opened, fill(versions["may"])]
    refused = app.http.post("/tokenize", content=b"this is not read")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
    for service, admitted in zip(full, opened, strict=True):
        service.set_capacity(num_engines=1, num_fronts=1)
        service.admission.close(admitted, 0.0)


def test_every_version_has_metrics_of_its_own_and_a_metric_is_described_once(app):
    before = scrape(app)
    app.models.moved = {"carol"}
    for user in ("carol", "carol", "dave"):
        ask(app, "right", user=user, ignore_eos=True)
    after = scrape(app)
    for name in ("vllm:request_success_total", "vllm:time_to_first_token_seconds_count"):
        counted = [
            after[name, "model_name=right", f"version={version}"]
            - before[name, "model_name=right", f"version={version}"]
            for version in ("june", "may")
        ]
        assert counted == [2, 1]
    lines = [line for line in after.text.splitlines() if line.startswith("# TYPE")]
    assert len(lines) == len(set(lines))
    for name in ("vllm:num_requests_running", "saccade:server_state", "saccade:admission_usage", "vllm:prompt_tokens"):
        found = {(labels["model_name"], labels["version"]) for labels, _ in after.samples_of(name)}
        assert found == {("left", "may"), ("right", "may"), ("right", "june")}


def test_a_version_is_added_and_removed_while_others_are_served(app, owners, texts):
    service = add(app, "new", "may", owners[1])
    assert [text(ask(app, model)) for model in ("left", "new")] == texts
    counted = scrape(app)
    assert counted["vllm:request_success_total", "model_name=new"] == 1
    del app.models.by_name["new"]
    service.close()
    assert app.http.post("/v1/chat/completions", json=chat_body(model="new")).status_code == 404
    ask(app, "left")
    removed = scrape(app)
    assert 'model_name="new"' not in removed.text
    name = "vllm:request_success_total", "model_name=left"
    assert removed[name] == counted[name] + 1 > 1


def test_a_version_that_is_closed_cancels_its_requests(app, owners):
    service = add(app, "new", "may", owners[1])
    body = chat_body(model="new", max_tokens=15_000, ignore_eos=True, stream=True)
    with app.http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        del app.models.by_name["new"]
        service.close()
        ended = events(lines)[-1]
    assert ended["error"]["code"] == "cancelled"
    assert service.generations == set()
