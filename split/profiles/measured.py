"""What was measured of one model on one device: the numbers the planner starts from. Written by the workbench as
`profile.json`, refined while serving. Times are milliseconds of this device **without** `emulation.slowdown`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from split.errors import InvalidModel
from split.ids import CutId, ModelDigest

PROFILE_VERSION = 8

MEASURES_MAX: Final = 16
"""Measures of fidelity that a point may have: there are half as many."""

GOLDEN_RUNS = "golden-runs.msgpack"


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """How a runtime runs a model's segments on one device."""

    threads: int
    """Intra-op, ≥ 1."""
    spin_us: int = 0
    """How long a thread spins for the next operator of a run before it sleeps; nothing spins between runs."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """What one setting of a codec was measured to cost and to do, on inputs that nothing else was taken from."""

    level: int
    """The setting, which rides in the payload. For `klt` the grid index of the step (`split/codec/calibration.py`), for
    pictures the index of quality and size (`split/codec/picture.py`)."""
    mean_bytes: float
    """Of the whole payload, framing included."""
    p95_bytes: float
    fidelity: Annotated[dict[str, float], Meta(max_length=MEASURES_MAX)]
    """Measure (`split/codec/fidelity.py`) → mean over the sources of the inputs; what is missing was not finite: not
    allowed."""
    fidelity_high: Annotated[dict[str, float], Meta(max_length=MEASURES_MAX)]
    """The same measures → what the mean over all such inputs is at most (nominally 95 % confidence, over sources:
    `split/workbench/upper_mean.py`): this is what a bound is held against."""

    def within(self, measure: str, bound: float) -> bool:
        """Whether it keeps the bound, as far as so many inputs can tell; not for a NaN, or what was not measured."""
        return self.fidelity_high.get(measure, math.inf) <= bound


def cheapest(points: Iterable[Point], measure: str, bound: float) -> Point | None:
    """The one of fewest bytes that keeps `bound` of `measure`; None where none does. Nothing is interpolated."""
    return min((one for one in points if one.within(measure, bound)), key=lambda one: one.mean_bytes, default=None)


class CodecCosts(msgspec.Struct, frozen=True, kw_only=True):
    """A codec on one payload (a boundary, or the model's inputs); bytes: the median over the golden inputs."""

    codec: str
    bytes: int
    encode_ms: float
    decode_ms: float
    fidelity: dict[str, float] = {}
    """Measure → value of the final outputs against the unsplit run, worst golden input; {} = not measured.
    A lossless codec needs none."""
    curve: tuple[Point, ...] = ()
    """Of a codec with settings to choose from (klt, jpeg, webp), as calibrated: then `bytes` and `fidelity` above say
    nothing of what will be sent. () for one that has none."""


class CutCosts(msgspec.Struct, frozen=True, kw_only=True):
    cut: CutId
    head_ms: float
    tail_ms: float
    other_head_ms: float = 0.0
    other_tail_ms: float = 0.0
    """At `ModelProfile.other_sizes`, where there are any."""
    codecs: tuple[CodecCosts, ...]
    estimated: bool = False
    """Whether the times are estimated from those of other cuts (`split/plan/costs.py`): there was no time to measure
    them. Everything else of the cut is measured."""


class GoldenRuns(msgspec.Struct, frozen=True, kw_only=True):
    """What the golden inputs gave on this device, as sampled outputs in payload format: a companion that is to share
    the model must get the same (I10). Beside the profile, in a file of its own, of the same runtime and processor."""

    offered: bytes
    """The golden inputs, in payload format, where the model takes none of the built-in ones; empty where it does."""
    whole: bytes
    cuts: dict[CutId, bytes]
    """Boundary and outputs of head ∘ tail, of every cut in the profile."""


class ModelProfile(msgspec.Struct, frozen=True, kw_only=True):
    version: int = PROFILE_VERSION
    digest: ModelDigest
    runtime: str
    """The engine's name (`onnxruntime 1.32.0 x86_64`); a profile of another runtime is measured again."""
    fingerprint: str
    """`split.runtime.machine.Machine.digest` of the device (cores, features, quota, frequency policy)."""
    basis: str = ""
    """`split.workbench.golden.profile_basis` of what lay beside the model: golden requests, the contract's pictures."""
    calibration: str = ""
    """SHA-256 (hex) of the sidecar that the curves are from; empty: none lay beside the model."""
    dims: dict[str, int]
    """Symbolic dims the numbers hold for."""
    sizes: tuple[int, ...] = ()
    """The same of all open dims, those without a name too (`graph.growth.open_dims`)."""
    other_sizes: tuple[int, ...] = ()
    """At which everything was timed, too; () where no dim is open or the model takes no other sizes."""
    threads: int
    spin_us: int = 0
    """The `tuning` that was measured to be best, and that all times hold for."""
    whole_ms: float
    other_whole_ms: float = 0.0
    """At `other_sizes`."""
    image_ms: float
    """Decoding and preparing one encoded input; 0.0 where the model takes none."""
    input_codecs: tuple[CodecCosts, ...]
    """The model's inputs as tensors (offload), per codec."""
    encoded_bytes: int
    """Typical size of an encoded input (a JPEG as received); 0 where the model takes none."""
    output_bytes: int
    cuts: tuple[CutCosts, ...]
    self_difference: float = 0.0
    """Largest relative difference of the whole to itself without the runtime's optimisations and with one thread, over
    the golden requests: what another machine's order of sums may change. 0.0 for a model that computes in integers."""
    rows_apart: bool = False
    """Whether the first dim of all inputs and outputs is a batch whose rows were found not to depend on each other
    (`split/workbench/rows.py`): then a batch may be served in parts."""
    calibrated_sizes: tuple[tuple[int, int], ...] = ()
    """Of each open dim, the least and the largest that the curves hold for (`Calibration.sizes`)."""
    golden: tuple[int, str] = (0, "")
    """(bytes, sha256 hex) of the file with the `GoldenRuns`, without which no profile is read back."""

    @property
    def tuning(self) -> Tuning:
        """What the model was measured with, and is served with."""
        return Tuning(threads=self.threads, spin_us=self.spin_us)

    def holds_for(self, *, digest: ModelDigest, runtime: str, fingerprint: str, basis: str) -> bool:
        """Whether these numbers are of this model, runtime, device and surroundings; otherwise they are to be measured
        again."""
        return (self.digest, self.runtime, self.fingerprint, self.basis) == (digest, runtime, fingerprint, basis)


def write_golden_runs(runs: GoldenRuns, folder: Path) -> tuple[int, str]:
    """Write them into `folder` in one step; what `ModelProfile.golden` says of them."""
    data = msgspec.msgpack.encode(runs)
    fresh = folder / f"{GOLDEN_RUNS}.new"
    fresh.write_bytes(data)
    fresh.replace(folder / GOLDEN_RUNS)
    return len(data), hashlib.sha256(data).hexdigest()


def read_golden_runs(profile: ModelProfile, folder: Path) -> GoldenRuns:
    """The runs that belong to this profile; InvalidModel when they are missing or damaged."""
    path = folder / GOLDEN_RUNS
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidModel(
            f"{path} cannot be read ({error.strerror}); load the model again, it is made again"
        ) from None
    if (len(data), hashlib.sha256(data).hexdigest()) != profile.golden:
        raise InvalidModel(f"{path} is not what was written there; load the model again, it is made again")
    return msgspec.msgpack.decode(data, type=GoldenRuns)


def write_profile(profile: ModelProfile, folder: Path) -> None:
    """Write `folder/profile.json` in one step, after the golden runs that it names."""
    fresh = folder / "profile.json.new"
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1))
    fresh.replace(folder / "profile.json")


def read_profile(folder: Path) -> ModelProfile | None:
    """The profile in `folder`, or None where there is none that this version reads, or its golden runs are missing or
    damaged (it is measured again)."""
    try:
        profile = msgspec.json.decode((folder / "profile.json").read_bytes(), type=ModelProfile)
        read_golden_runs(profile, folder)
    except (FileNotFoundError, msgspec.MsgspecError, InvalidModel):
        return None
    return profile if profile.version == PROFILE_VERSION else None
