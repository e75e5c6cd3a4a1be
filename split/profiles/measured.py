"""What was measured of one model on one device: the numbers the planner starts from. Written by the workbench as
`profile.json`, refined while serving. Times are milliseconds of this device **without** `emulation.slowdown`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from split.ids import CutId, ModelDigest

PROFILE_VERSION = 1


class CodecCosts(msgspec.Struct, frozen=True, kw_only=True):
    """A codec on one payload (a boundary, or the model's inputs), medians over the golden inputs."""

    codec: str
    bytes: int
    encode_ms: float
    decode_ms: float
    fidelity: dict[str, float] = {}
    """Measure → value of the final outputs against the unsplit run, worst golden input; {} = not measured.
    A lossless codec needs none."""


class CutCosts(msgspec.Struct, frozen=True, kw_only=True):
    cut: CutId
    head_ms: float
    tail_ms: float
    codecs: tuple[CodecCosts, ...]


class ModelProfile(msgspec.Struct, frozen=True, kw_only=True):
    version: int = PROFILE_VERSION
    digest: ModelDigest
    runtime: str
    """The engine's name (`onnxruntime 1.32.0 x86_64`); a profile of another runtime is measured again."""
    fingerprint: str
    """`split.runtime.machine.Machine.digest` of the device (cores, features, quota, frequency policy)."""
    dims: dict[str, int]
    """Symbolic dims the numbers hold for."""
    threads: int
    whole_ms: float
    image_ms: float
    """Decoding and preparing one encoded input; 0.0 where the model takes none."""
    input_codecs: tuple[CodecCosts, ...]
    """The model's inputs as tensors (offload), per codec."""
    encoded_bytes: int
    """Typical size of an encoded input (a JPEG as received); 0 where the model takes none."""
    output_bytes: int
    cuts: tuple[CutCosts, ...]

    def holds_for(self, *, digest: ModelDigest, runtime: str, fingerprint: str) -> bool:
        """Whether these numbers are of this model, runtime and device; otherwise they are to be measured again."""
        return (self.digest, self.runtime, self.fingerprint) == (digest, runtime, fingerprint)


def write_profile(profile: ModelProfile, folder: Path) -> None:
    """Write `folder/profile.json` in one step."""
    fresh = folder / "profile.json.new"
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1))
    fresh.replace(folder / "profile.json")


def read_profile(folder: Path) -> ModelProfile | None:
    """The profile in `folder`, or None where there is none that this version reads (it is measured again)."""
    try:
        profile = msgspec.json.decode((folder / "profile.json").read_bytes(), type=ModelProfile)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
    return profile if profile.version == PROFILE_VERSION else None
