"""split/codec/image.py, its arithmetic held against a plain float implementation of the antialiased bilinear filter."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from split.codec.image import PIXELS_MAX, ImageSpec, image_fingerprint, prepare_image
from split.errors import InvalidRequest, TooLarge, UnsupportedRequest

Pixels = np.ndarray[Any, Any]


def scene(width: int, height: int) -> Image.Image:
    y, x = np.mgrid[0:height, 0:width]
    red = 127 + 120 * np.sin(x / 7) * np.cos(y / 5)
    return Image.fromarray(np.stack([red, x * 255 / width, y * 255 / height], -1).astype(np.uint8))


def file_of(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


def triangle(pixels: Pixels, size: int, axis: int) -> Pixels:
    """One axis resized by the triangle filter whose width follows the scale (what "antialiased bilinear" means)."""
    pixels = np.moveaxis(pixels, axis, 0)
    scale = pixels.shape[0] / size
    reach = max(scale, 1.0)
    rows = []
    for index in range(size):
        centre = (index + 0.5) * scale
        weights = np.maximum(0, 1 - np.abs(np.arange(pixels.shape[0]) + 0.5 - centre) / reach)
        rows.append(np.tensordot(weights / weights.sum(), pixels, 1))
    return np.moveaxis(np.stack(rows), 0, axis)


@pytest.mark.parametrize(("width", "height"), [(97, 61), (61, 97), (40, 40), (30, 44), (301, 20), (32, 32)])
def test_a_picture_is_resized_on_its_short_side_cropped_and_normalised(width: int, height: int) -> None:
    spec = ImageSpec(resize=32, crop=24, mean=(10.0, 20.0, 30.0), std=(2.0, 4.0, 8.0))
    picture = scene(width, height)
    short = min(width, height)
    new_width, new_height = 32 * width // short, 32 * height // short
    pixels = triangle(triangle(np.asarray(picture, dtype=np.float64), new_width, 1), new_height, 0)
    top, left = round((new_height - 24) / 2), round((new_width - 24) / 2)
    cropped = pixels[top : top + 24, left : left + 24]
    expected = ((cropped - [10, 20, 30]) / [2, 4, 8]).transpose(2, 0, 1)[None]
    found = prepare_image(file_of(picture), spec)
    assert found.dtype == np.float32
    assert found.shape == spec.shape == (1, 3, 24, 24)
    # Pillow rounds to whole pixel values after each pass: at most 1 of 255 for each.
    assert np.abs((found - expected) * np.array([2, 4, 8])[None, :, None, None]).max() <= 2


def test_a_picture_of_the_right_size_keeps_its_very_pixels() -> None:
    picture = scene(16, 16)
    found = prepare_image(file_of(picture), ImageSpec(resize=16, crop=16, mean=(0.0,) * 3, std=(1.0,) * 3))
    assert found[0].transpose(1, 2, 0).tolist() == np.asarray(picture).tolist()


def test_nhwc_holds_the_same_values_in_another_order() -> None:
    data = file_of(scene(50, 40))
    wide = prepare_image(data, ImageSpec(resize=32, crop=24, layout="NHWC"))
    assert wide.shape == (1, 24, 24, 3)
    assert wide.flags.c_contiguous
    np.testing.assert_array_equal(wide.transpose(0, 3, 1, 2), prepare_image(data, ImageSpec(resize=32, crop=24)))


def test_efficientnet_lite_values_are_rgb_minus_127_over_128() -> None:
    picture = Image.new("RGB", (300, 260), (255, 127, 0))
    spec = ImageSpec(resize=256, crop=224, mean=(127.0,) * 3, std=(128.0,) * 3)
    found = prepare_image(file_of(picture), spec)
    assert found.shape == (1, 3, 224, 224)
    assert [set(np.unique(channel).tolist()) for channel in found[0]] == [{1.0}, {0.0}, {-0.9921875}]


def test_one_mean_makes_one_grey_channel() -> None:
    found = prepare_image(
        file_of(Image.new("RGB", (9, 9), (255, 255, 255))), ImageSpec(resize=8, crop=8, mean=(0.0,), std=(255.0,))
    )
    assert found.shape == (1, 1, 8, 8)
    assert found.min() == found.max() == 1.0


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_pictures_of_other_modes_become_rgb(mode: str) -> None:
    picture = Image.new("RGB", (20, 20), (255, 255, 255)).convert(mode)
    kind = "JPEG" if mode == "CMYK" else "PNG"
    found = prepare_image(file_of(picture, kind), ImageSpec(resize=16, crop=16))
    assert found.shape == (1, 3, 16, 16)
    assert found.min() > 0.98


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP"])
def test_each_allowed_format_gives_about_the_same_picture(kind: str) -> None:
    spec = ImageSpec(resize=64, crop=48)
    found = prepare_image(file_of(scene(90, 70), kind), spec)
    assert np.abs(found - prepare_image(file_of(scene(90, 70)), spec)).mean() < 0.03


def test_the_cameras_orientation_is_applied() -> None:
    upright = scene(40, 64)
    exif = Image.Exif()
    exif[0x0112] = 6  # "rotate 90° clockwise to display"
    sideways = file_of(upright.rotate(90, expand=True), "PNG", exif=exif)
    spec = ImageSpec(resize=32, crop=24)
    np.testing.assert_array_equal(prepare_image(sideways, spec), prepare_image(file_of(upright), spec))


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "ICO", "PPM"])
def test_formats_outside_the_list_are_refused_though_pillow_reads_them(kind: str) -> None:
    with pytest.raises(InvalidRequest, match="no picture"):
        prepare_image(file_of(scene(16, 16), kind), ImageSpec(resize=8, crop=8))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP"])
def test_damaged_pictures_are_refused_whatever_is_missing(kind: str) -> None:
    data = file_of(scene(64, 64), kind)
    for cut in (0, 1, 10, 40, len(data) // 2):
        with pytest.raises(InvalidRequest, match="no picture") as caught:
            prepare_image(data[:cut], ImageSpec(resize=8, crop=8))
        assert " object at 0x" not in str(caught.value)


def test_a_picture_that_would_fill_the_memory_is_refused_by_its_header() -> None:
    side = 7072
    assert side * side > PIXELS_MAX
    with pytest.raises(TooLarge, match="at most 50000000"):
        prepare_image(file_of(Image.new("1", (side, side))), ImageSpec(resize=8, crop=8))
    with pytest.raises(TooLarge, match="too many pixels"):
        prepare_image(file_of(Image.new("1", (20_000, 20_000))), ImageSpec(resize=8, crop=8))


def test_a_strip_that_would_grow_beyond_the_bound_is_refused() -> None:
    with pytest.raises(TooLarge, match="1048576000 × 2048"):
        prepare_image(file_of(Image.new("L", (512_000, 1))), ImageSpec(resize=2048, crop=8))


def test_sixteen_bits_a_channel_are_refused_not_clipped() -> None:
    picture = Image.fromarray(np.full((9, 9), 40_000, np.uint16))
    with pytest.raises(UnsupportedRequest, match="8 bits"):
        prepare_image(file_of(picture), ImageSpec(resize=8, crop=8))


@pytest.mark.parametrize(
    "fields",
    [
        {"resize": 8, "crop": 9},
        {"resize": 8, "crop": 0},
        {"resize": 5000, "crop": 8},
        {"resize": 8, "crop": 8, "mean": (1.0, 2.0)},
        {"resize": 8, "crop": 8, "mean": (1.0,)},
        {"resize": 8, "crop": 8, "std": (1.0, 0.0, 1.0)},
        {"resize": 8, "crop": 8, "std": (1.0, float("nan"), 1.0)},
        {"resize": 8, "crop": 8, "mean": (1.0, float("inf"), 1.0)},
    ],
)
def test_a_spec_that_makes_no_sense_cannot_be_built(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"crop|mean|std"):
        ImageSpec(**fields)


def test_the_fingerprint_is_the_same_each_time() -> None:
    first = image_fingerprint()
    image_fingerprint.cache_clear()
    assert image_fingerprint() == first
    assert first.startswith("sha256:")
    assert len(first) == 7 + 64
