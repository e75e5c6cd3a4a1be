"""What a wake word listens to, for bench `codec`: speech in the windows of openWakeWord's embedding, one every 80 ms.

A window is 76 frames of a mel spectrogram (10 ms apart); the rival is the sound itself, whole clips through Opus at a
bit rate. Recordings that two packages ship stand for the microphone; speakers of the test are others than those for
calibration. Opus is libsndfile's, out of the wheel of `soundfile` in a folder of its own: no dependency of the project.
"""

from __future__ import annotations

import importlib
import io
import subprocess
import sys
import wave
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal

import numpy as np

from scripts import models
from scripts.benches.figure import CACHE
from scripts.models import Unavailable
from split.runtime.segment import OrtEngine
from split.tensor import Array

CLIPS: Final = {
    "calibration": ("two_cities.wav", "endgame_nagg_nell.wav"),
    "test": ("speakers.wav", "beckett.wav"),
}
STRIDES_MS: Final = {"calibration": 800, "test": 400}
"""From one window to the next: for calibration none shares sound with another."""
STRETCH_MS: Final = 4000
"""What counts as one source: windows in it are alike."""
RATE_HZ: Final = 16_000
MEL: Final = "oww-melspec"
MEL_HOP: Final = 160
WINDOW_FRAMES: Final = 76
STEP_MS: Final = 80
"""The embedding is made anew so often; bytes are those of so much sound."""
PCM_BYTES: Final = 2 * RATE_HZ * STEP_MS // 1000
BIT_RATES: Final = (6_000, 8_000, 12_000, 16_000, 24_000, 32_000, 48_000, 64_000, 96_000, 128_000)

SOUNDFILE: Final = "soundfile==0.14.0"
FOLDER: Final = CACHE.parent / SOUNDFILE
INSTALL_TIMEOUT_S: Final = 120
_BIT_RATE_MIN, _BIT_RATE_MAX = 6_000, 256_000
"""Of one channel, between which libsndfile divides its compression levels from 1 to 0."""
_PAGE = 27
"""Bytes of an Ogg page's header before its table of segments (RFC 3533)."""


@dataclass(frozen=True, slots=True)
class Heard:
    """One window: of which clip, from which frame of its mel spectrogram on."""

    clip: str
    frame: int


def prepare() -> None:
    """What the test needs beside what calibration has fetched; Unavailable where it cannot be had."""
    _soundfile()
    for clip in CLIPS["test"]:
        models.file_path(clip)


def windows(kind: Literal["calibration", "test"]) -> list[tuple[int, Heard, Array]]:
    """Source, place, and FP32 [1, 76, 32, 1] of every window; Unavailable where a package cannot be had."""
    found = []
    step = STRIDES_MS[kind] * RATE_HZ // 1000 // MEL_HOP
    for number, clip in enumerate(CLIPS[kind]):
        mel = _heard(clip)
        for frame in range(0, len(mel) - WINDOW_FRAMES + 1, step):
            stretch = frame * MEL_HOP * 1000 // RATE_HZ // STRETCH_MS
            found.append((1000 * number + stretch, Heard(clip, frame), _window(mel, frame)))
    return found


def through_opus(heard: Heard, bit_rate: int) -> tuple[int, Array]:
    """Bytes of 80 ms of its clip at this rate, containers and headers aside, and the window as it comes out."""
    nbytes, mel = _coded(heard.clip, bit_rate)
    return nbytes, _window(mel, heard.frame)


def _window(mel: Array, frame: int) -> Array:
    return np.ascontiguousarray(mel[None, frame : frame + WINDOW_FRAMES, :, None])


@cache
def _heard(clip: str) -> Array:
    return _mel(_pcm(clip))


@cache
def _coded(clip: str, bit_rate: int) -> tuple[int, Array]:
    soundfile = _soundfile()
    pcm, file = _pcm(clip), io.BytesIO()
    level = 1 - (bit_rate - _BIT_RATE_MIN) / (_BIT_RATE_MAX - _BIT_RATE_MIN)
    soundfile.write(file, pcm, RATE_HZ, format="OGG", subtype="OPUS", compression_level=level)
    back, rate_hz = soundfile.read(io.BytesIO(file.getvalue()), dtype="int16")
    assert rate_hz == RATE_HZ, "libsndfile gives back the rate it got"
    steps = len(pcm) / RATE_HZ * 1000 / STEP_MS
    return round(packet_bytes(file.getvalue()) / steps), _mel(back[: len(pcm)])


def packet_bytes(ogg: bytes) -> int:
    """Of the pages of an Opus stream what is sound: not their headers, not the first two pages (RFC 7845)."""
    total = pages = at = 0
    while at < len(ogg):
        assert ogg[at : at + 4] == b"OggS", "a page begins where the one before it ends"
        segments = ogg[at + _PAGE - 1]
        body = sum(ogg[at + _PAGE : at + _PAGE + segments])
        pages += 1
        total += body if pages > 2 else 0
        at += _PAGE + segments + body
    return total


def _pcm(clip: str) -> Array:
    """INT16 at 16 kHz, one channel; other rates are cut off in frequency, which keeps what both can carry."""
    with wave.open(str(models.file_path(clip)), "rb") as file:
        assert (file.getnchannels(), file.getsampwidth()) == (1, 2), clip
        rate_hz, found = file.getframerate(), np.frombuffer(file.readframes(file.getnframes()), "<i2")
    if rate_hz == RATE_HZ:
        return found
    size = len(found) * RATE_HZ // rate_hz
    slow = np.fft.irfft(np.fft.rfft(found)[: size // 2 + 1], size) * (size / len(found))
    return np.asarray(np.clip(np.rint(slow), -(2**15), 2**15 - 1), np.int16)


def _mel(pcm: Array) -> Array:
    """FP32 [frames, 32] as openWakeWord has them: its model on 16-bit values, scaled by x / 10 + 2."""
    segment = OrtEngine().open(models.model_path(MEL), threads=1)
    try:
        (found,) = segment.run({"input": pcm.astype(np.float32)[None]}).values()
    finally:
        segment.close()
    return np.asarray(found.reshape(-1, 32) / 10 + 2, np.float32)


@cache
def _soundfile() -> Any:
    """The module; Unavailable where it cannot be had. It needs numpy and cffi, which are here."""
    if not FOLDER.exists():
        fresh = FOLDER.with_suffix(".new")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--upgrade", "--target", str(fresh), SOUNDFILE]
        try:
            done = subprocess.run(command, capture_output=True, check=False, timeout=INSTALL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{SOUNDFILE} did not come within {INSTALL_TIMEOUT_S} s") from None
        if done.returncode:
            raise Unavailable(f"{SOUNDFILE}, which codes Opus, cannot be had now")
        fresh.rename(FOLDER)
    sys.path.append(str(FOLDER))
    try:
        return importlib.import_module("soundfile")
    except (ImportError, OSError) as error:
        raise Unavailable(f"{SOUNDFILE} cannot be loaded: {error}") from error
    finally:
        sys.path.remove(str(FOLDER))
