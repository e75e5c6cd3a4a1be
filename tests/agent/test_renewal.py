"""The device's certificate is renewed in time, through every way in which that can fail, and never half."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from agent import renewal as renewal_module
from agent.renewal import RETRY_S, Renewal
from split.identity.certificates import issue, make_authority, request_key, serial_of, sign
from split.identity.contexts import Identity
from split.identity.credentials import Credentials
from split.identity.known_time import KnownTime
from split.wire.messages import Renewed

DAY_S = 86_400.0


class Device:
    """A device with a certificate for 30 days, a clock, and a companion that answers as `answer` says."""

    def __init__(self, folder: Path) -> None:
        self.ca = folder / "ca"
        make_authority(self.ca)
        self.issued_at = datetime.now(UTC)
        self.identity: Identity = issue(self.ca, "cam-1", "device", folder / "id", days=30, now=self.issued_at)
        self.now_s = self.issued_at.timestamp()
        self.asked: list[str] = []
        self.slept: list[float] = []
        self.connected = True
        self.answer: Callable[[str], Renewed | None] = self.signed
        credentials = Credentials(self.identity, "device", known_time=KnownTime(wall_s=lambda: self.now_s))
        self.renewal = Renewal(credentials, ask=self._ask, sleep=self._sleep)
        self._turns = 0
        self._done = asyncio.Event()

    def signed(self, request: str, name: str = "cam-1") -> Renewed:
        now = datetime.fromtimestamp(int(self.now_s), UTC)
        pem = sign(self.ca, request_key(request), name, "device", days=30, now=now)
        return Renewed(chain=pem.decode())

    def _ask(self, request: str) -> bool:
        if not self.connected:
            return False
        self.asked.append(request)
        answer = self.answer(request)
        if answer is not None:
            asyncio.get_running_loop().call_soon(self.renewal.answered, answer)
        return True

    async def _sleep(self, seconds: float) -> None:
        if seconds == renewal_module.FIRST_LOOK_S:
            return
        self.slept.append(seconds)
        self._turns -= 1
        if self._turns == 0:
            self._done.set()
            await asyncio.Event().wait()

    async def look(self, times: int = 1) -> None:
        """Let it look at the time so often."""
        self._turns = times
        self._done.clear()
        task = asyncio.create_task(self.renewal.run())
        async with asyncio.timeout(60):
            await self._done.wait()
        task.cancel()
        await asyncio.wait([task])

    @property
    def serial(self) -> int:
        return serial_of(self.identity.cert.read_bytes())

    def pair_fits(self) -> bool:
        certificate = x509.load_pem_x509_certificate(self.identity.cert.read_bytes())
        key = serialization.load_pem_private_key(self.identity.key.read_bytes(), None)
        return key.public_key() == certificate.public_key()


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path)


async def test_before_two_thirds_of_its_life_nothing_is_asked_and_after_it_a_new_key_is_certified(
    device: Device,
) -> None:
    before = device.serial, device.identity.key.read_bytes()
    device.now_s += 19.9 * DAY_S
    await device.look(3)
    assert device.asked == []
    device.now_s += 0.2 * DAY_S
    await device.look()
    assert device.serial != before[0]
    assert device.identity.key.read_bytes() != before[1]
    assert device.pair_fits()
    assert device.renewal.renewed == 1
    await device.look(3)
    assert len(device.asked) == 1, "the new one is not due"


async def test_the_key_is_not_in_what_is_asked(device: Device) -> None:
    device.now_s += 25 * DAY_S
    await device.look()
    (request,) = device.asked
    assert "PRIVATE" not in request
    assert x509.load_pem_x509_csr(request.encode()).subject.rfc4514_string() == ""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("nobody there", "no companion is connected"),
        ("refused", "the companion does not renew it: you are revoked"),
        ("another name", "is for 'cam-2', ours is for 'cam-1'"),
        ("another key", "does not belong to the certificate"),
        ("another authority", "did not issue"),
        ("garbage", "must be a PEM certificate"),
        ("silence", "did not answer within"),
        ("a link", "is a link: whoever made it renews"),
    ],
)
async def test_whatever_goes_wrong_the_old_pair_stays_is_said_once_and_tried_again_less_and_less(
    device: Device,
    tmp_path: Path,
    what: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    device.now_s += 25 * DAY_S
    make_authority(tmp_path / "other")
    match what:
        case "nobody there":
            device.connected = False
        case "refused":
            device.answer = lambda request: Renewed(message="you are revoked")
        case "another name":
            device.answer = lambda request: device.signed(request, "cam-2")
        case "another key":
            old = device.identity.cert.read_text()
            device.answer = lambda request: Renewed(chain=old)
        case "another authority":
            device.answer = lambda request: Renewed(
                chain=sign(
                    tmp_path / "other", request_key(request), "cam-1", "device", days=30, now=datetime.now(UTC)
                ).decode()
            )
        case "garbage":
            device.answer = lambda request: Renewed(chain="nothing")
        case "silence":
            monkeypatch.setattr(renewal_module, "ANSWER_S", 0.0)
            device.answer = lambda request: None
        case _:
            device.identity.cert.rename(tmp_path / "cert.pem")
            device.identity.cert.symlink_to(tmp_path / "cert.pem")
    before = device.identity.cert.read_bytes(), device.identity.key.read_bytes()
    with caplog.at_level(logging.WARNING):
        await device.look(9)
    assert (device.identity.cert.read_bytes(), device.identity.key.read_bytes()) == before
    (warning,) = [message for message in caplog.messages if "is due for renewal" in message]
    assert said in warning
    assert device.slept == [60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0, 3600.0]
    assert RETRY_S[1] * 10 < 10 * DAY_S, "many tries in the third of the life that is left"
    if what != "a link":
        assert len(list(device.identity.cert.parent.iterdir())) == 3, "no key is left beside"


async def test_the_status_tells_who_this_is_until_when_and_what_is_in_the_way(device: Device) -> None:
    said = device.renewal.status()
    end = device.issued_at.replace(microsecond=0) + timedelta(days=30)
    assert said["name"] == "cam-1"
    assert said["until"] == f"{end:%Y-%m-%dT%H:%M:%SZ}"
    assert said["note"] == ""
    assert device.renewal.until_s == end.timestamp()
    device.now_s += 25 * DAY_S
    device.connected = False
    await device.look()
    assert device.renewal.status()["note"] == "no companion is connected that renews certificates"
    device.identity.cert.unlink()
    assert "does not exist" in str(device.renewal.status()["note"])
    assert device.renewal.until_s == 0.0


async def test_an_answer_that_comes_too_late_is_dropped(device: Device) -> None:
    before = device.serial
    device.renewal.answered(device.signed(_request()))
    await device.look()
    assert device.serial == before


def _request() -> str:
    from split.identity.certificates import make_request

    return make_request()[1]


async def test_with_the_clock_at_1970_it_is_due_by_the_time_known(device: Device) -> None:
    device.renewal._credentials.known_time.at_least(device.now_s + 25 * DAY_S)
    device.now_s = 40.0
    device.answer = lambda request: None if device.asked[1:] else Renewed(message="seen")
    await device.look()
    assert len(device.asked) == 1
