"""A slow link for tests and the demo, without root: a TCP relay that delays and paces what passes through it.

    python scripts/relay.py --to HOST:PORT [--delay-ms 10] [--rate-mbit 10]

It prints one JSON line, `{"port": …, "control": …}`: dial `port` instead of HOST:PORT; send commands to `control`, one
a line, each answered with one JSON line:

    set [up|down|both] delay_ms=10 rate_mbit=10    new conditions from now on (rate 0 = unlimited)
    cut rst                                        reset everything and refuse
    cut silent [up|down|both]                      let nothing through
    restore                                        end of the cut
    stats                                          bytes passed up and down, connections

It is an emulation of rate and delay only: each side speaks TCP with the relay, so there is no loss, no slow start over
the emulated delay, and the connection itself opens at once. (`netlab` beside it emulates packets, and needs root.)

How it stays exact: when bytes leave the emulated link is computed, not waited for (finish of the bytes before + own air
time, + delay), so a late wake-up makes single chunks late and never changes the rate. At most `QUEUE_S` of air time
waits before the link, and the sockets' buffers are small, so that the sender feels the rate as it would on a real one.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import selectors
import socket
import struct
import sys
from dataclasses import dataclass, field
from typing import Final

CHUNK_BYTES: Final = 4096
"""Read at a time: 3.3 ms of air time at 10 Mbit/s."""

QUEUE_S: Final = 0.010
"""Air time that may wait before the link (a real router's queue is longer; a short one keeps pings honest)."""

WAYS: Final = ("up", "down", "both")
SOCKET_BUFFER_BYTES: Final = 64 << 10
SEGMENT_BYTES: Final = 1448
"""Announced TCP segment size: loopback's 64 KiB segments do not go through small socket buffers without stalls."""


@dataclass(slots=True)
class Direction:
    """One way of the emulated link, shared by all connections: they queue for the same air."""

    delay_s: float = 0.0
    rate_bytes_per_s: float = 0.0
    free_at_s: float = 0.0
    """When the link has sent all that was given to it."""
    passed_bytes: int = 0
    open: asyncio.Event = field(default_factory=asyncio.Event)
    """Not set: nothing passes."""

    def __post_init__(self) -> None:
        self.open.set()

    def set(self, key: str, value: float) -> None:
        """`delay_ms` or `rate_mbit`; ValueError for anything else."""
        if not 0 <= value < 1e6:
            raise ValueError(f"{key} must be in 0…1e6, got {value}")
        if key == "delay_ms":
            self.delay_s = value / 1e3
        elif key == "rate_mbit":
            self.rate_bytes_per_s = value * 1e6 / 8
        else:
            raise ValueError(f"no condition {key!r}: delay_ms or rate_mbit")

    def send(self, size: int, now_s: float) -> float:
        """Put `size` bytes on the link and give the time at which the last of them arrives."""
        air_s = size / self.rate_bytes_per_s if self.rate_bytes_per_s else 0.0
        self.free_at_s = max(self.free_at_s, now_s) + air_s
        self.passed_bytes += size
        return self.free_at_s + self.delay_s


@dataclass
class Relay:
    """Listens, dials the target for each connection, and carries bytes both ways under the conditions of the moment."""

    target: tuple[str, int]
    up: Direction = field(default_factory=Direction)
    down: Direction = field(default_factory=Direction)

    def __post_init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self._pairs: set[asyncio.Task[None]] = set()
        self._refusing = False

    async def start(self) -> tuple[int, int]:
        """Listen on loopback; gives the relay's port and the control port."""
        listener = socket.create_server(("127.0.0.1", 0))
        _small_buffers(listener)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
        relay = await asyncio.start_server(self._on_connection, sock=listener, limit=CHUNK_BYTES)
        control = await asyncio.start_server(self._on_control, "127.0.0.1", 0)
        self._servers = [relay, control]
        return listener.getsockname()[1], control.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        for server in self._servers:
            server.close()
        await self._drop_all()

    async def command(self, line: str) -> dict[str, object]:
        """Carry out one control line; ValueError when it is none."""
        match line.split():
            case ["set", *words]:
                ways = self._ways(words.pop(0) if words and words[0] in WAYS else "both")
                settings = [word.partition("=")[::2] for word in words]
                for way in ways:
                    for key, value in settings:
                        way.set(key, float(value))
            case ["cut", "silent", *words] if words in ([], *([way] for way in WAYS)):
                for way in self._ways(*words):
                    way.open.clear()
            case ["cut", "rst"]:
                self._refusing = True
                await self._drop_all()
            case ["restore"]:
                self._refusing = False
                for way in self._ways():
                    way.open.set()
            case ["stats"]:
                pass
            case _:
                raise ValueError(f"no command {line!r}: set, cut rst, cut silent, restore, stats")
        counts = {"up_bytes": self.up.passed_bytes, "down_bytes": self.down.passed_bytes}
        return {"ok": True, **counts, "connections": len(self._pairs)}

    def _ways(self, which: str = "both") -> list[Direction]:
        return {"up": [self.up], "down": [self.down]}.get(which, [self.up, self.down])

    async def _on_control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while line := await reader.readline():
                try:
                    answer = await self.command(line.decode())
                except ValueError as error:
                    answer = {"ok": False, "error": str(error)}
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            _reset(writer)
            return
        task = asyncio.current_task()
        assert task is not None
        self._pairs.add(task)
        try:
            await self._carry(reader, writer)
        except asyncio.CancelledError:
            pass  # `cut rst` or close: both sides were reset
        finally:
            self._pairs.discard(task)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Both ways until both have ended; whatever else ends it, both sides are reset."""
        ends = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection(*self.target, limit=CHUNK_BYTES)
            ends.append(far_writer)
            for each in ends:
                _small_buffers(each.get_extra_info("socket"))
                each.transport.set_write_buffer_limits(high=CHUNK_BYTES)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._one_way(reader, far_writer, self.up))
                group.create_task(self._one_way(far_reader, writer, self.down))
            for each in ends:
                each.close()
        except* OSError:
            pass  # the target refuses, or one side was reset
        finally:
            for each in ends:
                if not each.is_closing():
                    _reset(each)

    async def _one_way(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Direction) -> None:
        """Read → pace → delay → write, until end of file, which is passed on as such."""
        in_flight: collections.deque[tuple[float, bytes]] = collections.deque()
        something = asyncio.Event()
        loop = asyncio.get_running_loop()

        async def deliver() -> None:
            while True:
                while not in_flight:
                    something.clear()
                    await something.wait()
                arrives_at_s, data = in_flight.popleft()
                await asyncio.sleep(arrives_at_s - loop.time())
                await way.open.wait()
                if not data:
                    writer.write_eof()
                    return
                writer.write(data)
                await writer.drain()

        async with asyncio.TaskGroup() as group:
            group.create_task(deliver())
            while True:
                data = await reader.read(CHUNK_BYTES)
                await way.open.wait()
                in_flight.append((way.send(len(data), loop.time()), data))
                something.set()
                if not data:
                    return
                await asyncio.sleep(way.free_at_s - QUEUE_S - loop.time())

    async def _drop_all(self) -> None:
        pairs = list(self._pairs)
        for task in pairs:
            task.cancel()
        await asyncio.gather(*pairs, return_exceptions=True)


def _small_buffers(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST: SO_LINGER on with zero seconds."""
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _serve(arguments: argparse.Namespace) -> None:
    host, _, port = arguments.to.rpartition(":")
    relay = Relay((host, int(port)))
    await relay.command(f"set delay_ms={arguments.delay_ms} rate_mbit={arguments.rate_mbit}")
    relay_port, control_port = await relay.start()
    print(json.dumps({"port": relay_port, "control": control_port}), flush=True)
    await asyncio.Event().wait()


def main() -> int:
    parser = argparse.ArgumentParser(prog="relay", description="A TCP relay with an emulated rate and delay.")
    parser.add_argument("--to", required=True, metavar="HOST:PORT", help="where to dial")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way, ms")
    parser.add_argument("--rate-mbit", type=float, default=0.0, help="each way, Mbit/s; 0 = unlimited")
    # select() waits to the microsecond, where the default epoll rounds up to whole milliseconds.
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(_serve(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
