"""The workbench as a child process: its errors keep their types, its death is a refusal, and it can be ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from split.errors import CutRefused, EngineFailed, InvalidModel, InvalidRequest, ModelUnavailable
from split.graph.card import CARD_VERSION, read_card
from split.profiles.measured import PROFILE_VERSION
from split.workbench import child
from split.workbench.child import run_child, run_child_sync

TEXT = """<ir_version: 8, opset_import: ["" : 18]>
    g (float[2] x) => (float[2] y) { a = Neg(x)  y = Abs(a) }"""

CODE = Path(child.__file__).resolve().parents[1]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(onnx.parser.parse_model(TEXT), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def scripted(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let the child be this Python code."""
    monkeypatch.setattr(child, "_argv", lambda command, limits: [sys.executable, "-c", code])


async def test_a_model_is_prepared_and_its_progress_told(model: Path, tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    await run_child(
        ["prepare", str(model), "--cache", str(tmp_path / "cache")],
        timeout_s=60,
        on_progress=lambda stage, ratio: told.append((stage, ratio)),
    )
    [folder] = (tmp_path / "cache" / "models").iterdir()
    assert len(read_card(folder).cuts) == 1
    assert told[0] == ("read", 0.0)
    assert told[-1] == ("done", 1.0)
    assert [ratio for _, ratio in told] == sorted(ratio for _, ratio in told)


def test_what_a_library_stumbles_over_is_told_from_its_root_on_one_line(model: Path) -> None:
    """onnx-ir wraps it in the whole it was about to write."""
    model.write_bytes(model.read_bytes().replace(b"\x01a", b"\x01\xff"))
    with pytest.raises(InvalidModel) as caught:
        run_child_sync(["cuts", str(model), "--out", str(model.parent / "cuts.json")], timeout_s=60)
    assert "cannot be worked on: UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff" in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_it_works_from_any_working_directory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    out = model.parent / "cuts.json"
    await run_child(["cuts", str(model), "--out", str(out)], timeout_s=60)
    assert len(json.loads(out.read_bytes())["cuts"]) == 1


async def test_packages_that_lie_in_the_working_directory_are_not_taken_for_ours(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("split.py", "numpy.py", "json.py"):
        (model.parent / name).write_text("raise SystemExit('not ours')")
    monkeypatch.chdir(model.parent)
    out = model.parent / "cuts.json"
    await run_child(["cuts", str(model), "--out", str(out)], timeout_s=60)
    assert len(json.loads(out.read_bytes())["cuts"]) == 1


async def test_the_childs_error_keeps_its_type_and_sentence(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"gone\.onnx is not a file"):
        await run_child(["prepare", str(tmp_path / "gone.onnx"), "--folder", str(tmp_path)], timeout_s=60)
    part = ["part", str(model), "--folder", str(tmp_path), "--cut", "0" * 12, "--bitmap", "01"]
    with pytest.raises(CutRefused, match="the models differ"):
        await run_child(part, timeout_s=60)


@pytest.mark.parametrize(
    ("code", "kind"),
    [("MODEL_UNAVAILABLE", ModelUnavailable), ("INVALID_REQUEST", InvalidRequest), ("CUT_REFUSED", CutRefused)],
)
async def test_each_code_becomes_its_error(monkeypatch: pytest.MonkeyPatch, code: str, kind: type[Exception]) -> None:
    line = json.dumps({"error": {"code": code, "message": "why"}})
    scripted(monkeypatch, f"print({line!r}); raise SystemExit(1)")
    with pytest.raises(kind, match="why") as caught:
        await run_child(["prepare", "m"], timeout_s=60)
    assert type(caught.value) is kind


async def test_a_child_killed_by_a_signal_is_an_invalid_model(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})")
    with pytest.raises(InvalidModel, match=r"prepare of m\.onnx died by signal SIGSEGV"):
        await run_child(["prepare", "m.onnx"], timeout_s=60)


async def test_a_child_that_fails_without_a_word_of_ours_shows_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, "raise RuntimeError('something native')")
    with pytest.raises(InvalidModel, match=r"failed \(1\): RuntimeError: something native"):
        await run_child(["prepare", "m.onnx"], timeout_s=60)


async def test_a_child_whose_code_was_replaced_under_a_running_program_says_so_and_what_to_do(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "FORMATS", "card-5-profile-9")
    with pytest.raises(ModelUnavailable) as caught:
        await run_child(["prepare", str(model), "--folder", str(tmp_path / "parts")], timeout_s=60)
    assert str(caught.value) == (
        f"the files of Isthmus in {CODE} were replaced while this program runs (they write "
        f"card-{CARD_VERSION}-profile-{PROFILE_VERSION}, it reads card-5-profile-9); restart it: systemctl restart "
        "isthmus-agent, or isthmus-cloud"
    )
    assert not (tmp_path / "parts").exists()


async def test_noise_on_stdout_does_not_disturb(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = "print('noise'); print('[1]'); print('{\"progress\": 3}'); print('x' * (5 << 20)); "
    scripted(monkeypatch, noise + 'print(\'{"progress": ["after", 1]}\')')
    told: list[str] = []
    await run_child(["prepare", "m.onnx"], timeout_s=60, on_progress=lambda stage, _: told.append(stage))
    assert told == ["after"]


async def test_a_child_that_hangs_is_ended_at_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, "import threading; threading.Event().wait()")
    with pytest.raises(InvalidModel, match=r"did not end within 0\.5 s"):
        await run_child(["prepare", "m.onnx"], timeout_s=0.5)


async def test_cancelling_ends_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(
        monkeypatch,
        "import os, json, threading; print(json.dumps({'progress': [str(os.getpid()), 0]}), flush=True); "
        "threading.Event().wait()",
    )
    started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    job = asyncio.create_task(
        run_child(["prepare", "m"], timeout_s=60, on_progress=lambda pid, _: started.set_result(int(pid)))
    )
    pid = await started
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("end", ["killed", "cancelled"])
async def test_a_child_that_is_ended_leaves_nothing_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """A job on a big model keeps its weights there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    then = "os.kill(os.getpid(), 9)" if end == "killed" else "time.sleep(60)"
    scripted(
        monkeypatch,
        "import os, tempfile, time; f = tempfile.mkdtemp(); open(f + '/weights', 'w').close(); "
        f'print(\'{{"progress": ["made", 0.5]}}\', flush=True); {then}',
    )
    made: list[Path] = []

    def on_progress(stage: str, ratio: float) -> None:
        made.extend(tmp_path.rglob("weights"))
        if end == "cancelled":
            job.cancel()

    job = asyncio.ensure_future(run_child(["prepare", "model.onnx"], timeout_s=60, on_progress=on_progress))
    with pytest.raises((InvalidModel, asyncio.CancelledError)):
        await job
    assert len(made) == 1
    assert os.listdir(tmp_path) == []


def test_sigterm_ends_a_command_and_its_child_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    scripted(
        monkeypatch,
        "import os, time; open(os.environ['TMPDIR'] + '/weights', 'w').close(); "
        'print(f\'{{"progress": ["{os.getpid()}", 0.5]}}\', flush=True); time.sleep(60)',
    )
    pids: list[int] = []

    def on_progress(stage: str, ratio: float) -> None:
        pids.append(int(stage))
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        run_child_sync(["prepare", "model.onnx"], timeout_s=60, on_progress=on_progress)
    assert ended.value.code == 143  # 128 + 15, as shells have it
    assert os.listdir(tmp_path) == []
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


async def test_the_blocking_twin_runs_on_a_thread_beside_a_loop_that_has_the_signals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripted(monkeypatch, 'print(\'{"progress": ["made", 0.5]}\')')
    told: list[str] = []
    await asyncio.to_thread(
        run_child_sync, ["prepare", "model.onnx"], timeout_s=60, on_progress=lambda stage, ratio: told.append(stage)
    )
    assert told == ["made"]


async def test_a_child_that_needs_no_temporary_folder_runs_where_none_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    scripted(monkeypatch, "pass")
    await run_child(["prepare", "model.onnx"], timeout_s=60)


def test_the_blocking_twin_does_the_same(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="is not a file"):
        run_child_sync(["probe", str(tmp_path / "gone.onnx")], timeout_s=60)


STRICT = """<ir_version: 8, opset_import: ["" : 18]>
    g (float[6] x, int64[2] s) => (float[n, m] y) { a = Relu(x)  r = Reshape(a, s)  y = Exp(r) }"""


@pytest.mark.parametrize("job", ["check", "cuts"])
async def test_a_golden_request_beside_the_model_is_what_its_cuts_are_shown_and_checked_with(
    tmp_path: Path, job: str
) -> None:
    path = tmp_path / "strict" / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    onnx.save(onnx.parser.parse_model(STRICT), path)
    command = [job, str(path), "--out", str(tmp_path / "out.json")]
    if job == "check":
        with pytest.raises(EngineFailed, match="Reshape"):
            await run_child(command, timeout_s=60)
    np.savez(tmp_path / "strict" / "golden.npz", x=np.arange(6, dtype="f4"), s=np.array([3, 2]))
    await run_child(command, timeout_s=60)
    found = json.loads((tmp_path / "out.json").read_bytes())
    if job == "check":
        assert [(cut["boundary"], cut["max_rel"]) for cut in found] == [(["a"], 0.0), (["r"], 0.0)]
    else:
        assert [cut["boundary"][0]["shape"] for cut in found["cuts"]] == [[6], [3, 2]]


def test_a_model_that_was_moved_after_it_was_prepared_is_optimised_where_it_is_now(model: Path, tmp_path: Path) -> None:
    run_child_sync(["prepare", str(model), "--folder", str(tmp_path / "parts")], timeout_s=60)
    moved = model.rename(tmp_path / "other.onnx")
    run_child_sync(["optimise", str(moved), "--folder", str(tmp_path / "parts"), "--cuts", ""], timeout_s=60)
    assert len(list((tmp_path / "parts" / "optimised").glob("*/whole.onnx"))) == 1
