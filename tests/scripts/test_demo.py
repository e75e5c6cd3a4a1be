"""What scripts/demo says of the requests during which the companion was killed; the rest needs the real model."""

from __future__ import annotations

import io

from rich.console import Console

from scripts.client import Answer
from scripts.demo import Killing, show_killing


def answer(took_ms: float) -> Answer:
    return Answer(
        outputs={},
        placement="local",
        cut=None,
        codec=None,
        fallback="",
        predicted_ms=1.0,
        request_id="r",
        timings_ms={"total": took_ms},
        took_ms=took_ms,
    )


def shown(killing: Killing) -> str:
    out = io.StringIO()
    show_killing(Console(file=out, width=200), killing)
    return out.getvalue()


def test_that_no_request_was_answered_is_said() -> None:
    killing = Killing(lost=["connection refused"])
    assert "answered 0, lost 1, wrong label 0, slowest - ms" in shown(killing)
    assert killing.as_json()["slowest_ms"] is None
    assert killing.failure == "none of 200 requests was answered, the first because: connection refused"


def test_a_lost_request_and_a_wrong_label_are_failures() -> None:
    assert Killing(answered=[answer(5.0)]).failure == ""
    lost = Killing(answered=[answer(5.0)], lost=["gone"])
    assert lost.failure == "of 200 requests 1 were lost and 0 got a wrong label"
    assert "lost: gone" in shown(lost)
    assert Killing(answered=[answer(5.0)], wrong=2).failure.endswith("2 got a wrong label")
