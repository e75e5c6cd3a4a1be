"""What an input would weigh as a picture: the rival of every split of a model that looks at pictures."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from PIL import Image

from split.tensor import TensorSpec
from split.workbench.golden import picture_beside, typical_jpeg

SIDE_MIN: Final = 16
"""Pixels; what is narrower is hardly a picture."""
JPEG_QUALITY: Final = 90
"""What cameras and phones send; at 75 a JPEG is 40 % smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureBytes:
    """Sizes of one picture, encoded at the size at which the model looks at it."""

    png: int
    jpeg: int
    """At `JPEG_QUALITY`."""
    of: str
    """Which picture, for people."""


def picture_bytes(spec: TensorSpec, model_path: Path) -> PictureBytes | None:
    """For an input of shape [n, 1 | 3 | 4, h, w] or [n, h, w, 1 | 3 | 4]; None for one that is no picture.

    Taken is the first picture in `golden/` beside the model's versions, or a synthetic photo of usual detail.
    """
    side = _side(spec)
    if side is None:
        return None
    width, height, channels = side
    found = picture_beside(model_path)
    with Image.open(found or io.BytesIO(typical_jpeg())) as opened:
        mode = "L" if channels == 1 else "RGB"
        picture = opened.convert(mode).resize((width, height), Image.Resampling.LANCZOS)
    return PictureBytes(
        png=_encoded(picture, "PNG"),
        jpeg=_encoded(picture, "JPEG"),
        of=f"{found.name if found else 'a usual photo'} at {width}x{height}",
    )


def _side(spec: TensorSpec) -> tuple[int, int, int] | None:
    """Width, height, channels."""
    if len(spec.shape) != 4 or not all(isinstance(dim, int) for dim in spec.shape):
        return None
    _, *dims = (int(dim) for dim in spec.shape)
    if dims[0] in (1, 3, 4) and min(dims[1:]) >= SIDE_MIN:
        return dims[2], dims[1], dims[0]
    if dims[2] in (1, 3, 4) and min(dims[:2]) >= SIDE_MIN:
        return dims[1], dims[0], dims[2]
    return None


def _encoded(picture: Image.Image, kind: str) -> int:
    out = io.BytesIO()
    picture.save(out, kind, quality=JPEG_QUALITY)
    return len(out.getvalue())
