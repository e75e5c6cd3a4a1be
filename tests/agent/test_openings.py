"""What is shared over a connection, in virtual time: models brought and compared, cuts opened, differences refused."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from agent.calibrated import Sidecar
from agent.served_model import ServedModel
from split.codec.calibration import Calibration
from split.profiles.contract import Contract, Data
from split.runtime.kernels import kernel_answers
from split.transport.virtual_time import run_in_virtual_time
from split.wire.messages import (
    Message,
    ModelChunk,
    ModelNeed,
    ModelOffer,
    ModelReady,
    Refused,
    SegmentOpen,
    SegmentReady,
)
from tests.agent.uplink_world import (
    CUTS,
    GOLDEN,
    OTHER,
    World,
    joined,
    model,
    opens,
    ready,
    refuses,
    running,
    story,
    takes,
)


@pytest.mark.parametrize("code", ["OVERLOADED", "DISK_FULL", "BUDGET_EXCEEDED", "INTERNAL"])
def test_a_model_refused_for_a_reason_that_may_go_away_is_offered_again(tmp_path: Path, code: str) -> None:
    async def main() -> None:
        async with running(World(tmp_path, on_offer=refuses(code, 3, takes))) as world:
            await world.until(lambda: f"not now: {code}; tried again in" in world.why())
            await world.until(lambda: world.why() == "")
            assert world.count(ModelOffer) == 4
            assert world.uplink.connects == 1

    run_in_virtual_time(main())


@story
async def test_an_offer_without_an_answer_is_made_again(tmp_path: Path) -> None:
    def silent_once(offer: ModelOffer, before: int) -> Sequence[Message]:
        return takes(offer, before) if before else ()

    async with running(World(tmp_path, on_offer=silent_once)) as world:
        await world.until(lambda: "did not answer" in world.why())
        await world.until(lambda: world.why() == "")


@story
async def test_the_pauses_between_tries_grow_to_half_a_minute_and_no_further(tmp_path: Path) -> None:
    at_s: list[float] = []

    def notes(offer: ModelOffer, before: int) -> Sequence[Message]:
        at_s.append(asyncio.get_running_loop().time())
        return (Refused(code="OVERLOADED", message="no", digest=offer.digest),)

    async with running(World(tmp_path, on_offer=notes, draw=1.0)):
        await asyncio.sleep(200)
    assert [round(later - earlier) for earlier, later in itertools.pairwise(at_s)][:7] == [1, 2, 4, 8, 16, 30, 30]


@pytest.mark.parametrize("code", ["UNSUPPORTED_OP", "DIGEST_MISMATCH", "INVALID_MODEL"])
def test_a_model_refused_for_good_is_offered_once(tmp_path: Path, code: str) -> None:
    async def main() -> None:
        async with running(World(tmp_path, on_offer=refuses(code, 99, takes))) as world:
            await asyncio.sleep(3600)
            assert world.why() == f"not now: {code}"
            assert world.count(ModelOffer) == 1

    run_in_virtual_time(main())


def of_integers(folder: Path) -> ServedModel:
    served = model(folder)
    return dataclasses.replace(served, card=msgspec.structs.replace(served.card, integer=True))


@story
async def test_where_integer_kernels_differ_a_model_of_integers_is_not_shared_and_the_reason_is_shown(
    tmp_path: Path,
) -> None:
    saturating = kernel_answers() | {"MatMulInteger": 1_048_544}
    async with running(World(tmp_path, kernels=saturating), of_integers(tmp_path)) as world:
        await asyncio.sleep(3600)
        assert "computes integers differently: its MatMulInteger answers 1,048,544 where" in world.why()
        assert world.count(ModelOffer) == 0
        assert world.why() == world.planner.snapshot(world.now)["models"]["m"]["local_only_reason"]


@story
async def test_where_integer_kernels_differ_a_model_of_floats_is_shared(tmp_path: Path) -> None:
    async with running(World(tmp_path, kernels={"MatMulInteger": 1_048_544})) as world:
        await asyncio.sleep(10)
        assert world.why() == ""


@story
async def test_where_integer_kernels_answer_alike_a_model_of_integers_is_shared(tmp_path: Path) -> None:
    async with running(World(tmp_path, kernels=kernel_answers()), of_integers(tmp_path)) as world:
        await asyncio.sleep(10)
        assert world.why() == ""


@story
async def test_a_model_computed_differently_is_never_shared_on_this_connection(tmp_path: Path) -> None:
    def differs(offer: ModelOffer, before: int) -> Sequence[Message]:
        return (ModelReady(digest=offer.digest, golden=joined(OTHER), whole_ms=10.0),)

    async with running(World(tmp_path, on_offer=differs)) as world:
        await asyncio.sleep(3600)
        assert "computes this model differently" in world.why()
        assert world.count(ModelOffer) == 1
        assert world.count(SegmentOpen) == 0


def self_differing(folder: Path, by: float) -> ServedModel:
    served = model(folder)
    assert served.profile is not None
    return dataclasses.replace(served, profile=msgspec.structs.replace(served.profile, self_difference=by))


@pytest.mark.parametrize(
    ("self_difference", "off_by", "why"),
    [
        (0.0, 0.9e-5, ""),
        (0.0, 1.1e-5, "allowed is 1e-05"),
        (6e-5, 1.1e-4, ""),  # PP-OCRv4-det, with other sums on either side
        (6e-5, 1.3e-4, "allowed is 0.00012"),
        (0.02, 0.0, ""),  # M-LSD
        (0.02, 2e-7, "not reproducible (it differs from itself by 0.02"),
    ],
)
def test_two_sides_may_be_twice_as_far_apart_as_the_model_is_from_itself(
    tmp_path: Path, self_difference: float, off_by: float, why: str
) -> None:
    theirs = {"y": np.array([1.0, 2.0 * (1 + off_by)], np.float32)}

    def slightly_off(offer: ModelOffer, before: int) -> Sequence[Message]:
        return ModelNeed(digest=offer.digest, missing=()), ModelReady(
            digest=offer.digest, golden=joined(theirs), whole_ms=10.0
        )

    async def main() -> None:
        async with running(World(tmp_path, on_offer=slightly_off), self_differing(tmp_path, self_difference)) as world:
            await asyncio.sleep(100)
            assert why in world.why()
            assert bool(world.why()) is bool(why)
            shown = world.planner.snapshot(world.now)["models"]["m"]
            assert shown["self_difference"] == self_difference

    run_in_virtual_time(main())


@story
async def test_local_only_models_are_never_offered(tmp_path: Path) -> None:
    private = model(tmp_path, contract=Contract(data=Data(privacy="local-only")))
    async with running(World(tmp_path), private) as world:
        await asyncio.sleep(100)
        assert world.why() == "the contract says local-only"
        assert world.count(ModelOffer) == 0


async def test_a_companion_that_refuses_while_it_is_sent_the_files_is_sent_no_more(tmp_path: Path) -> None:
    """In real time: a thread reads the file."""
    size = 8 << 20
    served = model(tmp_path, file_bytes=size)

    def wants_all(offer: ModelOffer, before: int) -> Sequence[Message]:
        need = ModelNeed(digest=offer.digest, missing=(("model.onnx", 0),))
        return need, Refused(code="DISK_FULL", message="full", digest=offer.digest)

    refused: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    world = World(tmp_path, on_offer=wants_all, draw=0.999)
    world.planner.companion_not_ready = lambda name, why: refused.set_result(why)  # type: ignore[method-assign]
    async with running(world, served):
        async with asyncio.timeout(30):
            assert "full" in await refused
        assert world.count(ModelChunk) < size // (256 * 1024)


async def test_a_model_is_sent_in_pieces_that_the_companion_takes(tmp_path: Path) -> None:
    """In real time: a thread reads the file."""

    def wants_all(offer: ModelOffer, before: int) -> Sequence[Message]:
        return (ModelNeed(digest=offer.digest, missing=(("model.onnx", 0),)),)

    world = World(tmp_path, on_offer=wants_all, max_message_bytes=1 << 16)
    async with running(world, model(tmp_path, file_bytes=300_000)):
        async with asyncio.timeout(30):
            while not any(isinstance(message, ModelChunk) and message.last for message in world.seen):  # noqa: ASYNC110
                await asyncio.sleep(0)
    assert world.count(ModelChunk) == 5  # of at most 61,440 bytes


async def test_a_companion_that_asks_for_a_model_again_and_again_is_not_obeyed_for_ever(tmp_path: Path) -> None:
    """In real time: a thread reads the file."""
    size = 600_000

    def wants_it_again(offer: ModelOffer, before: int) -> Sequence[Message]:
        return [ModelNeed(digest=offer.digest, missing=(("model.onnx", 0),)) for _ in range(9)]

    world = World(tmp_path, on_offer=wants_it_again)
    async with running(world, model(tmp_path, file_bytes=size)):
        async with asyncio.timeout(30):
            while "does not keep what it is sent" not in world.why():  # noqa: ASYNC110
                await asyncio.sleep(0)
    assert world.count(ModelOffer) == 2  # the second one names its chunks
    assert world.count(ModelChunk) <= 3 * 3  # three pieces, three times


@pytest.mark.parametrize("code", ["OVERLOADED", "INTERNAL", "STORAGE_FAILED"])
def test_a_cut_that_fails_for_now_keeps_no_other_back_and_is_tried_again(tmp_path: Path, code: str) -> None:
    def busy_with_b(wanted: SegmentOpen, before: int) -> Sequence[Message]:
        if wanted.cut == CUTS[1] and before < 6:
            return (Refused(code=code, message="busy", digest=wanted.digest, cut=wanted.cut),)
        return opens(wanted, before)

    async def main() -> None:
        async with running(World(tmp_path, on_cut=busy_with_b)) as world:
            await world.until(lambda: world.opened() == {CUTS[0], CUTS[2]})
            assert world.planner.snapshot(world.now)["models"]["m"]["cuts_not_open"] == {CUTS[1]: "busy"}
            await world.until(lambda: world.opened() == set(CUTS))
            assert world.planner.snapshot(world.now)["models"]["m"]["cuts_not_open"] == {}
            assert world.why() == ""

    run_in_virtual_time(main())


@story
async def test_a_cut_that_is_never_answered_keeps_no_other_back(tmp_path: Path) -> None:
    def silent_about_a(wanted: SegmentOpen, before: int) -> Sequence[Message]:
        return () if wanted.cut == CUTS[0] else opens(wanted, before)

    async with running(World(tmp_path, on_cut=silent_about_a)) as world:
        await world.until(lambda: world.opened() == {CUTS[1], CUTS[2]})
        assert world.why() == ""


@story
async def test_a_cut_computed_differently_is_left_out_for_good(tmp_path: Path) -> None:
    def differs_at_a(wanted: SegmentOpen, before: int) -> Sequence[Message]:
        golden = joined(OTHER if wanted.cut == CUTS[0] else GOLDEN)
        return (SegmentReady(digest=wanted.digest, cut=wanted.cut, golden=golden, tail_ms=6.0),)

    async with running(World(tmp_path, on_cut=differs_at_a)) as world:
        await asyncio.sleep(600)
        assert world.opened() == {CUTS[1], CUTS[2]}
        assert world.count(SegmentOpen) == 3
        assert "differently" in world.planner.snapshot(world.now)["models"]["m"]["cuts_not_open"][CUTS[0]]


@story
async def test_two_names_of_one_model_are_both_served(tmp_path: Path) -> None:
    """The companion answers the second offer while the first is under way, as it comes: answers say only the digest."""

    async with running(World(tmp_path, delay_s=0.05), model(tmp_path, "m"), model(tmp_path, "n")) as world:
        await world.until(lambda: world.opened("m") == world.opened("n") == set(CUTS), within_s=60)
        assert world.why("m") == world.why("n") == ""


@story
async def test_dropping_one_name_of_a_model_does_not_disturb_the_other(tmp_path: Path) -> None:
    async with running(World(tmp_path, delay_s=0.05)) as world:
        await world.until(lambda: world.count(ModelOffer) == 1)
        world.serve(model(tmp_path, "n"))
        await asyncio.sleep(0.01)
        world.uplink.drop_model(model(tmp_path, "m"))
        await world.until(lambda: world.opened("n") == set(CUTS), within_s=60)


def calibrated(folder: Path, name: str, data: bytes) -> ServedModel:
    served, digest = model(folder, name), hashlib.sha256(data).hexdigest()
    calibration = Calibration(model=served.digest, inputs=1, tables={}, curves={}, digest=digest)
    return dataclasses.replace(served, sidecar=Sidecar(calibration=calibration, data=data))


@story
async def test_an_offered_calibration_goes_with_those_that_other_names_of_the_model_use(tmp_path: Path) -> None:
    names = [calibrated(tmp_path, name, name.encode()) for name in "mno"]
    async with running(World(tmp_path, codecs=("raw", "klt")), *names, model(tmp_path, "plain")) as world:
        await world.until(lambda: len([one for one in world.seen if isinstance(one, ModelOffer) and one.keeps]) == 3)
        digest_of = {name: f"sha256:{hashlib.sha256(name.encode()).hexdigest()}" for name in "mnop"}
        offers = {one.digest: one for one in world.seen if isinstance(one, ModelOffer) and one.calibrates}
        for name in "mno":
            assert set(offers[digest_of[name]].keeps) == {digest_of[other] for other in "mno" if other != name}
        world.uplink.drop_model(names[2])
        world.uplink.recalibrated(calibrated(tmp_path, "m", b"p"))
        await world.until(lambda: isinstance(world.seen[-1], ModelOffer) and world.seen[-1].digest == digest_of["p"])
        assert world.seen[-1].keeps == (digest_of["n"],)


def test_what_is_refused_again_and_again_for_one_reason_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def full(offer: ModelOffer, before: int) -> Sequence[Message]:
        return refuses("BUDGET_EXCEEDED", 1000, takes)(offer, before) if offer.calibrates else takes(offer, before)

    async def main() -> None:
        world = World(tmp_path, on_offer=full, codecs=("raw", "klt"))
        async with running(world, calibrated(tmp_path, "m", b"m")):
            await asyncio.sleep(600)
            assert world.count(ModelOffer) > 20

    run_in_virtual_time(main())
    said = [one.getMessage() for one in caplog.records if "shared" in one.getMessage()]
    assert len(said) == 1
    assert said[0].endswith("(BUDGET_EXCEEDED)")


def test_a_cut_that_is_refused_again_and_again_is_logged_once_for_each_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refused: list[str] = []

    def busy_with_b(wanted: SegmentOpen, before: int) -> Sequence[Message]:
        if wanted.cut != CUTS[1] or len(refused) == 6:
            return opens(wanted, before)
        refused.append("OVERLOADED" if len(refused) < 3 else "BUDGET_EXCEEDED")
        return (Refused(code=refused[-1], message="not now", digest=wanted.digest, cut=wanted.cut),)

    async def main() -> None:
        async with running(World(tmp_path, on_cut=busy_with_b)) as world:
            await world.until(lambda: world.opened() == set(CUTS))

    run_in_virtual_time(main())
    assert len(refused) == 6
    said = [one.getMessage() for one in caplog.records if "is not open" in one.getMessage()]
    assert [one.split()[-1] for one in said] == ["(OVERLOADED)", "(BUDGET_EXCEEDED)"]
    assert all(f"cut={CUTS[1]} " in one for one in said)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0, 5e-324, 1e300])
def test_a_companion_that_needs_no_time_or_all_of_it_shares_nothing(tmp_path: Path, wrong: float) -> None:
    def wrong_whole(offer: ModelOffer, before: int) -> Sequence[Message]:
        return (msgspec.structs.replace(ready(offer), whole_ms=wrong),)

    def wrong_tail(wanted: SegmentOpen, before: int) -> Sequence[Message]:
        golden = joined(GOLDEN)
        return (SegmentReady(digest=wanted.digest, cut=wanted.cut, golden=golden, tail_ms=wrong),)

    async def main() -> None:
        async with running(World(tmp_path / "a", on_offer=wrong_whole)) as world:
            await world.until(lambda: "says it needs" in world.why())
        async with running(World(tmp_path / "b", on_cut=wrong_tail)) as world:
            await world.until(lambda: world.why() == "")
            await asyncio.sleep(60)
            assert world.opened() == set()

    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    run_in_virtual_time(main())
