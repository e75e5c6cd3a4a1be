"""Elements of one tensor between the Open Inference Protocol and numpy: JSON `data` and the binary tensor extension.

Pure. Every count and length is checked with Python integers before anything is allocated. Binary tensors are views into
the body where they are aligned; JSON is strict: no NaN, no Infinity, no booleans for numbers, no number out of range.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from split.errors import InvalidRequest
from split.tensor import NUMPY_DTYPES, Array, dtype_name

Buffer = bytes | bytearray | memoryview

MAX_RANK: Final = 32
"""Dims of one tensor; numpy ends at 64, no model here comes near."""
MAX_ELEMENTS: Final = 1 << 40
"""Product of the non-zero dims: over any body limit, and far from overflow in numpy's own sums."""

_LENGTH: Final = struct.Struct("<I")


def shown(name: object) -> str:
    """A caller's word or number as it may stand in an error text: at most 64 characters, words quoted."""
    text = str(name)
    short = text if len(text) <= 64 else text[:61] + "..."
    return repr(short) if isinstance(name, str) else short


def check_shape(name: str, shape: Sequence[int]) -> int:
    """Elements of a tensor of this shape; InvalidRequest for a negative dim, too many dims or an absurd product."""
    if len(shape) > MAX_RANK:
        raise InvalidRequest(f"tensor {shown(name)}: shape has {len(shape)} dims, at most {MAX_RANK} are accepted")
    for dim in shape:
        if dim < 0:
            raise InvalidRequest(
                f"tensor {shown(name)}: shape {list(shape)} has a negative dim; "
                "a request gives the real size of each dim"
            )
    if math.prod(dim for dim in shape if dim) > MAX_ELEMENTS:
        raise InvalidRequest(
            f"tensor {shown(name)}: shape {list(shape)} names more elements than any request can carry"
        )
    return math.prod(shape)


def numpy_dtype(name: str, datatype: str) -> np.dtype[Any]:
    """The numpy type of a protocol datatype; InvalidRequest naming the supported ones."""
    dtype = NUMPY_DTYPES.get(datatype)
    if dtype is None:
        raise InvalidRequest(
            f"tensor {shown(name)}: datatype {shown(datatype)} is not supported; "
            f"supported are {', '.join(NUMPY_DTYPES)}"
        )
    return dtype


def from_binary(name: str, datatype: str, shape: tuple[int, ...], body: memoryview) -> Array:
    """Tensor out of exactly its bytes (little-endian, row-major). A read-only view where aligned, else a copy."""
    dtype = numpy_dtype(name, datatype)
    count = check_shape(name, shape)
    if datatype == "BYTES":
        return _objects(bytes_elements(name, body, count), shape)
    if body.nbytes != count * dtype.itemsize:
        raise InvalidRequest(
            f"tensor {shown(name)}: shape {list(shape)} of {datatype} takes {count * dtype.itemsize} bytes, "
            f"got {body.nbytes}"
        )
    if datatype == "BOOL" and count and np.frombuffer(body, np.uint8).max() > 1:
        raise InvalidRequest(f"tensor {shown(name)}: a BOOL element must be the byte 0 or 1, got another value")
    flat: Array = np.frombuffer(body, dtype) if count else np.empty(0, dtype)
    if not flat.flags.aligned:
        flat = flat.copy()
    return flat.reshape(shape)


def bytes_elements(name: str, body: memoryview, count: int) -> list[bytes]:
    """`count` BYTES elements (u32 little-endian length, then the bytes) that fill `body` exactly."""
    if count * _LENGTH.size > body.nbytes:
        raise InvalidRequest(f"tensor {shown(name)}: {count} BYTES elements do not fit into {body.nbytes} bytes")
    elements: list[bytes] = []
    at = 0
    for index in range(count):
        if at + _LENGTH.size > body.nbytes:
            raise InvalidRequest(f"tensor {shown(name)}: element {index} of {count} has no length, the buffer ended")
        (size,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size
        if size > body.nbytes - at:
            raise InvalidRequest(
                f"tensor {shown(name)}: element {index} length exceeds buffer "
                f"({size} bytes named, {body.nbytes - at} left)"
            )
        elements.append(bytes(body[at : at + size]))
        at += size
    if at != body.nbytes:
        raise InvalidRequest(
            f"tensor {shown(name)}: {body.nbytes - at} bytes follow the last of {count} BYTES elements; "
            "shape and data disagree"
        )
    return elements


def from_json(name: str, datatype: str, shape: tuple[int, ...], data: object) -> Array:
    """Tensor out of a decoded JSON `data` array, flat in row-major order or nested exactly as `shape`."""
    dtype = numpy_dtype(name, datatype)
    count = check_shape(name, shape)
    if datatype == "FP16":
        raise InvalidRequest(f"tensor {shown(name)}: FP16 has no JSON form; send it as binary data (binary_data_size)")
    if not isinstance(data, list):
        raise InvalidRequest(f"tensor {shown(name)}: data must be an array, got {_json_type(data)}")
    flat = _flatten(name, shape, data)
    if len(flat) != count:
        raise InvalidRequest(f"tensor {shown(name)}: shape {list(shape)} needs {count} elements, data has {len(flat)}")
    match dtype.kind:
        case "b":
            _only(name, datatype, flat, {bool}, "true or false")
            return np.array(flat, dtype).reshape(shape)
        case "i" | "u":
            _only(name, datatype, flat, {int}, "an integer")
            bounds = np.iinfo(dtype)
            for value in (min(flat), max(flat)) if flat else ():
                if not bounds.min <= value <= bounds.max:
                    raise InvalidRequest(
                        f"tensor {shown(name)}: {shown(value)} is out of range for {datatype} "
                        f"({bounds.min} to {bounds.max})"
                    )
            return np.array(flat, dtype).reshape(shape)
        case "f":
            _only(name, datatype, flat, {int, float}, "a number")
            try:
                with np.errstate(over="ignore"):
                    array = np.array(flat, np.float64).astype(dtype)
            except OverflowError:
                array = np.array([math.inf], dtype)
            if not np.isfinite(array).all():
                raise InvalidRequest(f"tensor {shown(name)}: a value is out of range for {datatype}")
            return array.reshape(shape)
        case _:
            _only(name, datatype, flat, {str}, "a string")
            return _objects([text.encode() for text in flat], shape)


def to_binary(array: Array) -> memoryview:
    """The tensor's bytes as the binary extension carries them; a view where it is contiguous and little-endian."""
    if array.dtype.kind in "SUO":
        parts: list[bytes] = []
        for element in _bytes_of(array):
            parts += (_LENGTH.pack(len(element)), element)
        return memoryview(b"".join(parts))
    little = np.ascontiguousarray(array, NUMPY_DTYPES[dtype_name(array.dtype)])
    return little.reshape(-1).view(np.uint8).data


def to_json(name: str, array: Array) -> list[Any]:
    """The tensor as flat JSON data; InvalidRequest, advising binary, for what JSON cannot carry exactly."""
    advice = "ask for it as binary data (parameters.binary_data true on this output, or binary_data_output true)"
    if array.dtype == np.float16:
        raise InvalidRequest(f"output {shown(name)}: FP16 has no JSON form; {advice}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise InvalidRequest(f"output {shown(name)} holds NaN or infinity, which JSON cannot carry; {advice}")
    if array.dtype.kind in "SUO":
        try:
            return [element.decode() for element in _bytes_of(array)]
        except UnicodeDecodeError:
            raise InvalidRequest(f"output {shown(name)} holds bytes that are not UTF-8 text; {advice}") from None
    values: list[Any] = array.reshape(-1).tolist()
    return values


def _flatten(name: str, shape: tuple[int, ...], data: list[Any]) -> list[Any]:
    """One flat list; nested lists must be nested as `shape` (and are told apart by their first element)."""
    found: list[int] = [len(data)]
    level = data
    while level and type(level[0]) is list:
        width = len(level[0])
        if len(found) == len(shape) or not all(type(row) is list and len(row) == width for row in level):
            raise InvalidRequest(
                f"tensor {shown(name)}: nested data is ragged or deeper than shape {list(shape)}; "
                "send it flat or nested as shape"
            )
        level = list(itertools.chain.from_iterable(level))
        found.append(width)
    if len(found) == 1:
        return level
    # An empty level ends the nesting early: [[], []] stands for [2, 0] and for [2, 0, 3].
    if tuple(found) != shape and not (found[-1] == 0 and tuple(found) == shape[: len(found)]):
        raise InvalidRequest(
            f"tensor {shown(name)}: data is nested as {found}, shape says {list(shape)}; "
            "send it flat or nested as shape"
        )
    return level


def _only(name: str, datatype: str, flat: list[Any], allowed: set[type], wanted: str) -> None:
    if set(map(type, flat)) <= allowed:
        return
    at, value = next((at, value) for at, value in enumerate(flat) if type(value) not in allowed)
    raise InvalidRequest(
        f"tensor {shown(name)}: an element of {datatype} must be {wanted}, got {_json_type(value)} at index {at}"
    )


def _json_type(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return f"the number {shown(value)}"
        case str():
            return f"the string {shown(value)}"
        case list():
            return "an array"
        case _:
            return "an object"


def _objects(elements: list[bytes], shape: tuple[int, ...]) -> Array:
    array: Array = np.empty(len(elements), object)
    array[:] = elements
    return array.reshape(shape)


def _bytes_of(array: Array) -> list[bytes]:
    return [element if isinstance(element, bytes) else str(element).encode() for element in array.reshape(-1).tolist()]
