"""What a job of the workbench may not do, tried in real children; and what broken or hostile models come to."""

from __future__ import annotations

import ctypes
import hashlib
import os
import resource
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx.parser
import pytest

from split.errors import InvalidModel, ModelUnavailable
from split.workbench import child, limits
from split.workbench.child import run_child
from split.workbench.limits import default_limits, tells_of_memory

HEADER = '<ir_version: 8, opset_import: ["" : 18]>'
TEXT = f"{HEADER} g (float[2] x) => (float[2] y) {{ a = Neg(x)  y = Abs(a) }}"
ENDLESS = f"""{HEADER} g (float[2] x) => (float[2] y)
<int64 many = {{4611686018427387904}}, bool go = {{1}}> {{
  y = Loop (many, go, x) <body = again (int64 i, bool c, float[2] s) => (bool d, float[2] t) {{
    d = Identity(c)  t = Tanh(s)
  }}>
}}"""
HUGE = f"""{HEADER} g (float[1] x) => (float[1] y)
<int64[2] dims = {{4194304, 1048576}}, int64[1] flat = {{-1}}> {{
  big = ConstantOfShape(dims)  line = Reshape(big, flat)  top = ReduceMax<keepdims = 0>(line)  y = Add(x, top)
}}"""


def laid(folder: Path, text: str = TEXT, change: Callable[[onnx.ModelProto], object] = lambda model: None) -> Path:
    model = onnx.parser.parse_model(text)
    change(model)
    (folder / "model").mkdir(exist_ok=True)
    path = folder / "model" / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def inside(code: str, *, memory_bytes: int = 1 << 30, cpu_s: int = 20) -> subprocess.CompletedProcess[str]:
    """Run code in a process that has put limits on itself."""
    start = (
        "import os\nfrom split.workbench.limits import Limits, apply_limits\n"
        f"print(repr(apply_limits(Limits(memory_bytes={memory_bytes}, cpu_s={cpu_s}), os.getppid())))\n"
    )
    return subprocess.run(
        [sys.executable, "-c", start + code], capture_output=True, text=True, timeout=60, env=child._environment()
    )


def test_a_job_has_no_network_but_pipes_and_files() -> None:
    ran = inside(
        "import socket\n"
        "for family, kind in ((socket.AF_INET, socket.SOCK_STREAM), (socket.AF_INET6, socket.SOCK_DGRAM),"
        " (socket.AF_UNIX, socket.SOCK_STREAM)):\n"
        "    try: socket.socket(family, kind)\n"
        "    except PermissionError: print('refused')\n"
        "socket.socketpair(); os.pipe(); open('/proc/self/status').close(); print('open')"
    )
    assert ran.stdout.split() == ["''", "refused", "refused", "refused", "open"], ran.stderr


def test_a_job_can_neither_fill_more_memory_than_it_may_nor_raise_its_limits_nor_dump_core() -> None:
    ran = inside(
        "import resource\n"
        "try: bytearray(1 << 30)\n"
        "except MemoryError: print('full')\n"
        "print(resource.getrlimit(resource.RLIMIT_CORE)[0], resource.getrlimit(resource.RLIMIT_CPU)[0])\n"
        "print(open('/proc/self/oom_score_adj').read())",
        memory_bytes=512 << 20,
        cpu_s=7,
    )
    assert ran.stdout.split() == ["''", "full", "0", "7", "1000"], ran.stderr


def test_where_system_calls_are_not_known_it_says_that_the_network_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits.platform, "machine", lambda: "riscv64")
    assert limits._close_network() == "its system calls are not known on riscv64"


def test_the_default_grows_with_the_models_files_and_ends_at_the_machines_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_machine_bytes", lambda: 64 << 30)
    path = laid(tmp_path)
    small = default_limits(path, 10).memory_bytes
    with (path.parent / "weights.bin").open("wb") as weights:
        weights.truncate(1 << 30)
    assert default_limits(path, 10).memory_bytes == small + (8 << 30)
    monkeypatch.setattr(limits, "_machine_bytes", lambda: 4 << 30)
    assert default_limits(path, 10).memory_bytes == 3 << 30
    assert default_limits(tmp_path / "gone" / "model.onnx", 10).memory_bytes == 3 << 30


@pytest.mark.parametrize(
    ("text", "yes"),
    [
        ("MemoryError", True),
        ("onnxruntime refuses m.onnx: std::bad_alloc", True),
        ("Failed to allocate memory for requested buffer of size 17179869184", True),
        ("Unable to allocate 8.00 GiB for an array with shape (1073741824,)", True),
        ("ImportError: libxcb.so.1: failed to map segment from shared object", True),
        ("the node needs a tensor of rank 2", False),
    ],
)
def test_failed_allocations_are_known_by_their_words(text: str, yes: bool) -> None:
    assert tells_of_memory(text) is yes


# -- models that take too much ----------------------------------------------------------------------------------------


async def test_a_model_that_fills_memory_is_refused_with_the_limit_it_met(tmp_path: Path) -> None:
    path = laid(tmp_path, HUGE)
    with pytest.raises(InvalidModel, match=r"probe of .* needs more than the 1024 MiB of memory .*memory_bytes"):
        await run_child(["probe", str(path)], timeout_s=60, memory_bytes=1 << 30)


LIMITED = """
import sys
from pathlib import Path
from split.errors import InvalidModel
from split.workbench.child import run_child_sync

model, folder = sys.argv[1:]
try:
    run_child_sync(["prepare", model, "--folder", folder], timeout_s=100)
except InvalidModel as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("which", "limit_bytes", "said"),
    [
        (resource.RLIMIT_AS, 600 << 20, "ulimit -v, or LimitAS="),
        (resource.RLIMIT_DATA, 400 << 20, "ulimit -d, or LimitDATA="),
    ],
)
def test_where_the_program_itself_was_started_with_little_memory_that_limit_is_named(
    tmp_path: Path, which: int, limit_bytes: int, said: str
) -> None:
    text = HEADER + " g (float[1000, 1000, 1000] x) => (float[1000, 1000, 1000] y) { y = Neg(x) }"
    path = laid(tmp_path, text)
    found = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path), str(tmp_path / "parts")],
        capture_output=True,
        text=True,
        env=child._environment(),
        preexec_fn=lambda: resource.setrlimit(which, (limit_bytes, limit_bytes)),
        check=False,
    )
    assert f"prepare of {path} needs more than the {limit_bytes >> 20} MiB of memory that this program" in found.stdout
    assert f"was started with ({said} of its systemd unit); start it with more" in found.stdout, found.stderr


async def test_a_model_that_computes_for_ever_is_refused_with_the_limit_it_met(tmp_path: Path) -> None:
    path = laid(tmp_path, ENDLESS)
    with pytest.raises(InvalidModel, match=r"used more than the 2 s of processor time"):
        await run_child(["probe", str(path)], timeout_s=60, cpu_s=2)


async def test_what_the_job_started_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import json, subprocess, sys\n"
        "one = subprocess.Popen([sys.executable, '-c', 'import threading; threading.Event().wait()'])\n"
        "print(json.dumps({'progress': [str(one.pid), 0]}), flush=True)"
    )
    monkeypatch.setattr(child, "_argv", lambda command, limits: [sys.executable, "-c", code])
    told: list[int] = []
    with pytest.raises(InvalidModel, match="did not end within 3 s"):  # its child holds the pipes
        await run_child(["prepare", "m"], timeout_s=3, on_progress=lambda pid, _: told.append(os.pidfd_open(int(pid))))
    [grandchild] = told
    assert has_ended(grandchild)


def test_a_job_ends_with_the_process_that_asked_for_it(tmp_path: Path) -> None:
    path = laid(tmp_path, ENDLESS)
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import asyncio, os\nfrom split.workbench import child\n"
            "async def main():\n"
            f"    job = asyncio.create_task(child.run_child(['probe', {str(path)!r}], timeout_s=600))\n"
            "    while not (pids := open(f'/proc/self/task/{os.getpid()}/children').read()):\n"
            "        await asyncio.sleep(0.01)\n"
            "    print(pids, flush=True)\n"
            "    await job\n"
            "asyncio.run(main())",
        ],
        stdout=subprocess.PIPE,
        text=True,
        env=child._environment(),
    )
    assert parent.stdout is not None
    job = int(parent.stdout.readline())
    watched = os.pidfd_open(job)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert has_ended(watched), "the job outlived its parent"


def has_ended(pidfd: int) -> bool:
    """Within half a minute."""
    poll = select.poll()
    poll.register(pidfd)
    ended = bool(poll.poll(30_000))
    os.close(pidfd)
    return ended


# -- models that are not what they say --------------------------------------------------------------------------------


def external(location: str) -> Callable[[onnx.ModelProto], object]:
    def change(model: onnx.ModelProto) -> None:
        weight = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[2])
        weight.data_location = onnx.TensorProto.EXTERNAL
        weight.external_data.add(key="location", value=location)
        model.graph.initializer.append(weight)
        model.graph.node[0].op_type = "Add"
        model.graph.node[0].input.append("w")

    return change


def nested(depth: int) -> bytes:
    """Bytes that add a node with graphs in graphs to a model that they follow: protobuf merges what comes twice."""

    def field(number: int, content: bytes) -> bytes:
        size, length = len(content), b""
        while size > 127:
            length, size = length + bytes([size & 127 | 128]), size >> 7
        return bytes([number << 3 | 2]) + length + bytes([size]) + content

    graph = b""
    for _ in range(depth):
        attribute = field(1, b"then_branch") + bytes([20 << 3, 5]) + field(6, graph)  # name, type GRAPH, g
        graph = field(1, field(1, b"go") + field(2, b"z") + field(4, b"If") + field(5, attribute))
    return field(7, graph)


def cyclic(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = "y"


def absurd(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1 << 62


def unknown_op(model: onnx.ModelProto) -> None:
    model.graph.node[0].op_type = "Frobnicate"


async def refused(path: Path, tmp_path: Path) -> str:
    """What a daemon's first look says: prepare, then probe, in small limits."""

    async def first_look() -> None:
        for job in (["prepare", str(path), "--cache", str(tmp_path / "cache")], ["probe", str(path)]):
            await run_child(job, timeout_s=60, memory_bytes=1 << 30, cpu_s=60)

    with pytest.raises((InvalidModel, ModelUnavailable)) as caught:
        await first_look()
    text = str(caught.value)
    assert "Traceback" not in text
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (cyclic, "cycl"),
        (absurd, "model.onnx"),
        (unknown_op, "Frobnicate"),
        (external("gone.bin"), "not there"),
    ],
    ids=["cyclic", "absurd-dims", "unknown-op", "missing-external-data"],
)
async def test_a_hostile_model_is_refused_with_one_sentence(
    tmp_path: Path, change: Callable[[onnx.ModelProto], object], says: str
) -> None:
    assert says in await refused(laid(tmp_path, change=change), tmp_path)


@pytest.mark.parametrize("depth", [25, 3000])
async def test_graphs_nested_absurdly_deep_are_refused(tmp_path: Path, depth: int) -> None:
    path = laid(tmp_path)
    path.write_bytes(path.read_bytes() + nested(depth))
    assert "model.onnx" in await refused(path, tmp_path)


@pytest.mark.parametrize("kept", [0, 1, 20, -1])
async def test_a_truncated_model_is_refused(tmp_path: Path, kept: int) -> None:
    path = laid(tmp_path)
    path.write_bytes(path.read_bytes()[:kept])
    assert "model.onnx" in await refused(path, tmp_path)


class Opened:
    """Whether anybody opens a file (inotify)."""

    def __init__(self, path: Path) -> None:
        libc = ctypes.CDLL(None)
        self._descriptor = libc.inotify_init1(os.O_NONBLOCK)
        assert libc.inotify_add_watch(self._descriptor, os.fsencode(path), 0x20) >= 0  # IN_OPEN

    def __bool__(self) -> bool:
        try:
            return bool(os.read(self._descriptor, 4096))
        except BlockingIOError:
            return False

    def close(self) -> None:
        os.close(self._descriptor)


@pytest.mark.parametrize(
    "location",
    ["../secret.bin", "{abs}/secret.bin", "a/../../secret.bin", "C:\\x", "", "ok.bin\0x", "x" * 5000, "link.bin", "."],
    ids=["parent", "absolute", "nested", "drive", "empty", "nul", "long", "link", "folder"],
)
async def test_o_se_01_external_data_outside_the_models_folder_is_refused_unread(tmp_path: Path, location: str) -> None:
    secret = tmp_path / "secret.bin"
    secret.write_bytes(b"SECRETS!")
    path = laid(tmp_path, change=external(location.replace("{abs}", str(tmp_path))))
    (path.parent / "a").mkdir()
    (path.parent / "ok.bin").write_bytes(b"12345678")
    (path.parent / "link.bin").symlink_to(secret)
    opened = Opened(secret)
    try:
        text = await refused(path, tmp_path)
        assert not opened
        secret.read_bytes()
        assert opened  # the watch works
    finally:
        opened.close()
    assert "SECRETS!" not in text
    assert len(text) < 8000


def files_below(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


async def test_o_se_02_a_hostile_location_makes_nothing_be_written_elsewhere(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"as it was")
    before = hashlib.sha256(victim.read_bytes()).hexdigest()
    (tmp_path / "deep").mkdir()
    path = laid(tmp_path / "deep", change=external("../../victim"))
    await refused(path, tmp_path)
    assert hashlib.sha256(victim.read_bytes()).hexdigest() == before
    honest = laid(tmp_path / "deep")
    await run_child(["prepare", str(honest), "--cache", str(tmp_path / "cache")], timeout_s=60)
    made = files_below(tmp_path) - {victim, honest}
    assert made
    assert all(one.parent.parent == tmp_path / "cache" / "models" for one in made)


async def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    path = laid(tmp_path)
    with pytest.raises(ModelUnavailable, match=r"/proc/\S+ cannot be used \(No such file or directory\)"):
        await run_child(["prepare", str(path), "--cache", "/proc/nowhere"], timeout_s=60)
    command = ["check", str(path), "--out", str(tmp_path / "out.json"), "--outputs", "/proc/nowhere"]
    with pytest.raises(ModelUnavailable, match="/proc/nowhere cannot be used"):
        await run_child(command, timeout_s=60)
