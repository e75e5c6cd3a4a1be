"""What a split is held against: picture, text or sound itself, coded as others would, at every quality worth trying.

A rival's bytes are its file alone, without anything around it; what the model then answers is measured as for a split.
JPEG and WebP go through the codec that the daemon has (`split/codec/picture.py`), at full size and smaller. Beside them
`VARIANTS` of JPEG and AVIF are measured only: each rival is the best of its own, at every fidelity. So are the bytes of
an input that travels as it is.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Final

import numpy as np
from PIL import Image, features

from scripts.benches.codec_curves import Measurements
from scripts.benches.codec_speech import BIT_RATES, PCM_BYTES, Heard, through_opus
from scripts.benches.codec_subjects import Finish, Pixels, Sample, Subject, as_input
from split.codec.fidelity import farthest
from split.codec.picture import HEADER_BYTES_MIN, LEVELS, PICTURE_CODECS, Level, decode_picture, encode_picture
from split.profiles.image_spec import ImageSpec
from split.tensor import Array, Tensors

AVIF_SPEED: Final = 6
"""libavif's own default in Pillow: 17 ms for 224 × 224 at 8, some 40 at 6, on one core."""
SOME_QUALITIES: Final = (35, 65, 75, 85, 90, 95, 99)

Coded = tuple[int, Array]
"""Bytes of the file, and the model's input as it comes out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way to use a codec of pictures that the daemon does not go."""

    codec: str
    name: str
    options: Mapping[str, object]
    """Pillow's."""
    qualities: tuple[int, ...]


_JPEG, _AVIF = (35, 50, 65, 80, 88, 92, 95, 97), (40, 55, 65, 75, 82, 88, 92, 95)
VARIANTS: Final = (
    Variant(
        codec="jpeg", name="4:2:0 progressive", options={"progressive": True, "subsampling": "4:2:0"}, qualities=_JPEG
    ),
    Variant(codec="jpeg", name="4:4:4", options={"optimize": True, "subsampling": "4:4:4"}, qualities=_JPEG),
    Variant(
        codec="jpeg", name="4:4:4 progressive", options={"progressive": True, "subsampling": "4:4:4"}, qualities=_JPEG
    ),
    Variant(codec="avif", name="4:2:0", options={"speed": AVIF_SPEED, "max_threads": 1}, qualities=_AVIF),
    Variant(
        codec="avif",
        name="4:4:4",
        options={"speed": AVIF_SPEED, "max_threads": 1, "subsampling": "4:4:4"},
        qualities=_AVIF,
    ),
)
"""Networks see chroma at full resolution, which 4:2:0 halves: 4:4:4 takes 10 to 20 % fewer bytes at equal fidelity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """One codec at one setting."""

    codec: str
    setting: str
    code: Callable[[Sample], Coded]


class Detail(Enum):
    """How many settings of the picture's codecs are tried."""

    AROUND = auto()
    """At full size, the qualities around what is compared."""
    SOME = auto()
    """Every size, half of the qualities."""
    ALL = auto()

    def takes(self, setting: Level) -> bool:
        if self is Detail.AROUND:
            return setting.quarters == 4 and setting.quality >= 75
        return self is Detail.ALL or setting.quality in SOME_QUALITIES


def picture_rivals(subject: Subject, detail: Detail) -> Iterator[Rival]:
    """JPEG and WebP at their levels, and the variants; AVIF where Pillow has it."""
    spec = subject.spec
    assert spec is not None
    for codec in PICTURE_CODECS:
        for level, setting in enumerate(LEVELS):
            if detail.takes(setting):
                name = f"q{setting.quality}" + (f" at {setting.quarters}/4" if setting.quarters < 4 else "")
                code = partial(_through_codec, spec=spec, input_name=subject.input, codec=codec, level=level)
                yield Rival(codec=codec, setting=name, code=code)
    first = 0 if detail is Detail.ALL else 3
    for variant in VARIANTS:
        if variant.codec == "jpeg" or features.check(variant.codec):
            for quality in variant.qualities[first:]:
                code = partial(_through_variant, spec=spec, variant=variant, quality=quality)
                yield Rival(codec=variant.codec, setting=f"q{quality} {variant.name}", code=code)


def speech_rivals() -> Iterator[Rival]:
    """Opus at its bit rates."""
    for bit_rate in BIT_RATES:
        code = partial(_through_opus, bit_rate=bit_rate)
        yield Rival(codec="opus", setting=f"{bit_rate / 1000:g} kbit/s", code=code)


def plain_bytes(subject: Subject, samples: Sequence[Sample]) -> dict[str, float]:
    """Mean bytes of inputs that are no pictures as they are: lossless."""
    if subject.speech:
        return {"16-bit sound": PCM_BYTES}
    return text_bytes(samples) if subject.spec is None else {}


def text_bytes(samples: Sequence[Sample]) -> dict[str, float]:
    """Mean bytes of the sentences as UTF-8, and deflated: both lossless."""
    texts = [str(sample.plain).encode() for sample in samples]
    return {
        "text": float(np.mean([len(text) for text in texts])),
        "text, deflated": float(np.mean([len(zlib.compress(text, 9)) for text in texts])),
    }


def measure(
    rivals: Sequence[Rival], samples: Sequence[Sample], expected: Sequence[Tensors], finish: Finish, subject: Subject
) -> dict[str, Measurements]:
    """Codec → its bytes and how far off the model's answers are, at every setting on every sample."""
    found: dict[str, list[tuple[str, list[int], list[float]]]] = {}
    for rival in rivals:
        sizes, off = [], []
        for sample, wanted in zip(samples, expected, strict=True):
            size, tensor = rival.code(sample)
            sizes.append(size)
            off.append(worst(subject.measure, finish({subject.input: tensor}), wanted))
        found.setdefault(rival.codec, []).append((rival.setting, sizes, off))
    return {codec: as_measurements(settings, samples) for codec, settings in found.items()}


def as_measurements(settings: Sequence[tuple[str, list[int], list[float]]], samples: Sequence[Sample]) -> Measurements:
    return Measurements(
        settings=tuple(setting for setting, _, _ in settings),
        bytes=np.array([sizes for _, sizes, _ in settings], np.float64),
        fidelity=np.array([off for _, _, off in settings], np.float64),
        sources=np.array([sample.source for sample in samples], np.int64),
    )


def worst(measure_name: str, found: Tensors, expected: Tensors) -> float:
    """The measure's largest value over the outputs, as calibration and profile take it."""
    return farthest(measure_name, found, expected)


def _pixels(sample: Sample) -> Pixels:
    assert isinstance(sample.plain, np.ndarray)
    return sample.plain


def _through_opus(sample: Sample, *, bit_rate: int) -> Coded:
    assert isinstance(sample.plain, Heard)
    return through_opus(sample.plain, bit_rate)


def _through_codec(sample: Sample, *, spec: ImageSpec, input_name: str, codec: str, level: int) -> Coded:
    tensor = sample.tensors[input_name]
    plain = encode_picture(tensor, spec, codec, level)
    assert plain is not None, "crops are pixels"
    framing = HEADER_BYTES_MIN + 8 * (spec.channels - 1)
    return len(plain) - framing, decode_picture(memoryview(plain), tensor.shape, input_name)


def _through_variant(sample: Sample, *, spec: ImageSpec, variant: Variant, quality: int) -> Coded:
    file, form = io.BytesIO(), variant.codec.upper()
    Image.fromarray(_pixels(sample)).save(file, form, quality=quality, **variant.options)
    size = file.tell()
    with Image.open(file, formats=(form,)) as opened:
        return size, as_input(np.asarray(opened.convert("RGB"), np.uint8), spec)
