"""Codec klt under a fake clock: refused for want of its calibration, watched for bytes and fidelity, in parts.

The laboratory is that of `serve_lab.py`, its tiny model served in rows; expected outputs are its formula's. The
calibration is made up: identity transforms whose step is 2^-8, or 2^2 at the coarse level.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from agent.calibrated import calibrated, sidecar_beside
from agent.outcome import Outcome
from agent.serve import Serve
from split.codec.calibration import (
    CALIBRATION_FILE,
    Calibration,
    Curve,
    CutTables,
    Klt,
    TensorTables,
    grid_of,
    write_calibration,
)
from split.codec.klt import calibration_key, klt_key
from split.codec.payload import SPOKEN, decode, encode
from split.errors import EngineFailed, InvalidRequest
from split.plan.plan import Placement
from split.profiles.contract import Contract, Data, Fidelity
from split.profiles.measured import CodecCosts, Point
from split.transport.memory import MemoryChannel, memory_pair
from split.transport.virtual_time import run_in_virtual_time
from split.wire.messages import NO_CALIBRATION, Infer, Message, ModelOffer, Refused, SegmentOpen
from tests.agent.serve_lab import HELLO, WHOLE_MS, Behaviour_, Lab, answer

FINE, COARSE = 64, 144
CONTRACT = Contract(data=Data(codecs=("raw", "klt"), fidelity=Fidelity(measure="relative", bound=0.05)))
SPEAKS_KLT = msgspec.structs.replace(HELLO, codecs=SPOKEN)


class KltLab(Lab):
    laid = False

    def __init__(
        self,
        folder: Path,
        *,
        behave: Behaviour_,
        fine_bytes: float = 60.0,
        rows: int = 1,
        every: int = 0,
        hello: Any = SPEAKS_KLT,
    ) -> None:
        super().__init__(folder, behave=behave, contract=CONTRACT, rows=rows)
        self._hello = hello
        self.offers: list[ModelOffer] = []
        """Of calibrations."""
        self.openings: list[ModelOffer | SegmentOpen] = []
        """Of models and cuts."""
        self.broken: list[tuple[str, str, str]] = []
        """Model, codec, why: what is kept of bounds that were found broken."""
        self.lay(fine_bytes)
        self.serve = Serve(
            planner=self.planner,
            compute=self.compute,  # type: ignore[arg-type]  # the same methods, in virtual time
            uplink=self.uplink,
            lateness=self.lateness,
            journal=self.journal,
            spot_check_every=every,
            on_broken=lambda model, codec, why: self.broken.append((model.name, codec, why)),
        )

    def lay_anew(self, fine_bytes: float) -> None:
        """While it is served."""
        self.lay(fine_bytes)
        self.uplink.recalibrated(self.model)

    def lay(self, fine_bytes: float) -> None:
        """A calibration whose curve says that fine payloads have so many bytes; served from now on."""
        card = self.model.card
        points = (
            Point(
                level=COARSE,
                mean_bytes=fine_bytes / 2,
                p95_bytes=fine_bytes,
                fidelity={"relative": 0.5},
                fidelity_high={"relative": 0.5},
            ),
            Point(
                level=FINE,
                mean_bytes=fine_bytes,
                p95_bytes=fine_bytes,
                fidelity={"relative": 0.01},
                fidelity_high={"relative": 0.01},
            ),
        )
        klt = Klt(
            layout="NC",
            transform=np.eye(3, dtype=np.float32),
            inverse=np.eye(3, dtype=np.float32),
            mean=np.zeros(3, np.float32),
            block=(1, 1),
            scales=grid_of(np.ones(3)).reshape(3, 1, 1),
        )
        tables = CutTables(
            tensors=tuple(TensorTables(spec=spec, klt=klt) for spec in card.cut(self.cut).boundary),
            node_bitmap=card.cut(self.cut).node_bitmap,
        )
        path = Path(card.path)
        write_calibration(
            Calibration(
                model=card.digest,
                inputs=4,
                tables={self.cut: tables},
                curves={self.cut: Curve(points=points, inputs=2)},
            ),
            path.with_name(CALIBRATION_FILE),
        )
        sidecar = sidecar_beside(path, card.digest)
        assert self.model.profile is not None
        profile = calibrated(card, self.model.profile, sidecar.calibration)
        self.model = replace(self.model, profile=profile, sidecar=sidecar)
        (self.planner.recalibrated if self.laid else self.planner.add_model)("tiny", card, profile, self.model.contract)
        self.laid = True

    async def _dial(self, address: str, timeout_s: float, first: Sequence[Message]) -> MemoryChannel:
        device, companion = memory_pair(SPEAKS_KLT, self._hello)
        for message in first:
            device.send(message)
        send = device.send

        def watched(message: Any, *rest: Any, **more: Any) -> None:
            if isinstance(message, ModelOffer) and message.calibrates:
                self.offers.append(message)
            elif isinstance(message, ModelOffer | SegmentOpen):
                self.openings.append(message)
            send(message, *rest, **more)

        device.send = watched  # type: ignore[method-assign]  # seen on its way
        self.companions.append(asyncio.create_task(self._companion(companion)))
        return device

    def why_not(self) -> str:
        found = self.planner.snapshot(asyncio.get_running_loop().time())["models"]["tiny"]["codecs_why_not"]
        return str(found.get("klt", ""))

    async def ask_klt(self, **options: Any) -> Outcome:
        outcome = await self.ask(codec="klt", **options)
        y = np.maximum(self.x, 0) + np.exp(np.maximum(self.x, 0))
        np.testing.assert_allclose(outcome.outputs["y"], y + self.off(outcome), rtol=0.02)
        return outcome

    def off(self, outcome: Outcome) -> float:
        """What the companion of the test adds to its answers."""
        return 0.0 if outcome.ran.placement is Placement.LOCAL else self.shift_of_answers

    shift_of_answers = 0.0


def reads_klt() -> Behaviour_:
    async def behave(lab: Any, channel: MemoryChannel, infer: Infer, payload: memoryview) -> None:
        await asyncio.sleep(0.01)
        tables = lab.model.sidecar.tables[infer.cut]
        feeds = decode(payload, max_bytes=1 << 20, tables=tables) if infer.codec == "klt" else None
        if feeds is None:
            channel.send(*answer(lab, infer, payload))
            return
        reply, _ = answer(lab, infer, memoryview(b"".join(map(bytes, encode(feeds, "raw")))))
        outputs = lab.model.tail(infer.cut).run(feeds)
        channel.send(reply, encode({n: v + np.float32(lab.shift_of_answers) for n, v in outputs.items()}, "raw"))

    return behave


def without_calibration(infer: Infer) -> Refused:
    return Refused(
        code=NO_CALIBRATION,
        message="not here",
        request_id=infer.request_id,
        attempt=infer.attempt,
        digest=infer.digest,
        cut=infer.cut,
    )


def story_of(lab: Callable[[], KltLab]) -> Callable[[Callable[[KltLab], Any]], None]:
    def run(story: Callable[[KltLab], Any]) -> None:
        async def inside() -> None:
            async with lab() as made:
                await made.until(lambda: len(made.offers) > 0 or bool(made.why_not()))
                await asyncio.sleep(0.1)
                await story(made)

        run_in_virtual_time(inside())

    return run


def test_a_calibration_that_the_companion_has_makes_klt_a_plan_like_any_other(tmp_path: Path) -> None:
    async def story(lab: KltLab) -> None:
        outcome = await lab.ask_klt()
        assert (outcome.ran.codec, outcome.fallback, outcome.decision.chosen.level) == ("klt", "", FINE)
        assert lab.seen[0].codec == "klt"
        assert lab.offers[0].calibrates == lab.model.digest
        assert lab.offers[0].files[0][0] == CALIBRATION_FILE
        assert len(lab.request.facts.sizes) == 1

    story_of(lambda: KltLab(tmp_path, behave=reads_klt()))(story)


def test_a_payload_names_the_calibration_it_was_made_with(tmp_path: Path) -> None:
    named: list[bytes] = []

    async def behave(lab: Any, channel: MemoryChannel, infer: Infer, payload: memoryview) -> None:
        named.append(klt_key(payload))
        await reads_klt()(lab, channel, infer, payload)

    async def story(lab: KltLab) -> None:
        await lab.ask_klt()
        assert named == [calibration_key(lab.model.sidecar.calibration.digest)]  # type: ignore[union-attr]  # laid

    story_of(lambda: KltLab(tmp_path, behave=behave))(story)


def test_a_companion_that_does_not_speak_klt_is_not_offered_a_calibration(tmp_path: Path) -> None:
    async def story(lab: KltLab) -> None:
        assert lab.offers == []
        assert "does not know codec klt" in lab.why_not()
        outcome = await lab.ask_klt()
        assert outcome.ran.placement is Placement.LOCAL
        assert "does not know codec klt" in outcome.fallback
        raw = await lab.ask(codec="raw")
        assert raw.ran.placement is Placement.SPLIT

    story_of(lambda: KltLab(tmp_path, behave=reads_klt(), hello=HELLO))(story)


@pytest.mark.parametrize("hello", [HELLO, SPEAKS_KLT])
def test_a_companion_that_does_not_speak_a_picture_codec_is_sent_none(tmp_path: Path, hello: Any) -> None:
    class PictureLab(KltLab):
        def lay(self, fine_bytes: float) -> None:
            super().lay(fine_bytes)
            assert self.model.profile is not None
            point = Point(
                level=3, mean_bytes=9.0, p95_bytes=9.0, fidelity={"relative": 0.01}, fidelity_high={"relative": 0.01}
            )
            webp = CodecCosts(codec="webp", bytes=9, encode_ms=0.1, decode_ms=0.1, curve=(point,))
            codecs = (*self.model.profile.input_codecs, webp)
            profile = msgspec.structs.replace(self.model.profile, input_codecs=codecs)
            self.model = replace(self.model, profile=profile)
            self.planner.add_model("tiny", self.model.card, profile, self.model.contract)

    async def story(lab: KltLab) -> None:
        found = lab.planner.snapshot(0.0)["models"]["tiny"]["codecs_why_not"]
        wanted = "the companion does not know codec webp; update it"
        assert found.get("webp", "") == (wanted if hello is HELLO else "")

    story_of(lambda: PictureLab(tmp_path, behave=reads_klt(), hello=hello))(story)


def test_a_payload_that_is_refused_for_want_of_the_calibration_ends_here_and_it_is_offered_again(
    tmp_path: Path,
) -> None:
    refused: list[str] = []

    async def behave(lab: Any, channel: MemoryChannel, infer: Infer, payload: memoryview) -> None:
        if refused:
            await reads_klt()(lab, channel, infer, payload)
            return
        refused.append(infer.request_id)
        channel.send(without_calibration(infer))

    async def story(lab: KltLab) -> None:
        outcome = await lab.ask_klt()
        assert outcome.ran.placement is Placement.LOCAL
        assert "not here" in outcome.fallback
        await lab.until(lambda: len(lab.offers) == 2 and not lab.why_not())
        outcome = await lab.ask_klt()
        assert (outcome.ran.placement, outcome.fallback) == (Placement.SPLIT, "")

    story_of(lambda: KltLab(tmp_path, behave=behave))(story)


def test_a_companion_that_says_it_has_a_calibration_and_refuses_what_it_coded_is_offered_it_later_and_later(
    tmp_path: Path,
) -> None:
    """Each refused request costs a way there and back before it is finished here."""
    refused: list[str] = []

    async def behave(lab: Any, channel: MemoryChannel, infer: Infer, payload: memoryview) -> None:
        refused.append(infer.request_id)
        channel.send(without_calibration(infer))

    async def story(lab: KltLab) -> None:
        for _ in range(120):
            outcome = await lab.ask_klt()
            assert outcome.ran.placement is Placement.LOCAL
            await asyncio.sleep(0.5)
        # Offered at once, then after 0.5, 1, 2, 4, 8, 15, 15 … s (half of what is drawn from): nine times in a minute,
        # where each of the 120 would be refused without.
        assert 8 <= len(refused) <= 10
        assert len(lab.offers) <= len(refused) + 1
        assert "did not keep the calibration; it is offered again in 15 s" in lab.why_not()

    story_of(lambda: KltLab(tmp_path, behave=behave))(story)


def test_a_refusal_of_what_was_not_asked_or_was_coded_with_a_former_calibration_takes_nothing_away(
    tmp_path: Path,
) -> None:
    waiting: list[tuple[MemoryChannel, Refused]] = []

    async def behave(lab: Any, channel: MemoryChannel, infer: Infer, payload: memoryview) -> None:
        refused = Refused(
            code=NO_CALIBRATION, message="not here", request_id=infer.request_id, attempt=1, digest=infer.digest
        )
        waiting.append((channel, refused))

    async def story(lab: KltLab) -> None:
        asking = asyncio.create_task(lab.ask_klt())
        await lab.until(lambda: len(waiting) == 1)
        channel, refused = waiting[0]
        for _ in range(50):
            channel.send(msgspec.structs.replace(refused, request_id="never asked"))
            await asyncio.sleep(0.0)
        assert (len(lab.offers), lab.why_not()) == (1, "")
        lab.lay_anew(70.0)
        await lab.until(lambda: not lab.why_not())
        channel.send(refused)
        assert (await asking).fallback == "not here"
        assert (len(lab.offers), lab.why_not()) == (2, "")

    story_of(lambda: KltLab(tmp_path, behave=behave))(story)


def test_a_new_calibration_is_offered_and_used_while_the_connection_lives(tmp_path: Path) -> None:
    async def story(lab: KltLab) -> None:
        await lab.ask_klt()
        opened = len(lab.openings)
        lab.lay_anew(70.0)
        assert lab.why_not() == "the companion has no calibration yet"
        meanwhile = await lab.ask(codec="raw")
        assert (meanwhile.ran.placement, meanwhile.fallback) == (Placement.SPLIT, "")
        await lab.until(lambda: len(lab.offers) == 2)
        await asyncio.sleep(0.2)
        assert lab.offers[0].digest != lab.offers[1].digest
        assert len(lab.openings) == opened
        outcome = await lab.ask_klt()
        assert (outcome.ran.placement, outcome.decision.chosen.bytes) == (Placement.SPLIT, 70)

    story_of(lambda: KltLab(tmp_path, behave=reads_klt()))(story)


def test_a_request_that_asks_for_more_than_was_measured_is_refused_by_name(tmp_path: Path) -> None:
    async def story(lab: KltLab) -> None:
        with pytest.raises(
            InvalidRequest, match=r"the closest measured is 0.01 in the mean, 0.01 at most, with 60 bytes"
        ):
            await lab.ask_klt(fidelity=0.001)
        with pytest.raises(InvalidRequest, match=r"isthmus.fidelity is 0.06: looser .* whose bound is 0.05 .relative."):
            await lab.ask_klt(fidelity=0.06)

    story_of(lambda: KltLab(tmp_path, behave=reads_klt()))(story)


def test_payloads_far_above_the_curve_correct_it_and_are_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(lab: KltLab) -> None:
        told = [(await lab.ask_klt()).decision.chosen.bytes for _ in range(60)]
        await asyncio.sleep(0.1)
        sent_bytes = lab.planner.rates()["tiny", "klt"] * 10.0
        assert told[0] == 10
        assert told[-1] == pytest.approx(sent_bytes, rel=0.03)
        assert sent_bytes > 20.0
        snapshot = lab.planner.snapshot(0.0)["models"]["tiny"]
        assert snapshot["calibration_misfit"] == ["klt"]

    with caplog.at_level(logging.WARNING):
        story_of(lambda: KltLab(tmp_path, behave=reads_klt(), fine_bytes=10.0))(story)
    said = [record.getMessage() for record in caplog.records if "do not fit" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("model=tiny live inputs do not fit the calibration: codec klt sends")


def test_answers_beyond_the_bound_take_the_codec_from_the_model_until_it_is_calibrated_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(lab: KltLab) -> None:
        lab.shift_of_answers = 0.6  # relative to the largest output, 1 + e, that is 0.16
        for _ in range(40):
            await lab.ask_klt()
            await asyncio.sleep(0.5)  # idle
        assert lab.journal.checks("tiny")["klt"]["checked"] == 9
        assert lab.journal.checks("tiny")["klt"]["mean_of_bound"] > 1.0
        assert "times as far from the unsplit model's as the bound allows (relative 0.05" in lab.why_not()
        assert lab.broken == [("tiny", "klt", lab.why_not())]
        outcome = await lab.ask_klt()
        assert outcome.ran.placement is Placement.LOCAL
        assert "mean of 9 spot checks" in outcome.fallback
        raw = await lab.ask(codec="raw")
        assert raw.ran.placement is Placement.SPLIT
        lab.lay_anew(60.0)
        await lab.until(lambda: not lab.why_not())

    with caplog.at_level(logging.WARNING):
        story_of(lambda: KltLab(tmp_path, behave=reads_klt(), every=2))(story)
    assert len([one for one in caplog.records if "times as far" in one.getMessage()]) == 1


def test_answers_inside_the_bound_are_checked_one_in_so_many_and_stay(tmp_path: Path) -> None:
    async def story(lab: KltLab) -> None:
        for _ in range(30):
            await lab.ask_klt()
            await asyncio.sleep(0.5)
        found = lab.journal.checks("tiny")["klt"]
        assert (found["checked"], found["beyond_bound"]) == (10, 0)
        assert 0.0 <= found["mean_of_bound"] < 0.2
        assert lab.why_not() == ""

    story_of(lambda: KltLab(tmp_path, behave=reads_klt(), every=3))(story)


def test_answers_are_checked_whatever_their_deadlines_since_a_check_ends_for_whoever_comes(tmp_path: Path) -> None:
    """Behind a whole there would be no time for another one."""

    async def story(lab: KltLab) -> None:
        for answers in range(12):
            await lab.ask_klt(deadline_ms=2 * WHOLE_MS + 19.0)
            assert lab.journal.checks("tiny")["klt"]["unchecked"] == 1 + answers % 3
            await asyncio.sleep(0.5)
        assert lab.journal.checks("tiny")["klt"]["checked"] == 4

    story_of(lambda: KltLab(tmp_path, behave=reads_klt(), every=3))(story)


def test_what_a_payload_of_the_former_calibration_shows_says_nothing_of_the_new_one(tmp_path: Path) -> None:
    """Its answer is ten times over the bound, its bytes are six times those of the curve; levels are the same."""

    async def story(lab: KltLab) -> None:
        lab.shift_of_answers = 6.0
        for _ in range(7):
            await lab.ask_klt()
            await asyncio.sleep(0.5)
        assert lab.journal.checks("tiny")["klt"]["checked"] == 7
        await lab.ask_klt()  # its check, the eighth, has begun
        lab.lay_anew(10.0)
        await asyncio.sleep(0.5)
        assert lab.why_not() == ""
        assert lab.planner.rates() == {}
        await lab.ask_klt()
        assert lab.journal.checks("tiny")["klt"]["checked"] == 0

    story_of(lambda: KltLab(tmp_path, behave=reads_klt(), fine_bytes=10.0, every=1))(story)


def low_battery(lab: KltLab) -> None:
    lab.planner._battery_low = lambda: True


def whole_closed(lab: KltLab) -> None:
    lab.model.activation_ms = lambda cut: 50.0 if cut is None else 0.0  # type: ignore[method-assign]


def whole_fails(lab: KltLab) -> None:
    def fails() -> Any:
        raise EngineFailed("it fails here")

    lab.model.whole = fails  # type: ignore[method-assign]


@pytest.mark.parametrize("hindered", [low_battery, whole_closed, whole_fails])
def test_answers_that_cannot_be_checked_are_counted(
    tmp_path: Path, hindered: Callable[[KltLab], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def story(lab: KltLab) -> None:
        hindered(lab)
        for _ in range(10):
            await lab.ask_klt()
            await asyncio.sleep(0.5)
        found = lab.journal.checks("tiny")["klt"]
        assert (found["checked"], found["unchecked"]) == (0, 10)

    with caplog.at_level(logging.WARNING):
        story_of(lambda: KltLab(tmp_path, behave=reads_klt(), every=5))(story)
    said = [one for one in caplog.records if "was not checked" in one.getMessage()]
    assert len(said) == (2 if hindered is whole_fails else 0)


def test_a_plan_that_a_new_calibration_has_not_is_carried_out_with_the_one_it_was_decided_with(tmp_path: Path) -> None:
    """Between decision and worker: the new one is without curves."""

    async def story(lab: KltLab) -> None:
        decide, profile = lab.planner.decide, lab.model.profile
        assert profile is not None

        def and_drop(*args: Any, **now: Any) -> Any:
            decision = decide(*args, **now)
            bare = calibrated(lab.model.card, profile, None)
            lab.planner.recalibrated("tiny", lab.model.card, bare, lab.model.contract)
            return decision

        lab.planner.decide = and_drop  # type: ignore[method-assign]  # and more
        outcome = await lab.ask_klt()
        assert (outcome.ran.codec, outcome.fallback) == ("klt", "")

    for rows in (1, 8):
        story_of(lambda rows=rows: KltLab(tmp_path, behave=reads_klt(), rows=rows))(story)  # type: ignore[misc]  # of this turn


def test_a_batch_of_which_a_part_was_finished_here_is_not_checked(tmp_path: Path) -> None:
    async def behave(lab: Any, channel: MemoryChannel, infer: Infer, payload: memoryview) -> None:
        if not infer.request_id.endswith("/0"):
            await reads_klt()(lab, channel, infer, payload)

    async def story(lab: KltLab) -> None:
        outcome = await lab.ask_klt(deadline_ms=500.0)
        assert outcome.ran.codec == "klt"
        assert "parts were finished here" in outcome.fallback
        await asyncio.sleep(1.0)
        assert lab.journal.checks("tiny") == {}

    story_of(lambda: KltLab(tmp_path, behave=behave, rows=8, every=1))(story)


@pytest.mark.parametrize("every", [0, 1])
def test_lossless_answers_and_those_of_a_daemon_that_checks_none_are_not_checked(tmp_path: Path, every: int) -> None:
    async def story(lab: KltLab) -> None:
        for _ in range(5):
            await lab.ask(codec="raw")
            if not every:
                await lab.ask_klt()
            await asyncio.sleep(0.5)
        assert lab.journal.checks("tiny") == {}

    story_of(lambda: KltLab(tmp_path, behave=reads_klt(), every=every))(story)


def test_a_batch_in_parts_has_a_payload_for_each(tmp_path: Path) -> None:
    async def story(lab: KltLab) -> None:
        outcome = await lab.ask_klt()
        assert outcome.decision.chosen.parts > 1
        assert len(lab.seen) == outcome.decision.chosen.parts
        assert {one.codec for one in lab.seen} == {"klt"}

    story_of(lambda: KltLab(tmp_path, behave=reads_klt(), rows=8))(story)


def test_what_a_connection_took_with_it_is_sent_again_when_the_next_one_has_the_calibration(tmp_path: Path) -> None:
    """The device would take 100 s: only the next connection's companion answers in time. It opens the cut first, and
    reads klt some seconds later."""
    died: list[str] = []

    async def behave(lab: Any, channel: MemoryChannel, infer: Infer, payload: memoryview) -> None:
        if not died:
            died.append(infer.request_id)
            channel.kill()
            return
        assert lab.reads, "sent before the companion could read it"
        await reads_klt()(lab, channel, infer, payload)

    class LateReader(KltLab):
        reads = True

        async def _companion(self, channel: MemoryChannel) -> None:
            receive, send = channel.receive, channel.send
            calibrations: set[str] = set()

            async def slowly() -> Any:
                incoming = await receive()
                if isinstance(incoming.message, ModelOffer) and incoming.message.calibrates and died:
                    self.reads = False
                    calibrations.add(incoming.message.digest)
                return incoming

            def late(message: Any, *rest: Any, **more: Any) -> None:
                if getattr(message, "digest", None) in calibrations and type(message).__name__ == "ModelReady":
                    asyncio.get_running_loop().call_later(3.0, now, message)
                else:
                    send(message, *rest, **more)

            def now(message: Any) -> None:
                self.reads = True
                send(message)

            channel.receive, channel.send = slowly, late  # type: ignore[method-assign]  # seen on its way
            await super()._companion(channel)

    async def story(lab: KltLab) -> None:
        lab.planner.finish_ms = lambda *_: 100_000.0  # type: ignore[method-assign]  # a slow device
        outcome = await lab.ask_klt(deadline_ms=20_000.0)
        assert outcome.ran.placement is Placement.SPLIT
        assert 3000.0 < outcome.total_ms < 20_000.0

    story_of(lambda: LateReader(tmp_path, behave=behave))(story)
