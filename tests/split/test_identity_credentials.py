"""Files that change under a running program: good ones are taken by the next connection, others are not; and a renewed
pair is never half there, wherever a crash strikes."""

from __future__ import annotations

import logging
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from split.errors import ConfigError, ConnectionLost, IdentityError
from split.identity import files
from split.identity.certificates import issue, make_authority, serial_of
from split.identity.contexts import Identity
from split.identity.credentials import Credentials
from split.identity.files import finish_switch, make_folder, switch_pair, why_not_switched, write_whole
from split.transport.channel import Channel
from split.transport.listener import Listener, listen
from split.transport.tls import dial
from split.wire.limits import MIB
from split.wire.messages import Hello

HELLO = Hello(major=1, minor=0, agent="a", runtime="r", max_message_bytes=MIB, codecs=("raw",))


@pytest.fixture
def made(tmp_path: Path) -> dict[str, Identity]:
    make_authority(tmp_path / "ca")
    return {
        "device": issue(tmp_path / "ca", "d", "device", tmp_path / "device"),
        "renewed device": issue(tmp_path / "ca", "d2", "device", tmp_path / "renewed-device"),
        "companion": issue(tmp_path / "ca", "c", "companion", tmp_path / "companion"),
        "renewed companion": issue(tmp_path / "ca", "c2", "companion", tmp_path / "renewed-companion"),
    }


def serial(identity: Identity) -> int:
    return serial_of(identity.cert.read_bytes())


def replace_pair(old: Identity, new: Identity) -> None:
    for source, target in ((new.key, old.key), (new.cert, old.cert)):
        shutil.copy(source, target.with_suffix(".new"))
        os.replace(target.with_suffix(".new"), target)


async def start(credentials: Credentials, seen: list[Channel]) -> Listener:
    async def hold(channel: Channel) -> None:
        seen.append(channel)
        try:
            while True:
                await channel.receive()
        except ConnectionLost:
            pass

    return await listen("127.0.0.1", 0, identity=credentials, make_hello=lambda: HELLO, on_channel=hold, max_sessions=8)


async def test_a_new_pair_is_used_by_new_connections_on_both_sides_and_the_running_one_goes_on(
    made: dict[str, Identity],
) -> None:
    device, companion = Credentials(made["device"], "device"), Credentials(made["companion"], "companion")
    seen: list[Channel] = []
    listener = await start(companion, seen)
    try:
        first = await dial("127.0.0.1", listener.port, identity=device, hello=HELLO, timeout_s=20)
        assert first.peer.name == "c"
        replace_pair(made["device"], made["renewed device"])
        replace_pair(made["companion"], made["renewed companion"])
        second = await dial("127.0.0.1", listener.port, identity=device, hello=HELLO, timeout_s=20)
        assert second.peer.name == "c2"
        assert [channel.peer.name for channel in seen] == ["d", "d2"]
        assert [channel.peer.serial for channel in seen][1] == serial(made["renewed device"])
        assert first.closed_because is None
        await first.close("done")
        await second.close("done")
    finally:
        await listener.close()


@pytest.mark.parametrize("half", ["key first", "cert first", "cert cut off", "key gone", "another authority's"])
def test_half_a_pair_is_not_taken_and_the_whole_one_is_as_soon_as_it_is_there(
    made: dict[str, Identity], tmp_path: Path, half: str, caplog: pytest.LogCaptureFixture
) -> None:
    identity, new = made["device"], made["renewed device"]
    credentials = Credentials(identity, "device")
    before = credentials.context()
    old_key = identity.key.read_bytes()
    match half:
        case "key first":
            shutil.copy(new.key, identity.key)
        case "cert first":
            shutil.copy(new.cert, identity.cert)
        case "cert cut off":
            identity.cert.write_bytes(new.cert.read_bytes()[:200])
        case "key gone":
            identity.key.unlink()
        case _:
            make_authority(tmp_path / "other")
            other = issue(tmp_path / "other", "d", "device", tmp_path / "theirs")
            replace_pair(identity, other)
    with caplog.at_level(logging.WARNING, "isthmus.identity"):
        assert credentials.context() is before
        assert credentials.context() is before
    assert len([line for line in caplog.messages if "not taken" in line]) == 1, "said once for each change"
    identity.key.write_bytes(old_key)
    replace_pair(identity, new)
    assert credentials.context() is not before


def test_files_behind_links_that_are_switched_as_kubernetes_does_are_noticed(
    made: dict[str, Identity], tmp_path: Path
) -> None:
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    (mounted / "..data").symlink_to(tmp_path / "device")
    for name in ("cert.pem", "key.pem", "ca.pem"):
        (mounted / name).symlink_to(Path("..data") / name)
    identity = Identity(cert=mounted / "cert.pem", key=mounted / "key.pem", ca=mounted / "ca.pem")
    credentials = Credentials(identity, "device")
    before = credentials.context()
    (mounted / "..next").symlink_to(tmp_path / "renewed-device")
    os.replace(mounted / "..next", mounted / "..data")
    assert credentials.context() is not before
    assert "is a link" in why_not_switched(identity)


def test_files_that_stay_cost_no_new_context(made: dict[str, Identity]) -> None:
    credentials = Credentials(made["device"], "device")
    assert credentials.context() is credentials.context()


# ---- the switch


class Crash(BaseException):
    pass


@pytest.fixture
def crash_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """The process dies before the n-th file system operation of a switch."""
    left = {"operations": 10**9}

    def step(real):  # type: ignore[no-untyped-def]  # any function of os
        def does(*arguments, **named):  # type: ignore[no-untyped-def]  # as above
            if left["operations"] == 0:
                raise Crash
            left["operations"] -= 1
            return real(*arguments, **named)

        return does

    with monkeypatch.context() as patch:
        for name in ("replace", "fsync"):
            patch.setattr(files.os, name, step(getattr(os, name)))
        yield left


@pytest.mark.parametrize("operations", range(10))
def test_a_crash_anywhere_in_a_switch_leaves_a_pair_that_belongs_together(
    made: dict[str, Identity], crash_after: dict[str, int], operations: int
) -> None:
    identity, new = made["device"], made["renewed device"]
    serials = {serial(identity), serial(new)}
    cert, key = new.cert.read_bytes(), new.key.read_bytes()
    crash_after["operations"] = operations
    try:
        switch_pair(identity, cert=cert, key=key)
        died = False
    except Crash:
        died = True
    crash_after["operations"] = 10**9
    assert died == (operations < 9), "three files, each synced, renamed, its folder synced"
    credentials = Credentials(identity, "device")
    credentials.require()
    assert serial(identity) in serials
    credentials.context()
    assert not finish_switch(identity)


def test_a_switch_keeps_the_modes_and_leaves_nothing_beside(made: dict[str, Identity]) -> None:
    identity, new = made["device"], made["renewed device"]
    identity.key.chmod(0o640)
    identity.cert.chmod(0o600)
    switch_pair(identity, cert=new.cert.read_bytes(), key=new.key.read_bytes())
    assert stat.S_IMODE(identity.key.stat().st_mode) == 0o640
    assert stat.S_IMODE(identity.cert.stat().st_mode) == 0o600
    assert sorted(path.name for path in identity.cert.parent.iterdir()) == ["ca.pem", "cert.pem", "key.pem"]
    assert serial(identity) == serial(new)


def test_certificate_and_key_may_be_one_file(made: dict[str, Identity], tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes(made["device"].key.read_bytes() + made["device"].cert.read_bytes())
    both.chmod(0o600)
    identity = Identity(cert=both, key=both, ca=made["device"].ca)
    new = made["renewed device"]
    switch_pair(identity, cert=new.cert.read_bytes(), key=new.key.read_bytes())
    assert stat.S_IMODE(both.stat().st_mode) == 0o600
    assert Credentials(identity, "device").require() == ""
    assert serial(identity) == serial(new)


def test_a_journal_that_is_damaged_is_bad_configuration_and_changes_nothing(made: dict[str, Identity]) -> None:
    identity = made["device"]
    before = identity.cert.read_bytes(), identity.key.read_bytes()
    identity.cert.with_name("cert.pem.renewed").write_text("half of")
    with pytest.raises(ConfigError, match="is no renewed certificate and key: remove it"):
        Credentials(identity, "device").require()
    assert (identity.cert.read_bytes(), identity.key.read_bytes()) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files for others")
def test_what_root_makes_in_the_daemons_folder_is_the_daemons(tmp_path: Path) -> None:
    os.chown(tmp_path, 65532, 65533)
    make_folder(tmp_path / "a" / "b")
    write_whole(tmp_path / "a" / "b" / "f", b"x", mode=0o600)
    for path in (tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "f"):
        assert (path.stat().st_uid, path.stat().st_gid) == (65532, 65533)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.write_text("old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(IdentityError, match="cannot be written: No space left"):
        write_whole(path, b"new", mode=0o600)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
