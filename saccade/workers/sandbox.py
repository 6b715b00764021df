"""Sandbox of a worker process that decodes untrusted bytes.

After `seal` the process can compute, start threads, and use the file descriptors it has. It cannot open a file or a
socket, start or signal another process, gain privileges, or map memory as code; its memory, the size of a file it
writes and its CPU time are bounded.

    no new privileges, no core dump -> resource limits -> landlock (files, TCP, signals) -> seccomp (system calls)

Seccomp alone refuses all of this; landlock is a second line of defence, another mechanism of the kernel. A sealed
process cannot load shared libraries or Python modules: import everything first.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import resource
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_SYSTEM_CALLS = {
    # name: (x86-64, arm64)
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "lseek": (8, 62), "fstat": (5, 80),
    "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "pwrite64": (18, 68),
    "preadv": (295, 69), "pwritev": (296, 70), "preadv2": (327, 286), "pwritev2": (328, 287),
    "sendto": (44, 206), "recvfrom": (45, 207), "sendmsg": (46, 211), "recvmsg": (47, 212),
    "poll": (7, None), "ppoll": (271, 73),
    "brk": (12, 214), "munmap": (11, 215), "mremap": (25, 216), "madvise": (28, 233), "membarrier": (324, 283),
    "futex": (202, 98), "set_robust_list": (273, 99), "rseq": (334, 293), "set_tid_address": (218, 96),
    "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "getcpu": (309, 168),
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "gettimeofday": (96, 169), "restart_syscall": (219, 128),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132),
    "getpid": (39, 172), "gettid": (186, 178), "getrandom": (318, 278), "getrusage": (98, 165), "sysinfo": (99, 179),
    "uname": (63, 160), "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip
"""Allowed whatever their arguments: none of them names a file, an address or another process."""
_CHECKED_CALLS = {
    "mmap": (9, 222), "mprotect": (10, 226), "clone": (56, 220), "clone3": (435, 435), "tgkill": (234, 131),
    "prctl": (157, 167), "prlimit64": (302, 261), "seccomp": (317, 277),
}  # fmt: skip
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""AUDIT_ARCH and the column of the tables above."""

_EPERM, _ENOSYS = 1, 38
_PROT_EXEC = 4
_CLONE_VM, _CLONE_THREAD = 0x100, 0x10000
_PR_SET_DUMPABLE, _PR_SET_NAME, _PR_GET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 4, 15, 21, 38
_SET_MODE_FILTER, _SPEC_ALLOW = 1, 4
_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF = 444, 446


@dataclass(frozen=True, kw_only=True)
class ResourceLimits:
    """Bounds on what a sealed process uses."""

    memory_bytes: int
    """Private memory it may allocate beyond what it has when it is sealed; more is a `MemoryError`."""
    file_bytes: int
    """Size to which it may extend a file descriptor that it has."""
    cpu_s: int
    """CPU time over its life; then the kernel kills it."""
    open_files: int = 16
    """File descriptors are numbered below this."""


def missing_features() -> list[str]:
    """Parts of the sandbox that this system lacks."""
    if sys.platform != "linux":
        return ["seccomp", "landlock"]
    has_seccomp = platform.machine() in _ARCHITECTURES and _libc().prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) >= 0
    found = {"seccomp": has_seccomp, "landlock": _landlock_version() > 0}
    return [name for name, is_found in found.items() if not is_found]


def seal(limits: ResourceLimits) -> None:
    """Seal this process for good.

    Features that the system lacks are left out (`missing_features`); any other failure raises `OSError`.
    """
    missing = missing_features()
    _limit_resources(limits)
    if sys.platform == "linux":
        _call(_libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        _call(_libc().prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))  # no core dump, no debugger
    if "landlock" not in missing:
        _restrict_by_landlock()
    if "seccomp" not in missing:
        _install_filter()


def _limit_resources(limits: ResourceLimits) -> None:
    """Have allocations fail, not the machine, and make this process the first one the kernel kills."""
    status = Path("/proc/self/status")
    if status.exists():
        data_kib = int(re.search(r"VmData:\s*(\d+) kB", status.read_text())[1])  # type: ignore[index]
        _set_limit(resource.RLIMIT_DATA, data_kib * 1024 + limits.memory_bytes)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    _set_limit(resource.RLIMIT_CORE, 0)
    _set_limit(resource.RLIMIT_CPU, limits.cpu_s)
    _set_limit(resource.RLIMIT_NOFILE, limits.open_files)
    _set_limit(resource.RLIMIT_FSIZE, limits.file_bytes)
    sys.dont_write_bytecode = True  # cut off by that limit, the bytecode of a module would stay broken


def _set_limit(kind: int, value: int) -> None:
    _, most = resource.getrlimit(kind)
    value = value if most == resource.RLIM_INFINITY else min(value, most)
    resource.setrlimit(kind, (value, value))


# ------------------------------------------------------------------ landlock


def _landlock_version() -> int:
    """The kernel's landlock version; 0 if it has none or has not enabled it."""
    create_version = 1
    version: int = _libc().syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), create_version)
    return max(0, version)


def _restrict_by_landlock() -> None:
    """Deny every right that this version knows: a ruleset without rules."""
    version = _landlock_version()
    num_file_rights = {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)
    fields = [2**num_file_rights - 1]
    if version >= 4:
        fields.append(0b11)  # bind and connect TCP
    if version >= 6:
        fields.append(0b11)  # abstract unix sockets and signals outside of the sandbox
    attributes = struct.pack(f"{len(fields)}Q", *fields)
    ruleset = _call(
        _libc().syscall(_LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    )
    _call(_libc().syscall(_LANDLOCK_RESTRICT_SELF, ruleset, ctypes.c_uint32(0)))
    os.close(ruleset)


# ------------------------------------------------------------------ seccomp

_LOAD, _AND, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_KILL, _ALLOW, _ERRNO = 0x80000000, 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16  # offsets in struct seccomp_data
_Instruction = tuple[int, int, int, int]
"""Operation, instructions to skip if true and if false, operand."""


def _install_filter() -> None:
    program = _filter_program(platform.machine(), os.getpid())
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    number = _CHECKED_CALLS["seccomp"][_ARCHITECTURES[platform.machine()][1]]
    # A worker runs no code of others, so the kernel need not slow it down against speculation.
    _call(_libc().syscall(number, _SET_MODE_FILTER, ctypes.c_uint32(_SPEC_ALLOW), header))


def _filter_program(machine: str, pid: int) -> list[_Instruction]:
    """The BPF program: a list of allowed calls, a few of them by their arguments; all others fail with EPERM."""
    audit, column = _ARCHITECTURES[machine]
    checked = {name: numbers[column] for name, numbers in _CHECKED_CALLS.items()}
    program: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT), (_JUMP_EQUAL, 1, 0, audit), (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_GREATER_EQUAL, 0, 1, 0x40000000), (_RETURN, 0, 0, _ERRNO | _ENOSYS),  # the x32 interface
    ]  # fmt: skip
    for numbers in _SYSTEM_CALLS.values():
        if (number := numbers[column]) is not None:
            program += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    thread = _CLONE_VM | _CLONE_THREAD
    for name, check in {
        "mmap": _unless_set(2, _PROT_EXEC),
        "mprotect": _unless_set(2, _PROT_EXEC),
        "clone": [*_argument(0), (_AND, 0, 0, thread), *_if_equal(thread)],  # a thread, not a process
        "clone3": [(_RETURN, 0, 0, _ERRNO | _ENOSYS)],  # its flags cannot be read here; the C library then calls clone
        "tgkill": [*_argument(0), *_if_equal(pid)],
        "prctl": [*_argument(0), *_if_equal(_PR_SET_NAME)],
        "prlimit64": _if_own_limits_are_read(),
    }.items():
        program += [(_JUMP_EQUAL, 0, len(check), checked[name]), *check]
    return [*program, (_RETURN, 0, 0, _ERRNO | _EPERM)]


def _argument(index: int, *, is_high: bool = False) -> list[_Instruction]:
    """Load 32 bits of an argument."""
    return [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * index + 4 * is_high)]


def _if_equal(value: int) -> list[_Instruction]:
    return [(_JUMP_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | _EPERM)]


def _unless_set(index: int, bits: int) -> list[_Instruction]:
    return [
        *_argument(index), (_JUMP_SET, 1, 0, bits), (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | _EPERM),
    ]  # fmt: skip


def _if_own_limits_are_read() -> list[_Instruction]:
    """prlimit64(0, any, NULL, any)."""
    words: Sequence[tuple[int, bool]] = ((0, False), (2, False), (2, True))
    check: list[_Instruction] = []
    for index, is_high in words:
        check += [*_argument(index, is_high=is_high), (_JUMP_EQUAL, 1, 0, 0), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    return [*check, (_RETURN, 0, 0, _ALLOW)]


# ------------------------------------------------------------------ the C library


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(result: int) -> int:
    """The result of a system call; raises `OSError` if it failed."""
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
