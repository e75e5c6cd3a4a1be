"""Fixtures that many tests share: real models and photos out of pinned packages, fetched on first use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import models

Fetch = Callable[[str], Path]


def _or_skip(fetch: Fetch) -> Fetch:
    def get(name: str) -> Path:
        try:
            return fetch(name)
        except models.Unavailable as error:
            pytest.skip(str(error))

    return get


@pytest.fixture(scope="session")
def real_model() -> Fetch:
    """Name in scripts/models.json → its ONNX file; the test is skipped where its package cannot be had."""
    return _or_skip(models.model_path)


@pytest.fixture(scope="session")
def real_repository() -> Fetch:
    """Name in scripts/models.json → its folder in a model repository (version, contract, labels, golden photos)."""
    return _or_skip(models.lay_in_repository)


@pytest.fixture(scope="session")
def photo() -> Fetch:
    """`chelsea.png`, `coffee.png`, `astronaut.png` or `rocket.jpg` → the file as its package ships it."""
    return _or_skip(models.photo_path)
