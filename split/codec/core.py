"""The compiled core of codec `klt` (`native/*.c`), if there is one that fits: `core()` gives it, or the fallback.

`scripts/build_native.py` compiles it when the package is built or installed; `ISTHMUS_NATIVE=0` in the environment
does without it. Both make and read the same bits, so nothing but time depends on which it is.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sysconfig
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from split.codec import laplace
from split.codec.fallback import Fallback
from split.codec.transform import Core, Level, Order, Shape, dct
from split.errors import CodecError
from split.tensor import Array

ABI: Final = 2
"""`KLT_ABI` of native/klt.h."""
VARIABLE: Final = "ISTHMUS_NATIVE"
LIBRARY: Final = Path(__file__).with_name(f"_native.{sysconfig.get_platform()}.so")
_TOO_LARGE: Final = -3
_BYTES_MAX: Final = 8
"""Of one coefficient in a stream: an escape has 14 + 5 + 20 + 1 bits. Rounded up."""
_STATE_BYTES: Final = 4

log = logging.getLogger(__name__)


class _Tables(Structure):
    _fields_ = [("starts", c_void_p), ("groups", c_void_p), ("low_bits", c_void_p)]


class _Order(Structure):
    _fields_ = [
        ("positions", c_int64),
        ("blocks", c_int64),
        ("components", c_int64),
        ("first", c_void_p),
        ("component", c_void_p),
        ("table", c_void_p),
    ]


class _Map(Structure):
    _fields_ = [
        ("batch", c_int64),
        ("height", c_int64),
        ("width", c_int64),
        ("components", c_int64),
        ("rows", c_int64),
        ("columns", c_int64),
        ("dct_rows", c_void_p),
        ("dct_columns", c_void_p),
    ]


class Native:
    """`Core` by the compiled library. Calls release the interpreter's lock."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.name = f"compiled (ABI {ABI})"
        self.working = 3  # coefficients and map, or map and tensor; small tensors take some kilobytes more
        arrays = (c_void_p,)
        self._forward = library.klt_forward
        self._forward.argtypes = (POINTER(_Map), *arrays * 2, c_float, *arrays * 4)
        self._forward.restype = c_int32
        self._inverse = library.klt_inverse
        self._inverse.argtypes = (POINTER(_Map), c_void_p, c_float, *arrays * 2)
        self._inverse.restype = None
        self._pack = library.klt_pack
        self._pack.argtypes = (POINTER(_Tables), POINTER(_Order), *arrays * 2, c_int64)
        self._pack.restype = c_int64
        self._unpack = library.klt_unpack
        self._unpack.argtypes = (POINTER(_Tables), POINTER(_Order), c_void_p, c_int64, c_void_p)
        self._unpack.restype = c_int32
        tables = laplace.tables()
        self._tables = _Tables(
            _address(tables.starts, np.uint16), _address(tables.groups, np.uint8), _address(tables.low_bits, np.uint8)
        )

    def forward(self, shape: Shape, level: Level, found: Array) -> tuple[Array, bool, bool]:
        """As `Core.forward`."""
        quantised = np.empty((shape.positions, shape.blocks, shape.components), np.int32)
        flags = self._forward(
            byref(_map(shape)),
            _address(found, np.float32),
            _address(level.offset, np.float32),
            level.inverse_step,
            _address(level.rounding, np.float32),
            _address(level.kept, np.int32),
            _address(level.spilled, np.int32),
            _address(quantised, np.int32),
        )
        return quantised, bool(flags & 1), bool(flags & 2)

    def inverse(self, shape: Shape, level: Level, quantised: Array) -> Array:
        """As `Core.inverse`."""
        found = np.empty((shape.batch, shape.height, shape.width, shape.components), np.float32)
        self._inverse(
            byref(_map(shape)),
            _address(quantised, np.int32),
            level.step,
            _address(level.bias, np.float32),
            _address(found, np.float32),
        )
        return found

    def pack(self, order: Order, quantised: Array) -> bytes:
        """As `Core.pack`."""
        blocks = quantised.shape[1]
        stream = np.empty(order.count * blocks * _BYTES_MAX + _STATE_BYTES, np.uint8)
        length = self._pack(
            byref(self._tables),
            byref(_order(order, blocks)),
            _address(quantised, np.int32),
            _address(stream, np.uint8),
            stream.size,
        )
        if length == _TOO_LARGE:
            raise CodecError(f"a quantised coefficient is above {laplace.LARGEST}; this codec does not carry it")
        assert length > 0, "no coefficient takes more than _BYTES_MAX"
        return stream[stream.size - length :].tobytes()

    def unpack(self, order: Order, stream: memoryview, blocks: int) -> Array | None:
        """As `Core.unpack`."""
        quantised = np.zeros((order.coded.shape[0], blocks, order.coded.shape[1]), np.int32)
        data = np.frombuffer(stream, np.uint8)
        failed = self._unpack(
            byref(self._tables),
            byref(_order(order, blocks)),
            _address(data, np.uint8),
            data.size,
            _address(quantised, np.int32),
        )
        return None if failed else quantised


def _address(array: Array, dtype: Any) -> int:
    assert array.dtype == dtype, f"the core reads {dtype}, not {array.dtype}"
    assert array.flags.c_contiguous
    return array.ctypes.data


def _map(shape: Shape) -> _Map:
    return _Map(
        shape.batch,
        shape.height,
        shape.width,
        shape.components,
        shape.rows,
        shape.columns,
        _address(dct(shape.rows), np.float32),
        _address(dct(shape.columns), np.float32),
    )


def _order(order: Order, blocks: int) -> _Order:
    positions, components = order.coded.shape
    return _Order(
        positions,
        blocks,
        components,
        _address(order.first, np.int32),
        _address(order.component, np.uint16),
        _address(order.table, np.uint8),
    )


@cache
def load(path: Path = LIBRARY) -> Native | str:
    """The compiled core at `path`, or why there is none, as a sentence."""
    if not path.exists():
        return f"no compiled core for this platform was built ({path.name}): python scripts/build_native.py makes it"
    try:
        library = ctypes.CDLL(str(path))
        library.klt_abi.argtypes = ()
        library.klt_abi.restype = c_int32
        found = library.klt_abi()
    except (OSError, AttributeError) as error:
        return f"the compiled core {path.name} cannot be loaded ({error}): python scripts/build_native.py makes it anew"
    if found != ABI:
        return f"the compiled core {path.name} has ABI {found}, not {ABI}: python scripts/build_native.py makes it anew"
    return Native(library)


@cache
def core() -> Core:
    """What this process codes with; says once in the log when that is plain Python and nobody asked for it."""
    found = _chosen()
    if isinstance(found, str):
        if os.environ.get(VARIABLE) != "0":
            log.warning("codec klt runs in plain Python, ten to thirty times slower: %s", found)
        return Fallback()
    return found


def core_in_use() -> str:
    """Which core a process with this environment codes with, and why where it is not the compiled one."""
    found = _chosen()
    return f"{Fallback.name}: {found}" if isinstance(found, str) else found.name


def _chosen() -> Native | str:
    return f"{VARIABLE}=0 in the environment" if os.environ.get(VARIABLE) == "0" else load()
