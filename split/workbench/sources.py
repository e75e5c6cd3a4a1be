"""What a model is calibrated on: pictures and `.npz` requests of the user's, as sources that are held apart.

A source is a file, or a row of one file that holds a batch; what is held out for the curves shares no source with what
the tables come from. Of a picture there are several views (crops, mirrored or not), the same ones each time: few
pictures then tell more of what planes and channels look like. Everything is read once, checked, and refused by name.
"""

from __future__ import annotations

import hashlib
import io
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from PIL import Image, ImageOps

from split.codec.golden import golden_inputs
from split.codec.image import prepare_image
from split.errors import InvalidRequest, IsthmusError
from split.profiles.contract import Contract
from split.profiles.image_spec import ImageSpec
from split.tensor import Tensors, TensorSpec, bind_dims
from split.workbench.inputs import read_inputs

log = logging.getLogger(__name__)

SOURCES_MIN: Final = 2
"""One to learn from and one to measure on."""
SOURCES_FEW: Final = 8
"""Below it curves are rough, and said to be."""
SOURCES_MAX: Final = 96
"""Of more, so many spread evenly are used: the tables do not get better, the pictures take memory."""
FOLDS: Final = 3
"""Two sources in three are learnt from where one is measured on."""
VIEWS_MAX: Final = 8
PICTURES: Final = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
PICTURE_BYTES_MAX: Final = 256 << 20
"""Of a picture's file, which is read whole: a bitmap of as many pixels as are decoded (`codec/image.py`) has 200 MB."""
VIEWS_BYTES_MAX: Final = 256 << 20
"""Of all views together; of big pictures there are fewer."""
_AREA_MIN: Final = 0.35
"""Smallest part of a picture's central square that a view shows."""
_R1: Final = 0.6180339887498949
"""1/φ: the same on a line."""
_R2: Final = (0.7548776662466927, 0.5698402909980532)
"""1/φ₂, 1/φ₂²: steps of the R2 sequence (Roberts 2018), whose points lie evenly in a square however many are taken."""


Request = Callable[[], Tensors]
"""Makes a request's inputs: views are kept as pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One source's requests: `views[0]` as it is served, the others changed."""

    name: str
    views: Sequence[Request]
    picture: str = ""
    """The input that a picture became; "" where none did."""


def read_sources(path: Path, specs: Sequence[TensorSpec], contract: Contract | None) -> list[Source]:
    """Everything in a folder (pictures and `.npz`, one request a file; hidden files are passed over), or the rows of
    one `.npz` whose arrays all have a first dim of that size where the model has 1 or an open one; copies count once.

    InvalidRequest names the file that is no picture or `.npz`, does not fit the model's inputs (`specs`), is empty or
    holds a value that is not finite, and says so where there are fewer than two sources.
    """
    found = _folder(path, specs, contract) if path.is_dir() else _rows(path, specs)
    if len(found) < SOURCES_MIN:
        raise InvalidRequest(
            f"{path} holds {len(found)} input{'' if len(found) == 1 else 's'}; calibration learns from some and "
            f"measures on others, so it needs at least {SOURCES_MIN} (better 20 or more), each in a file of its own or "
            "as the rows of one .npz"
        )
    if len(found) < SOURCES_FEW:
        log.warning("%d inputs are few: what they tell of sizes and fidelity is rough; use 20 or more", len(found))
    return found


def folds_of(sources: Sequence[Source]) -> int:
    """How many folds the sources are dealt into, source i into fold i modulo that."""
    return min(FOLDS, len(sources))


def dealt(sources: Sequence[Source]) -> list[Source]:
    """The same ones in the order of their use: neighbours, which may be frames of one film, share a fold (but for the
    two at its ends), and the first so many, however many that is, lie evenly among all."""
    folds = folds_of(sources)
    sizes = [len(range(fold, len(sources), folds)) for fold in range(folds)]
    found: list[Source | None] = [None] * len(sources)
    begin = 0
    for fold, size in enumerate(sizes):
        found[fold::folds] = [sources[begin + at] for at in _evenly(size)]
        begin += size
    return [source for source in found if source is not None]


def _evenly(count: int) -> list[int]:
    """0 … count − 1 in the order of their bits reversed (van der Corput 1935): 0, half, a quarter, three quarters …"""
    bits = max(count - 1, 0).bit_length()
    reversed_bits = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits))
    return [number for number in reversed_bits if number < count]


def spread(sources: Sequence[Source], count: int) -> list[tuple[int, Request]]:
    """At most `count` requests with the numbers of their sources: each one's first view, then each one's second …"""
    most = max(len(source.views) for source in sources)
    found = [
        (number, source.views[view])
        for view in range(most)
        for number, source in enumerate(sources)
        if view < len(source.views)
    ]
    return found[:count]


def _folder(path: Path, specs: Sequence[TensorSpec], contract: Contract | None) -> list[Source]:
    files = sorted(one for one in path.iterdir() if one.is_file() and not one.name.startswith("."))
    known: dict[str, Path] = {}
    for file in files:
        if file.suffix.lower() not in (*PICTURES, ".npz"):
            raise InvalidRequest(
                f"{file} is neither a picture ({', '.join(PICTURES)}) nor an .npz; the folder may hold nothing else"
            )
        if file.suffix.lower() != ".npz" and (size := file.stat().st_size) > PICTURE_BYTES_MAX:
            raise InvalidRequest(f"{file} has {size} bytes; a picture may have {PICTURE_BYTES_MAX}")
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest in known:
            log.warning("%s is the same file as %s and is not used", file, known[digest].name)
        else:
            known[digest] = file
    distinct = list(known.values())
    files = [distinct[number] for number in _used(len(distinct), path)]
    found = []
    for file in files:
        try:
            if file.suffix.lower() == ".npz":
                tensors = read_inputs(file)
                assert tensors is not None
                found.append(_request(file.name, tensors, specs))
            else:
                found.append(_picture(file, specs, contract, VIEWS_BYTES_MAX // len(files)))
        except IsthmusError as error:
            raise InvalidRequest(f"{file}: {error}") from error
    return found


def _used(count: int, path: Path) -> list[int]:
    """Which of so many inputs are used."""
    if count <= SOURCES_MAX:
        return list(range(count))
    log.warning("%s holds %d inputs; %d of them, evenly spread, are used", path, count, SOURCES_MAX)
    return [number * count // SOURCES_MAX for number in range(SOURCES_MAX)]


def _rows(path: Path, specs: Sequence[TensorSpec]) -> list[Source]:
    tensors = read_inputs(path)
    assert tensors is not None
    wanted = {spec.name: spec for spec in specs}
    sizes = {array.shape[0] if array.ndim else 0 for array in tensors.values()}
    batched = len(sizes) == 1 and all(
        name in wanted
        and array.ndim == len(wanted[name].shape) > 0
        and (wanted[name].shape[0] in (1, -1) or isinstance(wanted[name].shape[0], str))
        for name, array in tensors.items()
    )
    try:
        if not batched:
            return [_request(path.name, tensors, specs)]
        rows = _distinct(tensors, sizes.pop(), path)
        return [
            _request(f"row {row}", {name: array[row : row + 1] for name, array in tensors.items()}, specs)
            for row in (rows[number] for number in _used(len(rows), path))
        ]
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}: {error}") from error


def _distinct(tensors: Tensors, count: int, path: Path) -> list[int]:
    """The rows without those that are copies of one before: they would be learnt from and measured on at once, and
    make few inputs look like many."""
    known: dict[bytes, int] = {}
    for row in range(count):
        digest = hashlib.sha256()
        for array in tensors.values():  # each row has as many bytes of each
            digest.update(np.ascontiguousarray(array[row]).tobytes())
        known.setdefault(digest.digest(), row)
    if copies := count - len(known):
        log.warning("%s: %d of %d rows are copies of others and are not used", path, copies, count)
    return list(known.values())


def _request(name: str, tensors: Tensors, specs: Sequence[TensorSpec]) -> Source:
    bind_dims(specs, tensors)
    inputs = {spec.name: tensors[spec.name] for spec in specs}
    if inputs and not any(array.size for array in inputs.values()):
        raise InvalidRequest(f"{name}: its inputs are empty ({', '.join(inputs)}); nothing can be learnt from it")
    for spec in specs:
        if inputs[spec.name].dtype.kind == "f" and not np.isfinite(inputs[spec.name]).all():
            raise InvalidRequest(f"{name}: input {spec.name!r} has values that are not finite (NaN or infinity)")
    return Source(name=name, views=(lambda: inputs,))


# --- pictures ---------------------------------------------------------------------------------------------------------


def _picture(file: Path, specs: Sequence[TensorSpec], contract: Contract | None, bytes_max: int) -> Source:
    encoded = contract.encoded() if contract is not None else {}
    if not encoded:
        raise InvalidRequest(
            "the model's contract does not say how a picture becomes an input; add data.inputs.encoded to the contract "
            "beside its versions, or give .npz files with the inputs by name"
        )
    name, spec = next(iter(encoded.items()))
    others = golden_inputs([one for one in specs if one.name != name], {})
    data = file.read_bytes()
    first = {name: prepare_image(data, spec), **others}
    bind_dims(specs, first)
    crops = _crops(data, spec.crop, min(VIEWS_MAX, bytes_max // (3 * spec.crop**2)) - 1)
    small = msgspec.structs.replace(spec, resize=spec.crop)
    views: list[Request] = [_Prepared(data=_served(data, spec), spec=small, name=name, others=others)]
    views += [_Prepared(data=crop, spec=small, name=name, others=others) for crop in crops]
    return Source(name=file.name, views=views, picture=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """A view kept as 8-bit pixels at the model's own size: an eighth of the tensor's memory at most."""

    data: bytes
    spec: ImageSpec
    name: str
    others: Tensors

    def __call__(self) -> Tensors:
        return {self.name: prepare_image(self.data, self.spec), **self.others}


def _opened(data: bytes) -> Image.Image:
    """`data` was prepared once, so it is a picture that can be decoded."""
    picture = Image.open(io.BytesIO(data))
    ImageOps.exif_transpose(picture, in_place=True)
    return picture.convert("RGB")


def _bitmap(picture: Image.Image) -> bytes:
    out = io.BytesIO()
    picture.save(out, "BMP")
    return out.getvalue()


def _served(data: bytes, spec: ImageSpec) -> bytes:
    """The pixels that the model is shown when the picture comes with a request."""
    plain = msgspec.structs.replace(spec, mean=(0.0,) * spec.channels, std=(1.0,) * spec.channels, layout="NHWC")
    pixels = np.rint(prepare_image(data, plain)[0]).astype(np.uint8)
    return _bitmap(Image.fromarray(pixels if spec.channels == 3 else pixels[:, :, 0]))


def _crops(data: bytes, side: int, count: int) -> list[bytes]:
    """Squares of `_AREA_MIN` to all of the short side squared, every second one mirrored."""
    picture = _opened(data)
    whole = min(picture.size)
    found = []
    for number in range(1, count + 1):
        across, down = (number * step % 1.0 for step in _R2)
        area = _AREA_MIN + (1 - _AREA_MIN) * (number * _R1 % 1.0)
        size = whole * math.sqrt(area)
        left, top = across * (picture.width - size), down * (picture.height - size)
        box = (left, top, left + size, top + size)
        view = picture.resize((side, side), Image.Resampling.BILINEAR, box=box)
        if number % 2:
            view = view.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        found.append(_bitmap(view))
    return found
