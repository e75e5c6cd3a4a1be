"""Are our own identity files good for what they are configured for? Asked once, at the start of a program.

The three files are held against each other as a peer would: one TLS handshake in memory between two contexts, the
verifying one trusting only our own `ca`. So what is refused here is exactly what every peer would refuse later.
Validity in time is not a reason to refuse the start: a device's clock may be set only once it is up.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any, Final

from split.errors import ConfigError, IdentityError
from split.identity.contexts import NO_CHECK_TIME, Identity, Role, client_context, peer_of, server_context

_OTHER_AUTHORITY: Final = (2, 7, 18, 19, 20, 21)
"""X509_V_ERR_* that say: not issued by a certificate in the file."""
_HANDSHAKE_STEPS: Final = 10
"""TLS 1.3 needs two each way."""


def require_identity(identity: Identity, role: Role) -> str:
    """Hold `cert`, `key` and `ca` against each other for a peer that will be a `role`; a sentence about what is wrong
    only for now (the certificate is not valid yet, or not any more), or "".

    ConfigError names the key of the configuration, the file, what was expected, what came and how to make it.
    """
    try:
        return _hold_together(identity, role)
    except IdentityError as error:
        raise ConfigError(str(error)) from error


def own_certificate(identity: Identity, role: Role) -> Mapping[str, Any]:
    """What a peer sees of us, as `getpeercert` gives it; its time is not judged.

    IdentityError names the key of the configuration, as `require_identity` does.
    """
    client, server = _ends(identity, role)
    verifier = server if role == "device" else client
    verifier.verify_flags = ssl.VerifyFlags(verifier.verify_flags | NO_CHECK_TIME)
    try:
        shown, der = _shake_hands(client, server, seen_by_server=role == "device")
    except ssl.SSLCertVerificationError as error:
        raise IdentityError(_sentence(error, identity, role)) from error
    except ssl.SSLError as error:
        raise IdentityError(
            f"identity.cert, identity.key: {identity.cert} cannot be shown in TLS 1.3 ({error.reason}): its key is of "
            f"a kind that has no place there; {_how(role)}"
        ) from error
    try:
        peer_of(shown, role=role, der=der)
    except IdentityError as error:
        raise IdentityError(f"identity.cert: {identity.cert} is not a {role}'s: {error}; {_how(role)}") from error
    return shown


def _hold_together(identity: Identity, role: Role) -> str:
    shown = own_certificate(identity, role)
    try:
        _shake_hands(*_ends(identity, role), seen_by_server=role == "device")
    except ssl.SSLCertVerificationError as error:
        return (
            f"identity.cert: {identity.cert} will be refused by every peer: {error.verify_message} (valid from "
            f"{shown.get('notBefore')} to {shown.get('notAfter')}); set this host's clock, or {_how(role)}"
        )
    return ""


def _ends(identity: Identity, role: Role) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Client and server, both us: one certificate is on trial, so one end verifies, and no byte leaves memory."""
    client, server = client_context(identity), server_context(identity)
    (client if role == "device" else server).verify_mode = ssl.CERT_NONE
    return client, server


def _shake_hands(
    client: ssl.SSLContext, server: ssl.SSLContext, *, seen_by_server: bool
) -> tuple[dict[str, Any], bytes]:
    """The certificate that the verifying side saw, as `getpeercert` gives it, and in DER."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True)
    for _ in range(_HANDSHAKE_STEPS):
        waiting = 0
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                waiting += 1
        if not waiting:
            break
    seen = ends[seen_by_server]
    return seen.getpeercert() or {}, seen.getpeercert(binary_form=True) or b""


def _sentence(error: ssl.SSLCertVerificationError, identity: Identity, role: Role) -> str:
    if error.verify_code not in _OTHER_AUTHORITY:
        return (
            f"identity.cert: {identity.cert} cannot serve as a {role}'s certificate ({error.verify_message}); "
            f"{_how(role)}"
        )
    from split.identity.certificates import issuer_of, subjects_of  # 10 MB of memory, for this sentence alone

    return (
        f"identity.ca: {identity.ca} did not issue {identity.cert}: expected the authority {issuer_of(identity.cert)}, "
        f"the file holds {', '.join(subjects_of(identity.ca)) or 'none'}; take cert, key and ca from one issue: "
        f"{_how(role)}"
    )


def _how(role: Role) -> str:
    if role == "companion":
        return "`isthmus-cloud init` makes new ones"
    return "`isthmus-cloud issue NAME -o DIR` on the companion makes new ones"
