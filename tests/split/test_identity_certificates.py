"""What the authority issues, judged by `cryptography`'s own verifier and by the file system."""

from __future__ import annotations

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import PolicyBuilder, Store

from split.errors import IdentityError
from split.identity.certificates import Identity, issue, make_authority


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    make_authority(tmp_path / "ca")
    return tmp_path / "ca"


def read(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_a_device_certificate_passes_an_independent_verifier_with_its_uri(ca: Path, tmp_path: Path) -> None:
    identity = issue(ca, "pi-7", "device", tmp_path / "pi")
    verifier = PolicyBuilder().store(Store([read(identity.ca)])).build_client_verifier()
    verified = verifier.verify(read(identity.cert), [])
    assert verified.subjects is not None
    assert [name.value for name in verified.subjects] == ["spiffe://isthmus/device/pi-7"]


@pytest.mark.parametrize(
    ("role", "usage"),
    [("device", ExtendedKeyUsageOID.CLIENT_AUTH), ("companion", ExtendedKeyUsageOID.SERVER_AUTH)],
)
def test_a_certificate_may_be_used_in_its_role_only(
    ca: Path, tmp_path: Path, role: str, usage: x509.ObjectIdentifier
) -> None:
    certificate = read(issue(ca, "x", role, tmp_path / "x").cert)  # type: ignore[arg-type]  # the two roles, from above
    assert list(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [usage]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_certificate_and_key_belong_together_and_the_curve_is_p256(ca: Path, tmp_path: Path) -> None:
    identity = issue(ca, "x", "device", tmp_path / "x")
    key = serialization.load_pem_private_key(identity.key.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert isinstance(key.curve, ec.SECP256R1)
    assert key.public_key() == read(identity.cert).public_key()
    assert identity.ca.read_bytes() == (ca / "ca.pem").read_bytes()


def test_an_authority_lasts_ten_years_and_a_certificate_one(ca: Path, tmp_path: Path) -> None:
    now = datetime(2030, 1, 1, tzinfo=UTC)
    certificate = read(issue(ca, "x", "device", tmp_path / "x", now=now).cert)
    assert certificate.not_valid_after_utc == datetime(2031, 1, 1, tzinfo=UTC)
    assert now - timedelta(days=1) < certificate.not_valid_before_utc < now
    authority = read(ca / "ca.pem")
    assert (authority.not_valid_after_utc - authority.not_valid_before_utc).days == 3650


def test_keys_are_readable_by_their_owner_only(ca: Path, tmp_path: Path) -> None:
    identity = issue(ca, "x", "device", tmp_path / "x")
    for key in (identity.key, ca / "ca-key.pem"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_nothing_is_overwritten(ca: Path, tmp_path: Path) -> None:
    identity = issue(ca, "x", "device", tmp_path / "x")
    before = identity.key.read_bytes(), (ca / "ca-key.pem").read_bytes()
    with pytest.raises(IdentityError, match="exists already and is not overwritten"):
        issue(ca, "y", "device", tmp_path / "x")
    with pytest.raises(IdentityError, match="exists already and is not overwritten"):
        make_authority(ca)
    assert (identity.key.read_bytes(), (ca / "ca-key.pem").read_bytes()) == before


def test_a_dangling_link_in_place_of_the_key_is_not_followed(ca: Path, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "key.pem").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(IdentityError, match="cannot be created"):
        issue(ca, "x", "device", tmp_path / "x")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("name", ["", "A", "a b", "ä", "a/b", "x" * 65, "a\n", "../x"])
def test_a_name_that_is_none_is_refused(ca: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(IdentityError, match="1 to 64 characters of a-z, 0-9 and -"):
        issue(ca, name, "device", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_issuing_into_a_folder_with_another_authority_is_refused_before_a_key_is_made(ca: Path, tmp_path: Path) -> None:
    make_authority(tmp_path / "other")
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "ca.pem").write_bytes((tmp_path / "other" / "ca.pem").read_bytes())
    with pytest.raises(IdentityError, match="is another authority"):
        issue(ca, "x", "device", tmp_path / "x")
    assert not (tmp_path / "x" / "key.pem").exists()


def test_an_authority_that_is_missing_broken_mixed_up_or_expired_is_named(tmp_path: Path) -> None:
    def refused() -> str:
        with pytest.raises(IdentityError) as caught:
            issue(tmp_path / "ca", "x", "device", tmp_path / "x")
        return str(caught.value)

    assert "ca.pem does not exist: make the authority first (isthmus-cloud init)" in refused()
    authority = make_authority(tmp_path / "ca", now=datetime(2000, 1, 1, tzinfo=UTC))
    assert "expired on 2009-12-29" in refused(), "3650 days after 2000-01-01"
    other = make_authority(tmp_path / "other")
    authority.key.write_bytes(other.key.read_bytes())
    assert "does not belong to the authority" in refused()
    authority.key.write_text("no key")
    assert "no PEM certificate and unencrypted key" in refused()


def test_what_is_issued_names_its_three_files(ca: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "x"
    assert issue(ca, "x", "device", out) == Identity(cert=out / "cert.pem", key=out / "key.pem", ca=out / "ca.pem")
