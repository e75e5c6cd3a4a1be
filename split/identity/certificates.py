"""A private authority and the certificates it issues, as PEM files: the only user of `cryptography` for X.509.

The authority issues nothing but Isthmus certificates: one role URI, the one extended key usage of that role, P-256.
Keys are written once, with mode 0600, and never over an existing file. Using the files is in `contexts.py`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from split.errors import IdentityError
from split.identity.contexts import Identity, Role, role_uri
from split.identity.files import make_folder

__all__ = [
    "AUTHORITY_DAYS",
    "LEAF_DAYS",
    "Authority",
    "Identity",
    "issue",
    "issuer_of",
    "load_authority",
    "make_authority",
    "make_request",
    "request_key",
    "serial_of",
    "sign",
    "subjects_of",
]

AUTHORITY_DAYS: Final = 3650
LEAF_DAYS: Final = 365
"""Of certificates issued by hand as files; renewed ones live shorter."""

_BACKDATED: Final = timedelta(hours=1)
"""So that a peer whose clock is a little behind takes a fresh certificate."""

_USAGE: Final = {"device": ExtendedKeyUsageOID.CLIENT_AUTH, "companion": ExtendedKeyUsageOID.SERVER_AUTH}


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """Files of an authority, PEM; the key never leaves the companion's host."""

    cert: Path
    key: Path


def make_authority(folder: Path, *, now: datetime | None = None) -> Authority:
    """Create `folder/ca.pem` and `folder/ca-key.pem`, good for ten years; IdentityError when either exists."""
    authority = Authority(cert=folder / "ca.pem", key=folder / "ca-key.pem")
    _require_new(authority.cert, authority.key)
    key = ec.generate_private_key(ec.SECP256R1())
    start = now or datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Isthmus authority")])
    certificate = (
        _builder(name, name, key.public_key(), start, start + timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(authority=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    make_folder(folder)
    _write_new(authority.key, _key_pem(key), 0o600)
    _write_new(authority.cert, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    return authority


def issue(
    folder_of_ca: Path,
    name: str,
    role: Role,
    out: Path,
    *,
    days: float = LEAF_DAYS,
    now: datetime | None = None,
) -> Identity:
    """Make a key and a certificate for `name` in that role: `out/cert.pem`, `out/key.pem`, and `out/ca.pem`, a copy.

    `folder_of_ca` is what `make_authority` filled. IdentityError for a name that is none, an authority that is not
    there, cannot be read or has expired, and for files that exist already.
    """
    role_uri(role, name)  # a name that is none leaves no file behind
    identity = Identity(cert=out / "cert.pem", key=out / "key.pem", ca=out / "ca.pem")
    _require_new(identity.cert, identity.key)
    start = now or datetime.now(UTC)
    authority, authority_key = load_authority(folder_of_ca)
    authority_pem = authority.public_bytes(serialization.Encoding.PEM)
    if identity.ca.exists() and identity.ca.read_bytes() != authority_pem:
        raise IdentityError(
            f"{identity.ca} is another authority than the one in {folder_of_ca}: issue into a new folder"
        )
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _leaf(
        folder_of_ca, authority, authority_key, key.public_key(), name=name, role=role, days=days, start=start
    )
    make_folder(out)
    _write_new(identity.key, _key_pem(key), 0o600)
    _write_new(identity.cert, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    if not identity.ca.exists():
        _write_new(identity.ca, authority_pem, 0o644)
    return identity


def sign(
    folder_of_ca: Path, key: ec.EllipticCurvePublicKey, name: str, role: Role, *, days: float, now: datetime
) -> bytes:
    """The certificate, PEM, of whoever holds the key to `key` (from `request_key`) under that name, in that role.

    IdentityError for a name that is none and for an authority that cannot issue.
    """
    authority, authority_key = load_authority(folder_of_ca)
    certificate = _leaf(folder_of_ca, authority, authority_key, key, name=name, role=role, days=days, start=now)
    return certificate.public_bytes(serialization.Encoding.PEM)


def make_request() -> tuple[bytes, str]:
    """A new key, PEM, which is not to leave this host, and the request (PKCS#10, PEM) to have it certified."""
    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return _key_pem(key), request.public_bytes(serialization.Encoding.PEM).decode()


def request_key(request_pem: str) -> ec.EllipticCurvePublicKey:
    """The key that a request asks to have certified; nothing else in it counts.

    IdentityError when it is no request, not signed by its own key, or its key is not on P-256.
    """
    try:
        request = x509.load_pem_x509_csr(request_pem.encode())
        key = request.public_key()
        signed = request.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise IdentityError(f"a certificate request (PKCS#10, PEM) was expected: {error}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise IdentityError("the key of a certificate request must be on the curve P-256")
    if not signed:
        raise IdentityError("the certificate request is not signed by the key that it names")
    return key


def serial_of(pem: bytes) -> int:
    """Of the first certificate in `pem`; IdentityError when there is none."""
    try:
        return x509.load_pem_x509_certificate(pem).serial_number
    except ValueError as error:
        raise IdentityError(f"a certificate in PEM was expected: {error}") from error


def issuer_of(cert: Path) -> str:
    """Name and key of the authority that a certificate names as its issuer, for people."""
    certificate = x509.load_pem_x509_certificate(cert.read_bytes())
    try:
        key = certificate.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value.key_identifier
    except x509.ExtensionNotFound:
        key = None
    return _named(certificate.issuer, key)


def subjects_of(ca: Path) -> list[str]:
    """Names and keys of the authorities in a file, for people."""
    found = []
    for certificate in x509.load_pem_x509_certificates(ca.read_bytes()):
        try:
            key = certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest
        except x509.ExtensionNotFound:
            key = None
        found.append(_named(certificate.subject, key))
    return found


def _named(name: x509.Name, key: bytes | None) -> str:
    """All our authorities have one name: what tells them apart is the key's identifier."""
    return f"{name.rfc4514_string()!r} with key {key.hex()[:16] if key else 'unknown'}"


def _leaf(
    folder_of_ca: Path,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    key: ec.EllipticCurvePublicKey,
    *,
    name: str,
    role: Role,
    days: float,
    start: datetime,
) -> x509.Certificate:
    """Never good for longer than the authority itself."""
    uri = role_uri(role, name)
    if authority.not_valid_after_utc <= start:
        raise IdentityError(
            f"the authority in {folder_of_ca} expired on {authority.not_valid_after_utc:%Y-%m-%d}: make a new one in "
            "another folder and issue all certificates anew"
        )
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    return (
        _builder(
            subject, authority.subject, key, start, min(start + timedelta(days=days), authority.not_valid_after_utc)
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([_USAGE[role]]), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, start: datetime, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start - _BACKDATED)
        .not_valid_after(end)
    )


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def load_authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Certificate and key of the authority in `folder`; IdentityError where one is missing or no such thing."""
    cert, key = folder / "ca.pem", folder / "ca-key.pem"
    try:
        certificate = x509.load_pem_x509_certificate(cert.read_bytes())
        private = serialization.load_pem_private_key(key.read_bytes(), password=None)
    except FileNotFoundError as error:
        raise IdentityError(
            f"{error.filename} does not exist: make the authority first (isthmus-cloud init)"
        ) from error
    except OSError as error:
        raise IdentityError(f"{error.filename} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise IdentityError(f"{cert} and {key} are no PEM certificate and unencrypted key: {error}") from error
    if not isinstance(private, ec.EllipticCurvePrivateKey) or private.public_key() != certificate.public_key():
        raise IdentityError(f"the key {key} does not belong to the authority {cert}: restore the pair")
    return certificate, private


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _require_new(*paths: Path) -> None:
    for path in paths:
        if path.exists():
            raise IdentityError(f"{path} exists already and is not overwritten: remove it, or choose another folder")


def _write_new(path: Path, data: bytes, mode: int) -> None:
    """O_EXCL: two writers cannot both win, and a symbolic link is not followed."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except OSError as error:
        raise IdentityError(f"{path} cannot be created: {error.strerror}") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(descriptor)
