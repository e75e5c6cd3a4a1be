"""At idle, what was decided lately is opened again; what nobody asks for is left alone."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from agent.warming import Warming
from split.errors import UnknownModel
from split.ids import CutId

A, B = CutId("a" * 12), CutId("b" * 12)


class Recent:
    def __init__(self, known: dict[str, tuple[int, Sequence[CutId]]]) -> None:
        self.known = known

    def recent_cuts(self, name: str) -> tuple[int, Sequence[CutId]]:
        if name not in self.known:
            raise UnknownModel(name)
        return self.known[name]


def warming(planner: Recent, compute: Any, warmed: list[tuple[str, tuple[CutId, ...]]], *names: str) -> Warming:
    models: list[Any] = [
        SimpleNamespace(name=name, keep_warm=lambda cuts, name=name: warmed.append((name, tuple(cuts))))
        for name in names
    ]
    return Warming(planner=planner, compute=compute, models=lambda: models)  # type: ignore[arg-type]  # what it asks of it


def test_what_was_decided_lately_is_opened_once_for_each_burst_of_requests() -> None:
    planner, warmed = Recent({"m": (3, (B, A)), "n": (1, ())}), list[tuple[str, tuple[CutId, ...]]]()
    looker = warming(planner, SimpleNamespace(queue_ms=0.0), warmed, "m", "n", "not-measured-yet")
    looker.look()
    assert warmed == [("n", ()), ("m", (B, A))]  # what is asked for most is opened last
    looker.look()  # nothing was asked since: what the budget closed stays closed
    assert len(warmed) == 2
    planner.known["m"] = (4, (A, B))
    looker.look()
    assert warmed[2:] == [("m", (A, B))]


def test_a_busy_worker_is_left_alone() -> None:
    warmed: list[tuple[str, tuple[CutId, ...]]] = []
    compute = SimpleNamespace(queue_ms=1.5)
    looker = warming(Recent({"m": (3, (A,))}), compute, warmed, "m")
    looker.look()
    assert warmed == []
    compute.queue_ms = 0.0
    looker.look()
    assert warmed == [("m", (A,))]


def test_a_model_that_is_asked_for_now_and_then_closes_nothing_that_others_need() -> None:
    planner = Recent({"often": (50, (A,)), "rarely": (1, (A,)), "sometimes": (3, (B,))})
    warmed: list[tuple[str, tuple[CutId, ...]]] = []
    looker = warming(planner, SimpleNamespace(queue_ms=0.0), warmed, "often", "rarely", "sometimes")
    looker.look()
    assert warmed == [("sometimes", (B,)), ("often", (A,))]
    warmed.clear()
    planner.known["rarely"] = (2, (A,))
    looker.look()
    assert warmed == []
    planner.known["rarely"] = (90, (A,))  # popular now
    looker.look()
    assert warmed == [("rarely", (A,))]
