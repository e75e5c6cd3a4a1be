"""What scripts/bench prints of a report."""

from __future__ import annotations

import io

from rich.console import Console

from scripts.bench import show


def shown(rows: list[dict[str, object]]) -> list[str]:
    text = io.StringIO()
    report = {"bench": "b", "commit": "c", "machine": "m", "figures": [], "rows": rows}
    show(Console(file=text, width=120), report, 1.0)
    return [line.strip() for line in text.getvalue().splitlines()]


def test_three_rows_of_the_same_keys_are_a_table_and_two_are_lines() -> None:
    alike: list[dict[str, object]] = [{"policy": name, "mean_ms": 1.23456} for name in ("ours", "theirs", "nobody's")]
    found = shown(alike)
    assert [line.split() for line in found if "mean ms" in line] == [["policy", "mean", "ms"]]
    assert ["theirs", "1.235"] in [line.split() for line in found]
    assert "policy ours, mean_ms 1.235" in shown(alike[:2])


def test_rows_too_wide_for_a_screen_stay_lines() -> None:
    wide: list[dict[str, object]] = [{f"key{n}": n for n in range(10)}] * 3
    assert sum(line.startswith("key0 0, key1 1") for line in shown(wide)) == 3
