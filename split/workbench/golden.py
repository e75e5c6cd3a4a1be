"""The requests a model is measured on: given ones, those beside the model, else built-in ones it accepts.

In the repository they lie in `MODELS/<name>/golden/`, beside the versions: one request a file, `.npz` with the inputs
by name, or a picture where the contract says how one becomes an input. One `.npz` may lie there without a folder, as
`MODELS/<name>/golden.npz`. A file that cannot be used is left out, with a warning.
"""

from __future__ import annotations

import hashlib
import io
import logging
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from PIL import Image

from split.codec.fidelity import MEASURES
from split.codec.golden import SAMPLE_ELEMENTS, SAMPLES_BYTES, golden_inputs
from split.codec.image import prepare_image
from split.errors import EngineFailed, InvalidModel, InvalidRequest
from split.graph.card import CARD_VERSION, ModelCard
from split.ids import CutId
from split.profiles.contract import Contract
from split.runtime.engine import Segment
from split.tensor import NUMPY_DTYPES, Tensors
from split.workbench.inputs import read_inputs

log = logging.getLogger(__name__)

REQUESTS_MAX: Final = 8
"""Each one costs a run of every cut's halves for every lossy codec."""

_PICTURES: Final = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """One request and the unsplit model's answer."""

    inputs: Tensors
    outputs: Tensors
    picture: bytes = b""
    """The encoded picture that one of the inputs was made from; empty when it came as a tensor."""


def golden_requests(
    card: ModelCard, whole: Segment, *, inputs: Sequence[Tensors] | None, contract: Contract | None
) -> tuple[Golden, ...]:
    """At least one request with its answer, at most `REQUESTS_MAX`.

    InvalidRequest when a given one does not fit the model; InvalidModel when there is none that can be used and the
    model takes none of the built-in ones.
    """
    if inputs:
        return tuple(Golden(inputs=dict(given), outputs=whole.run(given)) for given in inputs[:REQUESTS_MAX])
    unusable: list[str] = []
    found = tuple(_beside(card, whole, contract, unusable))
    return found or (_built_in(card, whole, unusable),)


def inputs_to_compare(
    card: ModelCard, whole: Segment, requests: Sequence[Golden], dims: Mapping[str, int]
) -> tuple[Tensors, bool]:
    """The golden inputs that a companion is compared by, and whether they must travel to it.

    The built-in ones of these dims (the same bits everywhere, so they need not) where the model takes them, else the
    smallest of `requests`.
    """
    built_in = golden_inputs(card.inputs, dims)
    try:
        whole.run(built_in)
    except (InvalidRequest, EngineFailed):
        return min((request.inputs for request in requests), key=_bytes_of), True
    return built_in, False


def inputs_beside(model_path: Path) -> Tensors | None:
    """The first golden request that came as tensors: it shows the sizes that the model usually works at.

    None without one. InvalidRequest when it cannot be read.
    """
    found = [path for path in _files_beside(model_path) if path.suffix.lower() == ".npz"]
    return read_inputs(found[0]) if found else None


def profile_basis(model_path: Path, contract: Contract | None, calibrated: Sequence[CutId] = ()) -> str:
    """16 hex digits over what a profile depends on besides model, runtime and device: the golden requests that lie
    beside the model, the pictures that the contract takes, the threads that it wants and what it asks of cuts, by which
    rules halves are cut, the measures of fidelity (which detections count), how runs are sampled; which cuts there are
    for a calibration's sake (`ModelCard.calibrated`). Reads the files.

    None stands for a contract without pictures and with threads by measurement. Requests that were given
    (`--inputs`) change nothing in it: whoever measured on them meant it, until the surroundings change.
    """
    rules = (CARD_VERSION, REQUESTS_MAX, sorted(MEASURES), SAMPLE_ELEMENTS, SAMPLES_BYTES)
    digest = hashlib.sha256(repr(rules).encode())
    digest.update(repr(contract.resource.threads if contract is not None else "auto").encode())
    asked = contract or Contract()  # what it asks decides which cuts there are
    private = sorted((spec.name, spec.privacy) for spec in asked.data.inputs if spec.privacy != "any")
    digest.update(repr((asked.resource.memory_bytes, asked.data.depth_min_ratio, asked.data.privacy, private)).encode())
    for name, spec in sorted((contract.encoded() if contract is not None else {}).items()):
        digest.update(repr((name, msgspec.to_builtins(spec))).encode())
    if asked.data.fidelity.boxes is not None:
        digest.update(asked.data.fidelity.name.encode())
    if calibrated:
        digest.update(repr(tuple(calibrated)).encode())
    for path in _files_beside(model_path)[:REQUESTS_MAX]:
        try:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            content = str(error.errno)
        digest.update(repr((path.name, content)).encode())
    return digest.hexdigest()[:16]


def write_golden(requests: Sequence[Golden], path: Path) -> None:
    """All requests in one `.npz`: `<number>/input/<name>` and `<number>/output/<name>`; BYTES as fixed-size strings."""
    arrays = {
        f"{number}/{side}/{name}": array.astype(np.bytes_) if array.dtype.kind == "O" else array
        for number, request in enumerate(requests)
        for side, tensors in (("input", request.inputs), ("output", request.outputs))
        for name, array in tensors.items()
    }
    fresh = path.with_name(path.name + ".new")
    with fresh.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    fresh.replace(path)


def read_golden_inputs(path: Path) -> Tensors | None:
    """Inputs of the first request in what `write_golden` wrote; None where there is no such file."""
    prefix = "0/input/"
    try:
        with np.load(path, allow_pickle=False) as arrays:
            found = {key.removeprefix(prefix): arrays[key] for key in arrays.files if key.startswith(prefix)}
    except (OSError, ValueError, zipfile.BadZipFile):  # not there, or damaged
        return None
    return {name: value.astype(object) if value.dtype.kind == "S" else value for name, value in found.items()}


def typical_jpeg() -> bytes:
    """A synthetic photo, 640 × 480, about 60 KB: what decoding costs where no picture of the user's is at hand."""
    y, x = np.mgrid[0:480, 0:640]
    periods = ((37, 53, 911), (61, 29, 1709), (23, 71, 613))
    waves = [128 + 60 * np.sin(x / a + y / b) + 40 * np.sin(x * y / c) for a, b, c in periods]
    out = io.BytesIO()
    Image.fromarray(np.stack(waves, axis=-1).clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=85)
    return out.getvalue()


def picture_beside(model_path: Path) -> Path | None:
    """The first golden request beside the model that came as a picture; None without one."""
    return next((path for path in _files_beside(model_path) if path.suffix.lower() in _PICTURES), None)


def _files_beside(model_path: Path) -> list[Path]:
    """`golden.npz` and what lies in `golden/`, beside the model's versions; nothing where it is in no repository."""
    version = model_path.absolute().parent
    if not version.name.isdigit():
        return []
    folder, single = version.parent / "golden", version.parent / "golden.npz"
    files = [single] if single.is_file() else []
    if folder.is_dir():
        files += [path for path in sorted(folder.iterdir()) if path.suffix.lower() in (".npz", *_PICTURES)]
    return files


def _beside(card: ModelCard, whole: Segment, contract: Contract | None, unusable: list[str]) -> Iterator[Golden]:
    """What lies beside the model's versions and can be used; `unusable` gets a sentence for each other file."""
    for path in _files_beside(Path(card.path))[:REQUESTS_MAX]:
        try:
            picture = b"" if path.suffix.lower() == ".npz" else path.read_bytes()
            inputs = _with_picture(card, contract, picture) if picture else read_inputs(path)
            if inputs is None:
                raise InvalidRequest("the contract does not say how a picture becomes an input (data.inputs.encoded)")
            yield Golden(inputs=inputs, outputs=whole.run(inputs), picture=picture)
        except (InvalidRequest, EngineFailed, OSError) as error:
            unusable.append(f"{path} is not used as a golden request: {error}")
            log.warning(unusable[-1])


def _with_picture(card: ModelCard, contract: Contract | None, picture: bytes) -> Tensors | None:
    """The model's inputs with the picture in its place; None when the contract has none for pictures."""
    images = contract.encoded() if contract is not None else {}
    for name, spec in images.items():
        others = [other for other in card.inputs if other.name != name]
        return {name: prepare_image(picture, spec), **golden_inputs(others, {})}
    return None


def _built_in(card: ModelCard, whole: Segment, unusable: Sequence[str]) -> Golden:
    noise = golden_inputs(card.inputs, {})
    zeros = {name: np.zeros_like(array) for name, array in noise.items() if array.dtype != NUMPY_DTYPES["BYTES"]}
    ones = {name: np.ones_like(array) for name, array in zeros.items()}
    why = ""
    for inputs in (noise, noise | zeros, noise | ones):
        try:
            return Golden(inputs=inputs, outputs=whole.run(inputs))
        except (InvalidRequest, EngineFailed) as error:
            why = why or str(error)
    raise InvalidModel(
        f"{card.path} takes none of the built-in test inputs ({why}); give it a real request: lay a golden.npz, or the "
        "folder golden/ with such files, beside the model's versions, or name one with --inputs FILE.npz"
        + "".join(f"; {sentence}" for sentence in unusable[:1])
    )


def _bytes_of(tensors: Tensors) -> int:
    return sum(int(array.nbytes) for array in tensors.values())
