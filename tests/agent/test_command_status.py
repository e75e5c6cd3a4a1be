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
