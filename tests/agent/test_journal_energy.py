"""Joules of requests in the journal: in its sums, in `explain`, in the metrics."""

from __future__ import annotations

import dataclasses

import pytest

from agent.commands.explain import _lines as explain_lines
from agent.commands.status import _lines as status_lines
from agent.journal import Entry, Journal
from agent.metrics import Metrics
from split.plan.plan import LOCAL, Decision, PlanEstimate, RequestFacts
from split.plan.power import NO_POWER, Power

FOUR_WATTS = Power(compute_w=4.0, send_w=0.0, receive_w=0.0, wait_w=1.0, measured=False, source="modelled: x")
MEASURED = Power(compute_w=5.0, send_w=0.0, receive_w=0.0, wait_w=0.0, measured=True, source="measured: RAPL")


def answered(model: str, whole_ms: float, total_ms: float) -> Entry:
    chosen = PlanEstimate(
        plan=LOCAL,
        predicted_ms=90.0,
        risk_ms=95.0,
        stages_ms={"head": 90.0},
        bytes=0,
        fidelity=None,
        allowed=True,
        energy_j=0.36,
    )
    return Entry(
        model=model,
        received_at_s=10.0,
        deadline_ms=1000.0,
        facts=RequestFacts(budget_ms=1000.0),
        decision=Decision(chosen=chosen, runners_up=(), reason_of=lambda: "r", candidates=1),
        total_ms=total_ms,
        ran=LOCAL,
        stages_ms={"whole": whole_ms},
    )


def test_a_requests_joules_stand_beside_what_was_predicted_with_how_they_are_known() -> None:
    asked: list[tuple[str, float]] = []

    def power(now_s: float, model: str) -> Power:
        asked.append((model, now_s))
        return FOUR_WATTS

    journal = Journal(power)
    journal.answered("r1", answered("m", 100.0, 150.0))
    explained = journal.explain("r1")
    assert explained is not None
    assert explained["energy"] == {
        "used_j": 0.4,
        "predicted_j": 0.36,
        "measured": False,
        "source": "modelled: x",
    }
    assert asked == [("m", pytest.approx(10.15))]
    assert "energy     0.4 J used above idle, 0.36 J predicted (modelled: x)" in list(explain_lines(explained))
    assert journal.joules_mean("m") == pytest.approx(0.4)
    assert journal.joules_mean("other") is None


def test_what_was_sent_in_vain_and_computed_twice_is_in_a_requests_joules() -> None:
    watts = Power(compute_w=4.0, send_w=2.0, receive_w=1.0, wait_w=1.0, measured=False, source="by hand")
    journal = Journal(lambda *_: watts)
    late = answered("m", 100.0, 400.0)
    chosen = dataclasses.replace(late.decision.chosen, stages_ms={"up": 150.0, "down": 10.0})
    decision = dataclasses.replace(late.decision, chosen=chosen, link={"rtt_ms": 100.0})
    # 100 ms computed, 150 − 50 ms sent, the other 200 waited
    journal.answered("sent", dataclasses.replace(late, decision=decision, fallback="late", sent=True))
    assert journal.joules_mean("m") == pytest.approx(0.1 * 4 + 0.1 * 2 + 0.2 * 1)
    journal.answered("twice", dataclasses.replace(answered("n", 100.0, 100.0), doubled_ms=50.0))
    assert journal.joules_mean("n") == pytest.approx(0.15 * 4)


def test_metrics_keep_measured_and_modelled_joules_apart() -> None:
    powers = iter([FOUR_WATTS, MEASURED, MEASURED])
    journal = Journal(lambda *_: next(powers))
    for n in range(3):
        journal.answered(f"r{n}", answered("m", 100.0, 100.0))
    page = Metrics(journal, version="1", gauges={}, link=lambda: None).render().decode()
    assert 'isthmus_energy_joules_total{measured="false",model="m"} 0.4' in page
    assert 'isthmus_energy_joules_total{measured="true",model="m"} 1.0' in page


def test_a_device_of_unknown_power_reports_no_joules_instead_of_none_used() -> None:
    journal = Journal(lambda *_: NO_POWER)
    journal.answered("r1", answered("m", 100.0, 100.0))
    explained = journal.explain("r1")
    assert explained is not None
    assert explained["energy"] is None
    assert not any(line.startswith("energy") for line in explain_lines(explained))
    page = Metrics(journal, version="1", gauges={}, link=lambda: None).render().decode()
    assert "isthmus_energy_joules_total{" not in page


def test_status_shows_watts_their_source_and_the_joules_of_a_request() -> None:
    power = {"compute_w": 7.0, "send_w": 3.48, "receive_w": 1.96, "source": "modelled: raspberry-pi-5", "note": ""}
    sensors = {"temperature_c": 61.4, "throttled": True, "battery_ratio": 0.12, "on_battery": True}
    status = {
        "power": power | {"battery_low": True, "throttle_c": 80.0},
        "sensors": sensors,
        "models": [{"name": "m", "state": "READY", "joules": 0.4567}],
    }
    lines = list(status_lines(status))
    assert "power      7 W computing, 3.5 W sending, 2 W receiving, above idle (modelled: raspberry-pi-5)" in lines
    assert (
        "condition  61 °C (slows down at 80), throttled now, battery 12%, discharging, low: energy counts before "
        "latency"
    ) in lines
    assert lines[-1].split()[-1] == "0.457"


def test_status_of_a_device_of_unknown_power_says_nothing_of_it() -> None:
    unknown = {"compute_w": None, "source": "", "note": "", "battery_low": False}
    nothing = {"temperature_c": None, "throttled": None, "battery_ratio": None}
    lines = list(status_lines({"power": unknown, "sensors": nothing, "models": []}))
    assert not any(line.startswith(("power", "condition")) for line in lines)
