"""What a session opens: cuts on demand, golden inputs; the way of a whole model is in test_session."""

from __future__ import annotations

import asyncio
import threading

import numpy as np

import cloud.openings
from split.errors import InvalidModel
from split.wire.messages import ModelNeed, ModelOffer, ModelReady, Refused, Reply, SegmentOpen, SegmentReady


async def test_a_bitmap_that_is_none_of_this_models_costs_no_child_process(house, chain):
    device = house.connect()
    await device.bring(chain)
    cut = chain.card.cuts[0]
    for bitmap in ("", "zz", "--folder", "00" * 500_000, cut.node_bitmap + "00", "\0\0"):
        refused = await device.ask(SegmentOpen(digest=chain.digest, cut=cut.id, node_bitmap=bitmap))
        assert (type(refused), refused.code, refused.cut) == (Refused, "PLAN_MISMATCH", cut.id)
    assert "part" not in house.workbench.jobs


async def test_a_cut_made_on_demand_that_was_damaged_is_made_again(house, chain, feeds):
    candidates = {cut.id for cut in chain.card.cuts}
    cut = next(cut for cut in chain.every_cut() if cut.id not in candidates)
    device, later = house.connect("camera-1"), house.connect("camera-2")
    await device.bring(chain)
    await device.open(chain, cut)
    [tail] = house.companion.segments._folder.glob(f"*/{cut.id}.tail.onnx")
    tail.write_bytes(b"damaged")
    await later.ask(chain.offer)
    assert isinstance(await later.next(), ModelReady)
    await later.open(chain, cut)
    assert house.workbench.jobs.count("part") == 2
    later.channel.send(*chain.infer(chain.crossing(cut, feeds), cut.id))
    reply, outputs = await later.reply()
    assert isinstance(reply, Reply)
    np.testing.assert_array_equal(outputs["y"], chain.whole(feeds)["y"])


async def test_golden_inputs_are_made_beside_the_event_loop(house, chain, monkeypatch):
    made_in: list[threading.Thread] = []
    real = cloud.openings.golden_of
    monkeypatch.setattr(
        "cloud.openings.golden_of", lambda *given: made_in.append(threading.current_thread()) or real(*given)
    )
    await house.connect().bring(chain)
    assert made_in
    assert threading.main_thread() not in made_in


async def test_a_cut_asked_for_behind_its_model_is_open_without_waiting_for_it(house, chain):
    before, device = house.connect("camera-1"), house.connect("camera-2")
    await before.bring(chain)
    cut = chain.card.cuts[0]
    device.channel.send(chain.offer)
    device.channel.send(SegmentOpen(digest=chain.digest, cut=cut.id, node_bitmap=cut.node_bitmap))
    answers = [await device.next() for _ in range(3)]
    assert [type(one) for one in answers] == [ModelNeed, ModelReady, SegmentReady]
    assert answers[0].missing == ()


async def test_a_cut_asked_for_behind_a_model_that_is_not_here_is_refused_and_opened_once_it_is(house, chain):
    device, cut = house.connect(), chain.card.cuts[0]
    device.channel.send(chain.offer)
    device.channel.send(SegmentOpen(digest=chain.digest, cut=cut.id, node_bitmap=cut.node_bitmap))
    need, refused = await device.next(), await device.next()
    assert need.missing
    assert (type(refused), refused.code, refused.cut) == (Refused, "PLAN_MISMATCH", cut.id)
    await device.bring(chain)
    await device.open(chain, cut)


async def test_a_model_that_fails_takes_the_cut_asked_for_behind_it_along(house, chain, monkeypatch):
    before, device = house.connect("camera-1"), house.connect("camera-2")
    await before.bring(chain)
    cut = chain.card.cuts[0]

    async def broken(*_: object) -> None:
        raise InvalidModel("broken on the disk")

    monkeypatch.setattr(house.companion.segments, "prepare", broken)
    device.channel.send(chain.offer)
    device.channel.send(SegmentOpen(digest=chain.digest, cut=cut.id, node_bitmap=cut.node_bitmap))
    need, model_refused, cut_refused = [await device.next() for _ in range(3)]
    assert need.missing == ()
    assert (model_refused.code, model_refused.cut) == ("INVALID_MODEL", "")
    assert (cut_refused.code, cut_refused.cut) == ("PLAN_MISMATCH", cut.id)


async def test_what_a_cut_takes_is_timed_while_no_other_is_opened_for_the_device(house, chain, monkeypatch):
    device = house.connect()
    await device.bring(chain)
    under_way, most = 0, 0
    real = cloud.openings.GoldenRuns.cut

    async def counted(*given):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)  # others that may begin do so now
        made = await real(*given)
        under_way -= 1
        return made

    monkeypatch.setattr("cloud.openings.GoldenRuns.cut", counted)
    for cut in chain.card.cuts[:3]:
        device.channel.send(SegmentOpen(digest=chain.digest, cut=cut.id, node_bitmap=cut.node_bitmap))
    ready = [await device.next() for _ in range(3)]
    assert {one.cut for one in ready if isinstance(one, SegmentReady)} == {cut.id for cut in chain.card.cuts[:3]}
    assert most == 1


async def test_a_device_of_which_everything_is_refused_does_not_fill_the_log(house, chain, monkeypatch, caplog):
    monkeypatch.setattr(cloud.openings, "LOG_LINES", 2.0)
    monkeypatch.setattr(cloud.openings, "LOG_S", 1e9)
    device = house.connect()
    wanted = SegmentOpen(digest=chain.digest, cut=chain.card.cuts[0].id, node_bitmap=chain.card.cuts[0].node_bitmap)
    for _ in range(10):
        refused = await device.ask(wanted)
        assert (type(refused), refused.code) == (Refused, "PLAN_MISMATCH")
    assert sum("refused device=" in line for line in caplog.messages) == 2
    monkeypatch.setattr(cloud.openings, "LOG_S", 1e-9)
    await device.ask(wanted)
    assert "unlogged_before=8" in caplog.messages[-1]


def test_an_offer_that_waits_counts_with_all_that_it_names() -> None:
    offer = ModelOffer(digest="d", files=(), keeps=("x" * 1000, "y" * 500))
    plain = ModelOffer(digest="d", files=())
    nothing = memoryview(b"")
    assert cloud.openings._held_bytes(offer, nothing) - cloud.openings._held_bytes(plain, nothing) == 1500
