"""The sidecar `calibration.isthmus` beside `model.onnx`: what coding a model's boundaries takes, and what it costs.

Values only: made by `isthmus calibrate`, read by the device and by the companion, which must hold the same file to read
what the device coded (`Calibration.digest`). On disk: MessagePack in one zstd frame. Every read is bounded and checked
in full; whoever holds a `Calibration` may trust it. No coding here, and no measuring.

A tensor is coded so (`split/codec/klt.py`): y = transform · (x − mean) across channels, an orthonormal DCT over blocks
of each component's plane, one step for all coefficients; each coefficient (component, u, v) has its Laplace scale.
Steps and scales lie on one grid, so that scale/step is a difference of two indices.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISREG
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
import zstandard
from msgspec import Meta

from split.codec.picture import LEVELS, PICTURE_CODECS
from split.errors import InvalidCalibration, InvalidRequest, ModelUnavailable
from split.files import write_whole
from split.ids import CutId, ModelDigest
from split.profiles.measured import Point, cheapest
from split.tensor import RANK_MAX, Array, TensorSpec

CALIBRATION_FILE: Final = "calibration.isthmus"
CALIBRATION_VERSION: Final = 3

GRID_PER_OCTAVE: Final = 8
GRID_ONE: Final = 128
"""Index i of the grid of steps and scales stands for 2^((i − 128) / 8): 2^-16 … 2^15.9 in a byte. Eight an octave: one
index more costs about 7 % of the bytes, so a bound on fidelity that falls between two costs half of that."""
LEVEL_MAX: Final = 255

CHANNELS_MAX: Final = 1024
BLOCK_MAX: Final = 32
CUTS_MAX: Final = 32
TENSORS_MAX: Final = 64
DIMS_MAX: Final = 256
POINTS_MAX: Final = 256
FILE_BYTES_MAX: Final = 64 << 20
PLAIN_BYTES_MAX: Final = 128 << 20
"""What reading a sidecar may take, whoever sent it: 8 cuts of 512 channels take 17 MB."""
INVERSE_TOLERANCE: Final = 1e-2
"""Largest |transform · inverse − 1| by element: FP32 rounding of a badly conditioned transform stays far below."""

LAYOUTS: Final[Mapping[str, tuple[int, int, int, int]]] = {
    # axes of (batch, channels, rows, columns); -1: not there, one long
    "NCHW": (0, 1, 2, 3),
    "NHWC": (0, 3, 1, 2),
    "NCT": (0, 1, -1, 2),
    "NTC": (0, 2, -1, 1),
    "NC": (0, 1, -1, -1),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Klt:
    """How one float tensor is transformed and coded."""

    layout: str
    """A key of `LAYOUTS`, of the tensor's rank."""
    transform: Array
    """FP32 [components, channels]: y = transform · (x − mean). Components the tail does not see may be left out."""
    inverse: Array
    """FP32 [channels, components]: x ≈ inverse · y + mean; transform · inverse is the unit matrix."""
    mean: Array
    """FP32 [channels]."""
    block: tuple[int, int]
    """Rows and columns of a DCT block, ≥ 1; (1, 1) is no DCT."""
    scales: Array
    """UINT8 [components, block rows, block columns]: grid index of each coefficient's Laplace scale b, mean |y|; 0 for
    one that is never coded and always 0."""

    def __post_init__(self) -> None:
        for name in ("transform", "inverse", "mean", "scales"):
            view = getattr(self, name).view()  # whoever made it may go on writing
            view.flags.writeable = False
            object.__setattr__(self, name, view)

    @property
    def components(self) -> int:
        """That are coded, of `channels`."""
        return int(self.transform.shape[0])

    @property
    def channels(self) -> int:
        """Of the tensor, what the transform mixes."""
        return int(self.transform.shape[1])


WeighedBy = Literal["outputs", "weights", "variance"]
"""How the model's outputs move with each channel; the weights of the layers that read them; neither: how much each
varies."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorTables:
    """One tensor that crosses."""

    spec: TensorSpec
    """As in the model's card: open dims are names or -1."""
    klt: Klt | None
    """None: it travels lossless (masks, integers, what has no channels)."""
    weighed_by: WeighedBy | None = None
    """What told how much its channels matter, for people; None where nothing was asked."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CutTables:
    """What crosses at one cut, in the order in which it travels: the boundary, then the inputs the tail needs."""

    tensors: tuple[TensorTables, ...]
    node_bitmap: str
    """`CutCard.node_bitmap`: which cut it is, for whoever has the model but not this cut."""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Rate against fidelity."""

    points: Annotated[tuple[Point, ...], Meta(max_length=POINTS_MAX)]
    """Cheapest (by mean bytes) first."""
    inputs: int
    """How many were held out and measured, ≥ 1."""

    def within(self, measure: str, bound: float) -> Point | None:
        """The cheapest measured point that keeps `bound` of `measure`; None where none does."""
        return cheapest(self.points, measure, bound)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Calibration:
    """All of one model's sidecar."""

    model: ModelDigest
    inputs: int
    """How many inputs it was made from, those held out included."""
    tables: dict[CutId, CutTables]
    curves: dict[CutId, Curve]
    """Of the same cuts."""
    sizes: tuple[tuple[int, int], ...] = ()
    """Of each open dim of the model's inputs (`graph.growth.open_dims`), the least and the largest that curves were
    measured at: how far off the outputs are may depend on it. () where no dim is open."""
    pictures: dict[str, Curve] = field(default_factory=dict)
    """`jpeg`, `webp` → the model's picture input coded so, by the same measures; {} where it takes none."""
    digest: str = ""
    """SHA-256 of the file, 64 hex digits; set by whoever wrote or read it."""


def step_of(level: int) -> float:
    """The quantiser's step at a level of `klt`."""
    return float(2.0 ** ((level - GRID_ONE) / GRID_PER_OCTAVE))


def grid_of(scale: Array) -> Array:
    """UINT8 grid index nearest to each scale (finite, ≥ 0), at least 1; 0 for 0."""
    with np.errstate(divide="ignore"):
        index = np.rint(np.log2(scale) * GRID_PER_OCTAVE + GRID_ONE)
    return np.where(scale > 0, np.clip(index, 1, LEVEL_MAX), 0).astype(np.uint8)


def rounded(matrix: Array) -> Array:
    """FP32 with 11 bits of mantissa as FP16 has them (to within 2^-12, relative), and FP32's range: a transform and its
    inverse are as good so, far below any step that is used, and half as long in the file."""
    bits = np.ascontiguousarray(matrix, np.float32).view(np.uint32)
    return np.asarray(((bits + np.uint32(0x800)) & np.uint32(0xFFFFF000)).view(np.float32))


# --- the file ---------------------------------------------------------------------------------------------------------
# Whatever repeats has its largest count in its type, so that it is refused before it is made: of three bytes each, tens
# of millions of pairs would take gigabytes.


class _KltFile(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    layout: str
    components: int
    channels: int
    block: tuple[int, int]
    transform: bytes
    inverse: bytes
    mean: bytes
    scales: bytes


class _TensorFile(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    name: str
    dtype: str
    shape: Annotated[tuple[int | str, ...], Meta(max_length=RANK_MAX)]
    klt: _KltFile | None
    weighed_by: WeighedBy | None = None


class _CutFile(msgspec.Struct, frozen=True, kw_only=True):
    tensors: Annotated[tuple[_TensorFile, ...], Meta(max_length=TENSORS_MAX)]
    node_bitmap: str
    curve: Curve


class _Version(msgspec.Struct, frozen=True):
    version: int


class _File(msgspec.Struct, frozen=True, kw_only=True):
    version: int = CALIBRATION_VERSION
    model: ModelDigest
    inputs: int
    cuts: Annotated[dict[Annotated[str, Meta(pattern=r"\A[0-9a-f]{12}\Z")], _CutFile], Meta(max_length=CUTS_MAX)]
    pictures: Annotated[dict[str, Curve], Meta(max_length=len(PICTURE_CODECS))]
    sizes: Annotated[tuple[tuple[int, int], ...], Meta(max_length=DIMS_MAX)] = ()


def write_calibration(calibration: Calibration, path: Path) -> str:
    """Write the sidecar in one step: readers see the old or the new one, after a power cut too; its digest.

    InvalidCalibration for one that could not be read again (too big, values that are not finite), ModelUnavailable when
    the disk is full or read-only, or `path` is a device or a folder: nothing is written.
    """
    check_place(path)
    data = encode_calibration(calibration)
    decode_calibration(data, calibration.model)
    try:
        write_whole(path, data)
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        what = (
            "the disk is full; free some space" if full else f"{error.strerror}; its folder must be there and writable"
        )
        raise ModelUnavailable(f"{path} cannot be written: {what}") from error
    return hashlib.sha256(data).hexdigest()


def check_place(path: Path) -> None:
    """ModelUnavailable where no sidecar can be written: what lies there is no file, or its folder is not there or may
    not be written. A disk may still be full."""
    if path.exists() and not path.is_file():
        raise ModelUnavailable(f"{path} is no file and is not replaced; give the sidecar a path of its own")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ModelUnavailable(f"{path} cannot be written: its folder must be there and writable")


def read_calibration(path: Path, model: ModelDigest | None) -> Calibration | None:
    """The sidecar at `path`, None where there is none; InvalidCalibration when it is damaged or not of this model
    (None: of any, to be shown, not to be used)."""
    data = read_file(path)
    if data is None:
        return None
    try:
        return decode_calibration(data, model)
    except InvalidCalibration as error:
        raise InvalidCalibration(f"{path}: {error}") from error


def read_file(path: Path) -> bytes | None:
    """What lies at `path`, as far as it may be a sidecar; None where nothing does. InvalidCalibration, by its name, for
    what cannot be read, or is no file: a pipe would be waited for without end."""
    try:
        if not S_ISREG(path.stat().st_mode):
            raise InvalidCalibration(f"{path} is no file and is not used; remove it and run isthmus calibrate again")
        with path.open("rb") as file:
            return file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidCalibration(f"{path} cannot be read and is not used: {error.strerror or error}") from error


def encode_calibration(calibration: Calibration) -> bytes:
    """The bytes of its file: the same for the same values."""
    file = _File(
        model=calibration.model,
        inputs=calibration.inputs,
        cuts={
            cut: _CutFile(
                tensors=tuple(_tensor_file(tensor) for tensor in tables.tensors),
                node_bitmap=tables.node_bitmap,
                curve=calibration.curves[cut],
            )
            for cut, tables in calibration.tables.items()
        },
        pictures=calibration.pictures,
        sizes=calibration.sizes,
    )
    plain = msgspec.msgpack.encode(file, order="deterministic")
    return zstandard.ZstdCompressor(level=9, write_checksum=True).compress(plain)


def decode_calibration(data: bytes, model: ModelDigest | None) -> Calibration:
    """What `encode_calibration` wrote, checked in full.

    InvalidCalibration, which says to calibrate again, for anything else: damaged, too big, of another version, of
    another model than `model` (None: any), transforms that cannot be inverted, values that are not finite.
    """
    plain = _unpacked(data)
    try:
        version = msgspec.msgpack.decode(plain, type=_Version).version
        if version != CALIBRATION_VERSION:
            raise _bad(f"it has version {version}, this program reads {CALIBRATION_VERSION}")
        file = msgspec.msgpack.decode(plain, type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(f"it is damaged ({error})") from error
    if model is not None:
        require_model(file.model, model)
    if file.inputs < 1:
        raise _bad(f"it was made from {file.inputs} inputs; at least 1 is read")
    if not all(0 <= least <= most for least, most in file.sizes):
        raise _bad(f"the sizes that it was measured at are {str(file.sizes)[:80]}, which are none")
    for cut in file.cuts.values():
        _check_curve(cut.curve, level_max=LEVEL_MAX)
    for codec, curve in file.pictures.items():
        if codec not in PICTURE_CODECS:
            raise _bad(f"it has a curve of codec {codec[:12]!r}; of pictures {', '.join(PICTURE_CODECS)} are read")
        _check_curve(curve, level_max=len(LEVELS) - 1)
    return Calibration(
        model=file.model,
        inputs=file.inputs,
        tables={CutId(cut): _tables(cut, found) for cut, found in file.cuts.items()},
        curves={CutId(cut): found.curve for cut, found in file.cuts.items()},
        pictures=file.pictures,
        sizes=file.sizes,
        digest=hashlib.sha256(data).hexdigest(),
    )


def require_model(calibrated: ModelDigest, model: ModelDigest) -> None:
    """InvalidCalibration for the calibration of another model than `model`."""
    if calibrated != model:
        raise _bad(f"it belongs to the model {calibrated[:19]}…, not to {model[:19]}…")


def _bad(why: str) -> InvalidCalibration:
    return InvalidCalibration(f"the calibration is not used: {why}; run isthmus calibrate again")


def _unpacked(data: bytes) -> bytes:
    if len(data) > FILE_BYTES_MAX:
        raise _bad(f"it has more than {FILE_BYTES_MAX >> 20} MiB")
    try:
        stated = zstandard.get_frame_parameters(data).content_size
        if not 0 < stated <= PLAIN_BYTES_MAX:
            raise _bad(f"it claims to unpack to {stated} bytes; at most {PLAIN_BYTES_MAX} are read")
        plain = zstandard.ZstdDecompressor().decompress(data, max_output_size=stated, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _bad(f"it is damaged ({error})") from error
    return bytes(plain)


def _tensor_file(tensor: TensorTables) -> _TensorFile:
    klt = tensor.klt
    return _TensorFile(
        name=tensor.spec.name,
        dtype=tensor.spec.dtype,
        shape=tensor.spec.shape,
        klt=None
        if klt is None
        else _KltFile(
            layout=klt.layout,
            components=klt.components,
            channels=klt.channels,
            block=klt.block,
            transform=_packed(klt.transform),
            inverse=_packed(klt.inverse),
            mean=np.ascontiguousarray(klt.mean, "<f4").tobytes(),
            scales=np.ascontiguousarray(klt.scales, np.uint8).tobytes(),
        ),
        weighed_by=tensor.weighed_by,
    )


def _packed(matrix: Array) -> bytes:
    """FP32 as its four bytes apart, all first ones first: zstd finds those that are 0 (`rounded`) or alike."""
    return np.ascontiguousarray(np.ascontiguousarray(matrix, "<f4").view(np.uint8).reshape(-1, 4).T).tobytes()


def _unpacked_matrix(data: bytes, shape: tuple[int, int]) -> Array:
    apart = np.frombuffer(data, np.uint8).reshape(4, -1)
    return np.ascontiguousarray(apart.T).view("<f4").reshape(shape)


def _tables(cut: str, file: _CutFile) -> CutTables:
    if not file.tensors:
        raise _bad(f"cut {cut[:12]!r} has no tensors")
    try:
        bytes.fromhex(file.node_bitmap)
        specs = [TensorSpec(name=one.name, dtype=one.dtype, shape=one.shape) for one in file.tensors]
    except (ValueError, InvalidRequest) as error:
        raise _bad(f"cut {cut[:12]!r} is damaged ({error})") from error
    return CutTables(
        tensors=tuple(
            TensorTables(spec=spec, klt=None if one.klt is None else _klt(one.klt, spec), weighed_by=one.weighed_by)
            for spec, one in zip(specs, file.tensors, strict=True)
        ),
        node_bitmap=file.node_bitmap,
    )


def _klt(file: _KltFile, spec: TensorSpec) -> Klt:
    """Checked by what it takes to code with it."""
    (rows, columns), components, channels = file.block, file.components, file.channels
    name = repr(spec.name[:80])
    if len(spec.shape) > RANK_MAX or spec.dtype not in ("FP16", "FP32", "FP64"):
        raise _bad(f"tensor {name} is {spec.dtype} of rank {len(spec.shape)}: none that is transformed")
    if file.layout not in LAYOUTS or len(file.layout) != len(spec.shape):
        raise _bad(f"tensor {name} of rank {len(spec.shape)} has the layout {file.layout[:8]!r}")
    if not (1 <= components <= channels <= CHANNELS_MAX and 1 <= rows <= BLOCK_MAX and 1 <= columns <= BLOCK_MAX):
        raise _bad(f"tensor {name} has {components} components of {channels} channels in blocks of {rows}×{columns}")
    if spec.shape[LAYOUTS[file.layout][1]] != channels:
        raise _bad(f"tensor {name} of shape {list(spec.shape)} has tables for {channels} channels")
    sizes = (len(file.transform), len(file.inverse), len(file.mean), len(file.scales))
    expected = (4 * components * channels, 4 * components * channels, 4 * channels, components * rows * columns)
    if sizes != expected:
        raise _bad(f"tensor {name} has tables of {sizes} bytes, expected {expected}")
    klt = Klt(
        layout=file.layout,
        transform=_unpacked_matrix(file.transform, (components, channels)),
        inverse=_unpacked_matrix(file.inverse, (channels, components)),
        mean=np.frombuffer(file.mean, "<f4"),
        block=file.block,
        scales=np.frombuffer(file.scales, np.uint8).reshape(components, rows, columns),
    )
    if not all(np.isfinite(array).all() for array in (klt.transform, klt.inverse, klt.mean)):
        raise _bad(f"tensor {name} has tables that are not finite")
    unit = klt.transform.astype(np.float64) @ klt.inverse.astype(np.float64)
    if not np.abs(unit - np.eye(components)).max() <= INVERSE_TOLERANCE:
        raise _bad(f"the transform of tensor {name} and its inverse do not undo each other")
    return klt


def _check_curve(curve: Curve, *, level_max: int) -> None:
    if not curve.points or curve.inputs < 1:
        raise _bad(f"a curve has {len(curve.points)} points of {curve.inputs} inputs; one of each is read at least")
    before = 0.0
    for point in curve.points:
        values = (*point.fidelity.values(), *point.fidelity_high.values())
        sound = all(math.isfinite(value) and value >= 0 for value in values)
        sound = sound and all(point.fidelity.get(name, math.inf) <= high for name, high in point.fidelity_high.items())
        if not (0 <= point.level <= level_max and sound):
            raise _bad(f"a curve's point at level {point.level} is none")
        if not (before <= point.mean_bytes < math.inf and 0 <= point.p95_bytes < math.inf):
            raise _bad(f"a curve is not in the order of its bytes, or they are not finite, at level {point.level}")
        before = point.mean_bytes
