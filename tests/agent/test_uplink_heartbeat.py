"""The heartbeat of the uplink is watched: what ends it ends the connection, and another one is made."""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import Any

import msgspec
import pytest

from agent.planner import Planner
from agent.uplink import Uplink
from split.transport.memory import MemoryChannel, memory_pair
from split.transport.retry import Backoff
from split.transport.virtual_time import run_in_virtual_time
from split.wire.messages import Hello, Message, Ping

HELLO = Hello(major=1, minor=0, agent="test", runtime="test", max_message_bytes=1 << 20, codecs=("raw",))


class BrokenOnce(Planner):
    """A bug that the heartbeat meets in its first tick."""

    broken = 0

    def probe_wanted(self, now_s: float) -> int:
        self.broken += 1
        if self.broken == 1:
            raise ZeroDivisionError("a bug")
        return 0


def test_a_heartbeat_that_dies_ends_the_connection_and_the_next_one_beats(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        channels: list[MemoryChannel] = []
        companions: list[MemoryChannel] = []

        async def dial(_: str, timeout_s: float, first: object) -> MemoryChannel:
            device, companion = memory_pair(HELLO, HELLO)
            channels.append(device)
            companions.append(companion)
            return device

        planner = BrokenOnce(slowdown=1.0, probe_bytes_per_hour=0)
        uplink = Uplink(
            companions=["companion:1"],
            dial=dial,
            planner=planner,
            golden=None,  # type: ignore[arg-type]  # no model is shared here
            backoff=Backoff(draw=lambda: 0.5),
        )
        uplink.start()
        await asyncio.sleep(30)  # virtual
        await uplink.close()
        assert len(channels) == 2
        assert "heartbeat" in (channels[0].closed_because or "")
        assert channels[1].closed_because == "the device is going"
        assert planner.broken > 10

    run_in_virtual_time(main())
    assert "ZeroDivisionError" in caplog.text


class LooksAtTheRate(Planner):
    """Asks for pings with and without weight, in turns."""

    asked = 0

    def probe_wanted(self, now_s: float) -> int:
        self.asked += 1
        return (64, 8_000)[self.asked % 2] if self.asked <= 4 else 0

    def rtt_ms(self, now_s: float) -> float:
        return 12.5


def test_before_a_ping_with_weight_and_no_other_the_link_is_looked_at_afresh() -> None:
    told: list[tuple[str, float]] = []

    class Told(MemoryChannel):
        def look_afresh(self, rtt_ms: float) -> None:
            told.append(("afresh", rtt_ms))

        def send(self, message: Message, *more: Any, **priority: Any) -> None:
            if isinstance(message, Ping) and message.padding:
                told.append(("ping", float(len(message.padding))))
            super().send(message, *more, **priority)

    async def main() -> None:
        async def dial(_: str, timeout_s: float, first: object) -> MemoryChannel:
            device, _companion = memory_pair(HELLO, HELLO)
            device.__class__ = Told
            return device

        uplink = Uplink(
            companions=["companion:1"],
            dial=dial,
            planner=LooksAtTheRate(),
            golden=None,  # type: ignore[arg-type]  # no model is shared here
            backoff=Backoff(draw=lambda: 0.5),
        )
        uplink.start()
        await asyncio.sleep(1)  # virtual
        await uplink.close()

    run_in_virtual_time(main())
    heavy, light = [("afresh", 12.5), ("ping", 8_000.0)], ("ping", 64.0)
    assert told[:6] == [*heavy, light, *heavy, light]


class Surprised(Planner):
    """Wants to be asked a tenth of a second after the second time that it was."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_at_s: list[float] = []

    def probe_wanted(self, now_s: float) -> int:
        self.asked_at_s.append(now_s)
        return 0

    def looks_again_s(self, now_s: float) -> float:
        return 0.1 if len(self.asked_at_s) == 2 else math.inf


def test_a_surprise_is_looked_into_before_the_next_tick() -> None:
    planner = Surprised()

    async def main() -> None:
        async def dial(_: str, timeout_s: float, first: object) -> MemoryChannel:
            return memory_pair(HELLO, HELLO)[0]

        uplink = Uplink(
            companions=["companion:1"],
            dial=dial,
            planner=planner,
            golden=None,  # type: ignore[arg-type]  # no model is shared here
            backoff=Backoff(draw=lambda: 0.5),
        )
        uplink.start()
        await asyncio.sleep(2)  # virtual
        await uplink.close()

    run_in_virtual_time(main())
    apart_s = [after - before for before, after in itertools.pairwise(planner.asked_at_s)]
    assert apart_s[:4] == [pytest.approx(0.25), pytest.approx(0.1), pytest.approx(0.25), pytest.approx(0.25)]


class LooksDown(Planner):
    """Wants two pongs with weight, and light pings otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []
        self.wants = 2

    def pong_wanted(self, now_s: float) -> int:
        self.wants -= 1
        return 9_000 if self.wants >= 0 else 0

    def probe_wanted(self, now_s: float) -> int:
        return 64 if len(self.seen) < 5 else 0

    def observe_ping(self, rtt_ms: float, now_s: float, *, padding_bytes: int = 0, pong_bytes: int = 0) -> None:
        self.seen.append((padding_bytes, pong_bytes))


@pytest.mark.parametrize("minor", [2, 3])
def test_only_a_companion_that_knows_of_it_is_asked_for_pongs_with_weight(minor: int) -> None:
    asked: list[int] = []
    planner = LooksDown()

    class Told(MemoryChannel):
        def send(self, message: Message, *more: Any, **priority: Any) -> None:
            if isinstance(message, Ping):
                asked.append(message.pong_bytes)
            super().send(message, *more, **priority)

    async def main() -> None:
        async def dial(_: str, timeout_s: float, first: object) -> MemoryChannel:
            device, _companion = memory_pair(HELLO, msgspec.structs.replace(HELLO, minor=minor))
            device.__class__ = Told
            return device

        uplink = Uplink(
            companions=["companion:1"],
            dial=dial,
            planner=planner,
            golden=None,  # type: ignore[arg-type]  # no model is shared here
            backoff=Backoff(draw=lambda: 0.5),
        )
        uplink.start()
        await asyncio.sleep(2)  # virtual
        await uplink.close()

    run_in_virtual_time(main())
    weights = [9_000, 9_000, 0, 0] if minor >= 3 else [0, 0, 0, 0]
    assert asked[:5] == [0, *weights]
    assert planner.seen[:5] == [(0, 0), *((64, weight) for weight in weights)]
