"""The graph-split cases that show on the wire only, each by its id."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import onnx
import onnx.parser
import pytest

from split.graph.card import digest_of_files
from split.tensor import relative_difference
from split.wire.messages import ModelChunk, ModelNeed, ModelOffer, Refused, Reply

LADDER = """
<ir_version: 8, opset_import: ["" : 17]>
ladder (float[N, 4] x, float[4] bias) => (float[N, 4] y)
{
    a = Relu (x)
    b = Exp (a)
    c = Add (b, bias)
    d = Concat<axis = 1> (c, c)
    e = Neg (d)
    f, g = Split<axis = 1> (e)
    y = Mul (f, g)
}
"""
"""Widths of 4, 4, 4, 8, 8, 8 columns at its cuts 1…6."""


async def test_o_gs_15_every_request_says_its_cut_and_a_mix_is_never_answered(house, make_model):
    dice = np.random.default_rng(15)
    feeds = {name: dice.standard_normal(shape, np.float32) for name, shape in {"x": (2000, 4), "bias": 4}.items()}
    ladder = make_model(LADDER)
    device = house.connect()
    await device.bring(ladder)
    cuts = {cut.nodes: cut for cut in ladder.every_cut()}
    third, fifth = cuts[3], cuts[5]
    expected = ladder.whole(feeds)
    rows = feeds["x"].shape[0]
    for cut, columns in ((third, 4), (fifth, 8)):
        await device.open(ladder, cut)
        crossing = ladder.crossing(cut, feeds)
        assert sum(array.nbytes for array in crossing.values()) == rows * columns * 4
        before = device.channel.sent_bytes
        device.channel.send(*ladder.infer(crossing, cut.id))
        reply, outputs = await device.reply()
        assert isinstance(reply, Reply)
        assert reply.cut == cut.id
        assert device.channel.sent_bytes - before == pytest.approx(rows * columns * 4, rel=0.02)
        assert relative_difference(outputs["y"], expected["y"]) <= 1e-5
    for head, tail in itertools.permutations((third, fifth)):
        device.channel.send(*ladder.infer(ladder.crossing(head, feeds), tail.id))
        refused = await device.next()
        assert isinstance(refused, Refused)
        assert refused.code == "PLAN_MISMATCH"


async def test_o_gs_16_an_operator_the_companion_lacks_is_refused_at_set_up_and_the_next_model_works(
    house, make_model, chain, tmp_path
):
    text = """<ir_version: 8, opset_import: ["" : 17, "acme" : 1]>
        odd (float[3] x) => (float[3] y) { a = Neg(x)  y = acme.Wobble(a) }"""
    path = tmp_path / "odd.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    data = path.read_bytes()

    files = (("odd.onnx", len(data), hashlib.sha256(data).hexdigest()),)
    digest = digest_of_files(files)
    device = house.connect()
    assert isinstance(await device.ask(ModelOffer(digest=digest, files=files)), ModelNeed)
    refused = await device.ask(ModelChunk(digest=digest, file="odd.onnx", offset=0, last=True), [memoryview(data)])
    assert isinstance(refused, Refused)
    assert refused.code == "UNSUPPORTED_OP"
    assert "Wobble" in refused.message
    await device.bring(chain)
