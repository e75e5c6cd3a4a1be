"""Device daemon and companion in two network namespaces with an emulated link between (scripts/netlab): each has its
own kernel path, its own congestion control and, where there are two, a processor of its own.

The caller stays outside and reaches the daemon over its UNIX socket, so that the link carries nothing but what the two
programs say to each other. Needs root, /dev/net/tun and gcc.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Final

from scripts.client import Client
from scripts.models import Unavailable
from scripts.pair import ROOT, STATUS, Pair

PROCESSORS: Final = sorted(os.sched_getaffinity(0))
DRAINED_S: Final = 10.0
"""Longer than the fullest queue of the slowest link needs: 64 KiB at 1 Mbit/s, and some round trips."""
RECONNECT_TIMEOUT_S: Final = 60.0
"""Of a lossy link, several dials: each is given up after seconds (`agent/dialler.py`)."""

SHORTEST_RTT_MS: Final = 5.0
"""Of the link before anybody sets it, and of all links that the benches set: the kernel remembers a shorter one for
five minutes, and bbr would take every link that follows for that short, which no device meets by being measured."""

_LISTENING: Final = "0A"
"""A socket's state in /proc/net/tcp (proc(5))."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Of the link, the same both ways."""

    rate_mbit: float
    rtt_ms: float
    loss_ratio: float = 0.0

    def __str__(self) -> str:
        lossy = f", loss {self.loss_ratio:.0%}" if self.loss_ratio else ""
        return f"{self.rate_mbit:g} Mbit/s, {self.rtt_ms:g} ms{lossy}"


def netlab(name: str) -> ModuleType:
    """`scripts/netlab`, which is a program, as a module, for the lab of this name; Unavailable where it cannot run."""
    if os.geteuid() != 0 or not Path("/dev/net/tun").exists():
        raise Unavailable("network namespaces with a link between need root and /dev/net/tun")
    os.environ["NETLAB_ID"] = name
    loader = SourceFileLoader("netlab", str(ROOT / "scripts" / "netlab"))
    spec = spec_from_loader("netlab", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    try:
        module.binary()
    except (OSError, RuntimeError) as error:
        raise Unavailable(f"the link emulator of scripts/netlab.c cannot be compiled: {error}") from error
    return module


class LabPair(Pair):
    """A `Pair` whose link is the lab's: `condition` instead of `link`. Made by `lab_pair`."""

    def __init__(self, folder: Path, models: Path, lab: ModuleType) -> None:
        cores = {"agent": {PROCESSORS[0]}, "companion": {PROCESSORS[1]}} if len(PROCESSORS) > 1 else {}
        super().__init__(folder, models, host=lab.ADDR["cloud"], cores=cores)
        self._lab = lab

    def client(self) -> Client:
        return Client(self.folder / "agent.sock")

    def address(self, n: int = 0, *, through_link: bool = False) -> str:
        """Where companion `n` listens; there is no way to it but the link."""
        return super().address(n)

    def condition(self, conditions: Conditions) -> None:
        """New conditions, both ways, when what was under way has arrived."""
        self._drain()
        self._set(delay=conditions.rtt_ms / 2, rate=conditions.rate_mbit, loss=conditions.loss_ratio, blackout=0)

    def reconnect(self) -> None:
        """The device's connections end as by a reset, and it has made new ones over the link as it is now: a kernel
        keeps of a connection what its former link was like (bbr a round trip for ten seconds). Unavailable where the
        kernel does not let them be ended (CONFIG_INET_DIAG_DESTROY)."""
        before, deadline_at_s = self._connects(), time.monotonic() + RECONNECT_TIMEOUT_S
        kill = self._lab.exec_argv("edge", ["ss", "--tcp", "--kill", "dst", self._host])
        subprocess.run(kill, check=True, capture_output=True)
        while self._connects() == before:
            if time.monotonic() > deadline_at_s:
                raise Unavailable("the device's connections could not be ended, or it made no new ones")
            time.sleep(0.05)

    def _connects(self) -> int:
        """How often the device has connected since it started."""
        with self.client() as client:
            return int(client.get(STATUS)["companion"]["connects"])

    def change(self, up_mbit: float, down_mbit: float, rtt_ms: float, *, connected: bool) -> None:
        """The link becomes another one now, whatever is under way; not `connected`: every packet is lost."""
        self._set(up_rate=up_mbit, down_rate=down_mbit, delay=rtt_ms / 2, blackout=0 if connected else 1)

    def _set(self, **values: float) -> None:
        words = self._lab.link_words({key.replace("_", "-"): str(value) for key, value in values.items()})
        self._lab.ctl("set " + " ".join(words))

    def _drain(self) -> None:
        deadline_at_s, before = time.monotonic() + DRAINED_S, None
        while time.monotonic() < deadline_at_s and (now := self._lab.ctl("stats")) != before:
            before = now
            time.sleep(0.1)

    def _start_relay(self) -> None:
        """The lab's link is there already."""

    def _enter(self, name: str) -> Sequence[str]:
        argv: list[str] = self._lab.exec_argv("edge" if name == "agent" else "cloud", [])
        return argv

    def _companion_answers(self, n: int) -> bool:
        """Looked up where the companion is, since nobody outside the namespace can dial it."""
        port = int(self.address(n).rpartition(":")[2])
        process = self._processes["companion"]
        with contextlib.suppress(OSError, IndexError):
            for line in Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]:
                _, local, _, state = line.split()[:4]
                if state == _LISTENING and int(local.partition(":")[2], 16) == port:
                    return True
        return False


@contextlib.contextmanager
def lab_pair(folder: Path, models: Path, *, name: str, congestion_control: str = "bbr") -> Iterator[LabPair]:
    """Lab and companion up, both namespaces with this congestion control; everything ends with the block. Unavailable
    where there can be no lab."""
    lab = netlab(name)
    if modprobe := shutil.which("modprobe"):
        subprocess.run([modprobe, f"tcp_{congestion_control}"], check=False, capture_output=True)
    try:
        lab.up({"delay": str(SHORTEST_RTT_MS / 2), "rate": "200"}, cc=congestion_control)
    except RuntimeError as error:
        raise Unavailable(f"the lab cannot be set up: {error}") from error
    try:
        with LabPair(folder, models, lab) as pair:
            yield pair
    finally:
        lab.down()
