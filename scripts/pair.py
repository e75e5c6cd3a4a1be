"""A device daemon and a companion as two real processes, and an emulated link between them: for demo, benches and
flows. More companions may stand beside the first, without a link in between.

All on loopback, all files in one folder: configurations, keys, caches, the log of each process. Whatever was started
ends with the `with` block.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, Self

import yaml

from scripts.client import Client, Refused

ROOT: Final = Path(__file__).resolve().parents[1]
PROGRAMS: Final = Path(sys.executable).parent
START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 10.0
PROFILE_TIMEOUT_S: Final = 300.0
"""Until all models are measured, which takes a minute each at most."""
STATUS: Final = "/v2/isthmus/status"


class NotStarted(Exception):
    """A program that did not come up; the text ends with the last lines of its log."""


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, each another one (a companion is restarted on the same one, so 0 will not do).

    Held together until all are known: asked for one after the other, the kernel may give the same one twice.
    """
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


def free_port() -> int:
    """One such port."""
    return free_ports(1)[0]


class Pair:
    """Companions and link run from the start; `start_agent` starts the device with its speed. Companion 0 is the one
    behind the link. What an earlier pair left in `folder` (identities, models, profiles) is used again. `host`: where
    companions listen. `cores`: the processors that a program (`agent`, `companion`) may use, as a machine of its own
    has; all where it says nothing."""

    def __init__(
        self,
        folder: Path,
        models: Path,
        *,
        companions: int = 1,
        host: str = "127.0.0.1",
        cores: Mapping[str, set[int]] | None = None,
    ) -> None:
        self.folder = folder
        self.models = models
        self._host = host
        self._cores = cores or {}
        self.agent_port, *self._companion_ports = free_ports(1 + companions)
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._control: socket.socket | None = None
        self._answers: IO[str] | None = None

    def __enter__(self) -> Self:
        try:
            self._make_identities()
            for n in range(len(self._companion_ports)):
                self.start_companion(n)
            self._start_relay()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process and the control connection."""
        for name in list(self._processes):
            self._stop(name)
        for each in (self._answers, self._control):
            if each is not None:
                each.close()

    def client(self) -> Client:
        return Client(self.agent_port)

    # -- the companion ------------------------------------------------------------------------------------------------

    def start_companion(self, n: int = 0) -> None:
        """Start it and wait until its port answers; NotStarted."""
        config = str(self.folder / f"{_companion(n)}.yaml")
        self._start(_companion(n), [str(PROGRAMS / "isthmus-cloud"), "serve", "--config", config])
        self._wait(_companion(n), lambda: self._companion_answers(n))

    def stop_companion(self, n: int = 0) -> None:
        """SIGTERM, and wait until it has ended: goodbye is said, what is under way is answered."""
        self._stop(_companion(n))

    def kill_companion(self) -> None:
        """SIGKILL: nothing is said goodbye to."""
        process = self._processes.pop(_companion(0))
        process.kill()
        process.wait()

    def freeze_companion(self) -> None:
        """SIGSTOP: the connection stays open and nothing comes any more."""
        self._processes[_companion(0)].send_signal(signal.SIGSTOP)

    def pid(self, name: str) -> int:
        """Of a running program (`agent`, `companion`)."""
        return self._processes[name].pid

    def thaw_companion(self) -> None:
        self._processes[_companion(0)].send_signal(signal.SIGCONT)

    def forget_companion_models(self) -> None:
        """While it is down: everything that devices have sent it is gone."""
        for folder in ("companion-state/models", "companion-cache"):
            shutil.rmtree(self.folder / folder, ignore_errors=True)

    def _companion_answers(self, n: int) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((self._host, self._companion_ports[n]), timeout=1):
            return True
        return False

    # -- the device ---------------------------------------------------------------------------------------------------

    def start_agent(
        self,
        *,
        slowdown: float,
        on_progress: Callable[[str, float], None] | None = None,
        timeout_s: float = PROFILE_TIMEOUT_S,
    ) -> None:
        """(Re)start the device with this emulated speed; gives back when its models are profiled. NotStarted.

        `on_progress(what, ratio)` is called while models are prepared and profiled (the first time only).
        """
        self._stop("agent")
        config = {
            "listen": {"http": f"127.0.0.1:{self.agent_port}", "unix": str(self.folder / "agent.sock")},
            "models": str(self.models),
            "state_dir": str(self.folder / "agent-state"),
            "cache_dir": str(self.folder / "agent-cache"),
            "companions": [
                self.address(through_link=True),
                *(self.address(n) for n in range(1, len(self._companion_ports))),
            ],
            "identity": _identity(self.folder / "device"),
            "emulation": {"slowdown": slowdown},
        }
        path = self.folder / "agent.yaml"
        path.write_text(yaml.safe_dump(config))
        self._start("agent", [str(PROGRAMS / "isthmus"), "agent", "--config", str(path)])
        with self.client() as client:
            self._wait("agent", lambda: self._profiled(client, on_progress), timeout_s=timeout_s)

    def stop_agent(self) -> None:
        """SIGTERM, and wait until it has ended."""
        self._stop("agent")

    def address(self, n: int = 0, *, through_link: bool = False) -> str:
        """Where companion `n` listens, or (the first only) the link before it."""
        return f"127.0.0.1:{self._relay_port}" if through_link else f"{self._host}:{self._companion_ports[n]}"

    def companion_in_use(self) -> int:
        """The companion that the device is connected to, or was last."""
        with self.client() as client:
            address = str(client.get(STATUS)["companion"]["address"])
        ports = [self._relay_port, *self._companion_ports[1:]]
        return ports.index(int(address.rpartition(":")[2]))

    def wait_until_idle(self) -> None:
        """Until the device's worker has had nothing to do for a second (cuts are compared in the background)."""
        quiet = 0
        deadline_at_s = time.monotonic() + START_TIMEOUT_S
        with self.client() as client:
            while quiet < 5 and time.monotonic() < deadline_at_s:
                quiet = quiet + 1 if client.get(STATUS)["queue_ms"] == 0 else 0
                time.sleep(0.2)

    def _profiled(self, client: Client, on_progress: Callable[[str, float], None] | None) -> bool:
        try:
            models = client.get(STATUS)["models"]
        except (OSError, Refused):
            return False
        for model in models:
            if model["reason"]:
                raise NotStarted(f"model {model['name']}: {model['reason']}")
            if model["progress"] and on_progress is not None:
                on_progress(*told_of(model["progress"]))
        return bool(models) and all(model["profiled"] for model in models)

    # -- the link -----------------------------------------------------------------------------------------------------

    def link(self, *, rtt_ms: float, rate_mbit: float, down_mbit: float | None = None) -> None:
        """New conditions, both ways; `down_mbit` where the companion sends at another rate."""
        self._command(f"set delay_ms={rtt_ms / 2} rate_mbit={rate_mbit}")
        if down_mbit is not None:
            self._command(f"set down rate_mbit={down_mbit}")

    def cut_link(self) -> None:
        self._command("cut rst")

    def silence_link(self, way: str = "both") -> None:
        """Connections stay open and nothing passes, as when a mobile device drives through a tunnel; or nothing one way
        (`up`, `down`)."""
        self._command(f"cut silent {way}")

    def restore_link(self) -> None:
        self._command("restore")

    def sent_bytes(self) -> int:
        """What has passed the link towards the companion so far, all framing in."""
        return int(self._command("stats")["up_bytes"])

    def _command(self, line: str) -> dict[str, Any]:
        assert self._control is not None
        assert self._answers is not None
        self._control.sendall(f"{line}\n".encode())
        answer: dict[str, Any] = json.loads(self._answers.readline())
        assert answer["ok"], answer
        return answer

    def _start_relay(self) -> None:
        """Put the link between."""
        target = f"{self._host}:{self._companion_ports[0]}"
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "scripts" / "relay.py"), "--to", target], stdout=subprocess.PIPE, text=True
        )
        self._processes["relay"] = process
        assert process.stdout is not None
        ports = json.loads(process.stdout.readline())
        self._relay_port: int = ports["port"]
        self._control = socket.create_connection(("127.0.0.1", ports["control"]))
        self._answers = self._control.makefile("r")

    # -- processes ----------------------------------------------------------------------------------------------------

    def _make_identities(self) -> None:
        """The configurations, and one identity for all companions: they are one service."""
        identity = self.folder / "companion-state" / "identity"
        for n, port in enumerate(self._companion_ports):
            config = {
                "listen": f"{self._host}:{port}",
                "enroll_listen": None,
                "http": None,
                "state_dir": str(self.folder / f"{_companion(n)}-state"),
                "cache_dir": str(self.folder / f"{_companion(n)}-cache"),
                "identity": _identity(identity),
            }
            (self.folder / f"{_companion(n)}.yaml").write_text(yaml.safe_dump(config))
        cloud, config_file = str(PROGRAMS / "isthmus-cloud"), str(self.folder / f"{_companion(0)}.yaml")
        for command, made in (
            (["init"], identity),
            (["issue", "demo-device", "-o", str(self.folder / "device")], self.folder / "device"),
        ):
            if not made.exists():
                self._run([cloud, *command, "--config", config_file])

    def pin(self, name: str, cores: set[int]) -> None:
        """Keep a running process (`agent`, `companion`, `relay`) to these processors: main thread and what comes."""
        os.sched_setaffinity(self._processes[name].pid, cores)

    def _run(self, command: Sequence[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=START_TIMEOUT_S)
        if done.returncode:
            raise NotStarted(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")

    def _start(self, name: str, command: Sequence[str]) -> None:
        with (self.folder / f"{name}.log").open("a") as log:
            self._processes[name] = subprocess.Popen([*self._enter(name), *command], stdout=log, stderr=log, text=True)
        if name in self._cores:  # long before the interpreter is up and counts them
            self.pin(name, self._cores[name])

    def _enter(self, name: str) -> Sequence[str]:
        """What a program's command begins with, so that it runs where it shall."""
        return ()

    def _wait(self, name: str, up: Callable[[], bool], *, timeout_s: float = START_TIMEOUT_S) -> None:
        deadline_at_s = time.monotonic() + timeout_s
        while not up():
            ended = self._processes[name].poll()
            if ended is not None or time.monotonic() > deadline_at_s:
                why = f"ended with {ended}" if ended is not None else f"was not ready within {timeout_s:.0f} s"
                log = (self.folder / f"{name}.log").read_text().splitlines()
                raise NotStarted(f"the {name} {why}:\n" + "\n".join(log[-15:]))
            time.sleep(0.1)

    def _stop(self, name: str) -> None:
        process = self._processes.pop(name, None)
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _companion(n: int) -> str:
    """Of its process, log, configuration and folders."""
    return "companion" if n == 0 else f"companion-{n + 1}"


def told_of(progress: str) -> tuple[str, float]:
    """What is being done and how much of it is, of what a status says: `profile: cut 2 of 5 (40%)`, or a word alone."""
    what, found, percent = progress.rstrip(")%").rpartition(" (")
    return (what, float(percent) / 100) if found else (progress, 0.0)


def _identity(folder: Path) -> dict[str, Any]:
    return {"cert": str(folder / "cert.pem"), "key": str(folder / "key.pem"), "ca": str(folder / "ca.pem")}
