"""The elements of one tensor ↔ the plain bytes that stand for them without loss, shared by both payload formats."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from split.errors import CodecError
from split.tensor import NUMPY_DTYPES, Array

Buffer = bytes | bytearray | memoryview

STRING_OVERHEAD_BYTES: Final = 64
"""What one BYTES element costs in memory beside its bytes (object, pointer): counted against `max_bytes`."""


ELEMENTS_MAX: Final = 2**48


def check_elements(name: str, dims: tuple[int, ...]) -> None:
    """CodecError for dims, an empty tensor's too, that numpy should not see."""
    if math.prod(max(dim, 1) for dim in dims) > ELEMENTS_MAX:
        raise CodecError(f"tensor {name!r} has shape {list(dims)}: more than {ELEMENTS_MAX} elements")


def bytes_of(array: Array) -> list[Buffer]:
    """The memory of a C-contiguous array, not copied."""
    return [array.reshape(-1).view(np.uint8).data] if array.size else []


def array_of(name: str, dtype: str, dims: tuple[int, ...], plain: Buffer) -> Array:
    """A tensor of no BYTES from exactly its bytes; a view of them where they lie aligned. CodecError for a BOOL that is
    neither 0 nor 1."""
    flat = np.frombuffer(plain, np.uint8)
    if dtype == "BOOL" and flat.size and flat.max() > 1:
        raise CodecError(f"tensor {name!r}: a BOOL element is neither 0 nor 1")
    array = flat.view(NUMPY_DTYPES[dtype]).reshape(dims)
    return array if array.flags.aligned else array.copy()


def join_strings(name: str, array: Array) -> bytes:
    """Each element as u32 length and bytes; CodecError for one that is neither bytes nor str."""
    parts: list[bytes] = []
    for element in array.reshape(-1).tolist():
        if isinstance(element, str):
            element = element.encode()
        if not isinstance(element, bytes | bytearray | memoryview):
            raise CodecError(f"tensor {name!r}: a BYTES element must be bytes or str, got {type(element).__name__}")
        if len(element) > 0xFFFFFFFF:
            raise CodecError(f"tensor {name!r}: a BYTES element has {len(element)} bytes; at most 4294967295 travel")
        parts += (len(element).to_bytes(4, "little"), bytes(element))
    return b"".join(parts)


def split_strings(name: str, dims: tuple[int, ...], size: int, plain: memoryview) -> Array:
    """The inverse: `size` elements, as many as `dims` have. CodecError unless they are exactly the bytes."""
    elements: list[bytes] = []
    at = 0
    for _ in range(size):
        if at + 4 > plain.nbytes:
            raise CodecError(f"tensor {name!r} ends within the length of element {len(elements)}")
        end = at + 4 + int.from_bytes(plain[at : at + 4], "little")
        if end > plain.nbytes:
            raise CodecError(f"tensor {name!r}: element {len(elements)} ends at {end}, its bytes at {plain.nbytes}")
        elements.append(bytes(plain[at + 4 : end]))
        at = end
    if at != plain.nbytes:
        raise CodecError(f"tensor {name!r}: {plain.nbytes - at} bytes follow its last element")
    array = np.empty(size, dtype=object)
    array[:] = elements
    return array.reshape(dims)
