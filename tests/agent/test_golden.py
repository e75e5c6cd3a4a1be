"""What was measured of golden inputs comes from the file beside the profile; the worker computes nothing for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnx.parser
import pytest

from agent import golden as golden_module
from agent.compute import Compute
from agent.golden import OFFERED_BYTES_MAX, Golden
from agent.served_model import ServedModel
from split.codec.payload import encode
from split.errors import CutRefused, InvalidModel
from split.ids import CutId, ModelName
from split.profiles.contract import Contract, Data, Privacy
from split.profiles.measured import GOLDEN_RUNS, GoldenRuns, ModelProfile, write_golden_runs
from split.runtime.segment import OrtEngine
from split.runtime.store import SegmentStore
from split.workbench.cut import prepare

TINY = """
<ir_version: 10, opset_import: ["" : 18]>
tiny (float[3] x) => (float[3] y)
{
  a = Relu(x)
  y = Exp(a)
}
"""
WHOLE, AT_CUT = np.array([1.0, 2.0], np.float32), np.array([3.0], np.float32)


def payload(**tensors: np.ndarray) -> bytes:
    return b"".join(bytes(part) for part in encode(tensors, "raw"))


def served(folder: Path, *, offered: bytes = b"", privacy: Privacy = "any") -> ServedModel:
    """A model whose golden runs are made up, so that computing them would be seen."""
    path = folder / "model.onnx"
    onnx.save(onnx.parser.parse_model(TINY), path)
    card = prepare(path, folder / "cache")
    runs = GoldenRuns(offered=offered, whole=payload(y=WHOLE), cuts={card.cuts[0].id: payload(a=AT_CUT)})
    return ServedModel(
        name=ModelName("tiny"),
        version="1",
        card=card,
        contract=Contract(data=Data(privacy=privacy)),
        images={},
        labels={},
        folder=folder / "cache",
        profile=ModelProfile(
            digest=card.digest,
            runtime="test",
            fingerprint="test",
            dims={},
            threads=1,
            whole_ms=70.0,
            image_ms=0.0,
            input_codecs=(),
            encoded_bytes=0,
            output_bytes=12,
            cuts=(),
            golden=write_golden_runs(runs, folder / "cache"),
        ),
        store=SegmentStore(OrtEngine(), threads=1, budget_bytes=1 << 20),
    )


@pytest.fixture
async def compute() -> AsyncIterator[Compute]:
    made = Compute()
    yield made
    made.close()


async def test_what_was_measured_is_read_and_the_worker_does_nothing(
    tmp_path: Path, compute: Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise AssertionError("the worker was asked")

    monkeypatch.setattr(compute, "run", refuse)
    model, golden = served(tmp_path), Golden(compute)
    cut = model.card.cuts[0].id
    assert await golden.offered(model) == b""
    np.testing.assert_array_equal((await golden.run(model, None))["y"], WHOLE)
    np.testing.assert_array_equal((await golden.run(model, cut))["a"], AT_CUT)
    # … and what a split would need is open from now on
    assert [model.store.is_open(model.folder / f"{cut}.{half}.onnx") for half in ("head", "tail")] == [True, True]


async def test_the_file_is_read_once_for_all_cuts_until_it_is_forgotten_or_measured_anew(
    tmp_path: Path, compute: Compute
) -> None:
    model, golden = served(tmp_path), Golden(compute)
    await golden.run(model, None)
    path = model.folder / GOLDEN_RUNS
    content = path.read_bytes()
    path.unlink()
    for cut in (None, model.card.cuts[0].id):
        await golden.run(model, cut)
    golden.forget(model)
    with pytest.raises(InvalidModel, match="cannot be read"):
        await golden.run(model, None)
    path.write_bytes(content)
    await golden.run(model, None)
    model.profile = msgspec.structs.replace(model.profile, golden=(3, "another"))
    with pytest.raises(InvalidModel, match="is not what was written there"):
        await golden.run(model, None)


async def test_a_cut_that_was_not_measured_is_refused(tmp_path: Path, compute: Compute) -> None:
    with pytest.raises(CutRefused, match="was left out when this device was measured"):
        await Golden(compute).run(served(tmp_path), CutId("0123456789ab"))


async def test_damaged_golden_runs_are_never_compared(tmp_path: Path, compute: Compute) -> None:
    model = served(tmp_path)
    path = model.folder / GOLDEN_RUNS
    path.write_bytes(path.read_bytes()[:-1] + b"\x00")
    for asked in (Golden(compute).offered(model), Golden(compute).run(model, None)):
        with pytest.raises(InvalidModel, match="is not what was written there"):
            await asked


async def test_a_real_request_travels_only_where_the_contract_lets_it(tmp_path: Path, compute: Compute) -> None:
    real = payload(x=np.ones(3, np.float32))
    assert await Golden(compute).offered(served(tmp_path, offered=real)) == real
    with pytest.raises(InvalidModel, match="does not let a real one leave"):
        await Golden(compute).offered(served(tmp_path, offered=real, privacy="no-raw-input"))
    with pytest.raises(InvalidModel, match="lay a smaller request"):
        await Golden(compute).offered(served(tmp_path, offered=bytes(OFFERED_BYTES_MAX + 1)))


async def test_the_first_run_waits_behind_every_request_and_shows_in_the_queue(
    tmp_path: Path, compute: Compute
) -> None:
    model = served(tmp_path)
    begun, may_end = threading.Event(), threading.Event()

    def gate() -> None:
        begun.set()
        assert may_end.wait(30)

    busy = compute.run(gate, deadline_at_s=0.0, expected_ms=0.0)
    await asyncio.to_thread(begun.wait, 30)
    warming = asyncio.create_task(Golden(compute).warm_up(model))
    while not compute.waiting:  # noqa: ASYNC110 - it enters after a thread has opened the model; nothing tells of it
        await asyncio.sleep(0)
    assert compute.queue_ms == pytest.approx(70.0)  # as profiled
    request = compute.run(lambda: warming.done(), deadline_at_s=1e12, expected_ms=0.0)
    may_end.set()
    await busy
    assert (await request).value is False
    await warming


async def test_a_worker_that_is_never_idle_does_not_keep_a_model_from_being_ready(
    tmp_path: Path, compute: Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(golden_module, "WARM_UP_S", 0.0)
    model = served(tmp_path)
    begun, may_end = threading.Event(), threading.Event()

    def gate() -> None:
        begun.set()
        assert may_end.wait(30)

    busy = compute.run(gate, deadline_at_s=0.0, expected_ms=0.0)
    await asyncio.to_thread(begun.wait, 30)
    await Golden(compute).warm_up(model)
    assert compute.waiting == 0
    may_end.set()
    await busy
