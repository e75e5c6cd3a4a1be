"""The program `isthmus` with odd words, files and folders: one sentence on stderr, and the right exit status."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from agent import cli

TEXT = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[2] x) => (float[2] y) { a = Neg(x)  y = Abs(a) }"""

Said = tuple[int, str]


@pytest.fixture
def isthmus(capfd: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Run the program; exit status and what stood on stderr."""

    def call(*words: object) -> Said:
        capfd.readouterr()
        try:
            status = cli.run([str(word) for word in words])
        except SystemExit as error:  # argparse
            status = int(error.code or 0)
        return status, capfd.readouterr().err

    return call


def one_sentence(said: str) -> str:
    """The last line, which is all that is no usage and no progress."""
    assert "Traceback" not in said
    *before, last = said.splitlines()
    assert all(line.startswith(("usage:", " ", "profile:", "plan:")) for line in before), said
    assert " object at 0x" not in last
    return last


@pytest.mark.parametrize(
    "url",
    [
        "localhost:80",
        "ftp://x",
        "http://",
        "http://h:port",
        "http://h:0",
        "http://h:99999",
        "http://a b:1",
        "http://..:80",
        "http://" + "x" * 70 + ".example",
        "http://h\udcff:1",
        "http://[::1",
        "http://me@h:1",
        "http://h:1/path",
        "http://h:1?query",
        "http://h\n:1",
        "unix://",
        "unix://host/path",
        "unix:///a%00b",
        "",
    ],
)
@pytest.mark.parametrize(
    "words", [("status",), ("explain", "00"), ("infer", "net", "in.npz")], ids=lambda words: words[0]
)
def test_a_malformed_url_is_a_mistake_of_usage(isthmus: Callable[..., Said], words: tuple[str, ...], url: str) -> None:
    status, said = isthmus(*words, "--url", url)
    assert status == 2
    assert "--url must be http://HOST:PORT or unix:///PATH" in one_sentence(said)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:{port}", "http://name.invalid:1", "unix:///none", "unix:///" + "x" * 300]
)
def test_a_daemon_that_cannot_be_reached_is_a_failure(isthmus: Callable[..., Said], url: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        status, said = isthmus("status", "--url", url.replace("{port}", str(unused.getsockname()[1])))
    assert status == 1
    assert "no daemon answers at" in one_sentence(said)


@pytest.fixture
def stranger() -> Iterator[Callable[[bytes, dict[str, str]], str]]:
    """A server that is no daemon: give it a body and headers, take its URL."""
    answer: list[tuple[bytes, dict[str, str]]] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body, headers = answer[0]
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(200)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_OPTIONS = answer  # noqa: N815 - http.server's names

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()

    def answers(body: bytes, headers: dict[str, str]) -> str:
        answer[:] = [(body, headers)]
        return f"http://127.0.0.1:{server.server_port}"

    yield answers
    server.shutdown()
    serving.join()
    server.server_close()


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"null", b'"text"', b"\xff\xfe", b'{"a": "\xff"}'])
def test_what_is_no_daemon_is_told(
    isthmus: Callable[..., Said], stranger: Callable[[bytes, dict[str, str]], str], body: bytes
) -> None:
    status, said = isthmus("status", "--url", stranger(body, {}))
    assert status == 1
    assert "is no Isthmus daemon; check --url" in one_sentence(said)


def test_an_answer_with_a_length_that_is_none_is_told(
    isthmus: Callable[..., Said], stranger: Callable[[bytes, dict[str, str]], str], tmp_path: Path
) -> None:
    np.savez(tmp_path / "in.npz", x=np.zeros(2, "f4"))
    url = stranger(b"{}", {"Inference-Header-Content-Length": "many"})
    status, said = isthmus("infer", "net", tmp_path / "in.npz", "--url", url)
    assert (status, "is no Isthmus daemon" in one_sentence(said)) == (1, True)


def foreign_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("word/document.xml", "<w/>")


def truncated(path: Path) -> None:
    np.savez(path, x=np.zeros(1000))
    path.write_bytes(path.read_bytes()[:900])


def flipped(path: Path) -> None:
    np.savez_compressed(path, x=np.arange(1000))
    data = bytearray(path.read_bytes())
    data[100] ^= 255
    path.write_bytes(data)


def huge(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1152921504606,), }"
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)


@pytest.mark.parametrize("make", [foreign_zip, truncated, flipped, huge], ids=lambda make: make.__name__)
def test_an_archive_that_is_no_npz_is_not_called_a_picture(
    isthmus: Callable[..., Said],
    stranger: Callable[[bytes, dict[str, str]], str],
    tmp_path: Path,
    make: Callable[[Path], None],
) -> None:
    make(tmp_path / "in.npz")
    url = stranger(json.dumps({"name": "net", "inputs": []}).encode(), {})
    status, said = isthmus("infer", "net", tmp_path / "in.npz", "--url", url)
    assert status == 1
    assert "in.npz is no .npz file" in one_sentence(said)
    assert "picture" not in said


@pytest.mark.parametrize("value", ["nan", "-1", "0", "inf", "soon"])
def test_a_deadline_that_is_none_is_a_mistake_of_usage(isthmus: Callable[..., Said], value: str) -> None:
    status, said = isthmus("infer", "net", "in.npz", f"--deadline-ms={value}")
    assert status == 2
    assert f"argument --deadline-ms: expected a number above 0, got {value!r}" in one_sentence(said)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(onnx.parser.parse_model(TEXT), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


@pytest.mark.parametrize(
    "command",
    ["cuts", "plan"],
)
def test_a_plot_that_cannot_be_written_is_told(
    isthmus: Callable[..., Said], model: Path, tmp_path: Path, command: str
) -> None:
    cache = ["--cache", tmp_path / "cache"] if command == "plan" else []
    status, said = isthmus(command, model, "--plot", "/proc/nowhere/x.png", *cache)
    assert status == 1
    assert "cannot be written" in one_sentence(said)


@pytest.mark.parametrize(
    "words",
    [("check", "--outputs", "/proc/nowhere"), ("profile", "--cache", "/proc/nowhere"), ("plan", "--cache", "/proc/x")],
)
def test_a_folder_that_cannot_be_made_is_told(
    isthmus: Callable[..., Said], model: Path, words: tuple[str, ...]
) -> None:
    command, *options = words
    status, said = isthmus(command, model, *options)
    assert status == 1
    assert f"{options[1]}" in one_sentence(said)
    assert "cannot be used (No such file or directory)" in one_sentence(said)
    assert "Error" not in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("listen: {grpc: 127.0.0.1:9}\n", "grpc is not in this version"),
        ("mqtt: {host: broker}\n", "mqtt is not in this version"),
        ("listen: {http: null}\n", "at least one of http and unix must be set"),
        ("models: [a]\n", "models"),
        ("\x00", "is not YAML"),
    ],
)
def test_a_configuration_that_is_none_ends_with_78(
    isthmus: Callable[..., Said], tmp_path: Path, text: str, says: str
) -> None:
    path = tmp_path / "agent.yaml"
    keys = "" if text.startswith("models") else "models: .\n"
    path.write_text(f"{keys}state_dir: s\ncache_dir: c\n{text}")
    status, said = isthmus("agent", "--config", path)
    assert status == 78
    assert says in one_sentence(said)


@pytest.mark.parametrize("words", [("agent", "--config", "/none.yaml"), ("cuts", "m", "--config", "/none.yaml")])
def test_a_configuration_that_is_not_there_ends_with_78(isthmus: Callable[..., Said], words: tuple[str, ...]) -> None:
    status, said = isthmus(*words)
    assert status == 78
    assert "/none.yaml: cannot be read (No such file or directory)" in one_sentence(said)


@pytest.mark.parametrize("words", [(), ("nonsense",), ("infer",), ("plan", "m", "--rtt-ms", "fast")])
def test_what_is_no_command_line_ends_with_2(isthmus: Callable[..., Said], words: tuple[str, ...]) -> None:
    assert isthmus(*words)[0] == 2


def test_a_name_with_bytes_that_are_no_text_is_a_sentence(isthmus: Callable[..., Said]) -> None:
    status, said = isthmus("cuts", os.fsdecode(b"/m\xff.onnx"))
    assert status == 1
    assert "is no file" in one_sentence(said)


@pytest.mark.parametrize(("module", "command"), [("agent.cli", "status"), ("cloud.cli", "token")])
def test_numpy_computes_on_one_thread_in_the_programs_and_is_not_imported_before_that_is_said(
    module: str, command: str
) -> None:
    """OpenBLAS reads the variable when it is loaded."""
    code = (
        f"import os, sys, {module} as cli\n"
        "assert 'numpy' not in sys.modules\n"
        "cli.run = lambda arguments: print(os.environ['OPENBLAS_NUM_THREADS'])\n"
        f"sys.argv = ['isthmus', {command!r}]\n"
        "cli.main()\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
