"""How an encoded picture becomes a model's input: facts only, `split.codec.image` does the work. Both sides of the wire
get the same one: the device from the contract, the companion in the request's metadata.
"""

from __future__ import annotations

import math
from typing import Final, Literal

import msgspec

SIDE_MAX: Final = 4096
"""Largest side a picture is resized to: 4096² × 3 floats are 201 MB."""


class ImageSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Resize the short side, crop the centre, (value − mean) / std. ValueError when the numbers make no sense."""

    kind: Literal["image"] = "image"
    """What comes: a picture as JPEG or PNG."""
    resize: int
    """Pixels of the short side after resizing (bilinear, antialiased)."""
    crop: int
    """Pixels of the square cut from the centre afterwards; at most `resize`."""
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    """Per channel, in pixel values 0–255 (times 255 where they are given for 0–1). Three values: RGB, one: grey."""
    std: tuple[float, ...] = (255.0, 255.0, 255.0)
    """Per channel, in pixel values 0–255. The defaults give values from 0 to 1."""
    layout: Literal["NCHW", "NHWC"] = "NCHW"
    """Channels before or after the pixels, as the model has them."""

    def __post_init__(self) -> None:
        if not 1 <= self.crop <= self.resize <= SIDE_MAX:
            raise ValueError(f"expected 1 ≤ crop ≤ resize ≤ {SIDE_MAX}, got crop {self.crop}, resize {self.resize}")
        if len(self.mean) not in (1, 3) or len(self.std) != len(self.mean):
            raise ValueError(
                f"mean and std need one value each (grey) or three (RGB), got {len(self.mean)} and {len(self.std)}"
            )
        if not all(math.isfinite(value) for value in self.mean):
            raise ValueError(f"mean must be finite, got {list(self.mean)}")
        if not all(math.isfinite(value) and value > 0 for value in self.std):
            raise ValueError(f"std must be positive, got {list(self.std)}")

    @property
    def channels(self) -> int:
        """3 for RGB, 1 for grey."""
        return len(self.mean)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the tensor that comes out, one picture."""
        if self.layout == "NCHW":
            return (1, self.channels, self.crop, self.crop)
        return (1, self.crop, self.crop, self.channels)
