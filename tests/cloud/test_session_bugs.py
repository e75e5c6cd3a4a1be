"""A bug of ours, or no memory, in one request or set-up: refused INTERNAL, logged with its traceback, and no more."""

from __future__ import annotations

import numpy as np
import pytest

from cloud.executor.local import LocalExecutor
from cloud.store import ModelStore
from split.wire.messages import ModelChunk, ModelReady, Refused, Reply, SegmentOpen, SegmentReady

BUGS = [RuntimeError("a bug"), MemoryError(), np.exceptions.AxisError("axis"), AssertionError("never"), KeyError("x")]


def raising(error):
    def broken(*_, **__):
        raise error

    return broken


def check_internal(answer, error, caplog):
    assert isinstance(answer, Refused), answer
    assert answer.code == "INTERNAL"
    assert type(error).__name__ in answer.message
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("error", BUGS, ids=lambda error: type(error).__name__)
async def test_a_bug_in_one_request_is_refused_and_the_others_are_answered(
    house, chain, feeds, monkeypatch, caplog, error
):
    device = house.connect()
    await device.bring(chain)
    with monkeypatch.context() as patched:
        patched.setattr(LocalExecutor, "run", raising(error))
        device.channel.send(*chain.infer(feeds, request_id="hurt"))
        answer = await device.next()
    check_internal(answer, error, caplog)
    assert answer.request_id == "hurt"
    device.channel.send(*chain.infer(feeds, request_id="well"))
    reply = await device.next()
    assert (type(reply), reply.request_id) == (Reply, "well")
    await device.session.drained()
    assert house.companion.admission.inflight_requests == 0


async def test_a_payload_whose_decoding_meets_a_bug_costs_that_request_alone(house, chain, feeds, monkeypatch, caplog):
    device = house.connect()
    await device.bring(chain)
    with monkeypatch.context() as patched:
        patched.setattr("cloud.requests.decode", raising(OverflowError("shape")))
        device.channel.send(*chain.infer(feeds, request_id="hurt"))
        check_internal(await device.next(), OverflowError(), caplog)
    device.channel.send(*chain.infer(feeds))
    assert isinstance(await device.next(), Reply)


@pytest.mark.parametrize("step", ["offer", "write", "finish"])
async def test_a_bug_while_a_model_is_taken_refuses_the_model_and_it_may_be_offered_again(
    house, chain, monkeypatch, caplog, step
):
    device = house.connect()
    error = ValueError("a bug")
    with monkeypatch.context() as patched:
        patched.setattr(ModelStore, step, raising(error))
        answer = await device.ask(chain.offer)
        if not isinstance(answer, Refused):
            chunk = ModelChunk(digest=chain.digest, file="model.onnx", offset=0, last=True)
            answer = await device.ask(chunk, [chain.path.read_bytes()])
    check_internal(answer, error, caplog)
    assert answer.digest == chain.digest
    assert not house.companion.store._users
    assert isinstance(await device.bring(chain), ModelReady)


@pytest.mark.parametrize("job", ["probe", "prepare", "part"])
async def test_a_bug_while_a_model_or_cut_is_made_refuses_that_alone(house, chain, feeds, monkeypatch, caplog, job):
    device, other = house.connect("camera-1"), house.connect("camera-2")
    error = MemoryError()
    cut = chain.every_cut()[-1]
    wanted = SegmentOpen(digest=chain.digest, cut=cut.id, node_bitmap=cut.node_bitmap)
    if job == "part":
        await device.bring(chain)
        monkeypatch.setattr("cloud.segments._made_before", lambda *_: None)
    with monkeypatch.context() as patched:
        patched.setattr(type(house.workbench), job, raising(error))
        if job == "part":
            answer = await device.ask(wanted)
        else:
            await device.ask(chain.offer)
            chunk = ModelChunk(digest=chain.digest, file="model.onnx", offset=0, last=True)
            answer = await device.ask(chunk, [chain.path.read_bytes()])
    check_internal(answer, error, caplog)
    assert answer.cut == (cut.id if job == "part" else "")
    await other.bring(chain)
    if job == "part":
        assert isinstance(await device.ask(wanted), SegmentReady)
    else:
        await device.bring(chain)
    device.channel.send(*chain.infer(feeds))
    assert isinstance(await device.next(), Reply)
