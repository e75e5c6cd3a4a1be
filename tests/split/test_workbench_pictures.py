"""What an input would weigh as a picture, and which inputs are none."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from split.tensor import TensorSpec
from split.workbench.pictures import picture_bytes


def spec(*shape: int | str) -> TensorSpec:
    return TensorSpec(name="x", dtype="FP32", shape=shape)


@pytest.mark.parametrize("shape", [(1, 3, 100, 50), (1, 100, 50, 3), (1, 4, 100, 50), (1, 1, 100, 50)])
def test_both_layouts_are_pictures_of_the_same_size(shape: tuple[int, ...], tmp_path: Path) -> None:
    found = picture_bytes(spec(*shape), tmp_path / "model.onnx")
    assert found is not None
    assert found.of == "a usual photo at 50x100"
    assert found.jpeg < found.png


@pytest.mark.parametrize(
    "shape", [(1, 16), (1, 3, 224), (1, 3, 1, 1), (1, 3, 8, 224), (1, 64, 56, 56), ("n", 3, 9, "w")]
)
def test_what_is_no_picture_has_no_size_as_one(shape: tuple[int | str, ...], tmp_path: Path) -> None:
    assert picture_bytes(spec(*shape), tmp_path / "model.onnx") is None


def test_the_picture_beside_the_model_is_the_one_that_is_weighed(tmp_path: Path) -> None:
    (tmp_path / "net" / "1").mkdir(parents=True)
    (tmp_path / "net" / "golden").mkdir()
    noise = np.random.default_rng(7).integers(0, 256, (80, 80, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "net" / "golden" / "noise.png")
    found = picture_bytes(spec(1, 3, 80, 80), tmp_path / "net" / "1" / "model.onnx")
    assert found is not None
    assert found.of == "noise.png at 80x80"
    kept = io.BytesIO()
    Image.fromarray(noise).save(kept, "PNG")
    assert found.png == len(kept.getvalue()) >= noise.size  # noise cannot be packed
