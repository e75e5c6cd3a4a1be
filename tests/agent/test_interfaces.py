"""Changes of the network: told once for a burst and not too often; and by the kernel itself where it lets us."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.interfaces import APART_S, Interfaces, source_towards

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def kernel() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Stands for a netlink socket: what is sent into one end is heard at the other."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    yield here, there
    there.close()
    here.close()


async def test_a_burst_of_messages_is_told_once_and_a_later_one_again(
    kernel: tuple[socket.socket, socket.socket],
) -> None:
    here, there = kernel
    told_at_s: list[float] = []
    told = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_change() -> None:
        told_at_s.append(loop.time())
        told.set()

    interfaces = Interfaces(on_change, make_socket=lambda: here)
    interfaces.start()
    async with asyncio.timeout(30):
        for _ in range(20):
            there.send(b"an address")
        await told.wait()
        told.clear()
        there.send(b"a route")
        await told.wait()
    interfaces.close()
    first, second = told_at_s
    assert second - first >= APART_S  # a floor that the code sets, not a time that it takes
    assert here.fileno() == -1


@pytest.mark.parametrize("error", [PermissionError(), AttributeError("no AF_NETLINK")])
async def test_where_the_kernel_tells_nothing_nothing_is_told(error: Exception) -> None:
    def refuse() -> socket.socket:
        raise error

    interfaces = Interfaces(lambda: None, make_socket=refuse)
    interfaces.start()
    interfaces.close()


def test_the_way_to_this_host_leads_from_the_address_itself() -> None:
    assert source_towards("127.0.0.1") == "127.0.0.1"
    assert source_towards("not an address") is None


IN_A_NAMESPACE = """
import asyncio, subprocess
from agent.interfaces import Interfaces, source_towards

def ip(line):
    subprocess.run(["ip", *line.split()], check=True)

async def main():
    changed = asyncio.Event()
    interfaces = Interfaces(changed.set)
    interfaces.start()
    for address in ("10.1.0.2/24", "10.2.0.2/24"):
        ip("link set lo up")
        ip(f"address add {address} dev lo")
        ip(f"route replace default dev lo src {address.partition('/')[0]}")
        async with asyncio.timeout(30):
            await changed.wait()
        changed.clear()
        print(source_towards("192.0.2.1"))
        ip(f"address del {address} dev lo")
    ip("link set lo down")
    async with asyncio.timeout(30):
        await changed.wait()
    print(source_towards("192.0.2.1"))
    interfaces.close()

asyncio.run(main())
"""


def test_the_kernel_tells_of_a_new_address_and_of_the_last_one_that_goes() -> None:
    """In a network namespace of its own, whose loopback plays the Wi-Fi."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("needs root, ip and unshare for a network namespace")
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", IN_A_NAMESPACE],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if "Operation not permitted" in done.stderr:
        pytest.skip(f"no network namespace here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["10.1.0.2", "10.2.0.2", "None"]
