"""What was issued and what was taken back, judged with `cryptography` and the file system."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from cloud import register as register_module
from cloud.register import Register
from cloud.revocations import Revocations
from split.errors import ConfigError, IdentityError, Revoked
from split.identity.certificates import make_authority, make_request

NOW_S = datetime.now(UTC).timestamp()


@pytest.fixture
def register(tmp_path: Path) -> Register:
    make_authority(tmp_path / "ca")
    return Register(tmp_path / "ca")


def signed(
    register: Register, name: str, *, days: float = 30.0, days_ago: float = 0.0, replaces: int | None = None
) -> x509.Certificate:
    _, request = make_request()
    then_s = NOW_S - days_ago * 86_400
    pem = register.sign(request, name, "device", days=days, now_s=then_s, replaces=replaces)
    return x509.load_pem_x509_certificate(pem)


def crl(register: Register) -> x509.CertificateRevocationList:
    return x509.load_pem_x509_crl((register.folder / "crl.pem").read_bytes())


def test_the_authority_signs_the_name_it_is_told_and_nothing_that_the_request_says(register: Register) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    greedy = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "companion")]))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier("spiffe://isthmus/companion/c")]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
        .decode()
    )
    pem = register.sign(greedy, "cam-1", "device", days=30, now_s=NOW_S)
    certificate = x509.load_pem_x509_certificate(pem)
    assert certificate.public_key() == key.public_key()
    assert certificate.subject.rfc4514_string() == "CN=cam-1"
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["spiffe://isthmus/device/cam-1"]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    life = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    assert timedelta(days=30) <= life <= timedelta(days=30, hours=2)
    authority = x509.load_pem_x509_certificate(register.authority.read_bytes())
    certificate.verify_directly_issued_by(authority)


def request_of(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> str:
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()


def test_a_request_that_is_none_is_refused_with_its_reason(register: Register) -> None:
    good = request_of(ec.generate_private_key(ec.SECP256R1()))
    der = bytearray(x509.load_pem_x509_csr(good.encode()).public_bytes(serialization.Encoding.DER))
    der[-1] ^= 1
    forged = x509.load_der_x509_csr(bytes(der)).public_bytes(serialization.Encoding.PEM).decode()
    for request, said in (
        ("nothing", "a certificate request"),
        (good[:100], "a certificate request"),
        (request_of(rsa.generate_private_key(public_exponent=65537, key_size=2048)), "must be on the curve P-256"),
        (request_of(ec.generate_private_key(ec.SECP384R1())), "must be on the curve P-256"),
        (forged, "is not signed by the key"),
    ):
        with pytest.raises(IdentityError, match=said):
            register.sign(request, "cam-1", "device", days=30, now_s=NOW_S)
    assert not (register.folder / "issued.jsonl").exists()


def test_a_certificate_never_outlives_its_authority(register: Register) -> None:
    authority = x509.load_pem_x509_certificate(register.authority.read_bytes())
    assert signed(register, "x", days=3700).not_valid_after_utc == authority.not_valid_after_utc


def test_revoking_a_name_takes_back_all_its_certificates_and_nobody_elses(register: Register) -> None:
    mine = {signed(register, "cam-1").serial_number for _ in range(3)}
    other = signed(register, "cam-2").serial_number
    assert {int(serial, 16) for serial in register.revoke("cam-1", now_s=NOW_S)} == mine
    listed = crl(register)
    assert {entry.serial_number for entry in listed} == mine == set(register.revoked())
    assert other not in register.revoked()
    authority = x509.load_pem_x509_certificate(register.authority.read_bytes())
    key = authority.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert listed.is_signature_valid(key)
    assert listed.issuer == authority.subject


def test_an_expired_certificate_is_revoked_too_since_a_connection_made_with_it_may_be_open(register: Register) -> None:
    old = signed(register, "cam-1", days=1, days_ago=2).serial_number
    assert register.revoke("cam-1", now_s=NOW_S) == [f"{old:x}"]


def test_openssl_agrees_that_it_is_revoked(register: Register, tmp_path: Path) -> None:
    identity = register.issue("cam-1", "device", tmp_path / "d", days=365)
    register.revoke("cam-1", now_s=NOW_S)
    command = ["openssl", "verify", "-crl_check", "-CAfile", identity.ca, "-CRLfile", register.folder / "crl.pem"]
    try:
        said = subprocess.run([*command, identity.cert], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no openssl program here")
    assert "certificate revoked" in said.stderr + said.stdout


def test_a_serial_is_revoked_as_openssl_and_we_write_it_and_again_changes_nothing(register: Register) -> None:
    serial = signed(register, "cam-1").serial_number
    stranger = 0x1234567890ABCDEF1234
    for text in (f"{serial:x}", f"{serial:X}", f"0x{serial:x}"):
        assert register.revoke(text, now_s=NOW_S) == [f"{serial:x}"]
    first = register.revoked()[serial]
    register.revoke(f"{stranger:x}", now_s=NOW_S + 100)
    assert register.revoked()[serial] == first, "the time of the first stays"
    assert set(register.revoked()) == {serial, stranger}


@pytest.mark.parametrize("who", ["nobody", "abc", "companion", "", "zz" * 20, "f" * 41])
def test_whoever_is_not_on_record_cannot_be_revoked(register: Register, tmp_path: Path, who: str) -> None:
    register.issue("companion", "companion", tmp_path / "c", days=365)
    with pytest.raises(IdentityError, match="is on record"):
        register.revoke(who, now_s=NOW_S)
    assert not (register.folder / "crl.pem").exists()


def test_what_is_revoked_is_not_renewed(register: Register) -> None:
    old = signed(register, "cam-1").serial_number
    signed(register, "cam-1", replaces=old)
    register.revoke(f"{old:x}", now_s=NOW_S)
    with pytest.raises(Revoked, match="enrol anew"):
        signed(register, "cam-1", replaces=old)


def test_lines_of_expired_certificates_are_thrown_out_and_a_torn_line_costs_no_other(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = register.folder / "issued.jsonl"
    monkeypatch.setattr(register_module, "COMPACT_BYTES", 100)
    live = signed(register, "cam-1").serial_number
    for _ in range(3):
        signed(register, "gone", days=1, days_ago=400)
    with path.open("ab") as file:
        file.write(b'{"serial": "ab", "na')
    signed(register, "cam-2")
    text = path.read_text()
    assert "gone" not in text
    assert f"{live:x}" in text
    assert register.revoke("cam-2", now_s=NOW_S)


def test_without_an_authority_it_says_how_to_make_one(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    for folder in (tmp_path / "nothing", tmp_path / "state"):
        with pytest.raises(IdentityError, match="isthmus-cloud init"):
            Register(folder).sign(make_request()[1], "x", "device", days=1, now_s=NOW_S)


# ---- as the running companion sees it


def test_the_running_companion_takes_a_new_list_and_tells_of_it_once(register: Register) -> None:
    heard: list[set[int]] = []
    revocations = Revocations(register)
    revocations.on_change = lambda serials: heard.append(set(serials))
    revocations.start()
    assert revocations.serials == frozenset()
    serial = signed(register, "cam-1").serial_number
    register.revoke("cam-1", now_s=NOW_S)
    revocations.look()
    revocations.look()
    assert heard == [{serial}]
    assert revocations.serials == {serial}


@pytest.mark.parametrize("damage", ["garbage", "another authority's", "cut off"])
def test_a_list_that_is_damaged_or_forged_never_frees_anybody(register: Register, tmp_path: Path, damage: str) -> None:
    serial = signed(register, "cam-1").serial_number
    register.revoke("cam-1", now_s=NOW_S)
    revocations = Revocations(register)
    revocations.start()
    path = register.folder / "crl.pem"
    match damage:
        case "garbage":
            path.write_text("nothing")
        case "cut off":
            path.write_bytes(path.read_bytes()[:100])
        case _:
            make_authority(tmp_path / "other")
            other = Register(tmp_path / "other")
            other.revoke("1234567890abcdef1234", now_s=NOW_S)
            path.write_bytes((tmp_path / "other" / "crl.pem").read_bytes())
    with pytest.raises(IdentityError, match="revocation list"):
        revocations.look()
    assert revocations.serials == {serial}
    with pytest.raises(ConfigError, match="revocation list"):
        Revocations(register).start()
