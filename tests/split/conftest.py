"""What tests of codec klt share: its two cores."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from scripts.build_native import build
from split.codec.core import Native, load
from split.codec.fallback import Fallback
from split.codec.transform import Core


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> Native:
    """The compiled core, from the sources as they are now."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    library: Path = tmp_path_factory.mktemp("native") / "_native.so"
    assert build(library=library) is None
    found = load(library)
    assert isinstance(found, Native), found
    return found


@pytest.fixture(params=["compiled", "plain"])
def either_core(request: pytest.FixtureRequest) -> Core:
    return request.getfixturevalue("native") if request.param == "compiled" else Fallback()
