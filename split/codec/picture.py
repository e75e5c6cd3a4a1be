"""A model's picture input ↔ a JPEG or WebP of the pixels it was made of, at the size at which the model looks at them
or smaller: the rival of every split of a model that looks at pictures, held to the same bound of fidelity.

`split/codec/image.py` makes such an input of a picture that somebody took; here the tensor is what comes in and,
nearly, what comes out. Only tensors whose values are 8-bit pixels, shifted and scaled as the contract's `ImageSpec`
says, travel so; what is anything else is for the caller to send in another way. Nothing here depends on the machine:
WebP's decoder is specified to the bit, and JPEG's differs between libraries by less than what its quantisation does.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
from PIL import Image

from split.codec.image import PIXELS_MAX
from split.errors import CodecError
from split.profiles.image_spec import ImageSpec
from split.tensor import Array

__all__ = [
    "HEADER_BYTES_MIN",
    "LEVELS",
    "PICTURE_CODECS",
    "Level",
    "decode_picture",
    "decoding_bytes",
    "encode_picture",
]

PICTURE_CODECS: Final = ("jpeg", "webp")


@dataclass(frozen=True, slots=True)
class Level:
    """One setting, the same for both codecs."""

    quality: int
    """1 … 100 as libjpeg and libwebp understand it."""
    quarters: int
    """Sides of the picture in quarters of the model's own: 4, 3 or 2."""


QUALITIES: Final = (20, 35, 50, 65, 75, 80, 85, 90, 93, 95, 97, 99)
"""Closer together where a step weighs more: from 90 to 95 a JPEG grows by a third, as from 50 to 75."""

LEVELS: Final = tuple(Level(quality, quarters) for quarters in (4, 3, 2) for quality in QUALITIES)
"""What a level's index in a curve and in a payload stands for. Later ones are appended: sidecars keep indices."""

PIXEL_TOLERANCE: Final = 1 / 32
"""How far from a whole number, in pixel values, an element may be: (p − mean) / std and back costs FP32 less than 1e-4;
a picture that was resized in floats is off by a quarter in the mean."""

SIDE_MAX: Final = 16_383
"""WebP's (RFC 9649, §2.6), well below JPEG's 65,535."""
WEBP_METHOD: Final = 4
"""libwebp's own default: 2 to 7 ms for 224 × 224; 6 takes three times as long for 2 % fewer bytes."""

_SCAN: Final = b"\xff\xda"
"""JPEG's "start of scan" (ITU T.81, table B.1): each one makes the decoder go over the whole picture once."""
_FIXED: Final = struct.Struct("<BBBB")
"""format, quarters, layout, channels"""
HEADER_BYTES_MIN: Final = _FIXED.size + 8
"""Of a grey picture: one mean, one std."""
_FORMATS: Final = {1: "JPEG", 2: "WEBP"}
_FORMAT_CODES: Final = {"jpeg": 1, "webp": 2}
_LAYOUTS: Final = ("NCHW", "NHWC")
_PIXEL_BYTES: Final = 8
"""Pillow keeps RGB as four bytes, and two copies are alive at once (as decoded and as resized)."""


def encode_picture(tensor: Array, spec: ImageSpec, codec: str, level: int) -> bytes | None:
    """The plain bytes of `tensor` (FP32 [1, C, H, W] or [1, H, W, C], as `spec` says), the same each time; None where
    it is not what 8-bit pixels become under `spec` (shape, not finite, off the grid by more than `PIXEL_TOLERANCE`).

    `codec`: one of `PICTURE_CODECS`; JPEG with optimised Huffman tables and chroma at half resolution, WebP by method
    4. `level`: an index of `LEVELS`. CodecError for a codec or level that does not exist.
    """
    if codec not in PICTURE_CODECS or not 0 <= level < len(LEVELS):
        raise CodecError(
            f"codec {codec!r} has no level {level}; {' and '.join(PICTURE_CODECS)} have 0 to {len(LEVELS) - 1}"
        )
    pixels = _pixels(tensor, spec)
    if pixels is None:
        return None
    setting = LEVELS[level]
    picture = Image.fromarray(pixels if spec.channels == 3 else pixels[:, :, 0])
    size = _scaled(*picture.size, setting.quarters)
    if size != picture.size:
        picture = picture.resize(size, Image.Resampling.BILINEAR)
    out = io.BytesIO()
    if codec == "jpeg":
        picture.save(out, "JPEG", quality=setting.quality, optimize=True, subsampling="4:2:0")
    else:
        picture.save(out, "WEBP", quality=setting.quality, method=WEBP_METHOD)
    fixed = _FIXED.pack(_FORMAT_CODES[codec], setting.quarters, _LAYOUTS.index(spec.layout), spec.channels)
    return fixed + np.array([*spec.mean, *spec.std], "<f4").tobytes() + out.getvalue()


def decode_picture(plain: memoryview, dims: tuple[int, ...], name: str) -> Array:
    """The tensor of shape `dims` that `encode_picture` made `plain` of, nearly; CodecError for anything else.

    Of the picture the header is read first: one of another size than `dims` and the scale ask for, with more passes
    over it than one (progressive, several scans, animated) or in other colours is refused before it is decoded.
    """
    head = _header_bytes(plain)
    if head is None:
        raise CodecError(f"tensor {name!r}: its {plain.nbytes} bytes do not begin as a picture's do")
    code, quarters, layout, channels = _FIXED.unpack_from(plain)
    rank_fits = len(dims) == 4 and dims[0] == 1 and dims[3 if layout else 1] == channels
    height, width = (dims[1:3] if layout else dims[2:4]) if rank_fits else (0, 0)
    if not rank_fits or not _fits(width, height):
        raise CodecError(f"tensor {name!r} of shape {list(dims)} is no picture of {channels} channels that is read")
    offsets = np.frombuffer(plain, "<f4", count=2 * channels, offset=_FIXED.size)
    mean, std = offsets[:channels], offsets[channels:]
    if not (np.isfinite(offsets).all() and (std > 0).all()):
        raise CodecError(f"tensor {name!r}: its picture's mean and std are no finite numbers with std above 0")
    picture = _opened(plain[head:], _FORMATS[code], channels, _scaled(width, height, quarters), name)
    if picture.size != (width, height):
        picture = picture.resize((width, height), Image.Resampling.BILINEAR)
    with np.errstate(over="ignore"):
        values = (np.asarray(picture, np.float32).reshape(height, width, channels) - mean) / std
    if not layout:
        values = values.transpose(2, 0, 1)
    return np.ascontiguousarray(values)[np.newaxis]


def decoding_bytes(elements: int) -> int:
    """Memory at the peak of decoding a tensor of so many elements: pixels in Pillow, two copies of the tensor."""
    return elements * (_PIXEL_BYTES + 2 * 4)


def _header_bytes(plain: memoryview) -> int | None:
    """Bytes before the JPEG or WebP itself; None where `plain` does not begin as `encode_picture` begins it."""
    if plain.nbytes < _FIXED.size:
        return None
    code, quarters, layout, channels = _FIXED.unpack_from(plain)
    if code not in _FORMATS or quarters not in (2, 3, 4) or layout not in (0, 1) or channels not in (1, 3):
        return None
    head = _FIXED.size + 8 * channels
    return head if plain.nbytes > head else None


def _pixels(tensor: Array, spec: ImageSpec) -> Array | None:
    """UINT8 [H, W, C]"""
    channels_at = 1 if spec.layout == "NCHW" else 3
    if tensor.dtype != np.float32 or tensor.ndim != 4 or tensor.shape[0] != 1:
        return None
    plane = tensor[0].transpose(1, 2, 0) if channels_at == 1 else tensor[0]
    if tensor.shape[channels_at] != spec.channels or not _fits(plane.shape[1], plane.shape[0]):
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        values = plane * np.array(spec.std, np.float32) + np.array(spec.mean, np.float32)
        whole = np.rint(values)
        near = np.abs(values - whole) <= PIXEL_TOLERANCE
    if not (near.all() and whole.min() >= 0 and whole.max() <= 255):  # NaN and infinity are not near
        return None
    return np.asarray(whole, np.uint8)


def _fits(width: int, height: int) -> bool:
    return min(width, height) >= 1 and max(width, height) <= SIDE_MAX and width * height <= PIXELS_MAX


def _scaled(width: int, height: int, quarters: int) -> tuple[int, int]:
    """Rounded up, at least 1."""
    return -(-width * quarters // 4), -(-height * quarters // 4)


def _opened(data: memoryview, form: str, channels: int, size: tuple[int, int], name: str) -> Image.Image:
    mode = "RGB" if channels == 3 else "L"
    try:
        with Image.open(io.BytesIO(data), formats=(form,)) as opened:
            if opened.size != size:
                raise CodecError(
                    f"tensor {name!r}: its picture has {opened.width} × {opened.height} pixels, expected"
                    f" {size[0]} × {size[1]}"
                )
            once = getattr(opened, "n_frames", 1) == 1 and (form != "JPEG" or bytes(data).count(_SCAN) == 1)
            if not once or "progressive" in opened.info or opened.mode not in {mode, "RGB"}:
                raise CodecError(f"tensor {name!r}: its {form} is of a kind ({opened.mode}) that is never made here")
            return opened.convert(mode)
    except CodecError:
        raise
    except Exception as error:  # Pillow's parsers raise nearly anything on damaged bytes
        raise CodecError(f"tensor {name!r}: its {form} cannot be decoded ({type(error).__name__})") from error
