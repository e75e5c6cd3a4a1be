"""The compiled core of codec klt under sanitizers; `scripts/fuzz codec` is the same with any number of rounds."""

from __future__ import annotations

import pytest

from scripts.fuzzing.codec import NotCompiled, run

SEED = 20261130


def test_no_map_and_no_stream_makes_the_core_read_or_write_elsewhere() -> None:
    try:
        figures, wrong = run(400, SEED, timeout_s=60)
    except NotCompiled as error:
        pytest.skip(str(error))
    assert not wrong, f"scripts/fuzz codec --rounds 400 --seed {SEED}: {wrong}"
    assert figures["rounds"] == 400
    assert figures["refused"] > 600, "most damage must be noticed"
    assert min(figures["read"], figures["unfit"], figures["no_room"], figures["too_large"]) > 0
