"""The runtime cases that concern the companion, each by its id."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from split.wire.messages import Reply
from split.workbench.cut import prepare


@pytest.mark.parametrize("whole", [True, False])
async def test_o_rt_07_external_weights_go_to_the_companion_and_are_read_from_where_it_keeps_them(
    house, make_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
):
    """From beside the model as the companion holds it, never from the folder it was started in."""
    model = make_model("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[3] x) => (float[3] y) <float[3] W = {10, 20, 30}>
        { a = Identity(x)  b = Neg(a)  c = Neg(b)  y = Add(c, W) }""")
    proto = onnx.load(model.path)
    proto.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.float32([10, 20, 30]), "W"))
    onnx.save(proto, model.path, save_as_external_data=True, location="w.data", size_threshold=0)
    model.card = prepare(model.path, model.path.parent / "made")
    assert {name for name, *_ in model.card.files} == {"model.onnx", "w.data"}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "w.data").write_bytes(np.float32([7, 7, 7]).tobytes())
    monkeypatch.chdir(elsewhere)
    device = house.connect()
    await device.bring(model)
    feeds, cut = {"x": np.float32([1, 2, 3])}, model.every_cut()[1]
    await device.open(model, cut)
    device.channel.send(*(model.infer(feeds) if whole else model.infer(model.crossing(cut, feeds), cut.id)))
    reply, outputs = await device.reply()
    assert isinstance(reply, Reply)
    assert outputs["y"].tolist() == [11, 22, 33]
