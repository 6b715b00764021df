"""The state folder: one controller and one change at a time, whatever is paused, damaged or written late."""

import json
import multiprocessing
import os
import signal
import time
from dataclasses import replace

import pytest

from saccade.errors import ConfigError, DataError, StorageError
from saccade.fleet import lease as leases
from saccade.fleet.config import FleetConfig, ModelConfig, VersionConfig
from saccade.fleet.lease import LEASE_S, Candidate, LeaseLostError, Owner, holder_of
from saccade.fleet.objects import LocalObjects, open_objects
from saccade.fleet.state import FleetState
from saccade.serve.config import ServeConfig
from saccade.serve.keys import create_key

FLEET = FleetConfig(
    name="photos",
    models=(ModelConfig(name="tiny", versions=(VersionConfig(name="may", checkpoint="may", traffic=100.0),)),),
)


@pytest.fixture(params=["local", "s3"])
def url(request, tmp_path):
    if request.param == "local":
        return str(tmp_path / "state")
    _, bucket = request.getfixturevalue("new_bucket")()
    return f"s3://{bucket}/photos"


class Clock:
    """A clock that the test moves."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def owner(name="a"):
    return replace(Owner.of_this_process(f"Ray {name}"), pid=1)


def test_an_object_is_created_once_and_replaced_as_often_as_one_likes(url):
    objects = open_objects(url)
    assert objects.read("a/1.json") is None
    assert objects.names("a") == []
    assert objects.create("a/1.json", b"one")
    assert not objects.create("a/1.json", b"two")
    assert objects.create("a/1.json", b"one"), "its own object, after an answer that was lost"
    objects.write("a/2.json", b"three")
    objects.write("a/2.json", b"four")
    assert [objects.read("a/1.json"), objects.read("a/2.json")] == [b"one", b"four"]
    assert objects.names("a") == ["1.json", "2.json"]
    objects.remove("a/1.json")
    objects.remove("a/1.json")
    assert objects.names("a") == ["2.json"]


def test_a_generation_is_read_as_it_was_written_and_of_two_changes_one_fails(url):
    state, other = FleetState(url), FleetState(url)
    assert state.desired() is None
    assert state.snapshot() is None
    first = state.change(FLEET, after=None, command="up", time_s=1.0)
    assert other.desired() == first
    second = other.change(FLEET, after=1, command="update", time_s=2.0, at_once=("tiny",))
    with pytest.raises(ConfigError, match=r"saccade fleet update \(process \d+ on .*has changed fleet photos"):
        state.change(FLEET, after=1, command="rollback", time_s=2.0)
    assert state.desired() == second


def test_the_newest_epoch_counts_and_what_a_replaced_controller_writes_has_no_effect(url):
    state, clock = FleetState(url), Clock()
    first = Candidate(state.objects, owner("a"), clock=clock).try_acquire()
    state.write_snapshot(first.epoch, {"who": "first"}, 1.0)
    state.log(first.epoch, [{"number": 1, "what": "starts"}])
    second = Candidate(state.objects, owner("a"), clock=clock).try_acquire(takes_over=True)
    assert state.snapshot().content == {"who": "first"}, "until the second one writes"
    other = FleetState(url)
    other.write_snapshot(second.epoch, {"who": "second"}, 2.0)
    other.log(second.epoch, [{"number": 2, "what": "ready"}])
    state.write_snapshot(first.epoch, {"who": "late"}, 3.0)
    state.log(first.epoch, [{"number": 2, "what": "late"}, {"number": 3, "what": "late"}])
    assert state.snapshot().content == {"who": "second"}
    assert [one["what"] for one in state.decisions(2)] == ["starts", "ready"]
    with pytest.raises(LeaseLostError, match="epoch 2 has replaced epoch 1"):
        first.renew()
    assert not first.is_held


def test_a_lease_is_taken_over_when_its_owner_has_not_renewed_it(url):
    objects, clock = open_objects(url), Clock()
    lease = Candidate(objects, owner("a"), clock=clock).try_acquire()
    candidate = Candidate(objects, owner("b"), clock=clock)
    for _ in range(5):
        assert candidate.try_acquire() is None
        clock.now += LEASE_S / 2
        lease.renew()
    assert candidate.try_acquire() is None
    clock.now += LEASE_S - 0.01
    assert candidate.try_acquire() is None
    clock.now += 0.01
    assert candidate.try_acquire().epoch == 2
    assert not lease.is_held
    assert str(holder_of(objects).owner) == str(owner("b"))


def test_an_owner_that_could_not_renew_in_time_holds_nothing_before_any_other_takes_it(tmp_path):
    objects, clock = open_objects(str(tmp_path)), Clock()
    lease = Candidate(objects, owner(), clock=clock).try_acquire()
    clock.now += LEASE_S
    assert not lease.is_held
    with pytest.raises(LeaseLostError, match="was not renewed for 10 s"):
        lease.renew()


def test_a_lease_that_was_given_back_is_taken_at_once(tmp_path):
    objects = open_objects(str(tmp_path))
    lease = Candidate(objects, owner("a")).try_acquire()
    assert Candidate(objects, owner("b")).try_acquire() is None
    lease.release()
    assert not lease.is_held
    assert Candidate(objects, owner("b")).try_acquire().epoch == 2


def race(url, start, found):
    start.wait()
    lease = Candidate(open_objects(url), owner(str(os.getpid()))).try_acquire()
    found.put(None if lease is None else lease.epoch)


def test_of_processes_that_race_for_the_lease_one_gets_it(tmp_path):
    context = multiprocessing.get_context("fork")
    for number in range(4):
        start, found = context.Event(), context.Queue()
        racers = [context.Process(target=race, args=(str(tmp_path / str(number)), start, found)) for _ in range(4)]
        for racer in racers:
            racer.start()
        start.set()
        epochs = [found.get(timeout=30) for _ in racers]
        for racer in racers:
            racer.join()
        found.close()
        assert sorted(map(str, epochs)) == ["1", "None", "None", "None"]


def decide_until_lost(url, paused, seen):
    """A controller that is stopped between its look at the lease and its writes."""
    leases.LEASE_S = 0.3
    state = FleetState(url)
    lease = Candidate(state.objects, owner("a")).try_acquire()
    state.write_snapshot(lease.epoch, {"traffic": "may"}, 1.0)
    lease.renew()
    paused.set()
    os.kill(os.getpid(), signal.SIGSTOP)
    state.write_snapshot(lease.epoch, {"traffic": "june"}, 2.0)
    state.log(lease.epoch, [{"number": 1, "what": "late"}])
    try:
        lease.renew()
    except LeaseLostError as error:
        seen.put((lease.is_held, str(error)))


def test_a_paused_owner_that_wakes_after_a_takeover_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "LEASE_S", 0.3)
    url, context = str(tmp_path), multiprocessing.get_context("fork")
    paused, seen = context.Event(), context.Queue()
    first = context.Process(target=decide_until_lost, args=(url, paused, seen))
    first.start()
    assert paused.wait(30)
    state = FleetState(url)
    candidate, lease = Candidate(state.objects, owner("b")), None
    deadline = time.monotonic() + 30
    while lease is None and time.monotonic() < deadline:
        lease = candidate.try_acquire()
        time.sleep(0.05)
    state.write_snapshot(lease.epoch, {"traffic": "july"}, 3.0)
    os.kill(first.pid, signal.SIGCONT)
    assert seen.get(timeout=30) == (False, "epoch 2 has replaced epoch 1")
    first.join()
    seen.close()
    assert state.snapshot().content == {"traffic": "july"}
    assert state.decisions(0) == []


def damaged(path):
    return lambda root: (root / path).write_bytes(b'{"format": 1, "desired"')


DAMAGED = {
    "desired": (damaged("desired/000001.json"), "000001.json is damaged. Write the fleet again: saccade fleet update"),
    "snapshot": (damaged("snapshot/000001.json"), "snapshot/000001.json is damaged. Remove it"),
    "a list": (lambda root: (root / "desired/000001.json").write_text("[1]"), "is damaged"),
    "a later format": (
        lambda root: (root / "desired/000001.json").write_text('{"format": 2}'), "another version of Saccade",
    ),
    "no content": (lambda root: (root / "snapshot/000001.json").write_text('{"format": 1}'), "is damaged"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_object_is_one_line_with_a_remedy(tmp_path, kind):
    state = FleetState(str(tmp_path))
    lease = Candidate(state.objects, owner()).try_acquire()
    state.change(FLEET, after=None, command="up", time_s=1.0)
    state.write_snapshot(lease.epoch, {}, 1.0)
    damage, message = DAMAGED[kind]
    damage(tmp_path)
    with pytest.raises(DataError, match=message) as error:
        (state.desired(), state.snapshot())
    assert "\n" not in str(error.value)


def test_the_fleet_can_be_written_again_after_its_newest_generation_was_damaged(tmp_path):
    state = FleetState(str(tmp_path))
    state.change(FLEET, after=None, command="up", time_s=1.0)
    damaged("desired/000001.json")(tmp_path)
    assert state.change(FLEET, after=state.newest_generation(), command="update", time_s=2.0).generation == 2
    assert state.desired().config == FLEET


def test_a_damaged_lease_expires_like_any_other(tmp_path):
    objects, clock = open_objects(str(tmp_path)), Clock()
    Candidate(objects, owner("a"), clock=clock).try_acquire()
    for name in ("lease/000001.json", "lease/000001.heartbeat"):
        (tmp_path / name).write_bytes(b"\xff[")
    assert holder_of(objects).owner is None
    candidate = Candidate(objects, owner("a"), clock=clock)
    assert candidate.try_acquire(takes_over=True) is None
    clock.now += LEASE_S
    assert candidate.try_acquire().epoch == 2


def test_a_damaged_decision_is_named_in_its_place(tmp_path):
    state = FleetState(str(tmp_path))
    state.log(1, [{"number": 1, "what": "starts"}, {"number": 2, "what": "ready"}])
    damaged("decisions/00000001-000001.json")(tmp_path)
    assert [one["what"] for one in state.decisions(9)] == ["damaged", "ready"]


def test_files_that_are_not_ours_are_ignored(tmp_path):
    state = FleetState(str(tmp_path))
    for folder in ("desired", "lease", "snapshot", "decisions"):
        (tmp_path / folder).mkdir()
        for name in ("README.txt", ".000009.json.1234", "notes.json", "000003.json.backup"):
            (tmp_path / folder / name).write_text("{}")
    assert (state.desired(), state.snapshot(), state.decisions(9)) == (None, None, [])
    assert Candidate(state.objects, owner()).try_acquire().epoch == 1


def test_a_store_that_cannot_create_exclusively_is_refused():
    with pytest.raises(ConfigError, match=r"memory:// cannot create a file exclusively.*Use a local folder, s3://"):
        open_objects("memory://fleet")


def test_a_file_system_without_hard_links_is_refused(tmp_path, monkeypatch):
    def link(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(StorageError, match="has no hard links"):
        LocalObjects(tmp_path).create("a/1.json", b"")
    assert list((tmp_path / "a").iterdir()) == []


def test_an_s3_server_that_cannot_be_reached_is_one_line(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret-of-the-test")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr("saccade.fleet.objects._ATTEMPTS", 1)
    with pytest.raises(StorageError, match=r"s3://bucket/photos: .*The connection or the server failed") as error:
        FleetState("s3://bucket/photos").desired()
    assert "secret-of-the-test" not in str(error.value)


def test_the_folder_holds_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-test")
    key = create_key(tmp_path / "keys.json", name="ada")
    stored = json.loads((tmp_path / "keys.json").read_text())
    config = replace(FLEET, server=ServeConfig(api_keys=tmp_path / "keys.json"))
    state = FleetState(str(tmp_path / "state"))
    state.change(config, after=None, command="up", time_s=1.0)
    lease = Candidate(state.objects, owner()).try_acquire()
    state.write_snapshot(lease.epoch, {}, 1.0)
    written = b"".join(path.read_bytes() for path in (tmp_path / "state").rglob("*") if path.is_file()).decode()
    assert str(tmp_path / "keys.json") in written
    digests = [text for text in json.dumps(stored).split('"') if len(text) >= 32]
    assert digests
    for secret in (key, "secret-of-the-test", *digests):
        assert secret not in written
