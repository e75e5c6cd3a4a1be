"""An encoded picture → a model's input, the same on both sides: decode, orient, resize, crop, normalise. Pillow's home.

The steps are those of torchvision's `Resize` (bilinear, antialiased) and `CenterCrop` on a PIL image, in Pillow's
fixed-point arithmetic, and JPEG is decoded at full size (no draft mode), so two machines with the same libraries get
the same bits; `image_fingerprint` shows whether they have. The camera's EXIF orientation is applied: a picture is
prepared as people see it. Transparency is dropped, of an animation the first frame counts.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from split.errors import InvalidRequest, TooLarge, UnsupportedRequest
from split.profiles.image_spec import ImageSpec
from split.tensor import Array

__all__ = ["FORMATS", "PIXELS_MAX", "ImageSpec", "decoding_bytes", "image_fingerprint", "prepare_image"]

FORMATS: Final = ("JPEG", "PNG", "WEBP", "BMP")
"""Only these decoders are ever tried: each one more is one more parser of bytes from outside."""

PIXELS_MAX: Final = 50_000_000
"""Of a picture as it came and as resized: above today's cameras, and 400 MB while it is decoded."""
_PIXEL_BYTES: Final = 8
"""Pillow keeps RGB as four bytes, and two copies are alive at once (as decoded, and turned or converted)."""

_MODES: Final = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"})
"""Pillow's modes with 8 bits a channel; deeper ones would be clipped, not scaled, by its conversion."""


def prepare_image(data: bytes, spec: ImageSpec) -> Array:
    """The picture in `data` (JPEG, PNG, WebP or BMP) as FP32 of shape `spec.shape`.

    InvalidRequest: not a picture of these formats, or damaged; TooLarge: more than `PIXELS_MAX` pixels before or after
    resizing; UnsupportedRequest: more than 8 bits a channel.
    """
    with _translated(data), Image.open(io.BytesIO(data), formats=FORMATS) as opened:
        _check_pixels(*opened.size)
        if opened.mode not in _MODES:
            raise UnsupportedRequest(f"a picture of mode {opened.mode} is not supported; send 8 bits a channel")
        ImageOps.exif_transpose(opened, in_place=True)
        picture = opened.convert("RGB" if spec.channels == 3 else "L")
    pixels = np.asarray(_crop(_resize(picture, spec.resize), spec.crop), dtype=np.float32)
    pixels = pixels.reshape(spec.crop, spec.crop, spec.channels)
    values = (pixels - np.array(spec.mean, np.float32)) / np.array(spec.std, np.float32)
    if spec.layout == "NCHW":
        values = values.transpose(2, 0, 1)
    return np.ascontiguousarray(values)[np.newaxis]


def decoding_bytes(data: bytes, spec: ImageSpec) -> int:
    """The memory that `prepare_image` takes at its peak, by the picture's header; nothing is decoded. Its errors."""
    with _translated(data), Image.open(io.BytesIO(data), formats=FORMATS) as opened:
        width, height = opened.size
    _check_pixels(width, height)
    resized = _resized(width, height, spec.resize)
    _check_pixels(*resized)
    return _PIXEL_BYTES * (width * height + math.prod(resized)) + 4 * math.prod(spec.shape)


@contextmanager
def _translated(data: bytes) -> Iterator[None]:
    """Pillow's exceptions as ours."""
    try:
        yield
    except InvalidRequest:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise TooLarge(f"the picture has too many pixels; at most {PIXELS_MAX} are allowed") from error
    except Exception as error:  # Pillow's parsers raise nearly anything on damaged bytes
        formats = ", ".join(FORMATS)
        why = "" if isinstance(error, UnidentifiedImageError) else f": {error}"  # its text names a Python object
        raise InvalidRequest(f"the {len(data)} bytes are no picture ({formats}) that can be decoded{why}") from error


def _check_pixels(width: int, height: int) -> None:
    if width * height > PIXELS_MAX:
        raise TooLarge(f"the picture has {width} × {height} pixels; at most {PIXELS_MAX} in all are allowed")


def _resize(picture: Image.Image, short: int) -> Image.Image:
    if min(picture.size) == short:
        return picture
    size = _resized(*picture.size, short)
    _check_pixels(*size)  # a long thin strip grows
    return picture.resize(size, Image.Resampling.BILINEAR)


def _resized(width: int, height: int, short: int) -> tuple[int, int]:
    """Short side to `short`, the other in proportion, rounded down (as torchvision does)."""
    return (short, short * height // width) if width <= height else (short * width // height, short)


def _crop(picture: Image.Image, side: int) -> Image.Image:
    """The central square; odd rests are rounded half to even, as torchvision does."""
    left, top = round((picture.width - side) / 2), round((picture.height - side) / 2)
    return picture.crop((left, top, left + side, top + side))


_JPEG: Final = (
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAgGBgcGBQgHBwcJCQgKDBQNDAsLDBkSEw8UHRofHh0aHBwgJC4nICIsIxwcKDcpLDAx"
    "NDQ0Hyc5PTgyPC4zNDL/2wBDAQkJCQwLDBgNDRgyIRwhMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIy"
    "MjIyMjIyMjL/wAARCAAeACwDASIAAhEBAxEB/8QAGQAAAwEBAQAAAAAAAAAAAAAAAwUGBwEE/8QALhAAAQMDAgQEBQUAAAAAAAAA"
    "AQIEEQADBRIhBhMiMTJRYXEVI5HB8UFCgYLw/8QAFwEAAwEAAAAAAAAAAAAAAAAABAUGA//EAC4RAAAEBAQFAQkAAAAAAAAAAAEC"
    "AxEABCExEiJBUQUTFDNhMgYjQlJjcYGRof/aAAwDAQACEQMRAD8AVMMmMLpVdUkpR3A7+VHd3xxMAG+2nvq9fxU/fxT584+aF8kn"
    "qlMD608xLVeKUg2f76er2+9EGSlCSphQAQRfMQe4JqVKG3p10NCSXkkiMqUfefyONuHlMSBcSoqTuSkbedP8c7+AlNy8UlKO4Hfy"
    "plbyuPvNgL5QL5HVqVB+lTjtg8yN/rCuSfFKYH1oRRQ0wKRZywdpvgs3N2bK97GigkSGmRwzAMGvn7Q+dZJHEaQixtp76vX8V5U8"
    "OKtJ0LSsqHcpG2+/3oWLx13GXEqsAkHx6er2+9Vh4rwTFFu1kr6Lbkp1EKBmJgdvasRUmkZo3RCHUCGYw9sQpQvn06aGh6JyyCbp"
    "iAE8i0SmIetnFgN7qAgqHiJmI3oOY0NUnkRc5nltEfmpnM31tAs2IQQRBSII3p1wepWQWoOjzYiNe8UymJRdGcICp8UyIOU7UKWt"
    "MNhsara+IlJXhwJF6l8u0K22KeOnIcFSkJUfDExG1aHgndi/aDe8gIKv3EzEb0d0ws2QrlygACAnYDapvPrUzQtTcC2oRBSII3pa"
    "Vbr+eRHLy3531Lu3yuxrNfxFHKgHEMJGbbxFDn3bTEMbl8daYk6RB9B/M1iD1lkMs9uv1rUlV5RUUwTH6QN+21VNrK38nkCxcK5l"
    "qzpUdYnqIPb0g/7aqD4fZSYSClO2yTA7UQiohw2QIusTFLnHKR6lGtcVxdjUfUNomfaDiQy810ZagS47jr+rB+d4/9k="
)
"""44 × 30, quality 75, chroma at half resolution: inverse DCT, upsampling and colour conversion all show."""

_PNG: Final = (
    "iVBORw0KGgoAAAANSUhEUgAAABQAAAAQCAIAAACZeshMAAABhklEQVR42lWTwW7bMBAFhxqtbMlJk0vRfm7/NkUL5OAktmRLYg8U"
    "BRfYg7DikG/fIxO/iJ/ED+I78UoMROTIxEh8EO/EX+J3ijfijfhDvBNnYsyx0gpmXHHGO94RXPGOMy64YkawQbHF2Pqt4IwjfmGD"
    "d2wx4w0veMUJV2ywwwHvmPC4wzf8xIwjdtiw7ThVfkaxxwVbPOGMucAjrnhFUUxV+YIz3io8YODzRhY4O+IF1328JJgwYVMq21ZR"
    "TfmVZD/5WsebccWEYuARexzqwD0esdsEtoITnvGMXzjhggkDe3zCta4e8AWfsd9UtIJ3vOIHnvGCMyY84AnBIy7Y1M4LPuFhh0uq"
    "UxVfwljQ6laug3R4qOIb2s2e3SEw5e177+xrSmXMuRpWtjziUBNO9YQDtpgw1+RLossuO3CoOof/DTthj+KKI36yGRw7fMBv2D1c"
    "AGpURVGLC14w4xUDpco+Vp5KPrpQasYvvDwaUW5Yya3DFsUmbe9swVup7Ig3nOprW5OZf2ERkZaru//QAAAAAElFTkSuQmCC"
)
"""20 × 16, RGB."""


@functools.cache
def image_fingerprint() -> str:
    """`sha256:` and 64 hex digits over what two built-in pictures become here; compared before pictures travel."""
    spec = ImageSpec(resize=24, crop=20, mean=(127.0, 127.0, 127.0), std=(128.0, 128.0, 128.0))
    digest = hashlib.sha256()
    for picture in (_JPEG, _PNG):
        digest.update(prepare_image(base64.b64decode(picture), spec).astype("<f4").tobytes())
    return f"sha256:{digest.hexdigest()}"
