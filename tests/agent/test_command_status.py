"""What `isthmus status` prints of what the daemon says."""

from __future__ import annotations

from agent.commands.status import _lines


def test_cuts_that_are_not_open_stand_below_their_model_with_the_reason() -> None:
    model = {
        "name": "net",
        "state": "READY",
        "cuts_not_open": {"b2": "the companion computes this cut differently", "a1": "it has no memory"},
    }
    *_, row, first, second = _lines({"models": [model]})
    assert row.startswith("net")
    assert first.strip() == "cut a1 is not open at the companion: it has no memory"
    assert second.strip() == "cut b2 is not open at the companion: the companion computes this cut differently"


def test_companions_that_cannot_be_reached_stand_below_the_one_in_use_with_the_reason() -> None:
    unreached = {"address": "b:1", "code": "SECURITY", "reason": "of another CA", "next_try_s": 58.2}
    lines = list(_lines({"companion": {"address": "a:1", "state": "connected", "unreached": [unreached]}}))
    at = next(n for n, line in enumerate(lines) if line.startswith("companion"))
    assert lines[at + 1].strip() == "b:1: SECURITY, of another CA; next try not before 58 s from now"
