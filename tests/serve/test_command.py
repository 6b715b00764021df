"""`saccade serve` and `saccade keys`: what is wrong is said in one line, before anything expensive starts."""

import hashlib
import json
import socket
import stat

import pytest

from saccade.errors import ConfigError
from saccade.serve.config import ServeConfig
from saccade.serve.keys import read_keys


def test_a_created_key_is_printed_once_and_stored_as_a_hash(command, tmp_path):
    path = tmp_path / "keys.json"
    alice = command("keys", "create", path, "--name", "alice", "--requests-per-minute", 60)
    bob = command("keys", "create", path, "--name", "bob", "--tenant", "alice", "--admin")
    secret = alice.out.strip()
    assert (alice.status, bob.status, secret[:11], len(secret)) == (0, 0, "sk-saccade-", 54)
    first, second = read_keys(path)
    assert first.sha256 == hashlib.sha256(secret.encode()).hexdigest()
    assert (first.requests_per_minute, first.scope, second.scope) == (60, "api", "admin")
    assert first.salt == second.salt
    assert secret not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = command("keys", "create", path, "--name", "alice")
    assert (again.status, again.err.count("\n")) == (2, 1)
    assert "there is a key named alice already" in again.err


def test_keys_are_listed_without_their_hashes_and_revoked_by_name(command, tmp_path):
    path = tmp_path / "keys.json"
    command("keys", "create", path, "--name", "alice", "--requests-per-minute", 60)
    command("keys", "create", path, "--name", "bob", "--tenant", "alice", "--admin")
    shown = command("keys", "list", path)
    assert [line.split() for line in shown.out.splitlines()] == [
        ["NAME", "SCOPE", "TENANT", "REQUESTS/MIN", "TOKENS/MIN"],
        ["alice", "api", "alice", "60", "-"],
        ["bob", "admin", "alice", "-", "-"],
    ]
    assert not [key.sha256 for key in read_keys(path) if key.sha256 in shown.out]
    assert [key["name"] for key in json.loads(command("keys", "list", path, "--json").out)["keys"]] == ["alice", "bob"]
    assert command("keys", "revoke", path, "alice").status == 0
    assert [key.name for key in read_keys(path)] == ["bob"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = command("keys", "revoke", path, "alice")
    assert (again.status, again.err) == (2, f"saccade: {path}: no key is named alice. Keys: bob\n")
    assert "no such key file" in command("keys", "list", tmp_path / "nowhere.json").err


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ('{"keys": [{"name": "a", "sha256": "12"}]}', "not 64 hexadecimal digits"),
        ('{"keys": [{"name": "a", "hash": "12"}]}', "unknown key keys"),
        ("[]", "must be a section"),
        ("{", "not a readable JSON file"),
        (json.dumps({"keys": [{"name": "a", "sha256": "0" * 64}] * 2}), "more than one key is named a"),
    ],
    ids=["hash", "field", "list", "json", "twice"],
)
def test_a_broken_key_file_is_refused(tmp_path, keys, message):
    path = tmp_path / "keys.json"
    path.write_text(keys)
    with pytest.raises(ConfigError, match=message):
        read_keys(path)


def test_what_is_wrong_is_said_in_one_line(command, checkpoint, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = [
            ([tmp_path / "nothing"], "nothing"),
            ([checkpoint, "--port", port], "Choose another with --port"),
            ([checkpoint, "--host", "192.0.2.1", "--no-auth"], "Choose an address of this machine with --host"),
            ([checkpoint, "--host", "0.0.0.0"], "no API keys are set"),
            ([checkpoint, "--api-keys", tmp_path / "no.json"], "no such key file"),
            ([checkpoint, "--adapter", f"mine={tmp_path}"], "no adapter_config.json"),
            ([checkpoint, "--admin-port", 0], "admin_port needs api_keys"),
            ([checkpoint, "--set", "serve.max_bodybytes=3"], "Did you mean max_body_bytes"),
            ([checkpoint, "--set", "max_body_bytes=3"], "use serve.KEY=VALUE or engine.KEY=VALUE"),
            ([checkpoint, "--set", "serve.queue_timeout_s=-1"], "positive number of seconds"),
        ]
        for words, message in cases:
            ended = command("serve", *words)
            assert (ended.status, ended.err.count("\n")) == (2, 1), ended.err
            assert message in ended.err


def test_a_loopback_server_without_keys_answers_to_its_own_names_only():
    assert ServeConfig().checked_hosts == {"localhost", "127.0.0.1", "::1"}
    assert not ServeConfig(host="0.0.0.0", no_auth=True).checked_hosts
    assert ServeConfig(allowed_hosts=("AI.example",)).checked_hosts == {"ai.example"}
