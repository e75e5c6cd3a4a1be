"""Who we are to a peer and who the peer is to us: TLS contexts from an `Identity`, roles from verified certificates.

TLS 1.3 only, certificates on both sides, one private authority; there is no way to switch any of it off. A companion is
not checked by host name: devices dial IP addresses, forwarded ports and names that change, none of which the authority
could put into a certificate. What stands for it is stricter: the private authority issues nothing but Isthmus
certificates, each with one role in its URI (`spiffe://isthmus/<role>/<name>`) and in its extended key usage, and both
are checked before the first byte of ours is sent. Needs `ssl` only; making certificates is in `certificates.py`.
"""

from __future__ import annotations

import os
import re
import ssl
import stat
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from split.errors import IdentityError

Role = Literal["device", "companion"]

URI_ROOT: Final = "spiffe://isthmus/"
NAME: Final = re.compile(r"[a-z0-9-]{1,64}")
_URI: Final = re.compile(re.escape(URI_ROOT) + r"(device|companion)/([a-z0-9-]{1,64})")
NO_CHECK_TIME: Final = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME; `ssl` has no name for it. For a clock that is known to be wrong, see `credentials.py`."""
_AUTHORITY_LEAF: Final = re.compile(rb"\x06\x03\x55\x1d\x13(?:\x01\x01.)?\x04.\x30.\x01\x01[^\x00]", re.DOTALL)
"""Extension basicConstraints (2.5.29.19), critical or not, with cA other than FALSE, in DER. OpenSSL takes such a
certificate from a peer, `ssl` does not show the extension, and `cryptography` costs 10 MB for this one bit. Bytes that
only look like it, in another field, are refused with it."""
_NO_CERTIFICATE: Final = "PEER_DID_NOT_RETURN_A_CERTIFICATE"
_TOO_OPEN: Final = stat.S_IWGRP | stat.S_IRWXO
"""A key file may be readable by its group (how systemd and Kubernetes hand credentials over), never by everybody."""

_MAKE: Final = "`isthmus-cloud init` makes a companion's files, `isthmus-cloud issue` a device's"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Files, PEM: this side's certificate, its key, and the authority that both sides trust."""

    cert: Path
    key: Path
    ca: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Validity:
    """When a certificate is good, in seconds since 1970."""

    from_s: float
    until_s: float

    @property
    def renew_at_s(self) -> float:
        """Two thirds through: a third is left for whoever cannot be reached just then."""
        return self.from_s + (self.until_s - self.from_s) * 2 / 3


def validity_of(certificate: Mapping[str, Any]) -> Validity:
    """Of a certificate as `SSLObject.getpeercert()` gives it."""
    return Validity(
        from_s=ssl.cert_time_to_seconds(certificate["notBefore"]),
        until_s=ssl.cert_time_to_seconds(certificate["notAfter"]),
    )


def role_uri(role: Role, name: str) -> str:
    """The URI that names this peer; IdentityError for a name that is none."""
    if not NAME.fullmatch(name):
        raise IdentityError(f"a name has 1 to 64 characters of a-z, 0-9 and -, got {name!r}")
    return f"{URI_ROOT}{role}/{name}"


def enrolment_server_context(identity: Identity) -> ssl.SSLContext:
    """The companion's context for enrolment: it shows who it is; a device has nothing to show yet, and is not asked."""
    context = server_context(identity)
    context.verify_mode = ssl.CERT_NONE
    return context


def enrolment_client_context(authority_pem: str | None) -> ssl.SSLContext:
    """A device's context for enrolment, without a certificate of its own.

    With an authority that was checked against the token's pin: the companion must have a certificate by it. None: for
    fetching that authority, which is public, and nothing else; what comes is worth nothing before the pin is checked.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    if authority_pem is None:
        context.verify_mode = ssl.CERT_NONE
    else:
        context.load_verify_locations(cadata=authority_pem)
    return context


def client_context(identity: Identity) -> ssl.SSLContext:
    """The device's context for dialling; IdentityError when a file cannot serve."""
    return _prepare(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), identity)


def server_context(identity: Identity) -> ssl.SSLContext:
    """The companion's context for listening; IdentityError when a file cannot serve."""
    return _prepare(_ServerContext(ssl.PROTOCOL_TLS_SERVER), identity)


refusals: Final[ContextVar[list[ssl.SSLError]]] = ContextVar("refusals")
"""Where a listener wants to read why it refused a certificate, when the connection ends in another error."""


class _TellingObject(ssl.SSLObject):
    """Lets the alert out that tells a device what is wrong with its certificate.

    asyncio closes the socket on a handshake error with the alert still unsent. The error is held back once, as if more
    bytes were needed: asyncio then writes what is pending; the peer's next bytes, its end or the timeout bring the end.
    """

    _refusal: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        if self._refusal is not None:
            raise self._refusal
        try:
            super().do_handshake()
        except ssl.SSLError as error:
            if not isinstance(error, ssl.SSLCertVerificationError) and error.reason != _NO_CERTIFICATE:
                raise
            self._refusal = error
            refusals.get([]).append(error)
            raise ssl.SSLWantReadError from error


class _ServerContext(ssl.SSLContext):
    sslobject_class = _TellingObject


def _prepare(context: ssl.SSLContext, identity: Identity) -> ssl.SSLContext:
    _require_files(identity)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the role URI is checked instead, see above
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cafile=identity.ca)
    except ssl.SSLError as error:
        raise IdentityError(
            f"identity.ca: {identity.ca} must be a PEM file of the authority's certificate ({_reason(error)}); {_MAKE}"
        ) from error
    try:
        context.load_cert_chain(identity.cert, identity.key, password=_no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            text = f"identity.key: {identity.key} does not belong to the certificate {identity.cert}: take the pair as "
            text += f"issued; {_MAKE}"
        else:
            text = f"identity.cert, identity.key: {identity.cert} must be a PEM certificate and {identity.key} its "
            text += f"unencrypted PEM key ({_reason(error)}); {_MAKE}"
        raise IdentityError(text) from error
    return context


def _require_files(identity: Identity) -> None:
    for key, what, path in (
        ("cert", "certificate", identity.cert),
        ("key", "key", identity.key),
        ("ca", "authority", identity.ca),
    ):
        if not path.is_file():
            found = "is no file" if path.exists() else "does not exist"
            raise IdentityError(f"identity.{key}: the {what} file {path} {found}; correct the path, or {_MAKE}")
        if not os.access(path, os.R_OK):
            raise IdentityError(
                f"identity.{key}: the {what} file {path} may not be read by user {os.geteuid()}: correct its owner or "
                "mode"
            )
    mode = stat.S_IMODE(identity.key.stat().st_mode)
    if mode & _TOO_OPEN:
        raise IdentityError(
            f"identity.key: the key file {identity.key} is open to others (mode {mode:04o}): chmod 0600 it"
        )


def _no_password() -> bytes:
    raise IdentityError(
        "identity.key: an encrypted key cannot be used by a daemon: store the key unencrypted with mode 0600"
    )


def peer_of(certificate: Any, *, role: Role, der: bytes = b"") -> str:
    """Name of the peer with this verified certificate (`SSLObject.getpeercert()`, and the same in DER).

    IdentityError for another role, and for an authority's certificate: whoever has that shows one of its making.
    """
    if _AUTHORITY_LEAF.search(der):
        raise IdentityError("the peer's certificate is an authority's (CA:TRUE): issue it one that is not")
    uris = [value for kind, value in (certificate or {}).get("subjectAltName", ()) if kind == "URI"]
    match = _URI.fullmatch(uris[0]) if len(uris) == 1 else None
    if match is None:
        raise IdentityError(
            f"the peer's certificate must have the one URI {URI_ROOT}{role}/<name>, it has {', '.join(uris) or 'none'}"
        )
    found, name = match.groups()
    if found != role:
        raise IdentityError(f"the peer must be a {role}, its certificate is that of the {found} {name!r}")
    return name


_CHECKS: Final = {
    10: ("has expired", "issue a new one, or set the clock"),
    9: ("is not valid yet", "set this host's clock"),
    18: ("is self-signed", "let the authority that both sides trust issue it"),
    19: ("comes from another authority", "both sides must name the same `identity.ca`"),
    20: ("comes from another authority", "both sides must name the same `identity.ca`"),
    7: ("comes from another authority of the same name", "both sides must name the same `identity.ca`"),
    26: ("is for another role", "a companion needs a companion's certificate, a device a device's"),
    24: ("was issued by a certificate that is no authority", "let the authority itself issue it"),
    79: ("was issued by a certificate that is no authority", "let the authority itself issue it"),
    25: ("was issued by an authority below ours, which allows none", "let the authority itself issue it"),
    32: ("was issued by a certificate that may not sign others", "let the authority itself issue it"),
    66: ("has a key that is too weak", "issue a new one with a key on P-256"),
    67: ("was issued with a key that is too weak", "make a new authority"),
    68: ("is signed with a hash that is too weak", "issue a new one"),
}
"""OpenSSL's X509_V_ERR_* → what is wrong with the certificate, and what to do."""

_ALERTS: Final = {
    "UNKNOWN_CA": ("comes from another authority", "both sides must name the same `identity.ca`"),
    "CERTIFICATE_EXPIRED": ("has expired or is not valid yet", "issue a new one, or set the clocks"),
    "UNSUPPORTED_CERTIFICATE": ("is for another role", "a device needs a device's certificate"),
    "CERTIFICATE_REQUIRED": ("is missing", "set `identity` in the config"),
    "BAD_CERTIFICATE": ("is broken or not valid yet", "issue a new one, or set the clocks"),
    "CERTIFICATE_REVOKED": ("was revoked", "issue a new one"),
    "CERTIFICATE_UNKNOWN": ("is not acceptable", "issue a new one"),
    "DECRYPT_ERROR": ("does not fit its signature", "issue a new one"),
}
"""Alert by which the peer says what is wrong with our certificate."""


def explain(error: ssl.SSLError, peer: str) -> IdentityError | None:
    """The sentence behind a TLS failure with `peer` (as in "the companion at HOST:PORT"); None: not about identity."""
    if isinstance(error, ssl.SSLCertVerificationError):
        wrong, mend = _CHECKS.get(
            error.verify_code, (f"was refused ({error.verify_message})", "issue a new one by the authority of both")
        )
        return IdentityError(f"the certificate of {peer} {wrong}: {mend}")
    reason = getattr(error, "reason", None) or ""  # errors raised in Python have none
    for alert, (wrong, mend) in _ALERTS.items():
        if reason.endswith(f"ALERT_{alert}"):
            return IdentityError(f"{peer} refused our certificate, which {wrong}: {mend}")
    if reason == _NO_CERTIFICATE:
        return IdentityError(f"{peer} shows no certificate: set `identity` there")
    return None


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()
