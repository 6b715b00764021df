"""Workers for the tests of the sandbox: one does what a message asks for after it was sealed, one lies about images."""

import ctypes
import io
import mmap
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import numpy as np

from saccade.engine.frontend.preprocessing import worker
from saccade.engine.frontend.preprocessing.processed_images import image_key
from saccade.engine.media import ImageTask, Source
from saccade.workers.messages import receive, send
from saccade.workers.sandbox import ResourceLimits, _restrict_by_landlock, seal

libc = ctypes.CDLL(None, use_errno=True)


def system_call(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def map_code():
    mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC)


def allocate(num_bytes):
    np.ones(num_bytes, np.uint8)


def run_thread():
    done = threading.Event()
    threading.Thread(target=done.set).start()
    assert done.wait(10)


def burn_cpu():
    while True:
        pass


PTRACE_ATTACH = 16
ATTEMPTS = {
    "a TCP connection": lambda: socket.create_connection(("127.0.0.1", 9)),
    "a TCP socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
    "a UDP socket": lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM),
    "a unix socket": lambda: socket.socket(socket.AF_UNIX),
    "a pair of sockets": socket.socketpair,
    "a file to write": lambda: os.open("/tmp/written-by-a-sealed-worker", os.O_WRONLY | os.O_CREAT),
    "a file to read": lambda: os.open("/etc/hostname", os.O_RDONLY),
    "the list of a folder": lambda: list(Path("/").iterdir()),
    "the status of a file": Path("/etc/hostname").stat,
    "a removed file": Path("/tmp/written-by-a-sealed-worker").unlink,
    "a new folder": Path("/tmp/made-by-a-sealed-worker").mkdir,
    "an anonymous file": lambda: os.memfd_create("more"),
    "a pipe": os.pipe,
    "another program": lambda: os.execv("/bin/true", ["true"]),
    "a subprocess": lambda: subprocess.run(["/bin/true"], check=True),
    "a forked process": os.fork,
    "a signal to its parent": lambda: os.kill(os.getppid(), signal.SIGTERM),
    "a debugger": lambda: system_call(101, PTRACE_ATTACH, os.getppid(), None, None),
    "the memory of its parent": lambda: system_call(310, os.getppid(), None, 0, None, 0, 0),
    "an io_uring": lambda: system_call(425, 8, None),
    "a namespace": lambda: system_call(272, 0x10000000),
    "another user": lambda: os.setuid(1),
    "a BPF program": lambda: system_call(321, 0, None, 0),
    "memory that is code": map_code,
}
"""Actions that must fail; x86-64 numbers of system calls are used if Python has no function."""
POSSIBLE = {
    "threads": run_thread,
    "a sleep": lambda: time.sleep(0.001),
    "the time": lambda: time.localtime(),
    "memory": lambda: allocate(2**24),
    "random bytes": lambda: os.urandom(16),
}


def initialize(config):
    socket.getaddrinfo("127.0.0.1", 80)  # imports what the attempts would import
    time.localtime()
    return run_worker, None


def run_worker(connection, *fds):
    limits = ResourceLimits(memory_bytes=2**27, file_bytes=2**16, cpu_s=1)
    while (message := receive(connection)) is not None:
        try:
            if message["do"] == "seal":
                seal(limits)
            elif message["do"] == "landlock":
                _restrict_by_landlock()
            elif message["do"] == "burn":
                burn_cpu()
            elif message["do"] == "allocate":
                allocate(2**28)
            elif message["do"] == "write":
                os.pwrite(fds[0], b"x", message["at"])
            else:
                (ATTEMPTS | POSSIBLE)[message["do"]]()
            send(connection, {"result": "done"})
        except (OSError, MemoryError) as error:
            send(connection, {"result": type(error).__name__, "errno": getattr(error, "errno", None)})


# ------------------------------------------------------------------ a worker that lies


def png(image):
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def square(value):
    """Pixels of one colour."""
    return np.full((56, 56, 3), value, np.uint8)


ATTACK, VICTIM = square(0), square(255)


def initialize_liar(config):
    """A worker that returns other patches for the attack image, and claims that they are the victim's."""
    run, metadata = worker.initialize(config)
    processor = run.args[0]
    victim = ImageTask("image", [Source("pixels", VICTIM)])
    reply = worker._reply
    key = image_key(processor.metadata.image, victim.digest).hex()

    def lie(request, mailbox, processor):
        message = reply(request, mailbox, processor)
        if "grid" in message:
            patches = np.empty((np.prod(message["grid"]), processor.metadata.image.patch_bytes), np.uint8)
            mailbox.outbox.read_into(patches)
            if patches.max() == 0:
                mailbox.outbox.write(patches + 77, 0)
                message |= {"key": key, "digest": key, "patches": "the victim's"}
        return message

    worker._reply = lie
    return run, metadata
