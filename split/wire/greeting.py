"""Reading the first message of a peer about which nothing is known yet: its Hello, or why there will be none."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from split.errors import CompanionRefused, RemoteProtocolError
from split.wire.frames import Buffer, decode_metadata
from split.wire.limits import MAX_HELLO_BYTES, MAX_MESSAGE_BYTES, MIN_WINDOW_BYTES
from split.wire.messages import LANES, PROTOCOL_MAJOR, Hello, Refused

_SESSION: Final = re.compile("[0-9a-f]{32}")


class VersionMismatch(RemoteProtocolError):
    """The peer's major version is another one; an update mends it, trying again does not."""


class _Version(msgspec.Struct, tag="hello", tag_field="t"):
    """The one field of a Hello that every major version keeps, so that a stranger can be told why."""

    major: int


_version_decoder: Final = msgspec.msgpack.Decoder(_Version)


def read_hello(metadata: Buffer) -> Hello:
    """The Hello in the first message's metadata, its fields checked.

    VersionMismatch for another major version, whatever the rest looks like; CompanionRefused with the peer's own
    reason; RemoteProtocolError for anything else.
    """
    try:
        version = _version_decoder.decode(metadata)
    except (msgspec.MsgspecError, RecursionError):
        version = None
    if version is not None and version.major != PROTOCOL_MAJOR:
        raise VersionMismatch(
            f"the peer speaks wire protocol {version.major}, this side speaks {PROTOCOL_MAJOR}: "
            "update the older of the two"
        )
    message = decode_metadata(metadata)
    if isinstance(message, Refused):
        raise CompanionRefused(message.code, message.message)
    if not isinstance(message, Hello):
        raise RemoteProtocolError(f"the first message must be a Hello, got {type(message).__name__}")
    _check(message)
    return message


def _check(hello: Hello) -> None:
    if not MAX_HELLO_BYTES <= hello.max_message_bytes <= MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(
            f"a Hello's max_message_bytes must be {MAX_HELLO_BYTES} to {MAX_MESSAGE_BYTES}, "
            f"got {hello.max_message_bytes}"
        )
    if hello.window_bytes and not MIN_WINDOW_BYTES <= hello.window_bytes <= MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(
            f"a Hello's window_bytes must be 0 or {MIN_WINDOW_BYTES} to {MAX_MESSAGE_BYTES}, got {hello.window_bytes}"
        )
    if (hello.lane == "") != (hello.session == "") or hello.lane not in LANES:
        raise RemoteProtocolError(
            f"a Hello names a session and one of its lanes {LANES[1:]}, or neither, got {hello.session[:40]!r} "
            f"and {hello.lane[:40]!r}"
        )
    if hello.session and not _SESSION.fullmatch(hello.session):
        raise RemoteProtocolError(f"a Hello's session must be 32 hex digits, got {hello.session[:40]!r}")
