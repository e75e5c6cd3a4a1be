"""One-time join tokens as text: a secret, whom to give it to, and until when. What for, the companion knows.

A token is `isthmus-join-1.` and 84 characters of base64url: 20 bytes of secret, the SHA-256 of the authority's
certificate (DER), the expiry in seconds since 1970 (8 bytes, big-endian), 3 bytes of SHA-256 over all of that, so that
one that was cut off or mistyped is told from one that is wrong.
"""

from __future__ import annotations

import base64
import hashlib
import ssl
from dataclasses import dataclass, field
from typing import Final

from split.errors import IdentityError

PREFIX: Final = "isthmus-join-1."
SECRET_BYTES: Final = 20
"""160 bits: guessing is hopeless at any rate."""
_PIN_BYTES: Final = 32
_EXPIRY_BYTES: Final = 8
_CHECK_BYTES: Final = 3
_TOKEN_BYTES: Final = SECRET_BYTES + _PIN_BYTES + _EXPIRY_BYTES + _CHECK_BYTES
assert _TOKEN_BYTES % 3 == 0, "base64 without padding"


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinToken:
    """What the text says."""

    secret: bytes = field(repr=False)
    pin: bytes
    """`pin_of` the authority whose companion may be told the secret."""
    expires_at_s: int
    """Seconds since 1970, by the companion's clock."""

    def __post_init__(self) -> None:
        assert len(self.secret) == SECRET_BYTES
        assert len(self.pin) == _PIN_BYTES

    def text(self) -> str:
        """To be carried to the device, as secret as a password for as long as it lives."""
        body = self.secret + self.pin + self.expires_at_s.to_bytes(_EXPIRY_BYTES, "big")
        return PREFIX + base64.urlsafe_b64encode(body + _check(body)).decode()


def read_token(text: str) -> JoinToken:
    """The token in `text`; IdentityError, which does not repeat the text, when it is none."""
    text = text.strip()
    if not text.startswith(PREFIX):
        raise IdentityError(f"a token begins with {PREFIX!r}: copy the whole line that `isthmus-cloud token` printed")
    try:
        body = base64.b64decode(text.removeprefix(PREFIX), altchars=b"-_", validate=True)
    except ValueError:
        body = b""
    if len(body) != _TOKEN_BYTES or _check(body[:-_CHECK_BYTES]) != body[-_CHECK_BYTES:]:
        raise IdentityError("the token is damaged: copy the whole line that `isthmus-cloud token` printed")
    secret, rest = body[:SECRET_BYTES], body[SECRET_BYTES:]
    expires_at_s = int.from_bytes(rest[_PIN_BYTES : _PIN_BYTES + _EXPIRY_BYTES], "big")
    return JoinToken(secret=secret, pin=rest[:_PIN_BYTES], expires_at_s=expires_at_s)


def pin_of(authority_pem: str) -> bytes:
    """SHA-256 of one authority's certificate (PEM); IdentityError when it is no certificate."""
    try:
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(authority_pem.strip())).digest()
    except ValueError as error:
        raise IdentityError(f"an authority's certificate in PEM was expected: {error}") from error


def _check(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:_CHECK_BYTES]
