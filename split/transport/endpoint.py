"""What every transport's channel does alike: queue what came, wake who waits, keep the reason why it ended.

Not a transport: the subclass moves bytes (`_pump`, `_hold_reading`, `_end`), says on which of its connections a message
goes, where it has two (`_route`), and feeds messages in.
Invariant: a channel dies once; what was received before is still handed out, then every call raises the reason.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Final

from split.errors import CompanionRefused, ConnectionLost, RemoteProtocolError
from split.transport.channel import Buffer, Incoming, Observation, PeerIdentity
from split.wire.connection import Received, WireConnection
from split.wire.limits import CLOSE_FLUSH_S, MESSAGE_OVERHEAD_BYTES
from split.wire.messages import Hello, Message, Priority

_log = logging.getLogger("isthmus.transport")

TURN_S: Final = 0.002
"""What is handed out at a stretch before everything else on the loop has a turn: a peer that floods fills its own time,
and each of the others waits this long for it."""
INVALID_LOG_S: Final = 1.0
"""Between two lines of the log about messages of one peer that make no sense."""


class Endpoint(ABC):
    """One end of a channel over one or two `WireConnection`s; implements `Channel`."""

    def __init__(self, connection: WireConnection) -> None:
        self._connection = connection
        """The first one: its Hello and limits are the channel's."""
        self._connections = [connection]
        self._peer: PeerIdentity | None = None
        self._unread: deque[tuple[Incoming, Received]] = deque()
        self._unread_bytes = 0
        """Of what costs no credit."""
        self._holding = False
        self._logged_invalid = 0
        self._log_invalid_at_s = 0.0
        self._turn_began_s = 0.0
        self._reader: asyncio.Future[None] | None = None
        self._drainers: list[tuple[int, asyncio.Future[None]]] = []
        self._closed_because: str | None = None
        self._cause: BaseException | None = None

    # ---- what the subclass does

    @abstractmethod
    def _pump(self) -> None:
        """Move frames out while the link takes them."""

    @abstractmethod
    def _hold_reading(self, hold: bool) -> None:
        """Stop or resume taking bytes from the peer."""

    @abstractmethod
    async def _end(self) -> None:
        """Let go of the link; what was written leaves first, in bounded time."""

    @property
    @abstractmethod
    def sent_bytes(self) -> int: ...

    @property
    @abstractmethod
    def received_bytes(self) -> int: ...

    @abstractmethod
    def observe(self) -> Observation: ...

    # ---- Channel

    def _route(self, message: Message, priority: Priority) -> WireConnection:
        """Which connection a message goes on."""
        return self._connection

    @property
    def peer(self) -> PeerIdentity:
        assert self._peer is not None, "a channel is handed out once its peer is known"
        return self._peer

    @property
    def peer_hello(self) -> Hello:
        hello = self._connection.peer_hello
        assert hello is not None, "a channel is handed out once the Hellos are exchanged"
        return hello

    @property
    def closed_because(self) -> str | None:
        return self._closed_because

    @property
    def ends(self) -> tuple[str, str] | None:
        """See `Channel.ends`."""
        return None

    @property
    def lanes(self) -> int:
        """See `Channel.lanes`."""
        return len(self._connections)

    @property
    def queued_bytes(self) -> int:
        return sum(connection.queued_bytes for connection in self._connections)

    def look_afresh(self, rtt_ms: float) -> None:
        """See `Channel.look_afresh`."""
        return  # no kernel carries the bytes, or it keeps no pace

    @property
    def invalid_messages(self) -> int:
        return sum(connection.invalid_messages for connection in self._connections)

    def send(self, message: Message, payload: Sequence[Buffer] = (), *, priority: Priority = Priority.NORMAL) -> None:
        """See `Channel.send`."""
        self._refuse_when_closed()
        self._route(message, priority).send(message, payload, priority)
        self._pump()

    def forget(self, request_id: str, attempt: int) -> None:
        """See `Channel.forget`."""
        for connection in self._connections:
            connection.forget(request_id, attempt)
        if self._closed_because is None:
            self._pump()
        self._moved()

    async def drain(self, below_bytes: int) -> None:
        """See `Channel.drain`; `below_bytes` of at least 1."""
        assert below_bytes > 0, below_bytes
        while self.queued_bytes >= below_bytes:
            self._refuse_when_closed()
            waiter = asyncio.get_running_loop().create_future()
            entry = (below_bytes, waiter)
            self._drainers.append(entry)
            try:
                await waiter
            finally:
                self._drainers.remove(entry)
        self._refuse_when_closed()

    async def receive(self) -> Incoming:
        """See `Channel.receive`; cancelling it loses no message."""
        assert self._reader is None, "a channel is owned by one task for receiving"
        loop = asyncio.get_running_loop()
        if self._unread and loop.time() - self._turn_began_s > TURN_S:
            await asyncio.sleep(0)
            self._turn_began_s = loop.time()
        while not self._unread:
            self._refuse_when_closed()
            self._reader = loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
            self._turn_began_s = loop.time()
        incoming, received = self._unread.popleft()
        if received.taken() and self._closed_because is None:
            self._pump()
        if not received.credit_bytes:
            self._unread_bytes -= incoming.payload.nbytes + MESSAGE_OVERHEAD_BYTES
        if self._holding and self._unread_bytes <= self._connection.limits.unread_bytes // 2:
            self._holding = False
            self._hold_reading(False)
        self._log_invalid()
        return incoming

    async def close(self, reason: str) -> None:
        """See `Channel.close`."""
        if self._closed_because is None:
            try:
                async with asyncio.timeout(CLOSE_FLUSH_S):
                    await self.drain(1)
            except (TimeoutError, ConnectionLost):
                pass
        self._lost(reason)
        await self._end()

    # ---- for the subclass

    def _deliver(self, messages: Sequence[Received]) -> None:
        """Hand messages to whoever receives."""
        if not messages:
            return
        now_s = asyncio.get_running_loop().time()  # monotonic; a test's loop may have a clock of its own
        for received in messages:
            incoming = Incoming(
                message=received.message,
                payload=received.payload,
                received_at_s=now_s,
                priority=received.priority,
                bulk=received.connection is not self._connection,
            )
            self._unread.append((incoming, received))
            if not received.credit_bytes:
                self._unread_bytes += received.payload.nbytes + MESSAGE_OVERHEAD_BYTES
        if not self._holding and self._unread_bytes > self._connection.limits.unread_bytes:
            self._holding = True
            self._hold_reading(True)
        self._wake_reader()

    def _log_invalid(self) -> None:
        """One line a second at most, however many messages make no sense."""
        count, now_s = self.invalid_messages, asyncio.get_running_loop().time()
        if count > self._logged_invalid and now_s >= self._log_invalid_at_s:
            last = next(one.last_invalid for one in reversed(self._connections) if one.invalid_messages)
            _log.warning(
                "dropped %d messages of %s that make no sense (%d since it is connected); the last one: %s",
                count - self._logged_invalid,
                self.peer.name,
                count,
                last[:200],
            )
            self._logged_invalid, self._log_invalid_at_s = count, now_s + INVALID_LOG_S

    def _moved(self) -> None:
        """Bytes have left: wake who waits for it."""
        if self._drainers:
            queued = self.queued_bytes
            for below_bytes, waiter in self._drainers:
                if queued < below_bytes and not waiter.done():
                    waiter.set_result(None)

    def _lost(self, reason: str, cause: BaseException | None = None) -> None:
        """The channel is over; the first reason stays."""
        if self._closed_because is not None:
            return
        self._closed_because = reason
        self._cause = cause
        self._wake_reader()
        for _, waiter in self._drainers:
            if not waiter.done():
                waiter.set_result(None)

    def _failed(self, failure: RemoteProtocolError | CompanionRefused) -> None:
        """The wire connection cannot go on: because of what the peer sent, or because the peer says so."""
        if isinstance(failure, CompanionRefused):
            self._lost(f"the peer refused the connection: {failure} ({failure.code})", failure)
        else:
            self._lost(f"the peer broke the protocol: {failure}", failure)

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _refuse_when_closed(self) -> None:
        if self._closed_because is not None:
            raise ConnectionLost(self._closed_because) from self._cause
