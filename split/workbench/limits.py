"""What a job of the workbench may use of the machine: the child puts these on itself before it looks at any byte of a
model. No sandbox against code of an attacker's: bounds for what a broken or hostile file makes parsers and runtime do.

Memory counts what a process fills (RLIMIT_DATA), not what it maps from files: weights beside a model cost nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import resource
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from split.runtime.allowance import memory_limit_bytes, usable_threads

MEMORY_BASE_BYTES: Final = 4 << 30
MEMORY_PER_MODEL_BYTE: Final = 8
"""A job reads and parses the file once each and opens the whole, a head and a tail, each packed once more; the rest is
interpreter, runtime and activations: 0.2 GB for EfficientNet-Lite0, a few for big pictures."""
MACHINE_SHARE: Final = 0.75
"""Of the machine's memory (or the cgroup's): the daemon goes on answering meanwhile."""
MEMORY_MIN_BYTES: Final = 256 << 20
"""Below this not even the interpreter and the runtime start."""

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_SECCOMP: Final = 22
_PR_SET_NO_NEW_PRIVS: Final = 38
_SECCOMP_MODE_FILTER: Final = 2
_SECCOMP_ALLOW: Final = 0x7FFF0000
_SECCOMP_EACCES: Final = 0x00050000 | 13
_IO_URING_SETUP: Final = 425
"""The same number everywhere; its rings open sockets, too."""
_SOCKET_CALL: Final = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
"""Machine → (AUDIT_ARCH_*, number of socket(2)): where onnxruntime has wheels."""
_X32_BIT: Final = 0x40000000

_OUT_OF_MEMORY: Final = re.compile(
    r"bad_alloc|bad allocation|MemoryError|[Aa]llocate memory|Unable to allocate|failed to map segment"
)

_INHERITED: Final = ((resource.RLIMIT_AS, "ulimit -v", "LimitAS="), (resource.RLIMIT_DATA, "ulimit -d", "LimitDATA="))
"""Limits of memory that a shell or systemd may have put on whoever starts the job, which the job inherits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    memory_bytes: int
    cpu_s: int
    """Of all threads together."""

    def __post_init__(self) -> None:
        assert self.memory_bytes >= 1, self.memory_bytes
        assert self.cpu_s >= 1, self.cpu_s


def default_limits(model: Path, timeout_s: float) -> Limits:
    """Generous ones for a job on `model` that may take `timeout_s`: memory grows with its files, and the processor
    time is what all cores can give until then."""
    memory_bytes = MEMORY_BASE_BYTES + MEMORY_PER_MODEL_BYTE * _bytes_beside(model)
    memory_bytes = min(memory_bytes, int(MACHINE_SHARE * _machine_bytes()))
    return Limits(
        memory_bytes=max(memory_bytes, MEMORY_MIN_BYTES), cpu_s=max(1, round(timeout_s * (usable_threads() + 1)))
    )


def apply_limits(limits: Limits, parent: int) -> str:
    """Put them on this process, for good: memory, processor time, no core dump, no network, an end with `parent`.

    Call it while there is one thread. Returns why the network could not be closed off, "" when it was.
    """
    _lower(resource.RLIMIT_CORE, 0, 0)
    _lower(resource.RLIMIT_DATA, limits.memory_bytes, limits.memory_bytes)
    _lower(resource.RLIMIT_CPU, limits.cpu_s, limits.cpu_s + 5)  # the first is SIGXCPU, the second SIGKILL
    with contextlib.suppress(OSError):  # where memory runs out all the same, this process goes first
        Path("/proc/self/oom_score_adj").write_text("1000")
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before it could be noticed
        sys.exit(1)
    return _close_network()


def inherited_limit(below_bytes: int) -> str:
    """Which limit of memory this process was started with that is lower than what a job may use: bytes and how to lift
    it, as the end of a sentence; "" where there is none."""
    known = [(resource.getrlimit(which)[0], words) for which, *words in _INHERITED]
    lower = [(most, words) for most, words in known if most != resource.RLIM_INFINITY and most < below_bytes]
    if not lower:
        return ""
    most, (shell, unit) = min(lower)
    return f"the {most >> 20} MiB of memory that this program was started with ({shell}, or {unit} of its systemd unit)"


def tells_of_memory(text: str) -> bool:
    """Whether this is how the interpreter, numpy, onnxruntime or the loader of libraries say that memory ran out."""
    return _OUT_OF_MEMORY.search(text) is not None


def _bytes_beside(model: Path) -> int:
    """Bytes of the model's file and of those beside it, which may be its weights."""
    try:
        with os.scandir(model.parent) as entries:
            return sum(entry.stat().st_size for entry in entries if entry.is_file(follow_symlinks=False))
    except OSError:
        return 0


def _machine_bytes() -> int:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(machine, memory_limit_bytes() or machine)


def _lower(which: int, soft: int, hard: int) -> None:
    _, most = resource.getrlimit(which)
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(which, (soft, hard))


class _Instruction(ctypes.Structure):
    """struct sock_filter of linux/filter.h."""

    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction)))


def _close_network() -> str:
    """Refuse socket(2) with EACCES from here on (seccomp-bpf).

    A network namespace would do the same where user namespaces are allowed; our own systemd unit forbids them.
    """
    if platform.machine() not in _SOCKET_CALL:
        return f"its system calls are not known on {platform.machine()}"
    audit_arch, socket_call = _SOCKET_CALL[platform.machine()]
    load, if_equal, if_greater_or_equal, give = 0x20, 0x15, 0x35, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, …|JGE|K, BPF_RET
    program = (
        (load, 0, 0, 4),  # seccomp_data.arch
        (if_equal, 0, 5, audit_arch),  # a 32-bit call is refused
        (load, 0, 0, 0),  # seccomp_data.nr
        (if_greater_or_equal, 3, 0, _X32_BIT),
        (if_equal, 2, 0, socket_call),
        (if_equal, 1, 0, _IO_URING_SETUP),
        (give, 0, 0, _SECCOMP_ALLOW),
        (give, 0, 0, _SECCOMP_EACCES),
    )
    instructions = (_Instruction * len(program))(*(_Instruction(*line) for line in program))
    filtered = _Program(len(program), instructions)
    if failed := _prctl(_PR_SET_NO_NEW_PRIVS, 1) or _prctl(
        _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(filtered)
    ):
        return f"the kernel takes no seccomp filter ({os.strerror(failed)})"
    return ""


def _prctl(option: int, first: int, second: int = 0) -> int:
    """prctl(2); the error number, 0 when it did."""
    libc = ctypes.CDLL(None, use_errno=True)
    words = [ctypes.c_ulong(word) for word in (first, second, 0, 0)]
    return ctypes.get_errno() if libc.prctl(ctypes.c_int(option), *words) else 0
