"""Every bad certificate, shown over real TLS, in both directions: refused by who verifies it, with its own reason.

The certificates are built here with `cryptography`, not by the code under test, and each differs from a good one in the
one thing that its row names.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID as Usage

from split.errors import ConnectionLost, IdentityError, IsthmusError, Revoked
from split.identity.certificates import make_authority
from split.identity.contexts import Identity, Role, client_context
from split.identity.credentials import Credentials
from split.transport.channel import Channel
from split.transport.listener import Listener, listen
from split.transport.tls import dial
from split.wire.limits import MIB
from split.wire.messages import Hello

HELLO = Hello(major=1, minor=0, agent="a", runtime="r", max_message_bytes=MIB, codecs=("raw",))
NOW = datetime.now(UTC)
DAY = timedelta(days=1)
ROLES: tuple[Role, ...] = ("device", "companion")


@dataclass(frozen=True)
class Spec:
    """A certificate; the defaults make a good one. `{role}` is the role it is for, `{other}` the other one."""

    uris: tuple[str, ...] = ("spiffe://isthmus/{role}/x",)
    usage: str = "role"
    start: datetime = NOW - DAY
    end: datetime = NOW + DAY
    ca: bool = False
    signature: bool = True
    key: str = "p256"
    issuer: str = "ours"
    critical: bool = False


GOOD = Spec()


@dataclass(frozen=True)
class Row:
    spec: Spec
    said: str
    """By the side that verifies."""


ROWS: dict[str, Row] = {
    "expired": Row(replace(GOOD, start=NOW - 9 * DAY, end=NOW - DAY), "has expired"),
    "not yet valid": Row(replace(GOOD, start=NOW + DAY, end=NOW + 9 * DAY), "is not valid yet"),
    "by another authority": Row(replace(GOOD, issuer="stranger"), "comes from another authority:"),
    "by another authority of the same name": Row(
        replace(GOOD, issuer="namesake"), "another authority of the same name"
    ),
    "self-signed": Row(replace(GOOD, issuer="itself"), "is self-signed"),
    "for the other role": Row(
        replace(GOOD, usage="other", uris=("spiffe://isthmus/{other}/x",)), "is for another role"
    ),
    "other role in the URI alone": Row(replace(GOOD, uris=("spiffe://isthmus/{other}/x",)), "must be a {role}, its"),
    "for signing code": Row(replace(GOOD, usage="code"), "is for another role"),
    "for keys that do not sign": Row(replace(GOOD, signature=False), "is for another role"),
    "without a URI": Row(replace(GOOD, uris=()), "must have the one URI spiffe://isthmus/{role}/<name>, it has none"),
    "with two URIs": Row(
        replace(GOOD, uris=("spiffe://isthmus/{role}/x", "spiffe://isthmus/{role}/y")),
        "it has spiffe://isthmus/{role}/x, ",
    ),
    "of another trust domain": Row(replace(GOOD, uris=("spiffe://else/{role}/x",)), "it has spiffe://else/{role}/x"),
    "with a name that is none": Row(replace(GOOD, uris=("spiffe://isthmus/{role}/X_x",)), "isthmus/{role}/X_x"),
    "with a path in its name": Row(replace(GOOD, uris=("spiffe://isthmus/{role}/../x",)), "isthmus/{role}/../x"),
    "of an authority": Row(replace(GOOD, ca=True), "is an authority's (CA:TRUE)"),
    "with a weak key": Row(replace(GOOD, key="rsa1024"), "has a key that is too weak"),
    "with an unknown critical extension": Row(replace(GOOD, critical=True), "unhandled critical extension"),
    "below a certificate that is no authority": Row(
        replace(GOOD, issuer="leaf"), "by a certificate that is no authority"
    ),
    "below an authority that ours does not allow": Row(replace(GOOD, issuer="below"), "an authority below ours"),
}


class Careless(Credentials):
    """Shows what our own programs refuse to load."""

    def _make(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if self.role == "device" else ssl.PROTOCOL_TLS_SERVER)
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self.identity.ca)
        context.load_cert_chain(self.identity.cert, self.identity.key)
        return context


class Workshop:
    """Makes certificates in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("ours", "namesake"):
            make_authority(folder / name)
        self.ca = folder / "ours" / "ca.pem"
        self.issuers = {name: self._read(name) for name in ("ours", "namesake")}
        key = ec.generate_private_key(ec.SECP256R1())
        stranger = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "stranger")])
        self.issuers["stranger"] = stranger, key
        self.chain: dict[str, bytes] = {}
        for name, ca in (("leaf", False), ("below", True)):
            certificate, key = self._build(replace(GOOD, ca=ca, usage="any", uris=()), "device", name)
            self.issuers[name] = certificate.subject, key
            self.chain[name] = certificate.public_bytes(serialization.Encoding.PEM)

    def _read(self, name: str) -> tuple[x509.Name, Any]:
        certificate = x509.load_pem_x509_certificate((self.folder / name / "ca.pem").read_bytes())
        key = serialization.load_pem_private_key((self.folder / name / "ca-key.pem").read_bytes(), None)
        return certificate.subject, key

    def _build(self, spec: Spec, role: Role, name: str) -> tuple[x509.Certificate, Any]:
        key: Any = (
            ec.generate_private_key(ec.SECP256R1())
            if spec.key == "p256"
            else rsa.generate_private_key(public_exponent=65537, key_size=1024)
        )
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        issuer, issuer_key = (subject, key) if spec.issuer == "itself" else self.issuers[spec.issuer]
        other: Role = "companion" if role == "device" else "device"
        of_role = {"device": Usage.CLIENT_AUTH, "companion": Usage.SERVER_AUTH}
        usages = {"role": of_role[role], "other": of_role[other], "code": Usage.CODE_SIGNING}
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(spec.start)
            .not_valid_after(spec.end)
            .add_extension(x509.BasicConstraints(ca=spec.ca, path_length=None), critical=True)
            .add_extension(
                x509.KeyUsage(
                    digital_signature=spec.signature,
                    content_commitment=False,
                    key_encipherment=False,
                    data_encipherment=not spec.signature,
                    key_agreement=False,
                    key_cert_sign=spec.ca,
                    crl_sign=False,
                    encipher_only=False,
                    decipher_only=False,
                ),
                critical=True,
            )
        )
        if spec.usage != "any":
            builder = builder.add_extension(x509.ExtendedKeyUsage([usages[spec.usage]]), critical=False)
        if spec.uris:
            uris = [x509.UniformResourceIdentifier(uri.format(role=role, other=other)) for uri in spec.uris]
            builder = builder.add_extension(x509.SubjectAlternativeName(uris), critical=False)
        if spec.critical:
            strange = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.3.6.1.4.1.55555.1"), b"\x05\x00")
            builder = builder.add_extension(strange, critical=True)
        return builder.sign(issuer_key, hashes.SHA256()), key

    def identity(self, spec: Spec, role: Role) -> Identity:
        certificate, key = self._build(spec, role, "x")
        folder = self.folder / f"{role}-{certificate.serial_number:x}"
        folder.mkdir()
        identity = Identity(cert=folder / "cert.pem", key=folder / "key.pem", ca=self.ca)
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        identity.cert.write_bytes(pem + self.chain.get(spec.issuer, b""))
        identity.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        identity.key.chmod(0o600)
        return identity


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("workshop"))


@pytest.fixture(scope="module")
def good(workshop: Workshop) -> dict[str, Identity]:
    return {role: workshop.identity(GOOD, role) for role in ROLES}


@asynccontextmanager
async def listening(identity: Identity | Credentials) -> AsyncIterator[Listener]:
    async def hold(channel: Channel) -> None:
        try:
            await channel.receive()
        except ConnectionLost:
            pass

    listener = await listen(
        "127.0.0.1", 0, identity=identity, make_hello=lambda: HELLO, on_channel=hold, max_sessions=4
    )
    try:
        yield listener
    finally:
        await listener.close()


async def dialled(listener: Listener, identity: Identity | Credentials) -> Channel:
    return await dial("127.0.0.1", listener.port, identity=identity, hello=HELLO, timeout_s=20)


async def refused(listener: Listener, identity: Identity | Credentials) -> IsthmusError:
    with pytest.raises(IsthmusError) as caught:
        await dialled(listener, identity)
    return caught.value


async def read_all(port: int, context: ssl.SSLContext) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        return await reader.read()
    finally:
        writer.transport.abort()


async def test_a_good_pair_built_in_the_same_way_is_taken(good: dict[str, Identity]) -> None:
    async with listening(good["companion"]) as listener:
        channel = await dialled(listener, good["device"])
        assert (channel.peer.name, channel.peer.role) == ("x", "companion")
        await channel.close("done")


@pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))
async def test_a_device_that_shows_it_is_refused_told_so_and_the_log_says_why(
    workshop: Workshop, good: dict[str, Identity], row: Row, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "isthmus.transport")
    async with listening(good["companion"]) as listener:
        error = await refused(listener, Careless(workshop.identity(row.spec, "device"), "device"))
        assert isinstance(error, IdentityError), "it is told that its certificate is the reason"
        assert "refused our certificate" in str(error)
        await (await dialled(listener, good["device"])).close("done")
    assert listener.refused == 1
    assert row.said.format(role="device") in caplog.text


@pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))
async def test_a_companion_that_shows_it_is_refused_with_the_reason(
    workshop: Workshop, good: dict[str, Identity], row: Row
) -> None:
    async with listening(Careless(workshop.identity(row.spec, "companion"), "companion")) as listener:
        error = await refused(listener, good["device"])
    assert isinstance(error, IdentityError)
    assert row.said.format(role="companion") in str(error)


def test_the_reasons_tell_the_rows_apart() -> None:
    alike = {"for another role"}
    reasons = [row.said for row in ROWS.values() if not any(word in row.said for word in alike)]
    assert len(set(reasons)) == len(reasons) >= 16


async def test_a_revoked_device_learns_that_it_is_revoked_and_another_of_its_name_is_served(
    workshop: Workshop, good: dict[str, Identity]
) -> None:
    mine = x509.load_pem_x509_certificate(good["device"].cert.read_bytes())
    revoked: set[int] = set()
    companion = Credentials(good["companion"], "companion", revoked=lambda: revoked)
    async with listening(companion) as listener:
        await (await dialled(listener, good["device"])).close("done")
        revoked.add(mine.serial_number)
        error = await refused(listener, good["device"])
        assert isinstance(error, Revoked)
        assert error.code == "REVOKED"
        assert f"{mine.serial_number:x}" in str(error)
        await (await dialled(listener, workshop.identity(GOOD, "device"))).close("done")


async def test_a_device_that_shows_nothing_or_speaks_tls_1_2_is_refused(
    good: dict[str, Identity], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "isthmus.transport")
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname = False
    bare.load_verify_locations(good["device"].ca)
    old = client_context(good["device"])
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    async with listening(good["companion"]) as listener:
        for context, alert in ((bare, "CERTIFICATE_REQUIRED"), (old, None)):
            with pytest.raises((ssl.SSLError, ConnectionResetError), match=alert):
                await read_all(listener.port, context)
        await (await dialled(listener, good["device"])).close("done")
    assert "shows no certificate" in caplog.text
    assert "does not speak TLS 1.3" in caplog.text


@pytest.mark.parametrize("role", ROLES)
async def test_files_that_cannot_be_shown_are_refused_before_any_contact(
    workshop: Workshop, good: dict[str, Identity], role: Role
) -> None:
    other = workshop.identity(GOOD, role)
    cut_off = workshop.identity(GOOD, role)
    cut_off.cert.write_bytes(cut_off.cert.read_bytes()[:-100])
    for identity, said in (
        (replace(good[role], key=other.key), "does not belong to the certificate"),
        (cut_off, "must be a PEM certificate"),
    ):
        with pytest.raises(IdentityError, match=said):
            Credentials(identity, role).context()
