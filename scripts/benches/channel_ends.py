"""The two ends that `channel` measures, each a process of its own: `companion` answers, `device` does what stdin says.

Both use the project's own transport. Beside it, for comparison, a bare pair of `asyncio.BufferedProtocol`s over the
same TLS: no frames, no priorities, no credit, 64 KiB written at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import ssl
import statistics
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from split.errors import ConnectionLost
from split.identity.contexts import Identity, client_context, server_context
from split.identity.credentials import credentials_of
from split.transport import tcp_options
from split.transport.channel import Channel
from split.transport.listener import listen
from split.transport.tls import TlsChannel, dial
from split.wire.limits import DEFAULT_LIMITS, KIB, MIB
from split.wire.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR, Hello, Infer, Message, Priority, Reply

DIAL_S: Final = 20.0
TENSOR_BYTES: Final = 256 * KIB
WARM_S: Final = 2.0
BIG_BYTES: Final = 2_000_000
URGENT_BYTES: Final = 1_000
IDLE_BYTES: Final = 400_000
IDLE_S: Final = 2.0
MESSAGE_BYTES: Final = 1_000_000
WINDOW: Final = 4
"""Messages outstanding on the loopback."""
PIECE_BYTES: Final = 64 * KIB
_LENGTH: Final = struct.Struct("<Q")


def identity(folder: Path, role: str) -> Identity:
    return Identity(cert=folder / role / "cert.pem", key=folder / role / "key.pem", ca=folder / "ca" / "ca.pem")


def hello() -> Hello:
    return Hello(
        major=PROTOCOL_MAJOR,
        minor=PROTOCOL_MINOR,
        agent="bench",
        runtime="none",
        max_message_bytes=256 * MIB,
        codecs=("raw",),
        window_bytes=DEFAULT_LIMITS.unread_bytes,
    )


def infer(kind: str, request_id: str = "r") -> Infer:
    """`kind` says what the companion does with it: `sink`, `echo`, `stats`, or `cc:` and a congestion control."""
    return Infer(request_id=request_id, attempt=1, digest="d", cut=kind, codec="raw", budget_ms=1e4)


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# ---- the companion


async def companion(folder: Path, host: str) -> None:
    """Prints its two ports, then serves until stdin ends."""
    listener = await listen(
        host,
        0,
        identity=identity(folder, "companion"),
        make_hello=hello,
        on_channel=answer,
        max_sessions=16,
    )
    loop = asyncio.get_running_loop()
    bare = await loop.create_server(lambda: Bare(echo=True), host, 0, ssl=server_context(identity(folder, "companion")))
    print(json.dumps({"port": listener.port, "bare_port": bare.sockets[0].getsockname()[1]}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    bare.close()
    await listener.close()


async def answer(channel: Channel) -> None:
    with contextlib.suppress(ConnectionLost):
        await serve(channel)


async def serve(channel: Channel) -> None:
    arrivals: list[tuple[float, int]] = []
    while True:
        incoming = await channel.receive()
        message = incoming.message
        if not isinstance(message, Infer):
            continue
        kind, _, argument = message.cut.partition(":")
        payload = b""
        if kind == "sink":
            arrivals.append((incoming.received_at_s, incoming.payload.nbytes))
            continue
        if kind == "cc":
            tcp_options.CONGESTION_CONTROL = argument  # type: ignore[misc]  # for the connections that come; the bench names it
        elif kind == "stats":
            payload = json.dumps({"arrivals": arrivals, "cpu_s": cpu_s(), "link": link(channel)}).encode()
            arrivals.clear()
        urgent = incoming.payload.nbytes <= URGENT_BYTES
        reply = Reply(
            request_id=message.request_id,
            attempt=1,
            cut=message.cut,
            codec="raw",
            queue_ms=0,
            decode_ms=0,
            tail_ms=0,
            encode_ms=0,
            cloud_ms=0,
        )
        channel.send(reply, [payload] if payload else (), priority=Priority.URGENT if urgent else Priority.NORMAL)


def link(channel: Channel) -> list[dict[str, Any]]:
    return [
        {"lane": one.lane, "cc": one.congestion_control, "rtt_ms": one.rtt_ms, "retransmits": one.retransmits}
        for one in channel.observe().connections
    ]


# ---- the device


class Device:
    """Each method is a step of the bench and returns its numbers."""

    def __init__(self, folder: Path, host: str, port: int, bare_port: int) -> None:
        self._folder = folder
        self._credentials = credentials_of(identity(folder, "device"), "device")
        self._host = host
        self._port = port
        self._bare_port = bare_port

    async def _dial(self, *first: tuple[Message, list[bytes]]) -> TlsChannel:
        return await dial(
            self._host,
            self._port,
            identity=self._credentials,
            hello=hello(),
            timeout_s=DIAL_S,
            first=first,
        )

    async def _connect(self, cc: str) -> TlsChannel:
        """A session of two connections, both ends with this congestion control, which is checked."""
        if cc:
            before = await self._dial()
            await ask(before, infer(f"cc:{cc}"))
            await before.close("done")
            tcp_options.CONGESTION_CONTROL = cc  # type: ignore[misc]  # the bench names it
        channel = await self._dial()
        if channel._joining is not None:
            await channel._joining
        facts = channel.observe().connections
        assert len(facts) == 2, "the second connection is not there"
        if cc and (wrong := {one.congestion_control for one in facts} - {cc}):
            sys.exit(f"scripts/bench: this kernel gave {wrong} where {cc} was asked for")
        return channel

    async def goodput(self, cc: str, seconds: float) -> dict[str, Any]:
        """Tensor bytes per second at the companion, after the first two seconds."""
        channel = await self._connect(cc)
        tensor = bytes(TENSOR_BYTES)
        loop = asyncio.get_running_loop()
        end_s = loop.time() + WARM_S + seconds
        while loop.time() < end_s:
            channel.send(infer("sink"), [tensor])
            await channel.drain(2 * TENSOR_BYTES)
        facts = channel.observe().connections[-1]
        stats = await ask_stats(channel, Priority.NORMAL)
        await channel.close("done")
        arrivals = stats["arrivals"]
        began_s = arrivals[0][0] + WARM_S
        kept = [one for one in arrivals if began_s <= one[0] <= began_s + seconds]
        return {
            "bytes_per_s": sum(size for _, size in kept[1:]) / (kept[-1][0] - kept[0][0]),
            "tensors": len(kept),
            "frame_bytes": facts.frame_bytes,
            "rtt_ms": facts.rtt_ms,
            "retransmits": facts.retransmits,
        }

    async def urgent(self, cc: str, seconds: float) -> dict[str, Any]:
        """Milliseconds of 1 KB while three big tensors are always outstanding; their rate beside it."""
        channel = await self._connect(cc)
        big, small = bytes(BIG_BYTES), bytes(URGENT_BYTES)
        loop = asyncio.get_running_loop()
        idle_ms = [await timed(channel, infer("echo"), small, Priority.URGENT) for _ in range(5)]
        waiting: dict[str, asyncio.Future[None]] = {}
        replies = asyncio.create_task(hand_out(channel, waiting))
        for n in range(3):
            channel.send(infer("echo", f"big {n}"), [big])
        began_s, count, taken = loop.time(), 0, []
        while loop.time() < began_s + WARM_S + seconds:
            count += 1
            future = waiting[f"small {count}"] = loop.create_future()
            sent_s = loop.time()
            channel.send(infer("echo", f"small {count}"), [small], priority=Priority.URGENT)
            await future
            if sent_s > began_s + WARM_S:
                taken.append((loop.time() - sent_s) * 1e3)
            await asyncio.sleep(0.05)
        replies.cancel()
        facts = channel.observe().connections
        channel._abort()
        await channel.close("done")
        return {
            "median_ms": statistics.median(taken),
            "worst_ms": max(taken),
            "idle_ms": statistics.median(idle_ms),
            "requests": len(taken),
            "frame_bytes": facts[-1].frame_bytes,
            "bulk_rtt_ms": facts[-1].rtt_ms,
        }

    async def after_idle(self, cc: str, rounds: int, back_to_back: int) -> dict[str, Any]:
        """Milliseconds of a 400 KB tensor back to back, and after two seconds without a byte."""
        channel = await self._connect(cc)
        tensor = bytes(IDLE_BYTES)
        for _ in range(back_to_back):
            await timed(channel, infer("echo"), tensor, Priority.NORMAL)
        close = [await timed(channel, infer("echo"), tensor, Priority.NORMAL) for _ in range(back_to_back)]
        idle = []
        for _ in range(rounds):
            await asyncio.sleep(IDLE_S)
            idle.append(await timed(channel, infer("echo"), tensor, Priority.NORMAL))
        await channel.close("done")
        return {"back_to_back_ms": statistics.median(close), "after_idle_ms": statistics.median(idle)}

    async def connect(self, cc: str, rounds: int) -> dict[str, Any]:
        """Milliseconds from nothing to the first answer, the request going with the Hello, and of one round trip."""
        if cc:
            await (await self._connect(cc)).close("done")
        taken, rtts = [], []
        for _ in range(rounds):
            began_s = time.perf_counter()
            channel = await self._dial((infer("echo"), [bytes(URGENT_BYTES)]))
            await channel.receive()
            taken.append((time.perf_counter() - began_s) * 1e3)
            rtts += [await timed(channel, infer("echo"), bytes(100), Priority.URGENT) for _ in range(3)]
            await channel.close("done")
        return {"first_answer_ms": statistics.median(taken), "round_trip_ms": min(rtts)}

    async def loopback(self, rounds: int, messages: int) -> dict[str, Any]:
        """Ours and the bare pair in turns: bytes per second, and processor seconds of both ends per byte."""
        channel = await self._connect("")
        loop = asyncio.get_running_loop()
        _, bare = await loop.create_connection(
            lambda: Bare(echo=False),
            self._host,
            self._bare_port,
            ssl=client_context(identity(self._folder, "device")),
            server_hostname="",
        )
        payload = bytes(MESSAGE_BYTES)
        work: dict[str, Callable[[], Awaitable[None]]] = {
            "ours": lambda: many_of_ours(channel, payload, messages),
            "bare": lambda: bare.many(payload, messages),
        }
        rates: dict[str, list[float]] = {name: [] for name in work}
        cpu: dict[str, list[float]] = {name: [] for name in work}
        for turn in range(-1, rounds):
            for name in sorted(work, reverse=turn % 2 == 0):
                cpu_before = cpu_s() + (await ask_stats(channel, Priority.URGENT))["cpu_s"]
                began_s = time.perf_counter()
                await work[name]()
                took_s = time.perf_counter() - began_s
                spent_s = cpu_s() + (await ask_stats(channel, Priority.URGENT))["cpu_s"] - cpu_before
                if turn >= 0:
                    rates[name].append(messages * MESSAGE_BYTES / took_s)
                    cpu[name].append(spent_s / (messages * MESSAGE_BYTES))
        frame_bytes = channel.observe().connections[-1].frame_bytes
        await channel.close("done")
        bare.transport.abort()
        return {"bytes_per_s": rates, "cpu_s_per_byte": cpu, "frame_bytes": frame_bytes}


async def ask(
    channel: Channel, message: Infer, payload: bytes = b"", priority: Priority = Priority.URGENT
) -> memoryview:
    """Send, and wait for the reply with the same id; others are dropped."""
    channel.send(message, [payload] if payload else (), priority=priority)
    while True:
        incoming = await channel.receive()
        if isinstance(incoming.message, Reply) and incoming.message.request_id == message.request_id:
            return incoming.payload


async def ask_stats(channel: Channel, priority: Priority) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bytes(await ask(channel, infer("stats", "stats"), priority=priority)))
    return found


async def timed(channel: Channel, message: Infer, payload: bytes, priority: Priority) -> float:
    began_s = time.perf_counter()
    await ask(channel, message, payload, priority)
    return (time.perf_counter() - began_s) * 1e3


async def hand_out(channel: Channel, waiting: dict[str, asyncio.Future[None]]) -> None:
    """Replies go to who waits; one to a big tensor sends the next."""
    big = bytes(BIG_BYTES)
    while True:
        message = (await channel.receive()).message
        assert isinstance(message, Reply)
        if message.request_id.startswith("big"):
            channel.send(infer("echo", message.request_id), [big])
        else:
            waiting.pop(message.request_id).set_result(None)


async def many_of_ours(channel: Channel, payload: bytes, messages: int) -> None:
    sent = 0
    for got in range(messages):
        while sent < min(got + WINDOW, messages):
            channel.send(infer("echo"), [payload])
            sent += 1
        await channel.receive()


class Bare(asyncio.BufferedProtocol):
    """A length, then that many bytes, both ways: the least that carries messages over asyncio's TLS."""

    def __init__(self, *, echo: bool) -> None:
        self._echo = echo
        self._header = memoryview(bytearray(_LENGTH.size))
        self._body = memoryview(b"")
        self._filled = 0
        self._paused: asyncio.Future[None] | None = None
        self._came = asyncio.Semaphore(0)
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._filled < _LENGTH.size:
            return self._header[self._filled :]
        return self._body[self._filled - _LENGTH.size :]

    def buffer_updated(self, nbytes: int) -> None:
        before, self._filled = self._filled, self._filled + nbytes
        if before < _LENGTH.size == self._filled:
            self._body = memoryview(bytearray(_LENGTH.unpack(self._header)[0]))
        if self._filled == _LENGTH.size + len(self._body):
            self._filled = 0
            if self._echo:
                self.transport.write(_LENGTH.pack(1) + b"x")
            else:
                self._came.release()

    def pause_writing(self) -> None:
        self._paused = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._paused is not None:
            self._paused.set_result(None)
            self._paused = None

    async def send(self, payload: bytes) -> None:
        view = memoryview(payload)
        self.transport.write(_LENGTH.pack(len(payload)) + view[:PIECE_BYTES])
        for start in range(PIECE_BYTES, len(payload), PIECE_BYTES):
            if self._paused is not None:
                await self._paused
            self.transport.write(view[start : start + PIECE_BYTES])

    async def many(self, payload: bytes, messages: int) -> None:
        async def sending() -> None:
            for n in range(messages):
                if n >= WINDOW:
                    await self._came.acquire()
                await self.send(payload)

        await sending()
        for _ in range(min(WINDOW, messages)):
            await self._came.acquire()


async def device(folder: Path, host: str, port: int, bare_port: int) -> None:
    """One JSON line in, `[step, {arguments}]`, one line out, until stdin ends."""
    steps = Device(folder, host, port, bare_port)
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, arguments = json.loads(line)
        print(json.dumps(await getattr(steps, name)(**arguments)), flush=True)


def main() -> None:
    role, folder, host, *ports = sys.argv[1:]
    assert ssl.HAS_TLSv1_3
    if role == "companion":
        asyncio.run(companion(Path(folder), host))
    else:
        asyncio.run(device(Path(folder), host, *map(int, ports)))


if __name__ == "__main__":
    main()
