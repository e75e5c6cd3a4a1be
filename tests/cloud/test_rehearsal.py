"""A model that crashes the runtime dies in a child; the companion refuses it and serves the others (O-RT-09)."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from cloud.workbench import ChildWorkbench
from split.codec.payload import encode
from split.errors import InvalidModel
from split.ids import OFFLOAD_CUT
from split.wire.messages import ModelChunk, ModelReady, Refused, Reply, SegmentOpen, SegmentReady
from split.workbench import child

CRASHING = """
<ir_version: 8, opset_import: ["" : 17]>
crashing (float[2] x) => (float[2] y) { a = Exp (x) b = Sin (a) y = Cos (b) }
"""


@pytest.fixture
def crash_at(house, monkeypatch):
    """From now on the rehearsing child dies of these names as a runtime does that reads where nothing is."""
    deadly: set[str] = set()
    real = child._argv

    def argv(command, limits):
        names = command[command.index("--names") + 1].split(",")
        if deadly.isdisjoint(names):
            return real(command, limits)
        return [sys.executable, "-c", f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})"]

    monkeypatch.setattr(child, "_argv", argv)
    bench = ChildWorkbench()

    async def rehearse(model, folder, feeds, names):
        house.workbench.jobs.append(f"rehearse {','.join(names)}")
        await bench.rehearse(model, folder, feeds, names)

    monkeypatch.setattr(house.workbench, "rehearse", rehearse)
    return deadly


async def offered(device, model):
    await device.ask(model.offer)
    chunk = ModelChunk(digest=model.digest, file="model.onnx", offset=0, last=True)
    return await device.ask(chunk, [model.path.read_bytes()])


async def test_o_rt_09_a_model_that_kills_its_first_process_is_refused_while_another_answers_everything(
    house, make_model, chain, feeds, crash_at
):
    good, bad = house.connect("camera-1"), house.connect("camera-2")
    await good.bring(chain)
    crashing, before = make_model(CRASHING), os.getpid()
    crash_at.add(OFFLOAD_CUT)
    await bad.ask(crashing.offer)
    chunk = ModelChunk(digest=crashing.digest, file="model.onnx", offset=0, last=True)
    bad.channel.send(chunk, [crashing.path.read_bytes()])
    for number in range(20):
        good.channel.send(*chain.infer(feeds, request_id=f"{number}"))
    answered = [await good.next() for _ in range(20)]
    assert all(isinstance(reply, Reply) for reply in answered)
    refused = await bad.next()
    assert isinstance(refused, Refused)
    assert (refused.code, refused.digest) == ("INVALID_MODEL", crashing.digest)
    assert "SIGSEGV" in refused.message
    assert os.getpid() == before
    opened = house.companion.executor._segments._slots
    assert not [path for path in opened if crashing.digest[7:23] in str(path)]
    crash_at.clear()
    assert isinstance(await offered(bad, crashing), ModelReady)


async def test_a_cut_that_kills_the_child_is_refused_and_the_whole_and_the_other_cuts_are_served(
    house, make_model, feeds, crash_at
):
    model, device = make_model(CRASHING), house.connect()
    bad, *others = model.every_cut()
    crash_at.add(bad.id)
    assert isinstance(await offered(device, model), ModelReady)
    refused = await device.ask(SegmentOpen(digest=model.digest, cut=bad.id, node_bitmap=bad.node_bitmap))
    assert (type(refused), refused.cut) == (Refused, bad.id)
    assert "SIGSEGV" in refused.message
    assert others
    for cut in others:
        opened = await device.ask(SegmentOpen(digest=model.digest, cut=cut.id, node_bitmap=cut.node_bitmap))
        assert isinstance(opened, SegmentReady)


async def test_what_came_back_sound_is_not_rehearsed_again(house, chain, crash_at):
    device, later = house.connect("camera-1"), house.connect("camera-2")
    await device.bring(chain)
    await device.open(chain, chain.card.cuts[0])
    crash_at.add(OFFLOAD_CUT)
    await later.ask(chain.offer)
    assert isinstance(await later.next(), ModelReady)
    assert sum(job.startswith("rehearse") for job in house.workbench.jobs) == 1


async def test_the_child_runs_whole_and_halves_and_minds_no_refusal_of_the_inputs_but_a_file_that_is_none(
    chain, feeds, tmp_path
):
    folder, payload = chain.path.parent / "made", tmp_path / "feeds"
    names = [OFFLOAD_CUT, *(cut.id for cut in chain.card.cuts)]
    for inputs in (feeds, {"x": feeds["x"]}):
        payload.write_bytes(b"".join(encode(inputs, "raw")))
        await ChildWorkbench().rehearse(chain.path, folder, payload, names)
    (folder / f"{chain.card.cuts[0].id}.tail.onnx").write_bytes(b"no model")
    payload.write_bytes(b"".join(encode(feeds, "raw")))
    with pytest.raises(InvalidModel, match="refuses"):
        await ChildWorkbench().rehearse(chain.path, folder, payload, names)
