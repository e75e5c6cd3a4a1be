"""zstd around the bytes of one tensor, kept only where it pays; unpacking is bounded before anything is allocated.

Level 1: on activations level 3 is not smaller and half as fast, and byte shuffling does not help sparse ones.
"""

from __future__ import annotations

import threading
from typing import Final

import zstandard

from split.errors import CodecError

LEVEL: Final = 1
PROBE_BYTES: Final = 64 * 1024
"""Of a large tensor this much from its middle is tried first, so that dense data costs little."""
SAVING_MIN: Final = 0.05
"""Share of the probe that must be saved before the whole is packed: less does not pay for the time on both sides."""

_own = threading.local()


def _compressor() -> zstandard.ZstdCompressor:
    """One per thread: making one costs more than packing a small tensor, and it is not thread-safe."""
    if not hasattr(_own, "compressor"):
        _own.compressor = zstandard.ZstdCompressor(level=LEVEL)
    return _own.compressor  # type: ignore[no-any-return]  # a thread-local has no declared attributes


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_own, "decompressor"):
        _own.decompressor = zstandard.ZstdDecompressor()
    return _own.decompressor  # type: ignore[no-any-return]  # as above


def pack(plain: bytes | memoryview) -> bytes | None:
    """`plain` as one zstd frame that states its content size; None where that is not smaller."""
    view = memoryview(plain)
    if view.nbytes > 4 * PROBE_BYTES:
        start = (view.nbytes - PROBE_BYTES) // 2
        if len(_compressor().compress(view[start : start + PROBE_BYTES])) > (1 - SAVING_MIN) * PROBE_BYTES:
            return None
    packed = _compressor().compress(view)
    return packed if len(packed) < view.nbytes else None


def unpack(packed: memoryview, *, plain_bytes: int, name: str) -> bytes:
    """The `plain_bytes` bytes inside `packed`; CodecError when the frame states or holds anything else (bombs too)."""
    try:
        stated = zstandard.get_frame_parameters(packed).content_size
        if stated != plain_bytes:
            raise CodecError(f"tensor {name!r}: its zstd frame states {stated} bytes, its header {plain_bytes}")
        plain = _decompressor().decompress(packed, max_output_size=plain_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"tensor {name!r}: its zstd frame is damaged ({error})") from error
    if len(plain) != plain_bytes:
        raise CodecError(f"tensor {name!r}: its zstd frame holds {len(plain)} bytes, its header says {plain_bytes}")
    return plain
