"""Random streams against the wire protocol; `scripts/fuzz wire` is the same with any number of frames and any seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from scripts.fuzzing import wire
from split.wire.arriving import Arriving
from split.wire.connection import Received, WireConnection

SEED = 20261130


def test_whatever_comes_is_a_valid_event_or_one_typed_error_in_bounded_memory() -> None:
    result = wire.run(100_000, SEED)
    assert not result.wrong, "\n".join(
        f"scripts/fuzz wire --frames 1 --seed {one.seed}: {one.why}" for one in result.wrong
    )
    assert result.frames >= 100_000
    assert set(result.outcomes) <= {"open", "RemoteProtocolError", "CompanionRefused"}
    assert result.outcomes["open"] > 500, "most of a run must not end at its first frames"
    assert result.events > 20_000
    assert result.invalid_messages > 2_000


def test_a_seed_alone_makes_the_stream() -> None:
    first, second = (wire.draw(random.Random(7)) for _ in range(2))
    assert first.frames == second.frames


def _announced_at_once(self: Arriving, body_bytes: int) -> None:
    if not self._payload.nbytes:
        self._payload = memoryview(bytearray(self.payload_bytes + 20))


_complete = WireConnection._complete


def _forgets_one_priority(self: WireConnection, arriving: Arriving, received: list[Received]) -> None:
    _complete(self, arriving, [] if arriving.priority == 3 else received)


def _lets_invalid_through(self: WireConnection, error: Exception) -> None:
    raise KeyError(str(error))


@pytest.mark.parametrize(
    ("place", "name", "defect", "said"),
    [
        (Arriving, "make_room", _announced_at_once, "bytes are held after"),
        (WireConnection, "_complete", _forgets_one_priority, "missing or another"),
        (WireConnection, "_drop_invalid", _lets_invalid_through, "KeyError"),
    ],
)
def test_a_planted_defect_is_found(
    monkeypatch: pytest.MonkeyPatch, place: type, name: str, defect: Callable[..., Any], said: str
) -> None:
    monkeypatch.setattr(place, name, defect)
    wrong = wire.run(20_000, SEED).wrong
    assert any(said in one.why for one in wrong), wrong[:3]
