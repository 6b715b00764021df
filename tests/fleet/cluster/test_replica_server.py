"""The port of an engine replica: who may connect, what a broken connection does, what travels."""

import asyncio
import datetime
import os
import ssl
import time

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from fleet.cluster.local_fleet import LocalFleet
from fleet.cluster.test_replica_set import about, params, png
from PIL import Image

from saccade.engine.request import Request
from saccade.engine.transport.wire import encode_request
from saccade.errors import ConfigError
from saccade.fleet.cluster import replica_connection
from saccade.fleet.cluster.connections import Address, read_message, tls_context, write_message
from saccade.fleet.cluster.messages import pack, unpack
from saccade.fleet.cluster.replica_connection import ReplicaConnection
from saccade.model.initialize import initialize_random, named_size

TIMEOUT_S = 30


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("port") / "checkpoint"
    initialize_random(folder, named_size("tiny"), dtype=torch.float32)
    return folder


@pytest.fixture(scope="module")
def fleet(checkpoint):
    with LocalFleet(checkpoint, ("one",)) as fleet:
        yield fleet


@pytest.fixture
def server(fleet):
    return fleet.replicas.servers["one"]


def in_loop(fleet, coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, fleet.replicas.loop).result(TIMEOUT_S)


async def answer_to(address, *messages):
    """What a replica sends to a connection that begins with this token and these messages, until it closes it."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(address.token)
    for message in messages:
        write_message(writer, message)
    try:
        return await reader.read(100)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def test_a_connection_without_the_token_gets_nothing_and_is_closed(fleet, server):
    address = server.address()
    for token in (bytes(len(address.token)), address.token[:-1] + bytes([address.token[-1] ^ 1])):
        assert in_loop(fleet, answer_to(address._replace(token=token), pack("connect", "stranger"))) == b""
    assert "stranger" not in fleet.replicas.services["one"]._fronts
    assert in_loop(fleet, answer_to(address, pack("connect", "friend"))) != b""


def test_each_replica_has_a_token_of_its_own_and_the_address_survives_the_message(checkpoint, server):
    address = server.address()
    assert Address.from_bytes(address.to_bytes()) == address
    with LocalFleet(checkpoint, ("one",)) as other:
        assert other.replicas.servers["one"].address().token != address.token


def test_a_front_of_another_version_is_refused_and_others_are_served(fleet, server):
    [version, *rest] = list(pack("connect", "old"))[1:]
    old = bytes([0x93, version - 1, *rest])
    with pytest.raises(ConfigError, match="version"):
        unpack(old)
    assert in_loop(fleet, answer_to(server.address(), old)) == b""
    [completion] = fleet.engine.generate(about(), params(max_tokens=2))
    assert completion.failure is None


async def until_refused(connection):
    async for message in connection.messages():
        yield message
        if unpack(message)[0] == "refused":
            break


def test_a_request_that_cannot_be_read_is_refused_alone(fleet, server):
    async def ask():
        connection = await ReplicaConnection.open(server.address(), "other front")
        connection.submit("broken", b"\0 no request")
        kinds = [unpack(message) async for message in until_refused(connection)]
        connection.close()
        return kinds[-1][1]

    request_id, reason = in_loop(fleet, ask())
    assert request_id == "broken"
    assert "ConfigError" in reason
    [completion] = fleet.engine.generate(about(), params(max_tokens=2))
    assert completion.failure is None


def test_requests_of_a_front_whose_connection_breaks_are_cancelled_at_once(checkpoint, fleet):
    host = fleet.replicas.hosts["one"]
    with LocalFleet(checkpoint, ("one",), front="dead", joins=fleet) as dying:
        dying.engine.submit(dying.engine.preprocess(about()), params(max_tokens=3500), lambda delta: None)
        dying.wait_until(lambda: host.num_open == 1)
        [link] = dying.set._links.values()
        begun = time.monotonic()
        dying.loop.call_soon_threadsafe(link.connection._writer.transport.abort)
        fleet.wait_until(lambda: host.num_open == 0)
        assert time.monotonic() - begun < 2.0


def test_an_image_larger_than_a_part_arrives_whole(fleet):
    before = fleet.set.num_media_sent
    noise = os.urandom(3 * 1300 * 1000)  # more than three parts, which PNG cannot compress
    picture = Image.frombytes("RGB", (1300, 1000), noise)
    [expected] = fleet.engine.generate(about(picture), params(max_tokens=4))
    assert expected.failure is None
    [again] = fleet.engine.generate(about(picture), params(max_tokens=4))
    assert again.token_ids == expected.token_ids
    assert fleet.set.num_media_sent == before + 1


def test_a_replica_that_says_nothing_is_lost(checkpoint, monkeypatch):
    monkeypatch.setattr(replica_connection, "_SILENT_S", 0.5)
    with LocalFleet(checkpoint) as fleet:
        prompt = fleet.engine.preprocess(about(png("red")))
        fleet.engine.submit(prompt, params(max_tokens=3500), lambda delta: None)
        fleet.wait_until(lambda: fleet.replicas.hosts and any(sent.link for sent in fleet.set._sent.values()))
        name = fleet.replica_of_open_requests()
        fleet.set._links[name].connection._reader = asyncio.StreamReader(loop=fleet.loop)  # nothing arrives any more
        fleet.wait_until(lambda: fleet.set.num_continued == 1)


def certificates(folder):
    """A certificate of a cluster, signed by itself, and its key: files that Ray's variables name."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "cluster")])
    now = datetime.datetime.now(datetime.UTC)
    built = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    built = built.serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    certificate = built.add_extension(x509.BasicConstraints(ca=True, path_length=None), True).sign(key, hashes.SHA256())
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / "cert.pem").write_bytes(certificate.public_bytes(pem))
    (folder / "key.pem").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    names = {"RAY_TLS_CA_CERT": "cert.pem", "RAY_TLS_SERVER_CERT": "cert.pem", "RAY_TLS_SERVER_KEY": "key.pem"}
    return {"RAY_USE_TLS": "1"} | {variable: str(folder / name) for variable, name in names.items()}


def test_where_ray_has_tls_connections_have_it_too_and_others_are_refused(checkpoint, tmp_path, monkeypatch):
    for name, value in certificates(tmp_path).items():
        monkeypatch.setenv(name, value)
    with LocalFleet(checkpoint, ("one",)) as fleet:
        [completion] = fleet.engine.generate(about(png("red")), params(max_tokens=4))
        assert completion.failure is None
        address = fleet.replicas.servers["one"].address()
        assert in_loop(fleet, answer_to(address, pack("connect", "plain"))) == b""
        stranger = ssl.create_default_context()
        stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE

        async def without_certificate():
            reader, writer = await asyncio.open_connection(address.host, address.port, ssl=stranger)
            writer.write(address.token)
            write_message(writer, pack("connect", "stranger"))
            return await read_message(reader)

        with pytest.raises((EOFError, OSError)):
            in_loop(fleet, without_certificate())
    monkeypatch.delenv("RAY_TLS_CA_CERT")
    with pytest.raises(ConfigError, match="RAY_TLS_CA_CERT"):
        tls_context(ssl.Purpose.SERVER_AUTH)


def message_of(prompt, request_id):
    """A request for this prompt, as a front sends it."""
    spans = tuple(image.span for image in prompt.images)
    request = Request(id=request_id, token_ids=prompt.token_ids, images=spans, sampling=params(max_tokens=4))
    return encode_request(request, prompt)


def test_a_front_that_dies_while_its_image_is_awaited_holds_the_replica_no_longer(fleet, server):
    service = fleet.replicas.services["one"]
    message = message_of(fleet.engine.preprocess(about(png("yellow"))).result(TIMEOUT_S), "dying/1")

    async def ask_and_die():
        held = asyncio.create_task(service.hold("dying"))
        connection = await ReplicaConnection.open(server.address(), "dying")
        connection.submit("dying/1", message)
        async for one in connection.messages():
            if unpack(one)[0] == "need":
                break
        assert "dying/1" in service._preparing
        connection._writer.transport.abort()
        async with asyncio.timeout(2.0):
            await held
        assert "dying/1" not in service._preparing

    in_loop(fleet, ask_and_die())
