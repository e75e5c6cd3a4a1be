"""agent/broken_bounds.py: what was found of a codec outlives the daemon, and only as long as it is about the same."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent import broken_bounds
from agent.broken_bounds import BrokenBounds
from agent.served_model import ServedModel
from split.profiles.contract import Contract, Data, Fidelity


def a_model(*, digest: str = "sha256:m", calibration: str | None = "c", bound: float = 0.05) -> ServedModel:
    found = None if calibration is None else SimpleNamespace(digest=calibration)
    contract = Contract(data=Data(fidelity=Fidelity(measure="kl", bound=bound)))
    return cast(Any, SimpleNamespace(digest=digest, sidecar=SimpleNamespace(calibration=found), contract=contract))


def kept(path: Path, *found: tuple[ServedModel, str, str]) -> BrokenBounds:
    """Found one after the other, by a daemon that has ended since."""

    async def daemon() -> None:
        broken = BrokenBounds(path)
        for model, codec, why in found:
            broken.keep(model, codec, why)
        await asyncio.get_running_loop().shutdown_default_executor()

    asyncio.run(daemon())
    return BrokenBounds(path)


def test_what_was_found_is_known_after_a_restart_by_codec(tmp_path: Path) -> None:
    path = tmp_path / "broken-bounds.json"
    kept(path, (a_model(), "klt", "twice as far"))
    again = kept(path, (a_model(), "jpeg", "thrice as far"))
    assert again.of(a_model()) == {"klt": "twice as far", "jpeg": "thrice as far"}
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("other", [{"digest": "sha256:n"}, {"calibration": "d"}, {"calibration": None}, {"bound": 0.1}])
def test_of_another_model_calibration_or_bound_it_says_nothing(tmp_path: Path, other: dict[str, Any]) -> None:
    broken = kept(tmp_path / "broken-bounds.json", (a_model(), "klt", "twice as far"))
    assert broken.of(a_model(**other)) == {}


def test_those_found_last_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broken_bounds, "KEPT_MAX", 2)
    models = [a_model(digest=f"sha256:{n}") for n in range(3)]
    found = [(models[n], "klt", "far") for n in (0, 1, 0, 2)]
    broken = kept(tmp_path / "broken-bounds.json", *found)
    assert [bool(broken.of(model)) for model in models] == [True, False, True]


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b'{"a": 1}', b"[" * 100_000, b"\xff"])
def test_a_damaged_file_is_said_and_costs_only_what_it_told(
    tmp_path: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "broken-bounds.json"
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert BrokenBounds(path).of(a_model()) == {}
    assert "broken-bounds.json cannot be read" in caplog.text
    assert kept(path, (a_model(), "klt", "far")).of(a_model()) == {"klt": "far"}


def test_a_disk_that_does_not_take_it_is_said_and_it_holds_until_the_daemon_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "gone" / "broken-bounds.json"
    with caplog.at_level(logging.WARNING):
        assert kept(path, (a_model(), "klt", "far")).of(a_model()) == {}
    assert "broken-bounds.json cannot be written (No such file or directory)" in caplog.text
