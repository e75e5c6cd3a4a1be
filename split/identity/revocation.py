"""Certificates that are not good any more though they have not expired: an X.509 revocation list (RFC 5280 §5), PEM.

A list counts only with the signature of an authority that we trust; anybody else's, or a damaged one, is an error and
never an empty list.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from split.errors import IdentityError
from split.identity.certificates import load_authority
from split.identity.files import write_whole

_MAX_LIST_BYTES: Final = 64 << 20
"""Some million entries."""


def write_revocations(folder_of_ca: Path, revoked: Mapping[int, datetime], *, now: datetime) -> Path:
    """`folder_of_ca/crl.pem`: serial → when it was revoked, signed by that authority, in place of the list before."""
    authority, key = load_authority(folder_of_ca)
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.subject)
        .last_update(now)
        .next_update(authority.not_valid_after_utc)  # the next one comes with the next revocation
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .add_extension(x509.CRLNumber(int(now.timestamp())), critical=False)
    )
    for serial, at in sorted(revoked.items()):
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(at).build()
        builder = builder.add_revoked_certificate(entry)
    path = revocation_list(folder_of_ca)
    write_whole(path, builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM), mode=0o644)
    return path


def revocation_list(folder_of_ca: Path) -> Path:
    """Where the authority's list lies, once something was revoked."""
    return folder_of_ca / "crl.pem"


def read_revocations(path: Path, ca: Path) -> dict[int, datetime]:
    """Serial → when it was revoked; IdentityError when `path` is no list that an authority in `ca` has signed."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_LIST_BYTES)
        authorities = x509.load_pem_x509_certificates(ca.read_bytes())
        listed = x509.load_pem_x509_crl(data)
    except OSError as error:
        raise IdentityError(f"{error.filename} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise IdentityError(
            f"{path} is no revocation list in PEM ({error}): restore it, or `isthmus-cloud revoke` anew"
        ) from error
    if not any(_signed(listed, authority) for authority in authorities):
        raise IdentityError(f"the revocation list {path} is not signed by an authority in {ca}: restore it")
    return {entry.serial_number: entry.revocation_date_utc for entry in listed}


def _signed(listed: x509.CertificateRevocationList, authority: x509.Certificate) -> bool:
    key = authority.public_key()
    return (
        isinstance(key, ec.EllipticCurvePublicKey)
        and listed.issuer == authority.subject
        and listed.is_signature_valid(key)
    )


def utc(seconds: float) -> datetime:
    """Seconds since 1970 as X.509 has them: whole ones."""
    return datetime.fromtimestamp(int(seconds), UTC)
