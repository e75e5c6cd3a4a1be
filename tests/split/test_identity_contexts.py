"""Files that cannot serve are refused with a sentence before any contact; roles are read from verified certificates."""

from __future__ import annotations

import ssl
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from split.errors import IdentityError
from split.identity.certificates import Identity, issue, make_authority
from split.identity.contexts import client_context, explain, peer_of, server_context


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    make_authority(tmp_path / "ca")
    return issue(tmp_path / "ca", "pi-7", "device", tmp_path / "pi")


def refused(identity: Identity) -> str:
    with pytest.raises(IdentityError) as caught:
        client_context(identity)
    return str(caught.value)


@pytest.mark.parametrize("make", [client_context, server_context])
def test_contexts_take_tls_1_3_with_certificates_on_both_sides_and_nothing_else(identity: Identity, make) -> None:  # type: ignore[no-untyped-def]  # parametrized
    context = make(identity)
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert [entry["subject"] for entry in context.get_ca_certs()] == [((("commonName", "Isthmus authority"),),)]


@pytest.mark.parametrize("part", ["cert", "key", "ca"])
def test_a_missing_file_is_named(identity: Identity, tmp_path: Path, part: str) -> None:
    said = refused(replace(identity, **{part: tmp_path / "nowhere.pem"}))
    assert f"{tmp_path / 'nowhere.pem'} does not exist" in said


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o666])
def test_a_key_that_others_may_read_or_the_group_may_write_is_refused(identity: Identity, mode: int) -> None:
    identity.key.chmod(mode)
    assert f"open to others (mode {mode:04o}): chmod 0600" in refused(identity)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440, 0o640])
def test_a_key_as_systemd_and_kubernetes_hand_it_over_is_taken(identity: Identity, mode: int) -> None:
    identity.key.chmod(mode)
    client_context(identity)


def test_the_key_of_another_certificate_is_refused(identity: Identity, tmp_path: Path) -> None:
    other = issue(tmp_path / "ca", "pi-8", "device", tmp_path / "other")
    assert "does not belong to the certificate" in refused(replace(identity, key=other.key))


@pytest.mark.parametrize("part", ["cert", "key", "ca"])
def test_a_file_that_is_no_pem_is_refused(identity: Identity, part: str) -> None:
    getattr(identity, part).write_text("nothing of the kind")
    assert "PEM" in refused(identity)


def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_a_password(identity: Identity) -> None:
    key = serialization.load_pem_private_key(identity.key.read_bytes(), None)
    identity.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    assert "store the key unencrypted with mode 0600" in refused(identity)


def certificate(*uris: str) -> dict[str, object]:
    """As `SSLObject.getpeercert` gives it."""
    return {"subjectAltName": (("DNS", "host"), *(("URI", uri) for uri in uris))}


def test_the_name_comes_from_the_one_uri_of_the_expected_role() -> None:
    assert peer_of(certificate("spiffe://isthmus/device/pi-7"), role="device") == "pi-7"
    assert peer_of(certificate("spiffe://isthmus/companion/c"), role="companion") == "c"


@pytest.mark.parametrize(
    "found",
    [
        None,
        {},
        certificate(),
        certificate("spiffe://elsewhere/device/a"),
        certificate("spiffe://isthmus/device/"),
        certificate("spiffe://isthmus/device/A"),
        certificate("spiffe://isthmus/device/a/b"),
        certificate("xspiffe://isthmus/device/a"),
        certificate("spiffe://isthmus/device/a", "spiffe://isthmus/device/b"),
        certificate("spiffe://isthmus/companion/a"),
    ],
)
def test_any_other_certificate_is_refused(found: object) -> None:
    with pytest.raises(IdentityError, match="peer"):
        peer_of(found, role="device")


def test_the_refusal_of_the_other_role_names_both() -> None:
    with pytest.raises(IdentityError, match="must be a companion, its certificate is that of the device 'pi-7'"):
        peer_of(certificate("spiffe://isthmus/device/pi-7"), role="companion")


def test_a_tls_failure_that_is_not_about_identity_has_no_such_sentence() -> None:
    assert explain(ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number"), "the companion") is None
