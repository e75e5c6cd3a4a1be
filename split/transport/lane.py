"""One TLS 1.3 connection with certificates on both sides, on one asyncio transport; a channel has one or two of them.

Invariant: nothing of ours is sent before the peer's certificate and role were checked, and nothing is handed out before
its Hello came. Bytes waiting inside asyncio and the kernel are kept few, so that what is urgent overtakes what is big.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Any, Final, Protocol

from split.errors import CompanionRefused, ConnectionLost, IdentityError, IsthmusError, NotReached
from split.identity.contexts import Role, explain
from split.identity.credentials import Credentials
from split.transport.channel import LinkFacts, PeerIdentity
from split.transport.pacing import begin_afresh, is_worth_it
from split.transport.tcp_info import IPV4_HEADERS, IPV6_HEADERS, TcpInfo, read_tcp_info
from split.transport.tcp_options import keep_few_bytes, layers, restarts_after_idle, tune
from split.wire.connection import Received, WireConnection
from split.wire.limits import CLOSE_FLUSH_S, KIB, MAX_FRAME_BYTES, Limits
from split.wire.messages import Hello

WAITING_BYTES: Final = 16 * KIB
"""What may wait, at first and on slow links, in each of three places: asyncio's TLS layer, the TCP transport beneath,
and the kernel, unsent (TCP_NOTSENT_LOWAT: 77 ms instead of 592 for 1 KB behind 2 MB at 50 Mbit/s)."""

RECORD_BYTES: Final = 16 * KIB
"""Plain bytes of a full TLS record (RFC 8446, section 5.1); a frame fills whole ones."""
FRAME_S: Final = 0.005
"""A frame is what the link takes in so long: 13 ms at 10 Mbit/s (a record is the least), then 5 ms up to 200 Mbit/s."""
LARGEST_FRAME_BYTES: Final = 128 * KIB
"""In one run 256 KiB cost 3.8 ms of processor time per MB and both ends, 128 KiB 2.4; why was not looked into."""
MANY_MESSAGES: Final = 32
"""Understood from one piece of what came, at 10 µs each: then the other connections of the loop have a turn."""
MEASURE_S: Final = 0.2
"""The rate is read again after so long of sending: a few round trips, and the system call is nothing beside it."""


assert LARGEST_FRAME_BYTES <= MAX_FRAME_BYTES


def frame_bytes_at(rate_bytes_per_s: float) -> int:
    """Header and body of a frame on a link of this rate: clamp(rate × 5 ms, 16 KiB, 128 KiB), in whole TLS records."""
    records = round(rate_bytes_per_s * FRAME_S / RECORD_BYTES)
    return min(max(records * RECORD_BYTES, RECORD_BYTES), LARGEST_FRAME_BYTES)


def waiting_bytes_at(frame_bytes: int) -> int:
    """What may wait where frames have this size: half of one, 2.5 ms; less makes a fast link wait for this side."""
    return max(WAITING_BYTES, frame_bytes // 2)


class LaneOwner(Protocol):
    """Whom a lane tells; a Protocol, so that a lane does not know of channels."""

    def lane_received(self, messages: list[Received]) -> None: ...

    def lane_moved(self) -> None:
        """Bytes have left."""

    def lane_over(self, lane: Lane, reason: str, cause: Exception | None) -> None:
        """Called once; without a cause the peer has closed in good order."""


class Lane(asyncio.BufferedProtocol):
    """One end of a connection. `greets_first`: the Hello is sent at once, as the one that dials does, else when `greet`
    is called."""

    def __init__(
        self, hello: Hello, credentials: Credentials, where: str, limits: Limits, *, greets_first: bool
    ) -> None:
        self.connection = WireConnection(hello, limits=limits, dials=greets_first)
        self.peer: PeerIdentity | None = None
        """Set when its certificate was checked."""
        self.over: str | None = None
        """Why it ended; None before."""
        self._cause: Exception | None = None
        self._hello = hello
        self._credentials = credentials
        self._peer_role: Role = "companion" if credentials.role == "device" else "device"
        self._where = where
        self._owner: LaneOwner | None = None
        self._early: list[Received] = []
        """What came behind the Hello before there was an owner: at most what one read brings."""
        self._transport: asyncio.Transport | None = None
        self._socket: Any = None
        self._may_send = greets_first
        self._writing_paused = False
        self._held = False
        self._pumping = False
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._opened: asyncio.Future[None] = loop.create_future()
        self._gone: asyncio.Future[None] = loop.create_future()
        self._congestion_control = ""
        self._restarts = False
        self._headers = IPV4_HEADERS
        self._measure_at_s = 0.0
        self._latest = (0, 0)

    async def opened(self) -> None:
        """Wait for the peer's Hello. IdentityError, ConnectionLost, …: the sentence why it will not come."""
        try:
            await self._opened
        except BaseException:
            if self._transport is None or not self._transport.is_closing():  # else a last word is on its way out
                self.abort()
            raise

    def own(self, owner: LaneOwner) -> None:
        """From now on `owner` is told; it gets what came early at once."""
        self._owner = owner
        self.hold_reading(False)
        early, self._early = self._early, []
        owner.lane_received(early)
        if self.over is not None:  # it ended right behind its Hello, when there was nobody to tell
            owner.lane_over(self, self.over, self._cause)

    def greet(self) -> None:
        """Send the Hello that was held back, and from now on whatever waits."""
        self._may_send = True
        self.pump()

    async def refuse(self, code: str, why: str) -> None:
        """Tell the peer, as this side's last word, why it is not served (in place of a Hello held back); then close."""
        self.connection.refuse(code, why, stranger=not self._may_send)
        self.greet()
        self.close()
        await self.gone()

    @property
    def ends(self) -> tuple[str, str] | None:
        """IP addresses of this side and of the peer."""
        if self._transport is None or (here := self._transport.get_extra_info("sockname")) is None:
            return None
        return here[0], self._transport.get_extra_info("peername")[0]

    @property
    def peer_address(self) -> tuple[str, int]:
        """IP address and port of the other end."""
        assert self._transport is not None
        host, port = self._transport.get_extra_info("peername")[:2]
        return host, port

    # ---- asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        tls = transport.get_extra_info("ssl_object")
        try:
            peer = self._credentials.judge(tls.getpeercert(), tls.getpeercert(binary_form=True))
        except IdentityError as error:
            self._turn_away(error)
            return
        self.peer = PeerIdentity(name=peer.name, role=self._peer_role, serial=peer.serial)
        self._socket = transport.get_extra_info("socket")
        self._congestion_control = tune(self._socket)
        self._restarts = restarts_after_idle(self._congestion_control)
        self._headers = IPV6_HEADERS if self._socket.family == socket.AF_INET6 else IPV4_HEADERS
        keep_few_bytes(transport, self._socket, WAITING_BYTES)
        self.pump()

    def _turn_away(self, error: IdentityError) -> None:
        """The peer's certificate is not good. A device is told why, as the only thing it is told."""
        if self._peer_role == "device":
            self.connection.refuse(error.code, str(error), stranger=True)
            self.greet()
        self._end(f"{self._where}: {error}", type(error)(f"{self._where}: {error}"))
        if self._peer_role == "device":
            self.close()
        else:
            self.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.connection.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        before = self.connection.messages
        received = self.connection.buffer_updated(nbytes)
        if self.connection.messages - before >= MANY_MESSAGES:
            self._let_others_go_first()
        if not self._opened.done() and self.connection.peer_hello is not None:
            self._opened.set_result(None)
        if self._owner is not None:
            self._owner.lane_received(received)
        else:
            self._early += received
            if self.connection.peer_hello is not None:
                self.hold_reading(True)  # until somebody owns this; a Hello may come in many pieces
        failure = self.connection.failure
        if failure is None:
            self.pump()
        elif self.over is None:
            self._may_send, self._writing_paused = True, False  # what is left is a Refused, and the last this side says
            self.pump()
            if isinstance(failure, CompanionRefused):
                self._end(f"the peer refused the connection: {failure} ({failure.code})", failure)
            else:
                self._end(f"the peer broke the protocol: {failure}", failure)
            self.close()

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        if self._loop.time() >= self._measure_at_s:
            self._measure()
        self.pump()

    def eof_received(self) -> bool:
        self._end("the peer closed the connection", None)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None:
            self._end("the peer closed the connection", None)
        else:
            error = translate(exc, self._where)
            self._end(str(error), error)
        if not self._gone.done():
            self._gone.set_result(None)

    # ---- moving bytes

    def pump(self) -> None:
        """Hand frames to the transport while it takes them."""
        transport = self._transport
        if transport is None or self._pumping or not self._may_send:
            return
        self._pumping = True
        if self.connection.answers_rate:
            self.connection.answers_rate = False
            self.look_afresh(None)
        try:
            while not self._writing_paused and not transport.is_closing():
                frame = self.connection.next_frame()
                if frame is None:
                    break
                transport.write(memoryview(frame))  # asyncio slices off each record: of bytes that would copy the rest
        finally:
            self._pumping = False
        if self._owner is not None:
            self._owner.lane_moved()

    def _measure(self) -> None:
        """Let the size of frames follow the rate that TCP sees. Asked while the link holds us back and not otherwise:
        then the rate is the link's."""
        self._measure_at_s = self._loop.time() + MEASURE_S
        info = self._info()
        if info is not None and info.delivery_rate_bytes_per_s > 0:
            frame_bytes = frame_bytes_at(info.delivery_rate_bytes_per_s)
            if frame_bytes != self.connection.frame_bytes:
                assert self._transport is not None, "what is measured is connected"
                self.connection.frame_bytes = frame_bytes
                keep_few_bytes(self._transport, self._socket, waiting_bytes_at(frame_bytes))

    def _let_others_go_first(self) -> None:
        """Nothing more is taken in this turn of the loop. Asyncio's TLS layer has up to half a megabyte ready, and
        takes from it once for each time that the socket had something: ten thousand small messages in one turn."""
        if not self._held:
            self._set_reading(False)
            self._loop.call_soon(lambda: self._set_reading(not self._held))

    def hold_reading(self, hold: bool) -> None:
        """Stop or resume taking bytes from the peer."""
        self._held = hold
        self._set_reading(not hold)

    def _set_reading(self, read: bool) -> None:
        if self._transport is not None and not self._transport.is_closing():
            if read:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    # ---- what the kernel says

    def _info(self) -> TcpInfo | None:
        info = read_tcp_info(self._socket) if self._socket is not None else None
        if info is not None:
            sent = info.sent_bytes + info.segments_out * self._headers
            received = info.received_bytes + info.segments_in * self._headers
            self._latest = (max(sent, self._latest[0]), max(received, self._latest[1]))
        return info

    def link_bytes(self) -> tuple[int, int]:
        """Bytes sent and received, all headers and repetitions included."""
        self._info()
        return self._latest

    def waiting_bytes(self) -> int:
        """Written to the transport and not yet past the narrowest place of the way, as far as TCP can tell."""
        transport, info = self._transport, self._info()
        if transport is None or info is None:
            return 0
        return sum(layer.get_write_buffer_size() for layer in layers(transport)) + info.waiting_bytes

    def facts(self) -> LinkFacts | None:
        """None when the socket is closed."""
        info = self._info()
        if info is None:
            return None
        peer_hello = self.connection.peer_hello
        return LinkFacts(
            lane=self._hello.lane or (peer_hello.lane if peer_hello is not None else ""),
            congestion_control=self._congestion_control,
            rtt_ms=info.rtt_ms,
            rtt_var_ms=info.rtt_var_ms,
            min_rtt_ms=info.min_rtt_ms,
            rate_bytes_per_s=info.delivery_rate_bytes_per_s,
            app_limited=info.app_limited,
            cwnd_bytes=info.cwnd_bytes,
            threshold_bytes=info.threshold_bytes,
            segment_bytes=info.segment_bytes,
            timeout_ms=info.timeout_ms,
            timeouts=info.timeouts,
            silent_ms=info.silent_ms,
            restarts=self._restarts,
            unacked_bytes=info.unacked_bytes,
            unsent_bytes=info.unsent_bytes,
            acked_bytes=info.acked_bytes,
            retransmits=info.retransmits,
            frame_bytes=self.connection.frame_bytes,
        )

    def look_afresh(self, rtt_ms: float | None) -> None:
        """As `Channel.look_afresh`; None: the kernel's own average, where nobody here measures the path."""
        if not self._congestion_control.startswith("bbr") or (info := self._info()) is None:
            return
        if not is_worth_it(info, info.rtt_ms if rtt_ms is None else rtt_ms):
            return
        try:
            begin_afresh(self._socket, self._congestion_control)
        except OSError:
            self._congestion_control = tune(self._socket)
            self._restarts = restarts_after_idle(self._congestion_control)

    # ---- the end

    def close(self) -> None:
        """Begin to close; what was written leaves first."""
        self._info()
        if self._transport is not None and not self._transport.is_closing():
            self.hold_reading(False)
            self._transport.close()

    async def gone(self) -> None:
        """Wait until the connection is closed, which is begun already; in bounded time."""
        if self._transport is None:
            return
        try:
            async with asyncio.timeout(2 * CLOSE_FLUSH_S):
                await asyncio.shield(self._gone)
        except TimeoutError:
            self.abort()
            await self._gone

    async def ended(self) -> None:
        """Wait until the connection is closed, whenever that is."""
        await asyncio.shield(self._gone)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _end(self, reason: str, cause: Exception | None) -> None:
        if self.over is not None:
            return
        self.over, self._cause = reason, cause
        self._info()
        if not self._opened.done():
            if isinstance(cause, IsthmusError):
                failure = cause
            else:
                failure = ConnectionLost(f"{self._where}: {reason} before its Hello; the log over there may say why")
            self._opened.set_exception(failure)
            self._opened.exception()  # seen: where nobody waits for the opening any more, nobody is to be told
        if self._owner is not None:
            self._owner.lane_over(self, reason, cause)


def translate(error: Exception, where: str) -> IsthmusError:
    """The one place where the exceptions of `ssl` and `socket` become ours."""
    if isinstance(error, IsthmusError):
        return error
    if isinstance(error, ssl.SSLError):
        known = explain(error, where)
        if known is not None:
            return known
        return NotReached("TLS", f"{where} does not speak TLS 1.3 as Isthmus does ({error.args[-1]})")
    if isinstance(error, TimeoutError):
        return NotReached("TIMEOUT", f"{where} did not finish its handshake and Hello in time, or fell silent")
    if isinstance(error, ConnectionRefusedError):
        return NotReached("REFUSED", f"{where} refused the connection: nothing listens there")
    if isinstance(error, socket.gaierror):
        return NotReached("UNREACHABLE", f"{where} has no address: {error.strerror}")
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return ConnectionLost(f"{where} reset the connection")
    return NotReached("UNREACHABLE", f"the connection to {where} broke: {getattr(error, 'strerror', None) or error}")
