"""A sealed process computes and uses the file descriptors it has, and nothing else; media workers are sealed."""

import errno
import platform
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from workers import sealed_worker

from saccade.engine import Engine, EngineConfig, SamplingParams
from saccade.engine.frontend.preprocessing import backends
from saccade.engine.frontend.preprocessing.preprocessor import Preprocessor
from saccade.errors import ImageError
from saccade.model.initialize import initialize_random, named_size
from saccade.workers.fork_server import ForkServer
from saccade.workers.messages import receive, send
from saccade.workers.sandbox import _filter_program, missing_features
from saccade.workers.shared_memory import SharedMemory

TIMEOUT_S = 300
is_supported = sys.platform == "linux" and platform.machine() == "x86_64" and not missing_features()
needs_a_sandbox = pytest.mark.skipif(not is_supported, reason="the attempts use Linux system calls of x86-64")


@pytest.fixture(scope="module")
def fork_server():
    server = ForkServer(sealed_worker.initialize, {})
    yield server
    server.close()


class Process:
    """A worker of the tests, with a file."""

    def __init__(self, fork_server, first="seal"):
        self.file = SharedMemory()
        self.connection, self.pid = fork_server.start_worker(self.file.fd)
        self.connection.settimeout(TIMEOUT_S)
        assert self.try_to(first) == {"result": "done"}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.connection.close()

    def try_to(self, what, **arguments):
        send(self.connection, {"do": what, **arguments})
        return receive(self.connection)


@pytest.fixture(scope="module")
def sealed(fork_server):
    with Process(fork_server) as process:
        yield process


@needs_a_sandbox
@pytest.mark.parametrize("what", sealed_worker.ATTEMPTS)
def test_a_sealed_process_cannot_get(sealed, what):
    assert sealed.try_to(what) == {"result": "PermissionError", "errno": errno.EPERM}


@needs_a_sandbox
@pytest.mark.parametrize("what", sealed_worker.POSSIBLE)
def test_a_sealed_process_still_has(sealed, what):
    assert sealed.try_to(what) == {"result": "done"}


@needs_a_sandbox
def test_memory_and_file_size_are_bounded(sealed):
    assert sealed.try_to("allocate") == {"result": "MemoryError", "errno": None}
    assert sealed.try_to("write", at=100) == {"result": "done"}
    assert sealed.try_to("write", at=2**16) == {"result": "OSError", "errno": errno.EFBIG}
    assert sealed.file.num_bytes() == 101


@needs_a_sandbox
def test_a_process_that_uses_up_its_cpu_time_is_killed(fork_server):
    with Process(fork_server) as process:
        assert process.try_to("burn") is None


@needs_a_sandbox
def test_landlock_alone_refuses_files_and_tcp(fork_server):
    with Process(fork_server, first="landlock") as process:
        for what in ("a file to read", "a file to write", "the list of a folder", "a new folder"):
            assert process.try_to(what) == {"result": "PermissionError", "errno": errno.EACCES}
        assert process.try_to("a TCP connection") == {"result": "PermissionError", "errno": errno.EACCES}


def decide(program, architecture, number, *arguments):
    """Run a BPF program on one system call, as the kernel does."""
    words = [number, architecture, 0, 0]
    for argument in (*arguments, *[0] * (6 - len(arguments))):
        words += [argument & 0xFFFFFFFF, argument >> 32]
    accumulator, at = 0, 0
    while True:
        operation, if_true, if_false, operand = program[at]
        at += 1
        if operation == 0x20:
            accumulator = words[operand // 4]
        elif operation == 0x54:
            accumulator &= operand
        elif operation == 0x06:
            return operand
        else:
            is_true = {
                0x15: accumulator == operand,
                0x35: accumulator >= operand,
                0x45: accumulator & operand != 0,
            }[operation]
            at += if_true if is_true else if_false


KILL, ALLOW, EPERM, ENOSYS = 0x80000000, 0x7FFF0000, 0x00050001, 0x00050026
THREAD = 0x3D0F00
CALLS = {
    # name: x86-64, arm64, arguments, what happens
    "read": (0, 63, (), ALLOW),
    "exit_group": (231, 94, (), ALLOW),
    "openat": (257, 56, (), EPERM),
    "socket": (41, 198, (), EPERM),
    "connect": (42, 203, (), EPERM),
    "execve": (59, 221, (), EPERM),
    "ptrace": (101, 117, (), EPERM),
    "kill": (62, 129, (), EPERM),
    "clone as a thread": (56, 220, (THREAD,), ALLOW),
    "clone as a process": (56, 220, (17,), EPERM),
    "clone3": (435, 435, (), ENOSYS),
    "tgkill itself": (234, 131, (1234, 1234, 6), ALLOW),
    "tgkill another": (234, 131, (1, 1, 9), EPERM),
    "mmap data": (9, 222, (0, 4096, 3), ALLOW),
    "mmap code": (9, 222, (0, 4096, 5), EPERM),
    "mprotect data": (10, 226, (0, 4096, 3), ALLOW),
    "mprotect code": (10, 226, (0, 4096, 4), EPERM),
    "prctl name": (157, 167, (15,), ALLOW),
    "prctl anything": (157, 167, (4,), EPERM),
    "prlimit64 of itself": (302, 261, (0, 7, 0), ALLOW),
    "prlimit64 of another": (302, 261, (5, 7, 0), EPERM),
    "prlimit64 that sets": (302, 261, (0, 7, 2**40), EPERM),
    "seccomp": (317, 277, (), EPERM),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_decides_by_call_and_arguments(machine, name):
    architecture = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
    column = list(architecture).index(machine)
    *numbers, arguments, expected = CALLS[name]
    program = _filter_program(machine, pid=1234)
    assert decide(program, architecture[machine], numbers[column], *arguments) == expected
    assert decide(program, 0x40000003, numbers[column], *arguments) == KILL, "32-bit calls have other numbers"
    assert decide(program, architecture[machine], numbers[column] | 0x40000000, *arguments) == ENOSYS


# ------------------------------------------------------------------ media workers


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sealed") / "checkpoint"
    initialize_random(folder, named_size("tiny"), dtype=torch.float32)
    return folder


def ask(image):
    return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "what is it"}]}]


def seccomp_of(pid):
    status = dict(re.findall(r"(\w+):\s+(\S+)", Path(f"/proc/{pid}/status").read_text()))
    return status["NoNewPrivs"], status["Seccomp"]


def wait_until(is_so):
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@needs_a_sandbox
def test_media_workers_are_sealed(checkpoint):
    with Preprocessor(checkpoint, num_workers=1, processed_image_cache_bytes=0) as preprocessor:
        preprocessor.submit([{"role": "user", "content": "x"}]).result(TIMEOUT_S)
        for pid in (*preprocessor.worker_pids, *preprocessor._backend.text_pids):
            wait_until(lambda pid=pid: seccomp_of(pid) == ("1", "2"))  # an image worker may still be starting
            limits = Path(f"/proc/{pid}/limits").read_text()
            for name in ("Max cpu time", "Max file size", "Max data size", "Max core file size", "Max open files"):
                assert re.search(rf"{name} +\d+ +\d+", limits), name
            files = {str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir() if int(file.name) > 2}
            assert all(re.match(r"socket:|/memfd:saccade", file) for file in files), files


def test_an_image_that_takes_too_much_memory_ends_its_request_alone(checkpoint):
    bomb = Image.new("L", (9000, 7000))
    file = sealed_worker.png(bomb)
    with Preprocessor(
        checkpoint, num_workers=1, processed_image_cache_bytes=0, max_worker_bytes=100 * 2**20
    ) as preprocessor:
        bad, good = preprocessor.submit(ask(file)), preprocessor.submit(ask(sealed_worker.VICTIM))
        with pytest.raises(ImageError, match="needs more memory than there is"):
            bad.result(TIMEOUT_S)
        assert len(good.result(TIMEOUT_S).images) == 1


def test_a_worker_that_lies_about_an_image_changes_no_other_request(checkpoint, monkeypatch):
    config = EngineConfig(num_workers=1, num_pages=64)
    answers = {}
    for name in ("honest", "lying"):
        if name == "lying":
            monkeypatch.setattr(backends, "initialize", sealed_worker.initialize_liar)
        with Engine.load(checkpoint, device="cpu", config=config) as engine:
            images = [sealed_worker.ATTACK, sealed_worker.VICTIM]
            answers[name] = [
                engine.generate(ask(image), SamplingParams(max_tokens=8, logprobs=0))[0] for image in images
            ]
    attack, victim = (
        [[token.logprob for token in answers[name][index].logprobs] for name in ("honest", "lying")]
        for index in range(2)
    )
    assert not np.allclose(*attack), "the worker did lie"
    assert victim[0] == victim[1]
    assert answers["honest"][1].token_ids == answers["lying"][1].token_ids
