"""What cases say of an agent, its companion and the link between them: silent, dead, restarted, slow to open."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import numpy as np
import yaml

from scripts.benches.cases_device import FOLDER, ROWS, Agent, Taken, ms_of
from scripts.benches.figure import percentile
from scripts.client import Answer, Client, Refused
from scripts.pair import STATUS, Pair, free_port
from scripts.wire_vectors import HELLO, message
from split.identity.certificates import Identity, issue, make_authority
from split.identity.contexts import client_context

MIB_OF_ROWS: Final = {"x": np.ones((4096, 64), np.float32)}
"""One MiB."""
MANY: Final = 24
"""Requests of a MiB: more than a queue of 8 MiB and the sockets hold."""
WAIT_S: Final = 60.0
IMPOSTOR: Final = FOLDER / "impostor"


def run(taken: Taken, *, quick: bool) -> None:
    with Pair(FOLDER, FOLDER / "models") as pair:
        pair.start_agent(slowdown=1.0)
        until_remote(pair)
        taken["O-WI-11"] = [resets_within_a_frame(pair) for _ in range(1 if quick else 5)]
        taken["O-WI-04"] = [loop_lag(pair, rate_mbit=60 if quick else 8)]
        taken["O-WI-02"] = [stops_reading(pair) for _ in range(1 if quick else 10)]
        taken["O-WI-14"] = [restarted(pair) for _ in range(2 if quick else 20)]
        taken["O-WI-13"] = [stopped_while_waiting(pair) for _ in range(1 if quick else 5)]
        taken["O-WI-17"] = [opens_late(pair, after_s=3.0 if quick else 60.0)]
        pair.stop_agent()
        taken["O-WI-16"] = [one_of_four_lives(pair) for _ in range(1 if quick else 5)]


def until_remote(pair: Pair) -> None:
    """Until both models are answered by the companion; TimeoutError."""
    pair.link(rtt_ms=2, rate_mbit=1000)
    with pair.client() as client:
        for name in ("chain", "twin"):
            wait_for(partial(answered_remotely, client, name))


def answered_remotely(client: Client, model: str, mode: str = "offload") -> bool:
    try:
        return client.infer(model, ROWS, mode=mode, deadline_ms=10e3).placement == mode
    except (Refused, OSError):
        return False


def wait_for(true: Any) -> None:
    deadline_at_s = time.monotonic() + WAIT_S
    while not true():
        if time.monotonic() > deadline_at_s:
            raise TimeoutError(f"it did not come within {WAIT_S:.0f} s")
        time.sleep(0.002)


# -- a companion that is hurt -----------------------------------------------------------------------------------------


def resets_within_a_frame(pair: Pair) -> float:
    """O-WI-11: a hundred peers that are let in, send half a request and reset; then a request of the device."""
    device = Identity(**{name: FOLDER / "device" / f"{name}.pem" for name in ("cert", "key", "ca")})
    host, _, port = pair.address().rpartition(":")
    asked = {"t": "infer", "request_id": "1", "attempt": 1, "digest": "d", "cut": "offload", "codec": "raw"}
    half = message(2, asked | {"budget_ms": 1e3}, bytes(4096))[:-7]

    async def hurt() -> None:
        for _ in range(100):
            _, writer = await asyncio.open_connection(host, int(port), ssl=client_context(device))
            writer.write(message(1, HELLO, priority=0) + half)
            await writer.drain()
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() is a reset then
            writer.transport.abort()

    asyncio.run(hurt())
    with pair.client() as client:
        answer = client.infer("chain", ROWS, mode="offload", deadline_ms=20e3)
        assert answer.placement == "offload", answer.fallback
        return answer.took_ms


def loop_lag(pair: Pair, *, rate_mbit: float) -> float:
    """O-WI-04: 30 MB are sent while the companion stands still 0.4 s of every second; p99 of how soon the daemon's loop
    answers. Every answer is right and the connection is the one from before."""
    pair.link(rtt_ms=2, rate_mbit=rate_mbit)
    live_ms: list[float] = []
    stop = threading.Event()

    def watch() -> None:
        with pair.client() as client:
            while not stop.wait(0.01):
                live_ms.append(ms_of(client.get, "/v2/health/live"))

    def freeze() -> None:
        while not stop.is_set():
            pair.freeze_companion()
            time.sleep(0.4)
            pair.thaw_companion()
            stop.wait(0.6)

    with pair.client() as client, ThreadPoolExecutor(6) as pool:
        connects = client.get(STATUS)["companion"]["connects"]
        beside = [pool.submit(watch), pool.submit(freeze)]

        def send(_: int) -> Answer:
            with pair.client() as asking:
                return asking.infer("chain", MIB_OF_ROWS, mode="offload", deadline_ms=300e3)

        answers = list(pool.map(send, range(29)))
        stop.set()
        for one in beside:
            one.result()
        assert client.get(STATUS)["companion"]["connects"] == connects, "the connection was lost"
    expected = 2 * MIB_OF_ROWS["x"]
    assert all(np.array_equal(one.outputs["y"], expected) for one in answers)
    pair.link(rtt_ms=2, rate_mbit=1000)
    return percentile(live_ms, 0.99)


def stops_reading(pair: Pair) -> float:
    """O-WI-02: the companion stands still and requests of a MiB come until one does not fit any more; how long that one
    takes by the daemon's clock. Those before it wait: the sockets take some bytes still."""
    with ThreadPoolExecutor(MANY) as pool:

        def send(_: int) -> Answer:
            with pair.client() as asking:
                return asking.infer("chain", MIB_OF_ROWS, mode="offload", deadline_ms=20e3)

        pair.freeze_companion()
        try:
            for number in range(MANY):
                asked = pool.submit(send, number)
                with contextlib.suppress(TimeoutError):
                    answer = asked.result(timeout=0.2)
                    assert answer.placement == "local", "a companion that stands still has answered"
                    break
            else:
                raise AssertionError(f"{MANY} MiB wait for the companion")
        finally:
            pair.thaw_companion()
    until_remote(pair)
    return answer.timings_ms["total"]


def restarted(pair: Pair) -> float:
    """O-WI-14: from the moment a companion's port is open again until both of its models are answered by it."""
    pair.stop_companion()
    pair.start_companion()
    return ms_of(until_remote, pair)


def stopped_while_waiting(pair: Pair) -> float:
    """O-WI-13: how long the agent takes to end while a request waits for a companion that is silent."""
    with ThreadPoolExecutor(1) as pool, pair.client() as client:
        pair.freeze_companion()
        asked = pool.submit(client.infer, "chain", ROWS, mode="offload", deadline_ms=20e3)
        time.sleep(0.1)
        took_ms = ms_of(pair.stop_agent)
        with contextlib.suppress(Refused, OSError):
            asked.result()
    pair.thaw_companion()
    pair.start_agent(slowdown=1.0)
    until_remote(pair)
    return took_ms


def opens_late(pair: Pair, *, after_s: float) -> float:
    """O-WI-17: nothing passes to the companion's port from the agent's start on; then it does. First split answer."""
    pair.stop_agent()
    pair.silence_link()
    pair.start_agent(slowdown=1.0)
    with pair.client() as client:
        ends_s = time.monotonic() + after_s
        while time.monotonic() < ends_s:
            assert not answered_remotely(client, "chain"), "an answer came through a closed port"
            time.sleep(0.2)
        pair.restore_link()
        return ms_of(wait_for, partial(answered_remotely, client, "chain", "split"))


# -- one live and three dead ------------------------------------------------------------------------------------------


def make_impostor() -> None:
    """A companion's certificate by another authority, once."""
    if not IMPOSTOR.exists():
        make_authority(IMPOSTOR / "ca")
        issue(IMPOSTOR / "ca", "companion", "companion", IMPOSTOR / "companion")


def one_of_four_lives(pair: Pair) -> float:
    """O-WI-16: from the first dial, at an address that takes connections and says nothing, to the live one's use."""
    config = yaml.safe_load((FOLDER / "agent.yaml").read_text())
    with drops() as (drop, dialled), impostor() as wrong:
        config["companions"] = [drop, f"127.0.0.1:{free_port()}", wrong, pair.address()]
        with Agent(FOLDER, config) as agent, agent.client() as client:
            agent.until(lambda status: status["companion"]["state"] == "connected", client)
            connected_s = time.monotonic()
            assert client.get(STATUS)["companion"]["address"] == pair.address()
            return (connected_s - dialled.wait()) * 1e3


class Moment:
    """When something happened first."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._at_s = 0.0

    def now(self) -> None:
        if not self._event.is_set():
            self._at_s = time.monotonic()
            self._event.set()

    def wait(self) -> float:
        assert self._event.wait(WAIT_S), "nobody dialled"
        return self._at_s


@contextlib.contextmanager
def drops() -> Iterator[tuple[str, Moment]]:
    """An address that takes connections and never says anything, and when it was dialled."""
    first, kept = Moment(), []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    first.now()
                    kept.append(connection)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}", first
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    for one in kept:
        one.close()


@contextlib.contextmanager
def impostor() -> Iterator[str]:
    """An address where another authority's companion answers."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(IMPOSTOR / "companion" / "cert.pem", IMPOSTOR / "companion" / "key.pem")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with contextlib.suppress(OSError), context.wrap_socket(connection, server_side=True) as talking:
                    talking.recv(1)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
