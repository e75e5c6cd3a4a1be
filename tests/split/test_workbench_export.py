"""`isthmus export`: a module becomes a file that computes the same, or one sentence says what to mend."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from agent import cli
from split.errors import InvalidRequest
from split.graph.card import read_card
from split.runtime.segment import OrtEngine
from split.tensor import TensorSpec
from split.workbench.child import run_child_sync
from split.workbench.export import parse_input

ROOT = Path(__file__).resolve().parents[2]

NETS = '''
import torch
from torch import nn

print("what a user's module prints is no data")


class Scaled(nn.Module):
    """y = 3x + 1, halved in training."""

    def forward(self, x):
        y = nn.functional.conv2d(x, torch.full((1, 1, 1, 1), 3.0)) + 1
        return y / 2 if self.training else y


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(2, 3)
        self.table.weight.data = torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])

    def forward(self, ids, mask, scale):
        rows = self.table(ids) * mask.unsqueeze(-1)
        return {"rows": rows, "sums": rows.sum(dim=1) * scale}


class Wide(nn.Module):
    """Twice the sum over the last dim of x, 64 times beside each other: 16 KiB of weights."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((64, 64), 2.0))

    def forward(self, x):
        return torch.relu(x @ self.weight) @ torch.eye(64)


class Narrow(nn.Module):
    def forward(self, x):
        return x @ torch.ones(5, 2)


class Random(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


class OneOnly(nn.Module):
    def forward(self, x):
        return x.view(1, 12) * 2


class Frozen(nn.Module):
    def forward(self, x):
        return x * 2 if x.shape[0] == 2 else x * 3


made = Scaled()


def boom():
    raise FileNotFoundError("weights.pt")


def table():
    return {"a": 1}
'''


@pytest.mark.parametrize(
    ("text", "name", "dtype", "shape"),
    [
        ("1x3x224x224", "", "FP32", (1, 3, 224, 224)),
        ("ids=1x16:INT64", "ids", "INT64", (1, 16)),
        ("a=b=7:BOOL", "a=b", "BOOL", (7,)),
        ("sr=:INT64", "sr", "INT64", ()),
    ],
)
def test_an_input_is_name_shape_and_type(text: str, name: str, dtype: str, shape: tuple[int, ...]) -> None:
    assert parse_input(text) == TensorSpec(name=name, dtype=dtype, shape=shape)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1x3x", "shape '1x3x'"),
        ("0x3", "at least 1"),
        ("-1x3", "shape '-1x3'"),
        ("1×3", "shape '1×3'"),
        ("x=1,3", "shape '1,3'"),
        ("1x3:float", "element type 'float'; expected one of BOOL"),
        ("1x3:", "element type ''"),
        ("1:BYTES", "element type 'BYTES'"),
    ],
)
def test_an_input_that_is_none_says_what_was_expected(text: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_input(text)
    assert words in str(caught.value)


def test_a_wrong_shape_is_a_mistake_of_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.run(["export", "nets:make", "--input", "1x3x", "-o", "net.onnx"])
    assert ended.value.code == 2
    assert "shape '1x3x'" in capsys.readouterr().err


def test_without_torch_the_way_to_get_it_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch", "onnxscript"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError(\"No module named '{name}'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert cli.run(["export", "nets:make", "--input", "1x3", "-o", str(tmp_path / "net.onnx")]) == 1
    printed = capfd.readouterr()
    assert "pip install 'isthmus[torch]'" in printed.err
    assert printed.out == ""
    assert not list(tmp_path.glob("*.onnx"))


def test_a_process_that_dies_is_told_from_one_that_answers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "onnxscript.py").write_text("import os; os.abort()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert cli.run(["export", "nets:make", "--input", "1x3", "-o", str(tmp_path / "net.onnx")]) == 1
    assert "the export of nets:make died by signal SIGABRT; nothing was written" in capfd.readouterr().err


class _Exporter:
    """`isthmus export` in the folder of a user, as he calls it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", "-m", "agent.cli", "export", *arguments],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def export(tmp_path: Path) -> _Exporter:
    """The user's folder has packages called as ours are."""
    for package in ("split", "agent"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / "agent" / "nets.py").write_text(NETS)
    return _Exporter(tmp_path)


@pytest.mark.torch
def test_a_module_becomes_a_file_with_an_open_batch_that_computes_the_same(export: _Exporter) -> None:
    import onnx
    import onnxruntime

    done = export("agent.nets:Scaled", "--input", "1x1x2x2", "-o", "net.onnx")
    assert done.returncode == 0, done.stderr
    assert "x FP32[batch,1,2,2]" in done.stdout
    assert "no data" in done.stderr
    assert "no data" not in done.stdout
    session = onnxruntime.InferenceSession(export.folder / "net.onnx", providers=["CPUExecutionProvider"])
    x = np.arange(28, dtype=np.float32).reshape(7, 1, 2, 2)
    np.testing.assert_allclose(session.run(None, {"x": x})[0], 3 * x + 1, rtol=1e-6)
    model = onnx.load(export.folder / "net.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert model.opset_import[0].version >= 18
    assert str(export.folder) not in str(model), "paths of the machine it was made on travel with it"
    assert sorted(path.name for path in export.folder.iterdir()) == ["agent", "net.onnx", "split"]


BIG = """
import sys
from pathlib import Path
from split.workbench.export import export_module, parse_input

sys.path.insert(0, "agent")
report = export_module("nets:Wide", [parse_input("1x64")], Path("big.onnx").absolute(), one_file_bytes_max=10_000)
assert report["max_rel"] <= 1e-4 and report["batches"] == [1, 2, 5], report
"""


@pytest.mark.torch
def test_weights_that_one_file_cannot_hold_lie_beside_it_and_the_model_is_cut_as_any_other(export: _Exporter) -> None:
    import onnx

    done = subprocess.run(
        [sys.executable, "-P", "-c", BIG],
        cwd=export.folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    path = export.folder / "big.onnx"
    assert path.stat().st_size < 10_000
    bare = onnx.load(path, load_external_data=False)
    places = {entry.value for one in bare.graph.initializer for entry in one.external_data if entry.key == "location"}
    assert places == {"big.onnx.data"}
    assert (export.folder / "big.onnx.data").stat().st_size >= 64 * 64 * 4
    run_child_sync(["prepare", str(path), "--folder", str(export.folder / "parts")], timeout_s=100)
    card = read_card(export.folder / "parts")
    assert [name for name, _, _ in card.files] == ["big.onnx", "big.onnx.data"]
    assert card.cuts
    x = np.arange(128, dtype=np.float32).reshape(2, 64)
    expected = np.repeat(2 * x.sum(axis=1, keepdims=True), 64, axis=1)
    for cut in card.cuts:
        head, tail = (
            OrtEngine().open(export.folder / "parts" / f"{cut.id}.{half}.onnx", threads=1) for half in ("head", "tail")
        )
        [y] = tail.run(head.run({"x": x})).values()
        np.testing.assert_allclose(y, expected, rtol=1e-6)


@pytest.mark.torch
def test_several_inputs_keep_their_names_types_and_common_batch(export: _Exporter) -> None:
    import onnxruntime

    inputs = ("--input", "1x4:INT64", "--input", "attention=1x4:FP32", "--input", ":FP32")
    done = export("agent.nets:Two", *inputs, "-o", "two.onnx")
    assert done.returncode == 0, done.stderr
    assert "ids INT64[batch,4], attention FP32[batch,4], scale FP32[]" in done.stdout
    session = onnxruntime.InferenceSession(export.folder / "two.onnx", providers=["CPUExecutionProvider"])
    feeds = {
        "ids": np.array([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]),
        "attention": np.array([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]], np.float32),
        "scale": np.array(2, np.float32),
    }
    rows, sums = session.run(None, feeds)
    assert rows.shape == (3, 4, 3)
    np.testing.assert_array_equal(sums, [[22, 44, 66], [20, 40, 60], [8, 16, 24]])


@pytest.mark.torch
def test_a_module_that_takes_one_size_is_exported_for_that(export: _Exporter) -> None:
    done = export("agent.nets:OneOnly", "--input", "1x3x4", "--fixed-batch", "-o", "one.onnx")
    assert done.returncode == 0, done.stderr
    assert "x FP32[1,3,4]" in done.stdout


@pytest.mark.torch
def test_a_ready_module_needs_no_factory_and_the_opset_may_be_chosen(export: _Exporter) -> None:
    done = export("agent.nets:made", "--input", "1x1x2x2", "--opset", "21", "-o", "made.onnx")
    assert done.returncode == 0, done.stderr
    assert "opset 21" in done.stdout


@pytest.mark.torch
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nets"], "names no factory; expected PKG.MODULE:NAME"),
        (["gone.nets:make"], "module 'gone.nets' cannot be imported: No module named 'gone'"),
        (["agent.nets:gone"], "module 'agent.nets' has no 'gone'"),
        (["agent.nets:torch"], "is an object of type module; expected a torch.nn.Module"),
        (["agent.nets:boom"], "agent.nets:boom() fails: FileNotFoundError: weights.pt"),
        (["agent.nets:table"], "agent.nets:table() returns an object of type dict; expected a torch.nn.Module"),
        (["agent.nets:Scaled", "--input", "1x1"], "2 inputs are given, and Scaled.forward takes 1: x"),
        (["agent.nets:Two"], "Two.forward does not take ids FP32[1,3,4]: TypeError"),
        (["agent.nets:Narrow"], "Narrow.forward does not take x FP32[1,3,4]: RuntimeError"),
        (["agent.nets:Random"], "is not that of the module at batch 1"),
        (["agent.nets:OneOnly"], "OneOnly cannot be traced"),
        (["agent.nets:Frozen"], "the batch of input 'x' is fixed to 2 by what forward does with it"),
        (["agent.nets:Random", "--opset", "99"], "made opset 18 where 99 was asked for"),
        (["agent.nets:Random", "-o", "none/net.onnx"], "none of the output file is not there"),
    ],
)
def test_what_cannot_be_exported_is_one_sentence_and_leaves_no_file(
    export: _Exporter, arguments: list[str], words: str
) -> None:
    done = export(*arguments[:1], "--input", "1x3x4", "-o", "net.onnx", *arguments[1:])
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("isthmus: ")
    assert words in last
    assert not list(export.folder.rglob("*.onnx"))
    assert "Traceback" not in done.stderr
