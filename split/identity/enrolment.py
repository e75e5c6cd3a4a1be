"""What device and companion say to each other at enrolment: one JSON line each way per connection, over TLS 1.3.

Two connections. In the first the device asks for the authority's certificate, which is public, and takes it only if it
is the one that its token pins. In the second, which OpenSSL verifies against that authority alone, it sends the token's
secret and its request. So nothing secret is sent before the other end has proved who it is. No socket in here.
"""

from __future__ import annotations

from typing import Final

import msgspec

from split.errors import IdentityError

MAX_LINE_BYTES: Final = 16 << 10
"""A request or a chain of two certificates has 2 KB."""
CONVERSATION_S: Final = 10.0
"""For one connection, from the accepted socket to the last byte, at either end."""


class _Line(msgspec.Struct, frozen=True, kw_only=True, tag_field="t"):
    pass


class AskAuthority(_Line, tag="ask-authority", frozen=True, kw_only=True):
    """Device → companion."""


class AuthorityIs(_Line, tag="authority-is", frozen=True, kw_only=True):
    """Companion → device."""

    authority: str
    """PEM."""


class Enrol(_Line, tag="enrol", frozen=True, kw_only=True):
    """Device → companion."""

    secret: bytes
    """The token's."""
    request: str
    """PKCS#10, PEM; whatever subject it names, the companion sets the name."""


class Enrolled(_Line, tag="enrolled", frozen=True, kw_only=True):
    """Companion → device."""

    name: str
    chain: str
    """PEM, the device's certificate first."""


class NotEnrolled(_Line, tag="not-enrolled", frozen=True, kw_only=True):
    """Companion → device: why not, as a code and a sentence."""

    code: str
    message: str


Line = AskAuthority | AuthorityIs | Enrol | Enrolled | NotEnrolled
_decoder: Final = msgspec.json.Decoder(Line)


def encode_line(line: Line) -> bytes:
    """With its newline."""
    return msgspec.json.encode(line) + b"\n"


def decode_line(data: bytes) -> Line:
    """IdentityError for anything that is none of these lines, whole."""
    if not data.endswith(b"\n"):
        raise IdentityError("the connection ended in the middle of a line")
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:  # a ValidationError is one
        raise IdentityError(f"that is no line of an enrolment: {error}") from error
