"""Bodies of the HTTP API: read one within its limits in bytes and seconds; gzip and deflate both ways."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from typing import Final, Literal

import numpy as np
from aiohttp import web

from agent.http_guard import HttpRefusal
from agent.room import Holding
from split.errors import TooLarge
from split.oip.tensors import Buffer

Encoding = Literal["gzip", "deflate"]

_ALIGNMENT: Final = 16
"""What malloc gives; every element type of the protocol is content with 8."""
_PACK_LEVEL: Final = 1
"""Float tensors hardly shrink more at higher levels, which take five times as long."""
_WBITS: Final[dict[Encoding, int]] = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""`deflate` is the zlib format (RFC 9110 § 8.4.1.2)."""


async def read_body(
    request: web.BaseRequest, holding: Holding, *, limit_bytes: int, timeout_s: float, json_bytes: int = 0
) -> memoryview:
    """The whole body as it came, its bytes held by `holding` (Overloaded where there is no room).

    `json_bytes`: where binary data begins; it is laid where its elements are aligned.
    TooLarge over `limit_bytes`, before reading where the length is announced; HttpRefusal 408 when the body is not
    there after `timeout_s`, 400 when it is damaged.
    """
    length = request.content_length
    if length is not None and length > limit_bytes:
        raise _too_large(length, limit_bytes)
    holding.made(length or 0)
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    try:
        async with asyncio.timeout(timeout_s):
            if length is None:
                return await _read_chunked(request, holding, limit_bytes)
            return await _read_sized(request, length, json_bytes)
    except TimeoutError:
        raise HttpRefusal(408, f"the body did not arrive within {timeout_s:g} s") from None
    except web.RequestPayloadError:
        raise HttpRefusal(400, "the body is damaged: its chunks or its length are wrong") from None


async def _read_sized(request: web.BaseRequest, length: int, json_bytes: int) -> memoryview:
    start = -json_bytes % _ALIGNMENT
    # np.empty: pages that never arrive are never touched, whatever length was announced.
    body = np.empty(start + length, np.uint8).data[start:]
    at = 0
    while chunk := await request.content.readany():
        body[at : at + len(chunk)] = chunk
        at += len(chunk)
    if at != length:
        raise HttpRefusal(400, f"the body ended after {at} of {length} bytes")
    return body


async def _read_chunked(request: web.BaseRequest, holding: Holding, limit_bytes: int) -> memoryview:
    body = bytearray()
    while chunk := await request.content.readany():
        if len(body) + len(chunk) > limit_bytes:
            raise _too_large(len(body) + len(chunk), limit_bytes)
        holding.made(len(body) + len(chunk))
        body += chunk
    return memoryview(body)


def body_encoding(request: web.BaseRequest) -> Encoding | None:
    """How the body is packed; HttpRefusal 415 for an encoding that is not offered."""
    match request.headers.get("Content-Encoding", "identity").strip().lower():
        case "identity" | "":
            return None
        case "gzip":
            return "gzip"
        case "deflate":
            return "deflate"
        case _:
            raise HttpRefusal(415, "Content-Encoding must be one of gzip, deflate, identity, and only one")


async def unpack(body: memoryview, encoding: Encoding, limit_bytes: int) -> memoryview:
    """The body unpacked; TooLarge as soon as it has more than `limit_bytes`, HttpRefusal 400 when it is damaged."""
    return await asyncio.to_thread(_unpack, body, encoding, limit_bytes)


def _unpack(body: memoryview, encoding: Encoding, limit_bytes: int) -> memoryview:
    unpacker = zlib.decompressobj(_WBITS[encoding])
    try:
        plain = unpacker.decompress(body, limit_bytes + 1)
    except zlib.error as error:
        raise HttpRefusal(400, f"the body is not {encoding}: {error}") from None
    if len(plain) > limit_bytes:
        raise TooLarge(f"the body unpacks to more than {limit_bytes} bytes; send less at once")
    if not unpacker.eof or unpacker.unused_data:
        raise HttpRefusal(400, f"the body is not one whole {encoding} stream")
    return memoryview(plain)


def wanted_encoding(request: web.BaseRequest) -> Encoding | None:
    """The encoding of the answer, when the caller names just this one.

    A list (`gzip, deflate, br`, the default of many clients) says what a client can, not what it wants; packing 600 KB
    of floats takes twenty times as long as sending them over loopback, so a list is answered plain (RFC 9110 § 12.5.3).
    """
    match request.headers.get("Accept-Encoding", "").strip().lower():
        case "gzip":
            return "gzip"
        case "deflate":
            return "deflate"
        case _:
            return None


async def pack(buffers: Sequence[Buffer], encoding: Encoding) -> bytes:
    """All buffers as one packed body."""
    return await asyncio.to_thread(_pack, buffers, encoding)


def _pack(buffers: Sequence[Buffer], encoding: Encoding) -> bytes:
    packer = zlib.compressobj(_PACK_LEVEL, wbits=_WBITS[encoding])
    return b"".join([*map(packer.compress, buffers), packer.flush()])


def _too_large(found: int, limit_bytes: int) -> TooLarge:
    return TooLarge(f"the body has {found} bytes or more, at most {limit_bytes} are accepted")
