"""What the service manager hears, read from a socket of our own (sd_notify(3), sd_watchdog_enabled(3))."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from split.systemd import asked_to_stop, feed_watchdog, notify, watchdog_period_s
from split.transport.virtual_time import run_in_virtual_time


def test_a_message_reaches_the_notify_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        notify("READY=1")
        assert manager.recv(100) == b"READY=1"


def test_an_abstract_socket_works_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"isthmus-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}")
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        notify("WATCHDOG=1")
        assert manager.recv(100) == b"WATCHDOG=1"


def test_nothing_happens_without_a_manager_or_with_one_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    notify("READY=1")


@pytest.mark.parametrize(
    ("usec", "pid", "period_s"),
    [
        ("20000000", "", 10.0),
        ("20000000", str(os.getpid()), 10.0),
        ("20000000", "1", None),  # meant for another process
        ("", "", None),
        ("soon", "", None),
    ],
)
def test_the_watchdog_is_fed_twice_per_period(
    monkeypatch: pytest.MonkeyPatch, usec: str, pid: str, period_s: float | None
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", usec)
    monkeypatch.setenv("WATCHDOG_PID", pid)
    assert watchdog_period_s() == period_s


def test_the_watchdog_is_fed_while_the_program_says_that_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "20000000")
        monkeypatch.delenv("WATCHDOG_PID", raising=False)
        alive = True

        async def main() -> None:
            nonlocal alive
            task = asyncio.create_task(feed_watchdog(lambda: alive))
            await asyncio.sleep(25)  # virtual: fed at 0, 10 and 20
            alive = False
            await asyncio.sleep(100)
            task.cancel()

        run_in_virtual_time(main())
        heard = 0
        try:
            while manager.recv(100) == b"WATCHDOG=1":
                heard += 1
        except BlockingIOError:
            pass
        assert heard == 3


def test_without_a_watchdog_nothing_is_fed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    run_in_virtual_time(feed_watchdog(lambda: True))


@pytest.fixture
def hangup() -> Iterator[None]:
    """SIGHUP as it is without nohup, whatever these tests were started by."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_to_end_asks_to_stop(hangup: None, name: signal.Signals) -> None:
    stop = asyncio.Event()
    with asked_to_stop(stop):
        os.kill(os.getpid(), name)
        await stop.wait()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


async def test_a_program_under_nohup_outlives_its_terminal(hangup: None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = asyncio.Event()
    with asked_to_stop(stop):
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
