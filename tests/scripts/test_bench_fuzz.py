"""The figures of `scripts/bench fuzz`, from tallies made by hand."""

from __future__ import annotations

from collections import Counter

import pytest

from scripts.benches import fuzz
from scripts.benches.figure import Figure
from scripts.fuzzing.cuts import Tally, Wrong


def test_a_figure_is_held_against_one_bound() -> None:
    assert Figure(name="wrong", value=0, unit="cuts", at_most=0).as_json() == {
        "name": "wrong",
        "value": 0,
        "unit": "cuts",
        "reach": "≤ 0",
        "met": True,
    }
    assert [Figure(name="u", value=value, unit="ratio", at_least=0.85).met for value in (0.8499, 0.85)] == [False, True]
    assert Figure(name="u", value=1, unit="ratio", at_least=0.85).as_json()["reach"] == "≥ 0.85"
    with pytest.raises(AssertionError, match="u"):
        Figure(name="u", value=1, unit="ratio")


def test_the_full_run_reaches_for_two_thousand_graphs_and_fifteen_thousand_cuts() -> None:
    failure = Wrong(seed=7, cut="0123456789ab", boundary=("a",), why="it differs", text="")
    tally = Tally(graphs=2000, cuts=14_999, boundaries=1000, usable=850, rejected=3, reshaped=2, wrong=[failure])
    tally.refusals = Counter({"tensor … holds strings": 50, "tensor … is a sequence": 100})
    figures, rows = fuzz.report(tally, fuzz.GRAPHS)
    assert [(one.name, one.value, one.at_least, one.at_most, one.met) for one in figures] == [
        ("graphs", 2000, 2000, None, True),
        ("cuts", 14_999, 15_000, None, False),
        ("wrong", 1, None, 0, False),
        ("usable_ratio", 0.85, 0.85, None, True),
    ]
    assert rows == [
        {"boundaries": 1000, "usable": 850, "rejected": 3, "sensitive": 0, "reshaped": 2, "rounded": 0, "unopened": 0},
        {"refused": "tensor … is a sequence", "boundaries": 100},
        {"refused": "tensor … holds strings", "boundaries": 50},
        {"wrong": "0123456789ab", "seed": 7, "why": "it differs"},
    ]
