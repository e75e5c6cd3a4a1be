"""Calibrations that devices bring: stored as models are, read with, kept while used; what is none never answers."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from cloud import calibrations, openings
from split.codec.calibration import (
    CALIBRATION_FILE,
    Calibration,
    Curve,
    CutTables,
    Klt,
    TensorTables,
    encode_calibration,
    grid_of,
)
from split.codec.klt import BoundaryTables, encode_klt
from split.ids import ModelDigest
from split.profiles.measured import Point
from split.wire.messages import Infer, ModelChunk, ModelNeed, ModelOffer, ModelReady, Refused, Reply

FINE = 40
"""A step of 2^-11: rounding alone is seen in the outputs."""


def calibration_of(model, cut, *, scale: float = 1.0, inputs: int = 4) -> Calibration:
    """Of one cut of `chain`: identity transforms of what has rows of four."""
    klt = Klt(
        layout="NC",
        transform=np.eye(4, dtype=np.float32),
        inverse=np.eye(4, dtype=np.float32),
        mean=np.zeros(4, np.float32),
        block=(1, 1),
        scales=grid_of(np.full(4, scale)).reshape(4, 1, 1),
    )
    by_name = {spec.name: spec for spec in model.card.inputs}
    crossing = [*cut.boundary, *(by_name[name] for name in cut.tail_inputs)]
    tensors = tuple(TensorTables(spec=spec, klt=klt if len(spec.shape) == 2 else None) for spec in crossing)
    curve = Curve(
        points=(
            Point(
                level=FINE,
                mean_bytes=60.0,
                p95_bytes=70.0,
                fidelity={"relative": 1e-4},
                fidelity_high={"relative": 1e-4},
            ),
        ),
        inputs=2,
    )
    return Calibration(
        model=model.digest,
        inputs=inputs,
        tables={cut.id: CutTables(tensors=tensors, node_bitmap=cut.node_bitmap)},
        curves={cut.id: curve},
    )


class Laid:
    """A calibration as a file, and the payloads that are made with it."""

    def __init__(self, calibration: Calibration) -> None:
        self.data = encode_calibration(calibration)
        self.sha256 = hashlib.sha256(self.data).hexdigest()
        self.model = calibration.model
        self.keeps: tuple[str, ...] = ()
        self._tables = calibration.tables

    def offer(self, **changes) -> ModelOffer:
        known = {
            "digest": f"sha256:{self.sha256}",
            "files": ((CALIBRATION_FILE, len(self.data), self.sha256),),
            "calibrates": self.model,
            "keeps": self.keeps,
        }
        return ModelOffer(**known | changes)

    async def bring(self, device):
        """Offer it and send what is missing; what is answered at the end."""
        offer = self.offer()
        need = await device.ask(offer)
        if not isinstance(need, ModelNeed):
            return need
        for name, start in need.missing:
            chunk = ModelChunk(digest=offer.digest, file=name, offset=start, last=True)
            device.channel.send(chunk, [memoryview(self.data)[start:]])
        return await device.next()

    def infer(self, tensors, cut, **fields):
        payload = b"".join(map(bytes, encode_klt(tensors, BoundaryTables(self._tables[cut.id], self.sha256), FINE)))
        known = {"request_id": "1", "attempt": 1, "codec": "klt", "budget_ms": 20_000.0}
        return Infer(**known | {"digest": self.model, "cut": cut.id} | fields), payload


@pytest.fixture
async def opened(house, chain):
    """A device whose model and one cut are open, and that cut."""
    device = house.connect()
    await device.bring(chain)
    cut = next(cut for cut in chain.every_cut() if cut.tail_inputs)
    await device.open(chain, cut)
    return device, cut


async def asks(device, message, payload):
    device.channel.send(message, [payload])
    return await device.reply()


async def test_a_payload_is_read_with_the_calibration_that_it_names(opened, chain, feeds):
    device, cut = opened
    laid = Laid(calibration_of(chain, cut))
    ready = await laid.bring(device)
    assert (type(ready), ready.digest, ready.golden) == (ModelReady, f"sha256:{laid.sha256}", b"")
    reply, outputs = await asks(device, *laid.infer(chain.crossing(cut, feeds), cut))
    assert (type(reply), reply.codec) == (Reply, "klt")
    np.testing.assert_allclose(outputs["y"], chain.whole(feeds)["y"], atol=5e-3)


async def test_without_it_the_request_is_refused_by_name_and_the_session_lives(opened, chain, feeds):
    device, cut = opened
    laid = Laid(calibration_of(chain, cut))
    refused, _ = await asks(device, *laid.infer(chain.crossing(cut, feeds), cut))
    assert (type(refused), refused.code, refused.request_id) == (Refused, "NO_CALIBRATION", "1")
    assert laid.sha256[:16] in refused.message
    assert isinstance(await laid.bring(device), ModelReady)
    reply, _ = await asks(device, *laid.infer(chain.crossing(cut, feeds), cut))
    assert isinstance(reply, Reply)


async def test_a_new_one_leaves_the_one_before_it_and_takes_the_place_of_older_ones(opened, chain, feeds, house):
    device, cut = opened
    several = [Laid(calibration_of(chain, cut, inputs=number)) for number in (4, 5, 6)]
    for laid in several:
        assert isinstance(await laid.bring(device), ModelReady)
    answers = [(await asks(device, *laid.infer(chain.crossing(cut, feeds), cut)))[0] for laid in several]
    assert [type(one) for one in answers] == [Refused, Reply, Reply]
    assert answers[0].code == "NO_CALIBRATION"
    users = [digest for digest, _ in house.companion.store._users]
    assert several[0].sha256 not in users
    assert several[2].sha256 in users


async def test_those_that_the_device_goes_on_using_stay(opened, chain, feeds):
    """One model under three names, each with a calibration of its own; then one of them with a new one, twice."""
    device, cut = opened
    names = [Laid(calibration_of(chain, cut, inputs=number)) for number in (4, 5, 6, 7, 8)]
    for number, laid in enumerate(names):
        used = names[max(0, number - 2) : number] if number < 3 else names[:2]
        laid.keeps = tuple(one.offer().digest for one in used)
        assert isinstance(await laid.bring(device), ModelReady)
    answers = [(await asks(device, *laid.infer(chain.crossing(cut, feeds), cut)))[0] for laid in names]
    assert [type(one) for one in answers] == [Reply, Reply, Refused, Reply, Reply]


async def test_calibrations_take_no_place_of_a_model(house, chain, monkeypatch):
    monkeypatch.setattr(openings, "MAX_MODELS", 1)
    monkeypatch.setattr(openings, "CALIBRATIONS_MAX", 2)
    device = house.connect()
    await device.bring(chain)
    cut = next(cut for cut in chain.every_cut() if cut.tail_inputs)
    several = [Laid(calibration_of(chain, cut, inputs=number)) for number in (4, 5)]
    for laid in several:
        assert isinstance(await laid.bring(device), ModelReady)
    other = Laid(calibration_of(chain, cut, inputs=6))
    refused = await other.bring(device)
    assert (type(refused), refused.code) == (Refused, "OVERLOADED")
    assert "2 calibrations" in refused.message


async def test_one_that_there_is_no_room_for_takes_nothing_away(opened, chain, feeds, monkeypatch):
    device, cut = opened
    known, larger = (Laid(calibration_of(chain, cut, inputs=number)) for number in (4, 5))
    older = Laid(calibration_of(chain, cut, inputs=3))
    for laid in (older, known):
        assert isinstance(await laid.bring(device), ModelReady)
    for limit in ("SESSION_BYTES", "ALL_BYTES"):
        monkeypatch.setattr(calibrations, limit, 200)
        refused = await larger.bring(device)
        assert (type(refused), refused.code) == (Refused, "BUDGET_EXCEEDED")
        for laid in (older, known):
            assert isinstance((await asks(device, *laid.infer(chain.crossing(cut, feeds), cut)))[0], Reply)
        monkeypatch.setattr(calibrations, limit, 1 << 30)
    assert isinstance(await larger.bring(device), ModelReady)


async def test_one_that_is_here_already_need_not_be_sent_again_nor_read_twice(house, chain, opened, monkeypatch):
    device, cut = opened
    read, real = [], calibrations.decode_calibration
    monkeypatch.setattr(calibrations, "decode_calibration", lambda *given: read.append(given) or real(*given))
    laid = Laid(calibration_of(chain, cut, inputs=9))  # of no other test
    await laid.bring(device)
    again = house.connect("camera-2")
    await again.bring(chain)
    need = await again.ask(laid.offer())
    assert need.missing == ()
    assert isinstance(await again.next(), ModelReady)
    assert len(read) == 1


async def test_what_came_of_it_counts_when_the_link_was_cut(opened, chain, house):
    device, cut = opened
    laid = Laid(calibration_of(chain, cut))
    await device.ask(laid.offer())
    chunk = ModelChunk(digest=laid.offer().digest, file=CALIBRATION_FILE, offset=0)
    device.channel.send(chunk, [laid.data[:100]])
    await device.channel.close("gone")
    await device.task
    later = house.connect()
    need = await later.ask(laid.offer())
    assert need.missing == ((CALIBRATION_FILE, 100),)


@pytest.mark.parametrize("how", ["damaged", "another model", "another hash"])
async def test_a_file_that_is_none_is_refused_and_costs_nothing_else(opened, chain, feeds, how):
    device, cut = opened
    laid = Laid(calibration_of(chain, cut))
    code = "INVALID_CALIBRATION"
    if how == "damaged":
        laid.data = laid.data[:-9] + bytes(9)
        laid.sha256 = hashlib.sha256(laid.data).hexdigest()
    elif how == "another model":
        laid.model = ModelDigest("sha256:" + "ab" * 32)
    else:
        laid.data, code = laid.data[:-1] + b"\0", "DIGEST_MISMATCH"
    refused = await laid.bring(device)
    assert (type(refused), refused.code) == (Refused, code)
    device.channel.send(*chain.infer(chain.crossing(cut, feeds), cut.id))
    reply, outputs = await device.reply()
    assert isinstance(reply, Reply)
    np.testing.assert_array_equal(outputs["y"], chain.whole(feeds)["y"])


@pytest.mark.parametrize(
    "changes",
    [
        {"golden": b"x"},
        {"dims": {"N": 1}},
        {"files": ((CALIBRATION_FILE, 65 << 20, "ab" * 32),), "digest": "sha256:" + "ab" * 32},
        {"files": (("a", 1, "ab" * 32), ("b", 1, "cd" * 32))},
    ],
)
async def test_an_offer_that_is_none_of_a_calibration_is_refused(opened, chain, changes):
    device, cut = opened
    refused = await device.ask(Laid(calibration_of(chain, cut)).offer(**changes))
    assert (type(refused), refused.code) == (Refused, "INVALID_REQUEST")
    assert "one file of at most 64 MiB" in refused.message


async def test_tables_of_another_cut_answer_nothing(opened, chain, feeds):
    device, cut = opened
    other = next(one for one in chain.every_cut() if one.id != cut.id and one.boundary != cut.boundary)
    await device.open(chain, other)
    laid = Laid(calibration_of(chain, cut))
    await laid.bring(device)
    message, payload = laid.infer(chain.crossing(cut, feeds), cut)
    for wrong, code in (({"cut": other.id}, "PLAN_MISMATCH"), ({"cut": "offload"}, "PLAN_MISMATCH")):
        refused, _ = await asks(device, _with(message, **wrong), payload)
        assert (type(refused), refused.code) == (Refused, code)


@pytest.mark.parametrize("codec", ["raw", "klt"])
async def test_bytes_that_are_no_payload_are_refused_with_bounded_work(opened, chain, feeds, codec):
    device, cut = opened
    laid = Laid(calibration_of(chain, cut))
    await laid.bring(device)
    message, payload = laid.infer(chain.crossing(cut, feeds), cut, codec=codec)
    claims = bytearray(payload)
    claims[14:15] = b"\xff\xff\xff\xff\xff\x7f"  # of decoded bytes: more than may be in flight
    broken = [payload[:5], payload[:-1], payload + b"\0", b"ISTP" + payload[4:], bytes(claims)]
    for number, one in enumerate(broken if codec == "klt" else [payload]):
        refused, _ = await asks(device, _with(message, request_id=str(number)), one)
        assert isinstance(refused, Refused), number
        assert refused.code in ("CODEC_ERROR", "NO_CALIBRATION", "OVERLOADED"), refused


def _with(message: Infer, **changes) -> Infer:
    return Infer(**{name: getattr(message, name) for name in message.__struct_fields__} | changes)


async def test_a_session_brings_tables_up_to_a_bound(opened, chain, monkeypatch):
    device, cut = opened
    laid = Laid(calibration_of(chain, cut))
    monkeypatch.setattr(calibrations, "SESSION_BYTES", 100)
    refused = await laid.bring(device)
    assert (type(refused), refused.code) == (Refused, "BUDGET_EXCEEDED")


async def test_the_digest_of_a_calibration_is_no_model_that_may_be_asked(opened, chain, feeds):
    device, cut = opened
    laid = Laid(calibration_of(chain, cut))
    await laid.bring(device)
    device.channel.send(*replace(chain).infer(feeds, "offload", digest=f"sha256:{laid.sha256}"))
    refused, _ = await device.reply()
    assert (type(refused), refused.code) == (Refused, "PLAN_MISMATCH")
