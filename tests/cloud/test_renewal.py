"""What a device's request for renewal becomes, and the companion's own certificate; revocation of a running session."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509

from cloud import renewal as renewal_module
from cloud.accept import Reception
from cloud.register import Register
from cloud.renewal import Renewals
from split.errors import ConnectionLost, IdentityError
from split.identity.certificates import issue, make_authority, make_request, serial_of
from split.identity.contexts import Identity
from split.identity.credentials import Credentials
from split.identity.known_time import KnownTime
from split.transport.channel import PeerIdentity
from split.transport.memory import memory_pair
from split.wire.messages import Hello, Ping, Pong, Renew, Renewed


class Office:
    def __init__(self, folder: Path) -> None:
        make_authority(folder / "ca")
        self.register = Register(folder / "ca")
        self.identity: Identity = issue(folder / "ca", "c", "companion", folder / "id", days=30)
        self.now_s = datetime.now(UTC).timestamp()
        known = KnownTime(wall_s=lambda: self.now_s)
        self.credentials = Credentials(self.identity, "companion", known_time=known)
        self.renewals = Renewals(self.register, self.credentials, days=30)
        device = self.register.issue("cam-1", "device", folder / "device", days=30)
        self.device = PeerIdentity(name="cam-1", role="device", serial=serial_of(device.cert.read_bytes()))


@pytest.fixture
def office(tmp_path: Path) -> Office:
    return Office(tmp_path)


def names(renewed: Renewed) -> list[str]:
    certificate = x509.load_pem_x509_certificate(renewed.chain.encode())
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return found.get_values_for_type(x509.UniformResourceIdentifier)


async def test_a_device_gets_a_certificate_for_the_name_it_is_authenticated_with(office: Office) -> None:
    renewed = await office.renewals.answer(office.device, make_request()[1])
    assert names(renewed) == ["spiffe://isthmus/device/cam-1"]
    assert renewed.message == ""


async def test_a_renewed_certificate_is_revoked_with_its_name(office: Office) -> None:
    renewed = await office.renewals.answer(office.device, make_request()[1])
    serial = serial_of(renewed.chain.encode())
    assert f"{serial:x}" in office.register.revoke("cam-1", now_s=office.now_s)


async def test_a_revoked_device_is_not_renewed(office: Office) -> None:
    office.register.revoke(f"{office.device.serial:x}", now_s=office.now_s)
    renewed = await office.renewals.answer(office.device, make_request()[1])
    assert renewed.chain == ""
    assert "was revoked" in renewed.message


async def test_a_request_that_is_none_is_refused_with_its_reason(office: Office) -> None:
    renewed = await office.renewals.answer(office.device, "nothing")
    assert renewed.chain == ""
    assert "a certificate request" in renewed.message


async def test_who_asks_again_at_once_is_told_to_wait_and_the_others_are_served(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await office.renewals.answer(office.device, make_request()[1])).chain
    assert "ask later" in (await office.renewals.answer(office.device, make_request()[1])).message
    assert (await office.renewals.answer(replace(office.device, name="cam-2"), make_request()[1])).chain
    monkeypatch.setattr(renewal_module, "REMEMBERED", 3)
    for number in range(9):
        await office.renewals.answer(replace(office.device, name=f"d{number}"), "nothing")
    assert len(office.renewals._asked_at_s) <= 3


async def test_without_its_authority_or_with_one_that_it_does_not_trust_a_companion_renews_nothing(
    office: Office, tmp_path: Path
) -> None:
    make_authority(tmp_path / "other")
    for folder, said in (
        (tmp_path / "nowhere", "where they were issued"),
        (tmp_path / "other", "is not in identity.ca"),
    ):
        renewals = Renewals(Register(folder), office.credentials, days=30)
        renewed = await renewals.answer(office.device, make_request()[1])
        assert renewed.chain == ""
        assert said in renewed.message


def test_the_companions_own_certificate_is_renewed_two_thirds_through(office: Office) -> None:
    before = office.identity.cert.read_bytes()
    assert not office.renewals.renew_own()
    office.now_s += 21 * 86_400
    assert office.renewals.renew_own()
    after = x509.load_pem_x509_certificate(office.identity.cert.read_bytes())
    assert office.identity.cert.read_bytes() != before
    assert after.not_valid_after_utc.timestamp() > office.now_s + 29 * 86_400
    assert names(Renewed(chain=office.identity.cert.read_text())) == ["spiffe://isthmus/companion/c"]
    assert not office.renewals.renew_own()
    assert Credentials(office.identity, "companion").validity().until_s > office.now_s


def test_a_companions_certificate_from_elsewhere_is_left_alone(office: Office, tmp_path: Path) -> None:
    office.now_s += 21 * 86_400
    before = office.identity.cert.read_bytes()
    (office.register.folder / "ca-key.pem").unlink()
    with pytest.raises(IdentityError, match=r"ca-key\.pem does not exist"):
        office.renewals.renew_own()
    assert office.identity.cert.read_bytes() == before


# ---- sessions

HELLO = Hello(major=1, minor=1, agent="test", runtime="test", max_message_bytes=1 << 26, codecs=("raw",))


def connect(reception: Reception, peer: PeerIdentity):  # type: ignore[no-untyped-def]  # a channel and a task
    device, companion = memory_pair(HELLO, HELLO, device=peer)
    return device, asyncio.create_task(reception.receive(companion))


async def test_a_session_answers_a_renewal_and_goes_on(house, office: Office) -> None:  # type: ignore[no-untyped-def]  # a fixture
    reception = Reception(replace(house.companion, renewals=office.renewals))
    channel, task = connect(reception, office.device)
    channel.send(Renew(request=make_request()[1]))
    channel.send(Renew(request=make_request()[1]))
    first, second = (await channel.receive()).message, (await channel.receive()).message
    assert isinstance(first, Renewed)
    assert isinstance(second, Renewed)
    refused, granted = sorted((first, second), key=lambda renewed: len(renewed.chain))
    assert refused.message == "one renewal at a time"
    assert names(granted) == ["spiffe://isthmus/device/cam-1"]
    channel.send(Ping(nonce=5))
    assert (await channel.receive()).message == Pong(nonce=5)
    await channel.close("done")
    await task


async def test_a_companion_that_renews_nothing_says_so(house, office: Office) -> None:  # type: ignore[no-untyped-def]  # a fixture
    channel, task = connect(Reception(house.companion), office.device)
    channel.send(Renew(request=make_request()[1]))
    assert (await channel.receive()).message == Renewed(message="this companion renews no certificates")
    await channel.close("done")
    await task


async def test_revoking_ends_that_devices_sessions_with_a_typed_reason_and_no_other(
    house,  # type: ignore[no-untyped-def]  # a fixture
    office: Office,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    reception = Reception(house.companion)
    other = PeerIdentity(name="cam-2", role="device", serial=2)
    both = [connect(reception, office.device) for _ in range(2)]
    spared, spared_task = connect(reception, other)
    for channel in (*(one for one, _ in both), spared):
        channel.send(Ping(nonce=1))
        await channel.receive()
    reception.revoke({office.device.serial})
    for channel, task in both:
        with pytest.raises(ConnectionLost, match=r"your certificate was revoked.*\(REVOKED\)"):
            await channel.receive()
        await task
    spared.send(Ping(nonce=2))
    assert (await spared.receive()).message == Pong(nonce=2)
    late, late_task = connect(reception, office.device)
    with pytest.raises(ConnectionLost, match="REVOKED"):
        await late.receive()
    await late_task
    await spared.close("done")
    await spared_task
    assert caplog.text.count("was revoked") >= 3
