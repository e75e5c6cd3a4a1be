"""`isthmus validate`: a contract against a running daemon, a foreign service, the model beside it, and nothing."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import onnx
import onnx.parser
import pytest

from agent import cli
from agent.config import AgentConfig, Listen
from agent.daemon import Daemon
from agent.http_client import DaemonClient
from split.profiles.address import HostPort

TINY = """
<ir_version: 10, opset_import: ["" : 18]>
tiny (float[n, 3] x) => (float[n, 3] y) { a = Relu(x)  y = Exp(a) }
"""
CONTRACT = """\
model: tiny
resource: {memory_bytes: 1000}
behaviour: {latency_p99_ms: 5000, class: gold, weights: {latency: 2, energy: 2}, fallback: {timeout_ms: 800}}
data:
  inputs: [{name: x, dtype: FP32, shape: [-1, 3], privacy: no-raw-input}]
  outputs: [{name: y, labels: labels.txt}]
  depth_min_ratio: 0.25
  codecs: [raw, fp16]
  fidelity: {measure: kl, bound: 0.01}
"""

Validate = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def validate(capfd: pytest.CaptureFixture[str]) -> Validate:
    """Run the command with `--json`; exit status, and the field rows by path."""

    def call(contract: Path, *words: str) -> tuple[int, dict[str, Any]]:
        capfd.readouterr()
        status = cli.run(["validate", "--contract", str(contract), "--json", *words])
        said = json.loads(capfd.readouterr().out)
        assert set(said) == {"ok", "fields"}
        assert all(set(row) == {"path", "ok", "wanted", "found", "mend"} for row in said["fields"])
        assert all(row["ok"] is (row["mend"] == "") for row in said["fields"]), "who fails says how to mend it"
        assert said["ok"] is all(row["ok"] for row in said["fields"])
        assert status == (0 if said["ok"] else 1)
        return status, {row["path"]: row for row in said["fields"]}

    return call


def failing(rows: dict[str, Any]) -> set[str]:
    return {path for path, row in rows.items() if not row["ok"]}


def laid(folder: Path, contract: str = CONTRACT) -> Path:
    """The model `tiny` in a repository; its contract."""
    place = folder / "tiny"
    (place / "1").mkdir(parents=True)
    (place / "1" / "model.onnx").write_bytes(onnx.parser.parse_model(TINY).SerializeToString())
    (place / "labels.txt").write_text("ant\nbee\ncow\n")
    (place / "contract.yaml").write_text(contract)
    return place / "contract.yaml"


# -- the daemon -------------------------------------------------------------------------------------------------------


async def test_a_running_daemon_holds_its_own_contract_and_fails_the_fields_of_a_stricter_one(
    tmp_path: Path, validate: Validate
) -> None:
    own = laid(tmp_path / "models")
    config = AgentConfig(
        models=tmp_path / "models",
        state_dir=tmp_path / "state",
        cache_dir=tmp_path / "cache",
        listen=Listen(http=HostPort("127.0.0.1:0"), unix=None),
    )
    async with Daemon(config) as daemon:
        url = f"http://127.0.0.1:{daemon.http.ports[0]}"
        await daemon.service.load("tiny")

        def call(contract: Path) -> dict[str, Any]:
            return validate(contract, "--service", url)[1]

        assert failing(await asyncio.to_thread(call, own)) == set()
        await asyncio.to_thread(DaemonClient(url).infer, "tiny", {"x": np.zeros((1, 3), np.float32)}, {})
        rows = await asyncio.to_thread(call, own)
        assert failing(rows) == set()
        assert 0 < rows["behaviour.latency_p99_ms"]["found"] < 5000, "measured now"

        stricter = tmp_path / "stricter.yaml"
        stricter.write_text(
            """\
model: tiny
resource: {memory_bytes: 999, accelerators: [cuda]}
behaviour:
  {latency_p99_ms: 0.1, throughput_min_per_s: 1.0e+9, class: bronze, weights: {latency: 2, energy: 3},
   fallback: {strategy: fail, timeout_ms: 700, agreement_min: 0.95}, retry: {attempts: 1}}
data:
  inputs: [{name: x, dtype: FP16, shape: [-1, 4], privacy: local-only}]
  outputs: [{name: y, labels: labels.txt}, {name: z}]
  privacy: local-only
  depth_min_ratio: 0.5
  codecs: [raw]
  fidelity: {measure: top1, bound: 0.001}
"""
        )
        (tmp_path / "labels.txt").write_text("ant\nbear\ncow\n")
        rows = await asyncio.to_thread(call, stricter)
        assert failing(rows) == {
            "resource.memory_bytes",
            "resource.accelerators",
            "behaviour.latency_p99_ms",
            "behaviour.throughput_min_per_s",
            "behaviour.class",
            "behaviour.weights.latency",
            "behaviour.weights.energy",
            "behaviour.fallback.strategy",
            "behaviour.fallback.timeout_ms",
            "behaviour.retry.attempts",
            "data.inputs[0].dtype",
            "data.inputs[0].shape",
            "data.inputs[0].privacy",
            "data.outputs[0].labels",
            "data.outputs[1].name",
            "data.privacy",
            "data.depth_min_ratio",
            "data.codecs",
            "data.fidelity.measure",
            "data.fidelity.bound",
        }
        assert rows["data.fidelity.bound"]["mend"].startswith("set data.fidelity.bound to 0.001 in the contract.yaml")
        assert rows["data.outputs[0].labels"]["found"] == "3 labels, others from line 2 on"
        assert rows["data.codecs"]["mend"].startswith("set data.codecs to [raw] in the contract.yaml of the service")

        looser = tmp_path / "looser.yaml"
        looser.write_text("model: tiny\nbehaviour: {class: gold, weights: {latency: 1, energy: 1}}\n")
        rows = await asyncio.to_thread(call, looser)
        assert failing(rows) == {"data.codecs", "data.fidelity.bound"}, "nothing said allows raw alone, nothing lossy"

        other = tmp_path / "other.yaml"
        other.write_text("model: teeny\n")
        rows = await asyncio.to_thread(call, other)
        assert list(rows) == ["model"]
        assert "known: tiny" in rows["model"]["found"]


# -- foreign services -------------------------------------------------------------------------------------------------

METADATA = {
    "name": "tiny",
    "versions": ["1"],
    "platform": "onnxruntime_onnx",
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}],
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 3]}],
}


class Foreign:
    """Answers what it is told: (method, path) → (status, body); 404 for all else."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, str], tuple[int, bytes]] = {}
        self.breaks_off = False
        foreign = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                status, body = foreign.answers.get((self.command, self.path), (404, b'{"error": "not here"}'))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body) + foreign.breaks_off))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None: ...

            do_GET = do_OPTIONS = answer  # noqa: N815 - http.server's names

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def says(self, method: str, path: str, body: object, status: int = 200) -> None:
        self.answers[method, path] = (status, body if isinstance(body, bytes) else json.dumps(body).encode())


@pytest.fixture
def foreign() -> Iterator[Foreign]:
    service = Foreign()
    thread = threading.Thread(target=service.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield service
    finally:
        service.server.shutdown()
        thread.join()
        service.server.server_close()


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "given.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "options", [(404, b"{}"), (405, b""), (204, b""), (200, b"OK"), (200, b'{"contract": 7}')], ids=str
)
def test_a_foreign_service_is_held_to_its_metadata_and_to_what_is_no_default(
    tmp_path: Path, validate: Validate, foreign: Foreign, options: tuple[int, bytes]
) -> None:
    foreign.says("GET", "/v2/models/tiny", METADATA)
    foreign.says("OPTIONS", "/v2/models/tiny", options[1], options[0])
    plain = "model: tiny\ndata: {inputs: [{name: x, dtype: FP32, shape: [-1, 3]}], outputs: [{name: y}]}\n"
    _, rows = validate(written(tmp_path, plain), "--service", foreign.url)
    assert failing(rows) == set()
    _, rows = validate(written(tmp_path, CONTRACT), "--service", foreign.url)
    assert failing(rows) == {
        "resource.memory_bytes",
        "behaviour.latency_p99_ms",
        "behaviour.class",
        "behaviour.weights.latency",
        "behaviour.weights.energy",
        "behaviour.fallback.timeout_ms",
        "data.inputs[0].privacy",
        "data.outputs[0].labels",
        "data.depth_min_ratio",
        "data.codecs",
        "data.fidelity.measure",
        "data.fidelity.bound",
    }
    assert rows["behaviour.class"]["found"] is None
    assert "the service does not state it" in rows["behaviour.class"]["mend"]


def test_tritons_configuration_and_statistics_are_taken_for_what_they_say(
    tmp_path: Path, validate: Validate, foreign: Foreign
) -> None:
    foreign.says("GET", "/v2/models/tiny", METADATA)
    foreign.says("GET", "/v2/models/tiny/config", {"instance_group": [{"kind": "KIND_GPU", "count": 1}]})
    # 200 answers in 2 s of the instance's time: 100 a second.
    spent = {"success": {"count": 200, "ns": 9_000_000_000}, "compute_input": {"count": 200, "ns": 500_000_000}}
    spent |= {"compute_infer": {"count": 200, "ns": 1_000_000_000}, "compute_output": {"count": 200, "ns": 500_000_000}}
    foreign.says("GET", "/v2/models/tiny/stats", {"model_stats": [{"inference_stats": spent}]})
    text = "model: tiny\nbehaviour: {throughput_min_per_s: 90}\nresource: {accelerators: [cuda]}\n"
    _, rows = validate(written(tmp_path, text), "--service", foreign.url)
    assert failing(rows) == set()
    assert rows["behaviour.throughput_min_per_s"]["found"] == 100
    other = text.replace("90", "110").replace("cuda", "openvino")
    _, rows = validate(written(tmp_path, other), "--service", foreign.url)
    assert failing(rows) == {"behaviour.throughput_min_per_s", "resource.accelerators"}
    _, rows = validate(written(tmp_path, "model: tiny\n"), "--service", foreign.url)
    assert failing(rows) == set(), "a contract that asks for no place holds on a GPU"


@pytest.mark.parametrize(
    ("shape_of_service", "wanted", "ok"),
    [
        ([-1, 3], [-1, 3], True),
        ([-1, 3], [4, 3], True),
        ([1, 3], [-1, 3], False),
        ([1, 3], [1, 3], True),
        ([-1, -1], [1, 3], True),
        ([3], [1, 3], False),
        ([], [], True),
    ],
)
def test_a_shape_holds_where_the_service_takes_every_size_of_it(
    tmp_path: Path, validate: Validate, foreign: Foreign, shape_of_service: list[int], wanted: list[int], ok: bool
) -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": shape_of_service}
    foreign.says("GET", "/v2/models/tiny", METADATA | {"inputs": [tensor]})
    text = f"model: tiny\ndata: {{inputs: [{{name: x, shape: {wanted}}}]}}\n"
    _, rows = validate(written(tmp_path, text), "--service", foreign.url)
    assert rows["data.inputs[0].shape"]["ok"] is ok


@pytest.mark.parametrize(
    ("hostile", "fails"),
    [
        ({"data": 7, "behaviour": [], "resource": None}, {"data.privacy", "data.codecs", "behaviour.class"}),
        (
            {"data": {"privacy": "none", "codecs": 5, "fidelity": {"bound": "0"}, "inputs": [3, {"name": "x"}]}},
            {"data.privacy", "data.codecs", "data.fidelity.bound"},
        ),
        ({"behaviour": {"weights": {"latency": "much"}, "latency_p99_ms": "soon"}}, {"behaviour.weights.latency"}),
    ],
    ids=str,
)
def test_a_service_whose_contract_makes_no_sense_fails_the_fields_and_breaks_nothing(
    tmp_path: Path, validate: Validate, foreign: Foreign, hostile: dict[str, Any], fails: set[str]
) -> None:
    foreign.says("GET", "/v2/models/tiny", METADATA)
    foreign.says("OPTIONS", "/v2/models/tiny", METADATA | {"contract": hostile})
    status, rows = validate(written(tmp_path, CONTRACT), "--service", foreign.url)
    assert status == 1
    assert fails | {"behaviour.latency_p99_ms", "data.inputs[0].privacy"} <= failing(rows)


def test_what_a_service_leaves_out_of_its_contract_is_at_its_default(
    tmp_path: Path, validate: Validate, foreign: Foreign
) -> None:
    """Metadata in the answer to OPTIONS do, where there are none elsewhere."""
    told = {"behaviour": {"weights": {"energy": 1}}, "data": {"codecs": ["raw", "fp16"], "fidelity": {"bound": 0.1}}}
    foreign.says("OPTIONS", "/v2/models/tiny", METADATA | {"contract": told})
    text = "model: tiny\nbehaviour: {weights: {latency: 2, energy: 2}}\n"
    text += "data: {codecs: [raw, fp16, int8], fidelity: {bound: 0.1}}\n"
    _, rows = validate(written(tmp_path, text), "--service", foreign.url)
    assert failing(rows) == set()
    assert rows["data.privacy"]["found"] == "any"
    _, rows = validate(written(tmp_path, text.replace("raw, fp16, int8", "raw, int8")), "--service", foreign.url)
    assert failing(rows) == {"data.codecs"}


def test_a_service_that_reads_detections_otherwise_fails_that_field(
    tmp_path: Path, validate: Validate, foreign: Foreign
) -> None:
    head = {"box": ["y", 0, 3], "score": ["y", 4, 4]}
    boxes = {"heads": [head], "format": "xyxy", "scores": "logits", "threshold": 0.5}

    def failing_of(theirs: dict[str, Any] | None, ours: str = "", columns: int = 5) -> set[str]:
        said = {"measure": "boxes", "bound": 0.1, "boxes": theirs}
        outputs = [{"name": "y", "datatype": "FP32", "shape": [-1, columns]}]
        answer = METADATA | {"outputs": outputs, "contract": {"data": {"fidelity": said}}}
        foreign.says("OPTIONS", "/v2/models/tiny", answer)
        text = "{heads: [{box: [y, 0, 3], score: [y, 4, 4]}], format: xyxy, scores: logits, threshold: 0.5" + ours + "}"
        text = "model: tiny\ndata: {fidelity: {measure: boxes, bound: 0.1, boxes: " + text + "}}\n"
        return failing(validate(written(tmp_path, text), "--service", foreign.url)[1])

    assert failing_of(boxes) == failing_of(boxes, ", overlap: 0.5, axis: -1") == set()
    assert failing_of(boxes | {"threshold": 0.4}) == {"data.fidelity.boxes"}
    assert failing_of(boxes, ", match: overlap") == {"data.fidelity.boxes"}
    assert failing_of(None) == failing_of({"heads": 3}) == {"data.fidelity.boxes"}
    assert failing_of(boxes, columns=4) == {"data.fidelity.boxes.heads"}  # no fifth column to read a score off


@pytest.mark.parametrize("body", [b"hello", b"[]", b'{"inputs": 3}', b'{"name": "tiny", "inputs": [{"name": 1}]}'])
def test_what_speaks_no_such_protocol_fails_as_a_service(
    tmp_path: Path, validate: Validate, foreign: Foreign, body: bytes
) -> None:
    foreign.says("GET", "/v2/models/tiny", body)
    _, rows = validate(written(tmp_path, "model: tiny"), "--service", foreign.url)
    assert failing(rows) == {"service"} == set(rows)


@pytest.mark.parametrize("depth", [100, 100_000])
def test_json_deeper_than_anything_meant_fails_as_a_service(
    tmp_path: Path, validate: Validate, foreign: Foreign, depth: int
) -> None:
    deep = b'{"error": ' + b"[" * depth + b"]" * depth + b"}"
    for status in (200, 500):
        foreign.says("GET", "/v2/models/tiny", deep, status)
        foreign.says("OPTIONS", "/v2/models/tiny", deep, status)
        _, rows = validate(written(tmp_path, "model: tiny"), "--service", foreign.url)
        assert failing(rows) == {"service" if status == 200 else "model"} == set(rows)


def test_an_answer_is_read_to_a_bound_and_one_that_breaks_off_is_no_answer(
    tmp_path: Path, validate: Validate, foreign: Foreign, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign.says("GET", "/v2/models/tiny", METADATA)
    size = len(json.dumps(METADATA))
    monkeypatch.setattr("agent.http_client.JSON_BYTES_MAX", size)
    assert validate(written(tmp_path, "model: tiny"), "--service", foreign.url)[0] == 0
    monkeypatch.setattr("agent.http_client.JSON_BYTES_MAX", size - 1)
    _, rows = validate(written(tmp_path, "model: tiny"), "--service", foreign.url)
    assert failing(rows) == {"service"} == set(rows)
    monkeypatch.undo()
    foreign.breaks_off = True
    _, rows = validate(written(tmp_path, "model: tiny"), "--service", foreign.url)
    assert "IncompleteRead" in rows["service"]["found"]


def test_what_a_service_says_reaches_the_terminal_without_control_characters(
    tmp_path: Path, foreign: Foreign, capfd: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m\nnext"
    metadata = METADATA | {"name": evil, "inputs": [{"name": evil, "datatype": evil, "shape": [1]}]}
    foreign.says("GET", "/v2/models/tiny", metadata)
    text = "model: tiny\ndata: {inputs: [{name: x}]}\n"
    assert cli.run(["validate", "--contract", str(written(tmp_path, text)), "--service", foreign.url]) == 1
    said = capfd.readouterr().out
    assert "owned" in said
    assert all(character.isprintable() or character == "\n" for character in said)
    assert not any(line.startswith("next") for line in said.splitlines())


def test_what_a_service_refuses_with_reaches_the_terminal_so_too(
    foreign: Foreign, capfd: pytest.CaptureFixture[str]
) -> None:
    foreign.says("GET", "/v2/isthmus/status", {"error": "\x1b]0;owned\x07\x9b31m"}, 500)
    assert cli.run(["status", "--url", foreign.url]) == 1
    assert capfd.readouterr().err == "isthmus: \\x1b]0;owned\\x07\\x9b31m\n"


def test_a_service_that_answers_too_few_requests_keeps_no_latency(
    tmp_path: Path, validate: Validate, foreign: Foreign
) -> None:
    foreign.says("GET", "/v2/models/tiny", METADATA)
    contract = written(tmp_path, "model: tiny\nbehaviour: {latency_p99_ms: 50}\n")
    for measured, holds in (
        ({"requests": 90, "p99_ms": 20.0, "failed_ratio": 0.01}, True),
        ({"requests": 90, "p99_ms": 20.0, "failed_ratio": 0.011}, False),
        ({"requests": 0, "p99_ms": None, "failed_ratio": 1.0}, False),
        ({"requests": 90, "p99_ms": 20.0}, True),
    ):
        said = METADATA | {"contract": {"behaviour": {"latency_p99_ms": 50}}, "measured": measured}
        foreign.says("OPTIONS", "/v2/models/tiny", said)
        _, rows = validate(contract, "--service", foreign.url)
        assert failing(rows) == (set() if holds else {"behaviour.latency_p99_ms"}), measured


def test_what_a_service_leaves_out_of_its_inputs_is_at_its_default_too(
    tmp_path: Path, validate: Validate, foreign: Foreign
) -> None:
    foreign.says("GET", "/v2/models/tiny", METADATA)
    rule = {"resize": 8, "crop": 8, "mean": [0.0, 0.0, 0.0], "std": [255.0, 255.0, 255.0]}
    for encoded, fails in ((rule, set()), (rule | {"layout": "NHWC"}, {"data.inputs[0].encoded"})):
        contract = {"data": {"inputs": [{"name": "x", "encoded": encoded}]}}
        foreign.says("OPTIONS", "/v2/models/tiny", METADATA | {"contract": contract})
        text = "model: tiny\ndata: {inputs: [{name: x, encoded: {kind: image, resize: 8, crop: 8}}]}\n"
        _, rows = validate(written(tmp_path, text), "--service", foreign.url)
        assert failing(rows) == fails


def test_a_service_that_does_not_answer_fails_as_a_service(tmp_path: Path, validate: Validate) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        _, rows = validate(written(tmp_path, "model: tiny"), "--service", url)
    assert failing(rows) == {"service"} == set(rows)


# -- files ------------------------------------------------------------------------------------------------------------


def test_a_contract_alone_is_well_formed_or_bad_configuration(
    tmp_path: Path, validate: Validate, capfd: pytest.CaptureFixture[str]
) -> None:
    assert validate(written(tmp_path, CONTRACT.replace(", labels: labels.txt", ""))) == (0, {})
    status, rows = validate(written(tmp_path, CONTRACT))
    assert (status, list(rows)) == (0, ["data.outputs[0].labels"])
    assert "labels.txt" in rows["data.outputs[0].labels"]["found"]
    bad = written(tmp_path, "data:\n  privacy: some\n")
    assert cli.run(["validate", "--contract", str(bad)]) == 78
    assert f"{bad}:2: data.privacy: expected one of any, local-only" in capfd.readouterr().err
    assert cli.run(["validate", "--contract", str(tmp_path / "none.yaml"), "--service", "http://127.0.0.1:1"]) == 78


def test_a_contract_is_held_against_the_newest_model_beside_it(tmp_path: Path, validate: Validate) -> None:
    assert failing(validate(laid(tmp_path / "good"))[1]) == set()
    wrong = CONTRACT.replace("model: tiny", "model: teeny").replace("[-1, 3]", "[-1, 4]").replace("labels.t", "names.t")
    path = laid(tmp_path / "bad", wrong.replace("name: y", "name: z"))
    assert failing(validate(path)[1]) == {
        "model",
        "data.inputs[0].shape",
        "data.outputs[0].name",
        "data.outputs[0].labels",
    }
    draft = path.parent / "draft.yaml"
    draft.write_text(CONTRACT.replace("[-1, 3]", "[-1, 4]"))
    assert failing(validate(draft)[1]) == {"data.inputs[0].shape"}
    (path.parent / "12").mkdir()
    (path.parent / "12" / "model.onnx").write_bytes(b"no model")
    assert "model" in failing(validate(path)[1])


def test_the_table_marks_each_field_and_says_what_to_do(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = laid(tmp_path, CONTRACT.replace("dtype: FP32", "dtype: FP16"))
    assert cli.run(["validate", "--contract", str(path)]) == 1
    lines = capfd.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(lines) if "data.inputs[0].dtype" in line)
    assert lines[at].split() == ["✗", "data.inputs[0].dtype", "FP16", "FP32"]
    assert lines[at + 1] == "  → write FP32 into the contract, or export the model with FP16"
    assert lines[at + 2].split()[0] == "✓"
    assert lines[-1] == "1 of 7 fields do not hold"


@pytest.mark.parametrize("words", [(), ("--contract", "a.yaml", "--schema"), ("--contract", "a", "--service", "x")])
def test_a_wrong_call_is_a_mistake_of_usage(words: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.run(["validate", *words])
    assert exit_.value.code == 2
    if "--service" in words:
        assert "--service must be http://HOST:PORT or unix:///PATH, got 'x'" in capfd.readouterr().err


def test_the_schema_is_printed_as_it_is_checked_in(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["validate", "--schema"]) == 0
    printed = capfd.readouterr().out
    assert printed == (Path(__file__).parents[2] / "profiles" / "contract.schema.json").read_text("utf-8")
    jsonschema.Draft202012Validator.check_schema(json.loads(printed))
