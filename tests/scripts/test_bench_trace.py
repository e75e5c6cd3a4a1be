"""What the trace bench makes of a run: when a step is recovered from, and what is compared with what."""

from __future__ import annotations

import pytest

from agent.replay import traces
from scripts.benches import trace
from scripts.benches.trace import Asked, Ran
from split.plan.plan import LOCAL


def asked(at_s: float, took_ms: float = 50.0, *, missed: bool = False) -> Asked:
    return Asked(at_s=at_s, plan=LOCAL, fallback="", took_ms=took_ms, missed=missed)


def test_requests_count_from_the_step_until_one_is_near_the_best() -> None:
    requests = [asked(t / 10) for t in range(10)]
    near = [True, True, True, True, False, False, True, False, True, True]
    assert trace._until_near(requests, near, 0.35) == 2  # requests 4 and 5, then 6 is near
    assert trace._until_near(requests, near, 0.0) == 0
    assert trace._until_near(requests[:6], near[:6], 0.35) == 2, "never: all that came count"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rate steps", [20.0, 40.0]),
        ("rtt spike", [20.0, 40.0]),
        ("outage", [20.0, 25.0]),
        ("cloud slowdown", [20.0, 40.0]),
        ("thermal throttle", []),  # a ramp of 5 to 10 % a second
        ("lte walk", []),
    ],
)
def test_a_step_is_what_changes_at_once(name: str, expected: list[float]) -> None:
    assert list(trace._steps(traces.TRACES[name]())) == expected


def test_figures_hold_choices_against_the_best_and_waits_against_the_rule() -> None:
    def ran(policy: str, took_ms: float, *, back: int = 3) -> Ran:
        return Ran(
            trace="rate steps",
            policy=policy,
            asked=[asked(0.0, took_ms), asked(1.0, took_ms, missed=policy == "ours")],
            best_ms=[40.0, 40.0],
            plan_ms=[40.0, 44.0],
            best=[LOCAL, LOCAL],
            recovered=[1, back],
        )

    found = {figure.name: figure.value for figure in trace.figures([ran("ours", 45.0), ran("two-way rule", 60.0)])}
    assert found == {
        "mean": pytest.approx(1.05),
        "recover_requests": 3,
        "vs_rule": pytest.approx(0.75),
        "missed": 1,
    }
    again = [ran("ours", 400.0, back=7)]
    more = {one.name: one.value for one in trace.figures([ran("ours", 45.0), ran("two-way rule", 60.0)], again)}
    assert more == found | {"recover_requests": 7, "missed": 2}
