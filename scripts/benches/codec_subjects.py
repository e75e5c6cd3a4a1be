"""What bench `codec` measures on: models, and natural inputs as each of them meets them; calibrated from some sources,
measured on others.

Photographs are the 20 and 30 of `models.photographs`, in random crops of 8-bit pixels at the size at which the model
looks at them: what a device that compresses before it sends has in its hands. An OCR detector sees lines of text drawn
over them. Sentences are the paragraphs of the project's own pages, of other ones for calibration than for the test.
Speech is that of `codec_speech.py`.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from scripts import models
from scripts.benches import codec_speech
from scripts.benches.codec_speech import Heard
from split.profiles.image_spec import ImageSpec
from split.tensor import Tensors

Pixels = npt.NDArray[np.uint8]
Kind = Literal["calibration", "test"]

MAIN: Final = "efficientnet-lite0"
MAIN_BOUND: Final = 0.036
"""KL in nats at which its codecs are compared: JPEG's at quality 90 on the first photographs that were tried."""

SCALE_MIN: Final = 0.6
"""Smallest side of a crop over the photograph's shorter one: a crop is then seldom larger than what is in it."""
SEED: Final = {"calibration": 1, "test": 2}

IMAGENET_MEAN: Final = (123.675, 116.28, 103.53)
IMAGENET_STD: Final = (58.395, 57.12, 57.375)

WORDS: Final = {
    "calibration": (
        "exit",
        "24h",
        "SALE",
        "platform 7",
        "coffee",
        "open until 18:30",
        "Main Street",
        "no entry",
        "1967",
    ),
    "test": ("ENTRANCE", "tickets", "Room 12", "mind the step", "bakery", "Harbour Road", "9:45", "free WiFi", "No. 8"),
}
PAGES: Final = {
    "calibration": ("ARCHITECTURE.md",),
    "test": ("README.md", "docs/contracts.md", "docs/models.md", "docs/configuration.md"),
}
SENTENCE_CHARS: Final = (40, 400)
SENTENCES: Final = 30
TOKENS_MAX: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request."""

    source: int
    """Which photograph, paragraph or stretch of speech it is of."""
    tensors: Tensors
    plain: Pixels | str | Heard
    """What the tensors were made of: pixels [height, width, 3], text or sound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model, the measure it is held to, and where its inputs come from."""

    model: str
    kind: str
    measure: str
    input: str
    spec: ImageSpec | None = None
    """How its input is made of pixels; None where it takes no picture."""
    text: bool = False
    """Whether lines of text are drawn over the photographs."""
    speech: bool = False
    """Whether it hears."""

    def samples(self, kind: Kind, *, crops: int, sources: int | None = None) -> list[Sample]:
        """`crops` of each of the first `sources` (all), the same each time; Unavailable where they cannot be had."""
        if self.speech:
            heard = codec_speech.windows(kind)
            return [Sample(source=source, tensors={self.input: x}, plain=plain) for source, plain, x in heard]
        if self.spec is None:
            return sentences(kind)[:sources]
        found: list[Sample] = []
        for number, path in enumerate(models.photographs(kind)[:sources]):
            for pixels in crops_of(path, self.spec.crop, crops, seed=SEED[kind]):
                drawn = with_text(pixels, kind, seed=len(found)) if self.text else pixels
                found.append(Sample(source=number, tensors={self.input: as_input(drawn, self.spec)}, plain=drawn))
        return found


SUBJECTS: Final = (
    Subject(
        model=MAIN,
        kind="mobile CNN",
        measure="kl",
        input="input",
        spec=ImageSpec(resize=256, crop=224, mean=(127, 127, 127), std=(128, 128, 128)),
    ),
    Subject(
        model="pp-lcnet-orientation",
        kind="second mobile CNN",
        measure="kl",
        input="x",
        spec=ImageSpec(resize=256, crop=224, mean=IMAGENET_MEAN, std=IMAGENET_STD),
    ),
    Subject(
        model="blazeface-back",
        kind="detector",
        measure="rms",
        input="input:0",
        spec=ImageSpec(resize=256, crop=256, mean=(127.5,) * 3, std=(127.5,) * 3, layout="NHWC"),
    ),
    Subject(
        model="yolox-ddddocr-det",
        kind="detector with skips",
        measure="rms",
        input="images",
        spec=ImageSpec(resize=416, crop=416, mean=(0.0,) * 3, std=(1.0,) * 3),
    ),
    Subject(
        model="ppocrv4-det",
        kind="OCR detector",
        measure="rms",
        input="x",
        spec=ImageSpec(resize=320, crop=320, mean=IMAGENET_MEAN, std=IMAGENET_STD),
        text=True,
    ),
    Subject(model="minilm-l6-int8w", kind="text transformer", measure="cosine", input="input_ids"),
    Subject(model="oww-embedding", kind="wake word's embedding", measure="rms", input="input_1", speech=True),
)


def crops_of(path: Path, side: int, count: int, *, seed: int) -> list[Pixels]:
    """Square crops at random places and scales, every other one mirrored, `side` × `side` RGB; the same each time."""
    with Image.open(path) as opened:
        picture = opened.convert("RGB")
    random = np.random.default_rng([seed, *path.name.encode()])
    found = []
    for number in range(count):
        edge = round(min(picture.size) * random.uniform(SCALE_MIN, 1.0))
        left, top = (int(random.integers(room - edge + 1)) for room in picture.size)
        crop = picture.resize((side, side), Image.Resampling.BILINEAR, box=(left, top, left + edge, top + edge))
        turned = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if number % 2 else crop
        found.append(np.asarray(turned, np.uint8))
    return found


def as_input(pixels: Pixels, spec: ImageSpec) -> npt.NDArray[np.float32]:
    """[1, 3, side, side], or channels last, as `spec` says."""
    values = (pixels.astype(np.float32) - np.array(spec.mean, np.float32)) / np.array(spec.std, np.float32)
    return np.ascontiguousarray(values.transpose(2, 0, 1) if spec.layout == "NCHW" else values, np.float32)[np.newaxis]


def with_text(pixels: Pixels, kind: Kind, *, seed: int) -> Pixels:
    """Three lines of words as signs have them, light on dark or dark on light; other words for each kind."""
    random = np.random.default_rng([SEED[kind], seed])
    picture = Image.fromarray(pixels)
    draw = ImageDraw.Draw(picture)
    for line in range(3):
        text = " ".join(random.choice(WORDS[kind], 2))
        font = ImageFont.load_default(int(random.integers(16, 30)))
        at = (int(random.integers(8, 60)), 30 + line * pixels.shape[0] // 3)
        box = draw.textbbox(at, text, font=font)
        dark = bool(random.integers(2))
        draw.rectangle((box[0] - 5, box[1] - 4, box[2] + 5, box[3] + 4), fill="black" if dark else "white")
        draw.text(at, text, font=font, fill="white" if dark else "black")
    return np.asarray(picture, np.uint8)


# -- text -------------------------------------------------------------------------------------------------------------


def sentences(kind: Kind) -> list[Sample]:
    """Paragraphs of the project's pages, tokenised as the model was trained (uncased WordPiece)."""
    paragraphs = _paragraphs(kind)
    token_of = _vocabulary()
    return [
        Sample(source=number, tensors=_tokens(text, token_of), plain=text) for number, text in enumerate(paragraphs)
    ]


def _paragraphs(kind: Kind) -> list[str]:
    """Paragraphs and items of lists, without marks."""
    least, most = SENTENCE_CHARS
    pages = "\n\n".join((models.ROOT / page).read_text() for page in PAGES[kind])
    blocks = (" ".join(re.sub(r"[*`]", "", block).split()) for block in re.split(r"\n\n|\n- ", pages))
    plain = (block.removeprefix("- ") for block in blocks)
    return [text[:most] for text in plain if len(text) >= least and text[0].isalpha()][:SENTENCES]


def _vocabulary() -> dict[str, int]:
    found: dict[str, int] = json.loads(models.file_path("tokenizer.json").read_text())["model"]["vocab"]
    return found


def _tokens(text: str, token_of: dict[str, int]) -> Tensors:
    pieces = [piece for word in words(text) for piece in word_pieces(word, token_of)]
    ids = np.array([[token_of["[CLS]"], *pieces[: TOKENS_MAX - 2], token_of["[SEP]"]]], np.int64)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


def words(text: str) -> list[str]:
    """Lower case without accents, split at white space and around punctuation, as BERT's basic tokeniser does."""
    plain = [letter for letter in unicodedata.normalize("NFD", text.lower()) if unicodedata.category(letter) != "Mn"]
    spaced = (letter if letter.isalnum() or letter.isspace() else f" {letter} " for letter in plain)
    return "".join(spaced).split()


def word_pieces(word: str, token_of: dict[str, int]) -> Sequence[int]:
    """Longest known beginning first, then longest known continuations (Wu et al. 2016, as BERT has it)."""
    found: list[int] = []
    at = 0
    while at < len(word):
        mark = "##" if at else ""
        end = next((end for end in range(len(word), at, -1) if mark + word[at:end] in token_of), None)
        if end is None:
            return [token_of["[UNK]"]]
        found.append(token_of[mark + word[at:end]])
        at = end
    return found


def subject(model: str) -> Subject:
    """By the model's name."""
    return next(one for one in SUBJECTS if one.model == model)


Finish = Callable[[Tensors], Tensors]
"""Runs a model, or its tail."""
