"""What every peer would refuse is refused at the start, in words that name the config key, the file and what to do."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from split.errors import ConfigError
from split.identity.certificates import Identity, issue, make_authority
from split.identity.contexts import Role
from split.identity.readiness import require_identity

ROLES: list[Role] = ["device", "companion"]


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    make_authority(tmp_path / "ca")
    return tmp_path / "ca"


def key_id(ca: Path) -> str:
    """SHA-1 over the public key's bits, as RFC 5280 §4.2.1.2 (1) has it, independently of the code under test."""
    key = x509.load_pem_x509_certificate(ca.read_bytes()).public_key()
    point = key.public_bytes(serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint)
    return hashlib.sha1(point).hexdigest()[:16]


@pytest.mark.parametrize("role", ROLES)
def test_what_was_issued_together_serves(ca: Path, tmp_path: Path, role: Role) -> None:
    assert require_identity(issue(ca, "pi-7", role, tmp_path / role), role) == ""


@pytest.mark.parametrize("role", ROLES)
def test_an_authority_that_did_not_issue_the_certificate_is_refused_and_both_are_named(
    ca: Path, tmp_path: Path, role: Role
) -> None:
    make_authority(tmp_path / "other")
    identity = replace(issue(ca, "pi-7", role, tmp_path / role), ca=tmp_path / "other" / "ca.pem")
    with pytest.raises(ConfigError) as caught:
        require_identity(identity, role)
    said = str(caught.value)
    assert said.startswith(f"identity.ca: {identity.ca} did not issue {identity.cert}")
    assert f"expected the authority 'CN=Isthmus authority' with key {key_id(ca / 'ca.pem')}" in said
    assert f"holds 'CN=Isthmus authority' with key {key_id(identity.ca)}" in said
    assert ("isthmus-cloud init" if role == "companion" else "isthmus-cloud issue") in said


def test_an_authority_of_another_name_is_named(ca: Path, tmp_path: Path) -> None:
    stranger = trustme.CA(organization_name="Somebody Else")
    stranger.cert_pem.write_to_path(tmp_path / "theirs.pem")
    with pytest.raises(ConfigError, match="Somebody Else"):
        require_identity(replace(issue(ca, "pi-7", "device", tmp_path / "pi"), ca=tmp_path / "theirs.pem"), "device")


def test_a_file_of_several_authorities_serves_while_one_of_them_is_ours(ca: Path, tmp_path: Path) -> None:
    make_authority(tmp_path / "next")
    both = tmp_path / "both.pem"
    both.write_bytes((tmp_path / "next" / "ca.pem").read_bytes() + (ca / "ca.pem").read_bytes())
    assert require_identity(replace(issue(ca, "pi-7", "device", tmp_path / "pi"), ca=both), "device") == ""


@pytest.mark.parametrize(("issued", "wanted"), [("device", "companion"), ("companion", "device")])
def test_the_certificate_of_the_other_role_is_refused(ca: Path, tmp_path: Path, issued: Role, wanted: Role) -> None:
    identity = issue(ca, "pi-7", issued, tmp_path / "pi")
    with pytest.raises(ConfigError, match=f"identity.cert: .*cert.pem cannot serve as a {wanted}'s certificate"):
        require_identity(identity, wanted)


def test_a_certificate_without_our_uri_is_refused(tmp_path: Path) -> None:
    authority = trustme.CA()
    pair = authority.issue_cert("device.example")
    identity = Identity(cert=tmp_path / "cert.pem", key=tmp_path / "key.pem", ca=tmp_path / "ca.pem")
    pair.cert_chain_pems[0].write_to_path(identity.cert)
    pair.private_key_pem.write_to_path(identity.key)
    authority.cert_pem.write_to_path(identity.ca)
    identity.key.chmod(0o600)
    with pytest.raises(ConfigError, match=r"is not a device's: .*spiffe://isthmus/device/<name>"):
        require_identity(identity, "device")


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(("days", "word"), [(-800, "expired"), (30, "not yet valid")])
def test_a_clock_that_is_wrong_is_no_reason_to_refuse_the_start_but_is_told(
    tmp_path: Path, role: Role, days: int, word: str
) -> None:
    make_authority(tmp_path / "ca", now=datetime.now(UTC) - timedelta(days=900))
    then = datetime.now(UTC) + timedelta(days=days)
    said = require_identity(issue(tmp_path / "ca", "pi-7", role, tmp_path / "pi", now=then), role)
    assert word in said
    assert "clock" in said
    assert str(tmp_path / "pi" / "cert.pem") in said


@pytest.mark.parametrize("part", ["cert", "key", "ca"])
def test_a_file_that_is_missing_a_folder_or_garbage_is_named_with_its_key(ca: Path, tmp_path: Path, part: str) -> None:
    identity = issue(ca, "pi-7", "device", tmp_path / "pi")
    path: Path = getattr(identity, part)
    path.write_text("nothing of the kind")
    with pytest.raises(ConfigError, match=rf"identity\.{part}.*{path}.*isthmus-cloud issue"):
        require_identity(identity, "device")
    path.unlink()
    with pytest.raises(ConfigError, match=rf"identity\.{part}: .*{path} does not exist.*isthmus-cloud issue"):
        require_identity(identity, "device")
    path.mkdir()
    with pytest.raises(ConfigError, match=rf"identity\.{part}: .*{path} is no file"):
        require_identity(identity, "device")


def test_a_key_of_another_certificate_is_named(ca: Path, tmp_path: Path) -> None:
    other = issue(ca, "pi-8", "device", tmp_path / "other")
    identity = replace(issue(ca, "pi-7", "device", tmp_path / "pi"), key=other.key)
    with pytest.raises(ConfigError, match=rf"identity\.key: {other.key} does not belong to the certificate"):
        require_identity(identity, "device")


@pytest.mark.parametrize("role", ROLES)
def test_a_key_that_tls_cannot_use_is_named(
    ca: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: Role
) -> None:
    monkeypatch.setattr(ec, "SECP256R1", ec.SECP256K1)
    with pytest.raises(ConfigError, match=r"identity\.cert, identity\.key: .*cert\.pem cannot be shown in TLS 1\.3"):
        require_identity(issue(ca, "pi-7", role, tmp_path / role), role)
