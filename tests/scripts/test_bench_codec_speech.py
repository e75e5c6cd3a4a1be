import wave
from pathlib import Path

import numpy as np
import pytest

from scripts import models
from scripts.benches import codec_speech
from scripts.benches.codec import REFERENCES
from scripts.benches.codec_rivals import speech_rivals
from scripts.benches.codec_speech import BIT_RATES, packet_bytes


def page(*packets: bytes) -> bytes:
    """An Ogg page (RFC 3533, section 6) of packets below 255 bytes; what is not read is 0."""
    return b"OggS" + bytes(22) + bytes([len(packets), *map(len, packets)]) + b"".join(packets)


def test_of_an_opus_stream_only_the_sound_counts() -> None:
    stream = page(b"OpusHead" + bytes(11)) + page(b"OpusTags" + bytes(40))
    assert packet_bytes(stream) == 0
    assert packet_bytes(stream + page(b"a" * 80, b"b" * 100) + page(b"OggS")) == 184


def test_a_recording_of_another_rate_keeps_its_tone_and_its_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tone.wav"
    seconds = np.arange(48_000) / 48_000
    tones = 8000 * np.sin(2 * np.pi * 440 * seconds) + 8000 * np.sin(2 * np.pi * 12_000 * seconds)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(48_000)
        file.writeframes(tones.astype("<i2").tobytes())
    monkeypatch.setattr(models, "file_path", lambda name: path)
    slow = codec_speech._pcm("tone.wav")
    kept = 8000 * np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)  # 12 kHz is beyond what 16 kHz can carry
    assert slow.shape == (16_000,)
    assert np.abs(slow - kept).max() <= 2


def test_opus_is_measured_where_models_are_compared_and_within_what_its_library_takes() -> None:
    assert set(REFERENCES["opus"]) <= {rival.setting for rival in speech_rivals()}
    assert min(BIT_RATES) >= codec_speech._BIT_RATE_MIN
    assert max(BIT_RATES) <= codec_speech._BIT_RATE_MAX
