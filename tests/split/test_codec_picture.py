"""split/codec/picture.py: what comes out is what Pillow alone makes of the same pixels; what is no such picture is
refused before it costs anything."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import pytest
from PIL import Image

from split.codec.image import prepare_image
from split.codec.payload import decode, decoded_bytes, encode
from split.codec.payload_header import Kind
from split.codec.picture import LEVELS, encode_picture
from split.errors import CodecError
from split.profiles.image_spec import ImageSpec

ENOUGH = 1 << 28
RGB = ImageSpec(resize=60, crop=52, mean=(123.675, 116.28, 103.53), std=(58.395, 57.12, 57.375))
LAST = ImageSpec(resize=60, crop=52, mean=(127.5, 127.5, 127.5), std=(127.5, 127.5, 127.5), layout="NHWC")
GREY = ImageSpec(resize=60, crop=52, mean=(0.0,), std=(255.0,))
SPECS = {"channels first": RGB, "channels last": LAST, "grey": GREY}


def photo(spec: ImageSpec) -> Image.Image:
    """52 × 52 of waves and noise: smooth parts, edges and grain."""
    at = np.arange(52)
    waves = np.sin(at[:, None] / 7) * np.cos(at[None, :] / 11) * 80 + 120 + 30 * (at[None, :] > 26)
    grain = np.random.default_rng(3).normal(0, 6, (52, 52, 3))
    pixels = np.clip(waves[..., None] * (1.0, 0.8, 0.6) + grain, 0, 255).astype(np.uint8)
    return Image.fromarray(pixels).convert("RGB" if spec.channels == 3 else "L")


def as_input(picture: Image.Image, spec: ImageSpec) -> np.ndarray[Any, Any]:
    """The model's input, as the formula of ImageSpec says."""
    pixels = np.asarray(picture, np.float32).reshape(*picture.size[::-1], spec.channels)
    values = (pixels - np.asarray(spec.mean, np.float32)) / np.asarray(spec.std, np.float32)
    return np.ascontiguousarray(values.transpose(2, 0, 1) if spec.layout == "NCHW" else values)[np.newaxis]


def by_pillow(picture: Image.Image, codec: str, level: int) -> tuple[bytes, Image.Image]:
    """The file and what a reader of it sees, at the picture's own size."""
    quality, quarters = LEVELS[level].quality, LEVELS[level].quarters
    small = picture
    if quarters < 4:
        small = picture.resize((52 * quarters // 4, 52 * quarters // 4), Image.Resampling.BILINEAR)
    file = io.BytesIO()
    if codec == "jpeg":
        small.save(file, "JPEG", quality=quality, optimize=True, subsampling=2)
    else:
        small.save(file, "WEBP", quality=quality, method=4)
    seen = Image.open(io.BytesIO(file.getvalue())).convert(picture.mode)
    return file.getvalue(), seen if quarters == 4 else seen.resize((52, 52), Image.Resampling.BILINEAR)


def payload_of(tensor: np.ndarray[Any, Any], spec: ImageSpec, codec: str = "jpeg", level: int = 4) -> bytes:
    return b"".join(encode({"x": tensor}, codec, level=level, pictures={"x": spec}))


def test_levels_are_every_quality_at_every_scale_and_no_two_are_the_same() -> None:
    assert len(set(LEVELS)) == len(LEVELS) <= 256
    assert {level.quarters for level in LEVELS} == {4, 3, 2}
    assert all(1 <= level.quality <= 100 for level in LEVELS)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("codec", ["jpeg", "webp"])
def test_what_comes_out_is_what_pillow_makes_of_the_same_pixels(codec: str, spec: ImageSpec) -> None:
    tensor = as_input(photo(spec), spec)
    for level in range(len(LEVELS)):
        payload = payload_of(tensor, spec, codec, level)
        file, seen = by_pillow(photo(spec), codec, level)
        assert file in payload
        assert len(payload) <= len(file) + 192  # header, mean and std, padding
        found = decode(payload, max_bytes=ENOUGH)["x"]
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, as_input(seen, spec))


@pytest.mark.parametrize("codec", ["jpeg", "webp"])
def test_the_same_tensor_at_the_same_level_is_the_same_bytes(codec: str) -> None:
    tensor = as_input(photo(RGB), RGB)
    assert all(payload_of(tensor, RGB, codec, at) == payload_of(tensor, RGB, codec, at) for at in (0, 11, 30))


def test_an_input_that_prepare_image_made_of_a_photo_travels_as_one() -> None:
    file = io.BytesIO()
    photo(RGB).resize((90, 70)).save(file, "PNG")
    tensor = prepare_image(file.getvalue(), RGB)
    found = decode(payload_of(tensor, RGB, level=11), max_bytes=ENOUGH)["x"]
    assert not np.array_equal(found, tensor)
    assert np.abs(found - tensor).mean() < 0.1  # 6 pixel values at quality 99 with chroma halved


OFF_THE_GRID = {
    "half a pixel value beside": lambda x: x + 0.5 / 58.395,
    "not finite": lambda x: np.where(np.arange(52) == 3, np.float32(np.nan), x),
    "brighter than white": lambda x: x + 2,
    "another element type": lambda x: x.astype(np.float64),
    "two pictures": lambda x: np.concatenate([x, x]),
    "other channels": lambda x: x[:, :1],
    "another rank": lambda x: x[0],
    "nothing": lambda x: x[:, :, :0],
}


@pytest.mark.parametrize("change", OFF_THE_GRID.values(), ids=OFF_THE_GRID)
def test_what_is_no_picture_of_its_spec_travels_raw(change: Any) -> None:
    tensor = np.asarray(change(as_input(photo(RGB), RGB)))
    assert encode_picture(tensor, RGB, "jpeg", 4) is None
    found = decode(payload_of(tensor, RGB), max_bytes=ENOUGH)["x"]
    assert found.tobytes() == tensor.tobytes()
    assert found.shape == tensor.shape


def test_a_tensor_that_the_contract_does_not_call_a_picture_travels_raw_beside_one() -> None:
    tensor = as_input(photo(RGB), RGB)
    payload = b"".join(encode({"x": tensor, "same": tensor}, "webp", level=0, pictures={"x": RGB}))
    found = decode(payload, max_bytes=ENOUGH)
    np.testing.assert_array_equal(found["same"], tensor)
    assert not np.array_equal(found["x"], tensor)


def test_a_codec_of_pictures_needs_a_level_that_there_is() -> None:
    tensor = as_input(photo(RGB), RGB)
    with pytest.raises(CodecError, match="jpeg needs a level"):
        encode({"x": tensor}, "jpeg", pictures={"x": RGB})
    with pytest.raises(CodecError, match=rf"no level {len(LEVELS)}; jpeg and webp have 0 to {len(LEVELS) - 1}"):
        payload_of(tensor, RGB, level=len(LEVELS))


# --- from a peer that is broken or means harm ---------------------------------------------------------------------


def saved(form: str, size: tuple[int, int] = (52, 52), mode: str = "RGB", **options: Any) -> bytes:
    out = io.BytesIO()
    photo(RGB).resize(size).convert(mode).save(out, form, **options)
    return out.getvalue()


def carrying(
    file: bytes, *, fixed: bytes = b"\x01\x04\x00\x03", offsets: tuple[float, ...] = (0, 0, 0, 1, 1, 1)
) -> bytes:
    """A payload with a picture's file of our choice in it, for x: FP32 [1, 3, 52, 52]."""
    plain = fixed + struct.pack("<6f", *offsets) + file
    entry = struct.pack("<HBBBBBBQQ", 1, 11, 4, Kind.PICTURE, 0, 0, 0, len(plain), len(plain))
    header = entry + struct.pack("<4Q", 1, 3, 52, 52) + b"x"
    head = struct.pack("<4sBBHII", b"ISTP", 1, 0, 1, 16 + len(header), 0) + header
    return head + bytes(-len(head) % 64) + plain


def test_a_picture_made_elsewhere_is_read() -> None:
    found = decode(carrying(saved("JPEG", quality=90)), max_bytes=ENOUGH)["x"]
    seen = np.asarray(Image.open(io.BytesIO(saved("JPEG", quality=90))), np.float32)
    np.testing.assert_array_equal(found, seen.transpose(2, 0, 1)[np.newaxis])


def two_scans() -> bytes:
    """The scan of a JPEG twice: each makes the decoder go over all of it."""
    once = saved("JPEG")
    at = once.index(b"\xff\xda")
    return once[:-2] + once[at:]


def see_through() -> bytes:
    out = io.BytesIO()
    picture = photo(RGB)
    picture.putalpha(128)
    picture.save(out, "WEBP")
    return out.getvalue()


BROKEN = {
    "nothing": (b"", {}),
    "no picture": (b"\x00" * 100, {}),
    "cut off": (saved("JPEG")[:300], {}),
    "cut off within its header": (saved("JPEG")[:40], {}),
    "of another kind than it says": (saved("WEBP"), {}),
    "of a format that does not travel": (saved("PNG"), {}),
    "of another size": (saved("JPEG", (53, 52)), {}),
    "of far more pixels": (saved("JPEG", (4000, 4000)), {}),
    "of another scale than it says": (saved("JPEG", (39, 39)), {"fixed": b"\x01\x02\x00\x03"}),
    "progressive": (saved("JPEG", progressive=True), {}),
    "of two scans": (two_scans(), {}),
    "of four colours": (saved("JPEG", mode="CMYK"), {}),
    "with transparency": (see_through(), {"fixed": b"\x02\x04\x00\x03"}),
    "unknown format": (saved("JPEG"), {"fixed": b"\x03\x04\x00\x03"}),
    "unknown scale": (saved("JPEG"), {"fixed": b"\x01\x01\x00\x03"}),
    "unknown layout": (saved("JPEG"), {"fixed": b"\x01\x04\x02\x03"}),
    "another layout": (saved("JPEG"), {"fixed": b"\x01\x04\x01\x03"}),
    "two channels": (saved("JPEG"), {"fixed": b"\x01\x04\x00\x02"}),
    "std of zero": (saved("JPEG"), {"offsets": (0, 0, 0, 1, 0, 1)}),
    "mean that is no number": (saved("JPEG"), {"offsets": (float("nan"), 0, 0, 1, 1, 1)}),
}


@pytest.mark.parametrize(("file", "options"), BROKEN.values(), ids=BROKEN)
def test_a_damaged_or_unfit_picture_is_a_typed_error(file: bytes, options: dict[str, Any]) -> None:
    with pytest.raises(CodecError, match="tensor 'x'"):
        decode(carrying(file, **options), max_bytes=ENOUGH)


def test_any_byte_of_a_payload_that_is_wrong_gives_a_typed_error_or_a_tensor_of_the_right_shape() -> None:
    random = np.random.default_rng(5)
    for codec in ("jpeg", "webp"):
        whole = payload_of(as_input(photo(RGB), RGB), RGB, codec)
        for at in random.integers(len(whole), size=150):
            damaged = bytearray(whole)
            damaged[at] ^= int(random.integers(1, 256))
            try:
                found = decode(damaged, max_bytes=ENOUGH)
            except CodecError:
                continue
            assert [array.shape for array in found.values()] == [(1, 3, 52, 52)]


def test_an_animated_webp_is_refused() -> None:
    file = io.BytesIO()
    photo(RGB).save(file, "WEBP", save_all=True, append_images=[photo(RGB).rotate(90)])
    with pytest.raises(CodecError, match="never made here"):
        decode(carrying(file.getvalue(), fixed=b"\x02\x04\x00\x03"), max_bytes=ENOUGH)


def test_memory_is_counted_before_anything_is_decoded() -> None:
    payload = payload_of(as_input(photo(RGB), RGB), RGB)
    assert decoded_bytes(payload) >= 2 * 4 * 3 * 52 * 52  # the tensor, and its pixels on the way
    with pytest.raises(CodecError, match="bytes decoded, at most"):
        decode(payload, max_bytes=4 * 3 * 52 * 52)


def test_a_header_that_claims_a_picture_of_more_pixels_than_are_read_is_refused() -> None:
    payload = bytearray(carrying(saved("JPEG")))
    struct.pack_into("<2Q", payload, 16 + 24 + 16, 1 << 14, 1 << 14)
    with pytest.raises(CodecError, match=r"bytes decoded, at most|no picture of 3 channels that is read"):
        decode(payload, max_bytes=1 << 40)
