"""What scripts/demo says of requests: measured ones, and those during which the companion was killed. What needs the
real model is the demo itself."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from scripts.client import Answer
from scripts.demo import Asked, Killing, Road, Verdict, show_killing, show_sent
from scripts.demo_conditions import CONDITIONS
from scripts.pair import told_of
from split.profiles.contract import Fidelity


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


def asked(about: int, sent_bytes: int, logits: list[float], plan: str = "split") -> Asked:
    one = replace(answer(10.0), placement=plan, outputs={"logits": np.array([logits], np.float32)})
    return Asked(one, about, sent_bytes)


def test_bytes_of_a_road_are_the_mean_over_inputs_of_what_a_request_usually_sends() -> None:
    road = Road([asked(0, 2000, [0]), asked(1, 4000, [0]), asked(0, 2000, [0]), asked(0, 90_000, [0])])
    assert road.sent_bytes == 3000


def test_requests_by_another_plan_count_for_nothing() -> None:
    road = Road([asked(0, 2000, [0]), asked(0, 2000, [0]), asked(0, 9000, [0], plan="local")])
    assert road.sent_bytes == 2000


def test_fidelity_is_held_against_the_local_answers_of_the_same_inputs() -> None:
    # KL(p‖q) of p = (1/2, 1/2) and q = (1/4, 3/4): ½ ln 2 + ½ ln ⅔; the second input is answered alike.
    local = Road([asked(0, 0, [0, 0], "local"), asked(1, 0, [3, 1], "local")])
    split = Road([asked(0, 2000, [0, math.log(3)]), asked(1, 4000, [3, 1])])
    klt = replace(split.asked[0].answer, codec="klt")
    split.asked[0] = Asked(klt, 0, 2000)
    split.asked[1] = Asked(replace(split.asked[1].answer, codec="klt"), 1, 4000)
    expected = {one.about: one.answer.outputs for one in local.asked}
    assert split.distance("kl", expected) == pytest.approx((0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 2, rel=1e-5)
    out = io.StringIO()
    condition = next(one for one in CONDITIONS if one.calibrated)
    verdict = Verdict(condition, split, {"local": local, "best split": split, "offload jpeg": Road()}, 0)
    show_sent(Console(file=out, width=300), verdict, Fidelity(measure="kl", bound=0.05))
    assert "means over 2 photos" in out.getvalue()
    assert "klt 3.0 KB, kl 0.072" in out.getvalue()
    assert "jpeg" not in out.getvalue()


def test_a_road_that_is_left_out_says_why_in_the_json() -> None:
    condition = next(one for one in CONDITIONS if one.calibrated)
    roads = {name: Road(reason=condition.left_out.get(name, "")) for name in condition.roads}
    roads["local"].asked.append(asked(0, 0, [0], "local"))
    found = Verdict(condition, roads["local"], roads, 0).as_json()["alternatives"]
    raw = next(one for one in found if one["codec"] == "raw")
    assert (raw["placement"], raw["measured_ms"]) == ("offload", None)
    assert "602 KB" in raw["reason"]


@pytest.mark.parametrize(
    ("said", "told"),
    [("profile: cut 2 of 5 (40%)", ("profile: cut 2 of 5", 0.4)), ("prepare", ("prepare", 0.0))],
)
def test_progress_of_a_model_is_read_with_and_without_a_share(said: str, told: tuple[str, float]) -> None:
    assert told_of(said) == told
