"""Inputs as the models of the zoo meet them in life: photos, rendered text, a sentence, a voice; the same each time.

Noise shows that two engines agree; it says little about a detector that finds nothing in it, and models with a state, a
sampling rate or a mask do not run on what `split.codec.golden` makes up. Each entry of `NATURAL` follows the model's
own preprocessing, so its outputs mean something (tests/scripts/test_zoo.py looks at some of them).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from scripts import models

Tensors = dict[str, npt.NDArray[Any]]
FloatArray = npt.NDArray[np.float32]

SENTENCE: Final = (101, 1037, 4937, 2938, 2006, 1996, 13523, 102)
"""[CLS] a cat sat on the mat [SEP] in the vocabulary of bert-base-uncased, which MiniLM has."""
PADDED_TO: Final = 16
"""Tokens, so that the mask has zeros to hide."""

SAMPLE_RATE_HZ: Final = 16_000
LINE: Final = "Split inference 4821"


def photo(name: str, width: int, height: int) -> FloatArray:
    """RGB of a pinned picture stretched to this size, [height, width, 3], 0…255; Unavailable when it cannot be had."""
    picture = Image.open(models.photo_path(name)).convert("RGB")
    return np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR), np.float32)


def text_line(text: str, width: int, height: int) -> FloatArray:
    """Black text on white in one line that fills the height, [height, width, 3], 0…255."""
    canvas = Image.new("RGB", (width, height), "white")
    font = ImageFont.load_default(height * 0.6)
    ImageDraw.Draw(canvas).text((height // 8, height // 2), text, fill="black", font=font, anchor="lm")
    return np.asarray(canvas, np.float32)


def text_page(width: int, height: int) -> FloatArray:
    """Five lines of text of growing size, [height, width, 3], 0…255."""
    canvas = Image.new("RGB", (width, height), "white")
    draw, top = ImageDraw.Draw(canvas), height // 16
    for size in (16, 20, 26, 34, 44):
        draw.text((width // 16, top), LINE, fill=(20, 20, 60), font=ImageFont.load_default(size))
        top += size + height // 16
    return np.asarray(canvas, np.float32)


def vowel(samples: int) -> FloatArray:
    """A sung "ah" at 16 kHz, [samples], −1…1: a pulse train of 120 Hz through the resonances of a mouth that says so.

    Formants and bandwidths in Hz after Peterson & Barney 1952 (a man's /ɑ/): 730, 1090, 2440; two-pole resonators as in
    Klatt 1980, eq. 2.
    """
    time_s = np.arange(samples) / SAMPLE_RATE_HZ
    wave = (np.diff(np.floor(time_s * 120 * (1 + 0.02 * np.sin(2 * np.pi * 5 * time_s))), prepend=-1) > 0).astype(float)
    for formant_hz, bandwidth_hz in ((730, 60), (1090, 100), (2440, 120)):
        radius = np.exp(-np.pi * bandwidth_hz / SAMPLE_RATE_HZ)
        b = 2 * radius * np.cos(2 * np.pi * formant_hz / SAMPLE_RATE_HZ)
        c = -(radius**2)
        before, last = 0.0, 0.0
        for at, value in enumerate(wave):
            wave[at] = (1 - b - c) * value + b * last + c * before
            before, last = last, wave[at]
    return np.asarray(0.5 * wave / np.abs(wave).max(), np.float32)


def _chw(pixels: FloatArray, mean: object = 0.0, std: object = 1.0) -> FloatArray:
    """Normalised, channels first, one in the batch: [1, 3, height, width]."""
    scaled = (pixels - np.asarray(mean, np.float32)) / np.asarray(std, np.float32)
    return np.ascontiguousarray(scaled.transpose(2, 0, 1)[None], np.float32)


def _sentence() -> Tensors:
    ids = np.zeros((1, PADDED_TO), np.int64)
    ids[0, : len(SENTENCE)] = SENTENCE
    return {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int64), "token_type_ids": np.zeros_like(ids)}


def _speech() -> Tensors:
    """The window of 512 samples that Silero's wrapper feeds, behind the last 64 of the window before; a fresh state."""
    return {
        "input": vowel(4096)[None, -576:],
        "state": np.zeros((2, 1, 128), np.float32),
        "sr": np.array(SAMPLE_RATE_HZ, np.int64),
    }


def _with_alpha() -> Tensors:
    """M-LSD takes raw RGB and a plane of ones, channels last."""
    pixels = photo("astronaut.png", 512, 512)
    return {"input_image_with_alpha:0": np.concatenate([pixels, np.ones((512, 512, 1), np.float32)], axis=-1)[None]}


IMAGENET_MEAN: Final = (123.675, 116.28, 103.53)
IMAGENET_STD: Final = (58.395, 57.12, 57.375)

NATURAL: Final[dict[str, Callable[[], Tensors]]] = {
    "efficientnet-lite0": lambda: {"input": _chw(photo("chelsea.png", 224, 224), 127, 128)},
    # Caffe's ResNet: BGR without the mean of VGG, channels last.
    "open-nsfw-resnet50": lambda: {"input_0": photo("coffee.png", 224, 224)[None, ..., ::-1] - np.float32(110)},
    "yolox-ddddocr-det": lambda: {"images": _chw(photo("text.png", 416, 416))},
    "ppocrv4-det": lambda: {"x": _chw(text_page(640, 320), IMAGENET_MEAN, IMAGENET_STD)},
    "ppocrv4-rec": lambda: {"x": _chw(text_line(LINE, 320, 48), 127.5, 127.5)},
    "mlsd-tiny-512": _with_alpha,
    "minilm-l6-int8w": _sentence,
    "vit-s-focus": lambda: {"input_image": _chw(photo("astronaut.png", 224, 224), IMAGENET_MEAN, IMAGENET_STD)},
    "silero-vad": _speech,
    "ddddocr-rec-int8": lambda: {"input1": _chw(text_line("k7Wq", 160, 64)[..., :1], 127.5, 127.5)},
}
"""Name in models.json → its inputs by name."""
