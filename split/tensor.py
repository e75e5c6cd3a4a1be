"""Tensors by name, element type and shape: the words that ONNX, numpy and the Open Inference Protocol share.

Not a tensor library: values are numpy arrays everywhere. A dtype is written as the protocol writes it (`FP32`, `INT64`,
`BYTES` …); a dim is an int, or a str for a symbolic one (its name is kept), or -1 where nothing is known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from split.errors import InvalidRequest

Array = npt.NDArray[Any]
Tensors = dict[str, Array]
Dim = int | str

NUMPY_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BYTES": np.dtype("O"),
}
"""Protocol name → numpy type, little-endian. BF16 and 4-bit types have no numpy type and are refused by name."""

NAME_BYTES_MAX: Final = 4096
"""Of a tensor that travels, in UTF-8: exporters that write the path of a module stay far below."""
RANK_MAX: Final = 16
"""Of a tensor that travels."""

_NAMES: Final = {dtype: name for name, dtype in NUMPY_DTYPES.items()}


def dtype_name(dtype: np.dtype[Any]) -> str:
    """The protocol's name of a numpy type; InvalidRequest for one it does not have (strings count as BYTES)."""
    if dtype.kind in "SUO":
        return "BYTES"
    name = _NAMES.get(dtype) or _NAMES.get(dtype.newbyteorder("<"))
    if name is None:
        raise InvalidRequest(f"element type {dtype} is not supported; supported are {', '.join(NUMPY_DTYPES)}")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What a tensor is, without its values."""

    name: str
    dtype: str
    """A key of `NUMPY_DTYPES`."""
    shape: tuple[Dim, ...]

    def __post_init__(self) -> None:
        if self.dtype not in NUMPY_DTYPES:
            raise InvalidRequest(f"tensor {self.name!r}: element type {self.dtype} is not supported")

    @property
    def element_bytes(self) -> int:
        """Bytes of one element; 8 for BYTES, whose elements have no fixed size."""
        return NUMPY_DTYPES[self.dtype].itemsize

    def nbytes(self, dims: Mapping[str, int] | None = None) -> int:
        """Bytes of a dense tensor of this spec; symbolic dims are looked up in `dims` and count 1 where missing."""
        known = dims or {}
        sizes = (known.get(d, 1) if isinstance(d, str) else max(d, 1) if d == -1 else d for d in self.shape)
        return math.prod(sizes) * self.element_bytes

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of these sizes has the shape of this one."""
        return len(shape) == len(self.shape) and not any(map(_differs, self.shape, shape))

    def opened_for(self, shape: Sequence[int]) -> TensorSpec:
        """The same with those dims open (-1) that these sizes contradict; all of them where their number differs."""
        dims: tuple[Dim, ...] = (-1,) * len(shape)
        if len(shape) == len(self.shape):
            dims = tuple(-1 if _differs(want, got) else want for want, got in zip(self.shape, shape, strict=True))
        return TensorSpec(name=self.name, dtype=self.dtype, shape=dims)

    def refuse(self, array: Array) -> str | None:
        """Why `array` cannot stand for this tensor, as the end of a sentence; None when it can."""
        found = dtype_name(array.dtype)
        if found != self.dtype:
            return f"tensor {self.name!r} must have datatype {self.dtype}, got {found}"
        if not self.fits(array.shape):
            want = [d if isinstance(d, int) else -1 for d in self.shape]
            return f"tensor {self.name!r} must have shape {want}, got {list(array.shape)}"
        return None


def _differs(want: Dim, got: int) -> bool:
    return isinstance(want, int) and want != -1 and want != got


def spec_of(name: str, array: Array) -> TensorSpec:
    """The spec of a tensor that is there."""
    return TensorSpec(name=name, dtype=dtype_name(array.dtype), shape=tuple(array.shape))


def bind_dims(specs: Sequence[TensorSpec], tensors: Mapping[str, Array]) -> dict[str, int]:
    """Sizes of the symbolic dims of `specs` as these tensors have them.

    InvalidRequest when a tensor is missing, does not fit its spec, or two tensors disagree about a dim.
    """
    dims: dict[str, int] = {}
    for spec in specs:
        if spec.name not in tensors:
            wanted = ", ".join(repr(s.name) for s in specs)
            raise InvalidRequest(
                f"input {spec.name!r} is missing; expected {wanted}, got {', '.join(map(repr, tensors))}"
            )
        refusal = spec.refuse(tensors[spec.name])
        if refusal is not None:
            raise InvalidRequest(refusal)
        for dim, size in zip(spec.shape, tensors[spec.name].shape, strict=True):
            if isinstance(dim, str) and dims.setdefault(dim, size) != size:
                raise InvalidRequest(f"tensor {spec.name!r} has {size} for dim {dim!r}, another input has {dims[dim]}")
    return dims


def relative_difference(found: Array, expected: Array) -> float:
    """max|a − b| / max|b| over one tensor, b the expected one (DESIGN §1); integers and booleans: 0.0 or inf.

    0.0 where both are equal (NaN equals NaN at the same place), divided by 1 where max|b| is 0, inf where shapes,
    dtypes or the places of non-finite values differ.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return math.inf
    if found.dtype.kind not in "fc":
        return 0.0 if np.array_equal(found, expected) else math.inf
    if found.size == 0:
        return 0.0
    a, b = found.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(finite, np.isfinite(a)) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return math.inf
    if not finite.any():
        return 0.0
    worst = float(np.max(np.abs(a[finite] - b[finite])))
    scale = float(np.max(np.abs(b[finite])))
    return 0.0 if worst == 0.0 else worst / (scale or 1.0)


def worst_difference(found: Mapping[str, Array], expected: Mapping[str, Array], names: Sequence[str]) -> float:
    """The largest `relative_difference` over these outputs; inf where one is missing."""
    return max((relative_difference(found[n], expected[n]) if n in found else math.inf for n in names), default=0.0)
