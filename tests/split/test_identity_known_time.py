"""A clock at 1970: what is known to be past stands in for it, over restarts, and cannot be poisoned."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from split.errors import ConnectionLost, IdentityError
from split.identity.certificates import issue, make_authority
from split.identity.contexts import Identity
from split.identity.credentials import Credentials
from split.identity.known_time import KnownTime
from split.transport.channel import Channel
from split.transport.listener import Listener, listen
from split.transport.tls import dial
from split.wire.limits import MIB
from split.wire.messages import Hello

HELLO = Hello(major=1, minor=0, agent="a", runtime="r", max_message_bytes=MIB, codecs=("raw",))
DAY_S = 86_400.0
BOOT_S = 40.0
"""A minute after midnight on the first of January 1970: no battery behind the clock."""


class Clock:
    def __init__(self, wall_s: float) -> None:
        self.wall_s = wall_s
        self.monotonic_s = 7.0

    def known(self, path: Path | None = None) -> KnownTime:
        return KnownTime(path, wall_s=lambda: self.wall_s, monotonic_s=lambda: self.monotonic_s)


def test_without_anything_known_the_clock_is_believed() -> None:
    known = Clock(BOOT_S).known()
    assert known.now_s() == BOOT_S
    assert not known.clock_is_behind


def test_what_a_peer_showed_outlives_the_restart_and_goes_on_by_the_monotonic_clock(tmp_path: Path) -> None:
    clock = Clock(1_000_000.0)
    clock.known(tmp_path / "t").learn(900_000.0)
    rebooted = Clock(BOOT_S)
    known = rebooted.known(tmp_path / "t")
    assert known.clock_is_behind
    assert known.now_s() == 900_000.0
    rebooted.monotonic_s += 60.0
    assert known.now_s() == 900_060.0
    rebooted.wall_s = 1_000_500.0
    assert not known.clock_is_behind
    assert known.now_s() == 1_000_500.0


def test_it_never_goes_back(tmp_path: Path) -> None:
    known = Clock(1_000_000.0).known(tmp_path / "t")
    known.learn(900_000.0)
    known.learn(100.0)
    assert Clock(BOOT_S).known(tmp_path / "t").now_s() == 900_000.0


def test_what_lies_ahead_of_the_clock_is_not_learnt_so_that_one_wrong_clock_does_not_spoil_the_others(
    tmp_path: Path,
) -> None:
    known = Clock(1_000_000.0).known(tmp_path / "t")
    known.learn(5_000_000.0)
    assert not known.clock_is_behind
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("text", ["", "soon", "-5", "nan", "1e400", "9" * 500])
def test_a_damaged_file_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "t").write_text(text)
    assert Clock(BOOT_S).known(tmp_path / "t").now_s() == BOOT_S


def test_a_folder_that_cannot_be_written_costs_only_the_memory_of_it(tmp_path: Path) -> None:
    known = Clock(1_000_000.0).known(tmp_path / "nowhere" / "t")
    known.learn(900_000.0)
    assert known.now_s() == 1_000_000.0


# ---- over TLS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("identities")
    long_ago = datetime.now(UTC) - timedelta(days=400)
    make_authority(root / "ca", now=long_ago)
    for role in ("device", "companion"):
        issue(root / "ca", "x", role, root / role)  # type: ignore[arg-type]  # the two roles, from above
        issue(root / "ca", "x", role, root / f"old-{role}", days=30, now=long_ago)  # type: ignore[arg-type]  # as above
    return root


def identity(folder: Path, name: str) -> Identity:
    return Identity(cert=folder / name / "cert.pem", key=folder / name / "key.pem", ca=folder / name / "ca.pem")


@asynccontextmanager
async def listening(credentials: Credentials) -> AsyncIterator[Listener]:
    async def hold(channel: Channel) -> None:
        try:
            await channel.receive()
        except ConnectionLost:
            pass

    listener = await listen(
        "127.0.0.1", 0, identity=credentials, make_hello=lambda: HELLO, on_channel=hold, max_sessions=4
    )
    try:
        yield listener
    finally:
        await listener.close()


def behind(floor_s: float) -> KnownTime:
    """A host that has just booted without a clock, and knows that it is at least `floor_s`."""
    known = Clock(BOOT_S).known()
    known.at_least(floor_s)
    assert known.clock_is_behind
    return known


async def meet(device: Credentials, companion: Credentials) -> None:
    async with listening(companion) as listener:
        channel = await dial("127.0.0.1", listener.port, identity=device, hello=HELLO, timeout_s=20)
        await channel.close("done")


async def test_with_the_clock_at_1970_a_good_certificate_is_taken_on_both_sides(folder: Path) -> None:
    floor_s = time.time() - 5 * DAY_S
    device = Credentials(identity(folder, "device"), "device", known_time=behind(floor_s))
    companion = Credentials(identity(folder, "companion"), "companion", known_time=behind(floor_s))
    await meet(device, companion)


async def test_with_the_clock_at_1970_an_expired_companion_is_refused_by_the_time_known(folder: Path) -> None:
    device = Credentials(identity(folder, "device"), "device", known_time=behind(time.time() - 5 * DAY_S))
    companion = Credentials(identity(folder, "old-companion"), "companion")
    with pytest.raises(IdentityError, match=r"of x has expired: good until .* \(this host's clock says less"):
        await meet(device, companion)


async def test_with_the_clock_at_1970_an_expired_device_is_refused_by_the_time_known_and_told(folder: Path) -> None:
    device = Credentials(identity(folder, "old-device"), "device")
    companion = Credentials(identity(folder, "companion"), "companion", known_time=behind(time.time() - 5 * DAY_S))
    with pytest.raises(IdentityError, match="refused our certificate: the certificate of x has expired"):
        await meet(device, companion)


async def test_an_expired_authority_is_refused_by_the_time_known(tmp_path: Path) -> None:
    make_authority(tmp_path / "ca", now=datetime(2001, 1, 1, tzinfo=UTC))
    then = datetime(2001, 1, 2, tzinfo=UTC)
    made = {
        role: issue(tmp_path / "ca", "x", role, tmp_path / role, days=9000, now=then)
        for role in ("device", "companion")
    }  # type: ignore[arg-type]  # the two roles
    floor_s = datetime(2015, 1, 1, tzinfo=UTC).timestamp()
    with pytest.raises(IdentityError, match="good until 2010-12-30"):  # 3650 days after 2001-01-01; leaves end with it
        await meet(
            Credentials(made["device"], "device", known_time=behind(floor_s)),
            Credentials(made["companion"], "companion", known_time=behind(0.0 + BOOT_S + 1)),
        )


async def test_an_expired_certificate_stays_refused_when_the_clock_is_set_again(folder: Path) -> None:
    clock = Clock(BOOT_S)
    known = clock.known()
    known.at_least(time.time() - 5 * DAY_S)
    device = Credentials(identity(folder, "device"), "device", known_time=known)
    await meet(device, Credentials(identity(folder, "companion"), "companion"))
    clock.wall_s = time.time()
    with pytest.raises(IdentityError, match="has expired"):
        await meet(device, Credentials(identity(folder, "old-companion"), "companion"))


async def test_a_clock_that_is_set_during_the_handshake_lets_nothing_through(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(BOOT_S)
    known = clock.known()
    known.at_least(time.time() - 395 * DAY_S)
    device = Credentials(identity(folder, "device"), "device", known_time=known)
    judge = Credentials.judge

    def after_the_clock_was_set(self: Credentials, certificate: object, der: bytes | None) -> object:
        if self is device:
            clock.wall_s = time.time()
        return judge(self, certificate, der)

    monkeypatch.setattr(Credentials, "judge", after_the_clock_was_set)
    with pytest.raises(IdentityError, match="has expired: good until"):
        await meet(device, Credentials(identity(folder, "old-companion"), "companion"))


async def test_a_meeting_teaches_the_time_and_our_own_certificate_does_at_the_start(
    folder: Path, tmp_path: Path
) -> None:
    device = Credentials(identity(folder, "device"), "device", known_time=KnownTime(tmp_path / "t"))
    await meet(device, Credentials(identity(folder, "companion"), "companion"))
    shown_s = device.validity().from_s
    assert abs(float((tmp_path / "t").read_text()) - shown_s) < 60, "both certificates were issued together"
    fresh = Credentials(identity(folder, "device"), "device", known_time=Clock(BOOT_S).known())
    assert fresh.require() == "", "what only this clock says is no warning"
    assert fresh.known_time.now_s() == shown_s
