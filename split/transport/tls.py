"""Channels over TCP and TLS 1.3 with certificates on both sides: `dial` for devices, `listen` for companions.

Invariant: nothing of ours is sent before the peer's certificate and role were checked, and nothing is handed out before
its Hello came. Bytes waiting inside asyncio and the kernel are kept few, so that what is urgent overtakes what is big.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, Final

from split.errors import (
    ChannelError,
    CompanionRefused,
    ConnectionLost,
    IdentityError,
    IsthmusError,
    NotReached,
    Revoked,
)
from split.identity.contexts import Identity, Role, explain, refusals
from split.identity.credentials import Credentials, credentials_of
from split.transport.channel import Channel, PeerIdentity
from split.transport.endpoint import Endpoint
from split.wire.connection import WireConnection
from split.wire.limits import CLOSE_FLUSH_S, DEFAULT_LIMITS, HELLO_TIMEOUT_S, KIB, Limits
from split.wire.messages import Hello

_log = logging.getLogger("isthmus.transport")

WRITE_BUFFER_BYTES: Final = 16 * KIB
"""High-water mark of asyncio's TLS layer and, separately, of the TCP transport beneath it, which has its own."""

NOTSENT_LOWAT_BYTES: Final = 16 * KIB
"""The kernel takes more only while less than this is unsent: 77 ms instead of 592 for 1 KB behind 2 MB at 50 Mbit/s."""

USER_TIMEOUT_MS: Final = 10_000
"""Unacknowledged for so long, the connection is dead: shorter than the kernel's 15 minutes, longer than a handover."""

KEEPALIVE_S: Final = (15, 5, 3)
"""Idle seconds, interval, probes: an idle connection whose peer vanished is found within half a minute."""

CONGESTION_CONTROL: Final = "bbr"
HAPPY_EYEBALLS_DELAY_S: Final = 0.25
"""RFC 8305, section 8."""

ACCEPT_BACKLOG: Final = 128
MAX_STRANGERS: Final = 128
"""Sockets that have not shown yet who they are; one more takes the place of the oldest. So whoever wants to keep
devices out by opening sockets must open this many within the time of one handshake, again and again."""
ACCEPT_RETRY_S: Final = 1.0
"""Pause after the operating system refused a socket (too many open files)."""


class TlsChannel(Endpoint, asyncio.BufferedProtocol):
    """One end of a TLS connection; made by `dial` and `listen`."""

    def __init__(self, hello: Hello, credentials: Credentials, where: str, limits: Limits) -> None:
        super().__init__(WireConnection(hello, limits=limits))
        self._credentials = credentials
        self._peer_role: Role = "companion" if credentials.role == "device" else "device"
        self._where = where
        self._transport: asyncio.Transport | None = None
        self._writing_paused = False
        self._pumping = False
        loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[None] = loop.create_future()
        self._gone: asyncio.Future[None] = loop.create_future()
        self._congestion_control = ""

    async def opened(self) -> None:
        """Wait for the peer's Hello. IdentityError, ConnectionLost: the sentence why it will not come."""
        try:
            await self._opened
        except BaseException:
            if self._transport is None or not self._transport.is_closing():  # else a last word is on its way out
                self._abort()
            raise

    async def refuse(self, code: str, why: str) -> None:
        """Tell the peer, as this side's last word, why it is not served; then close."""
        self._connection.refuse(code, why)
        self._pump()
        await self.close(why)

    @property
    def congestion_control(self) -> str:
        """What the kernel uses to send here: `bbr` where it is allowed, else its default."""
        return self._congestion_control

    @property
    def ends(self) -> tuple[str, str] | None:
        """See `Channel.ends`."""
        if self._transport is None or (here := self._transport.get_extra_info("sockname")) is None:
            return None
        return here[0], self._transport.get_extra_info("peername")[0]

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
        self._peer = PeerIdentity(name=peer.name, role=self._peer_role, serial=peer.serial)
        self._congestion_control = _tune(transport.get_extra_info("socket"))
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        beneath = getattr(getattr(transport, "_ssl_protocol", None), "_transport", None)
        if isinstance(beneath, asyncio.Transport):
            beneath.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._pump()

    def _turn_away(self, error: IdentityError) -> None:
        """The peer's certificate is not good. A device is told why, as the only thing it is told."""
        if self._peer_role == "device":
            self._connection.refuse(error.code, str(error), stranger=True)
            self._pump()
        self._over(f"{self._where}: {error}", type(error)(f"{self._where}: {error}"))
        if self._peer_role == "device":
            self._close_transport()
        else:
            self._abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._connection.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        received = self._connection.buffer_updated(nbytes)
        if not self._opened.done() and self._connection.peer_hello is not None:
            self._opened.set_result(None)
        self._deliver(received)
        failure = self._connection.failure
        if failure is None:
            self._pump()
        elif self._closed_because is None:
            self._writing_paused = False  # what is left is a Refused, and the last that this side says
            self._pump()
            self._failed(failure)
            self._over(self._closed_because or "", failure)
            self._close_transport()

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        self._pump()

    def eof_received(self) -> bool:
        self._over("the peer closed the connection")
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None:
            self._over("the peer closed the connection")
        else:
            error = _translate(exc, self._where)
            self._over(str(error), error)
        if not self._gone.done():
            self._gone.set_result(None)

    # ---- Endpoint

    def _pump(self) -> None:
        transport = self._transport
        if transport is None or self._pumping:
            return
        self._pumping = True
        try:
            while not self._writing_paused and not transport.is_closing():
                frame = self._connection.next_frame()
                if frame is None:
                    break
                transport.write(frame)
        finally:
            self._pumping = False
        self._moved()

    def _hold_reading(self, hold: bool) -> None:
        if self._transport is not None and not self._transport.is_closing():
            if hold:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    async def _end(self) -> None:
        self._close_transport()
        if self._transport is None:
            return
        try:
            async with asyncio.timeout(2 * CLOSE_FLUSH_S):
                await asyncio.shield(self._gone)
        except TimeoutError:
            self._abort()
            await self._gone

    def _over(self, reason: str, cause: Exception | None = None) -> None:
        self._lost(reason, cause)
        if not self._opened.done():
            if isinstance(cause, IsthmusError):
                failure = cause
            else:
                failure = ConnectionLost(f"{self._where}: {reason} before its Hello; the log over there may say why")
            self._opened.set_exception(failure)
            self._opened.exception()  # seen: where nobody waits for the opening any more, nobody is to be told

    def _close_transport(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._hold_reading(False)
            self._transport.close()

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class Listener:
    """A listening companion; made by `listen`."""

    def __init__(
        self,
        sock: socket.socket,
        credentials: Credentials,
        make_hello: Callable[[], Hello],
        on_channel: Callable[[Channel], Awaitable[None]],
        max_connections: int,
        limits: Limits,
    ) -> None:
        self._sock = sock
        self._credentials = credentials
        self._make_hello = make_hello
        self._on_channel = on_channel
        self._max_connections = max_connections
        self._limits = limits
        self._serving: set[asyncio.Task[None]] = set()
        self._strangers: dict[asyncio.Task[None], str] = {}
        """Of those, the ones before their Hello, oldest first, and where they come from."""
        self.port: int = sock.getsockname()[1]
        """The port listened on, also where 0 was asked for."""
        self.refused = 0
        """Connections that did not become a channel: over the bound, no identity, no Hello in time."""
        self._accepting = asyncio.create_task(self._accept(), name="accept")

    async def stop_accepting(self) -> None:
        """Take no new connections; those that are open go on (the first step of a rolling restart)."""
        self._accepting.cancel()
        await asyncio.wait([self._accepting])
        self._sock.close()

    async def close(self) -> None:
        """Stop accepting, end every handler, close every channel."""
        await self.stop_accepting()
        for task in self._serving:
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(self._sock)
            except OSError as error:
                _log.warning("a connection could not be accepted (%s); trying again in %g s", error, ACCEPT_RETRY_S)
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            if len(self._strangers) >= MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                self._refuse(
                    f"{self._strangers.pop(oldest)} made room: {MAX_STRANGERS} others wait to say who they are"
                )
                oldest.cancel()
            where = f"the device at {address[0]}"
            task = asyncio.create_task(self._serve(sock, where), name=f"serve {address[0]}")
            self._serving.add(task)
            self._strangers[task] = where
            task.add_done_callback(self._left)
            await asyncio.sleep(0)  # it begins: a task cancelled before its first step would leave its socket open

    def _left(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        self._strangers.pop(task, None)

    async def _serve(self, sock: socket.socket, where: str) -> None:
        """One accepted socket: handshake, Hello, then the handler for as long as it likes."""
        channel = TlsChannel(self._make_hello(), self._credentials, where, self._limits)
        why: list[ssl.SSLError] = []
        refusals.set(why)
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: channel,
                    sock,
                    ssl=self._credentials.context(),
                    ssl_handshake_timeout=HELLO_TIMEOUT_S,
                    ssl_shutdown_timeout=CLOSE_FLUSH_S,
                )
                await channel.opened()
        except (OSError, IsthmusError) as error:  # TimeoutError is an OSError
            self._refuse(str(_translate(why[0] if why else error, where)))
            if isinstance(error, IdentityError):
                await channel.close("its certificate is not good here")  # what it was told leaves first
            return
        task = asyncio.current_task()
        assert task is not None
        self._strangers.pop(task, None)
        if len(self._serving) - len(self._strangers) > self._max_connections:
            full = f"{self._max_connections} connections are open here, the bound (limits.connections)"
            self._refuse(f"{where}: {full}")
            await channel.refuse("OVERLOADED", f"{full}; try again later")
            return
        try:
            await self._on_channel(channel)
        except Exception:
            _log.exception("serving %s (%s) failed", channel.peer.name, where)
        finally:
            await channel.close("this side is done with the connection")

    def _refuse(self, why: str) -> None:
        self.refused += 1
        _log.debug("refused: %s", why)


async def dial(
    host: str,
    port: int,
    *,
    identity: Identity | Credentials,
    hello: Hello,
    timeout_s: float,
    limits: Limits = DEFAULT_LIMITS,
) -> TlsChannel:
    """An open channel to the companion at `host:port`, its certificate and role checked, the Hellos exchanged.

    Names with several addresses are tried as RFC 8305 says. All of it takes at most `timeout_s`. IdentityError: one of
    the certificates is wrong (the sentence says whose and why; trying again soon does not help); Revoked: ours was
    taken back. CompanionRefused: the companion's typed reason. NotReached: not reachable, not in time, or no TLS there
    (its code says which). ConnectionLost: it hung up before its Hello.
    """
    credentials = credentials_of(identity, "device")
    context = credentials.context()
    where = f"the companion at {host}:{port}"
    try:
        async with asyncio.timeout(timeout_s):
            _, channel = await asyncio.get_running_loop().create_connection(
                lambda: TlsChannel(hello, credentials, where, limits),
                host,
                port,
                ssl=context,
                ssl_handshake_timeout=timeout_s,
                ssl_shutdown_timeout=CLOSE_FLUSH_S,
                happy_eyeballs_delay=HAPPY_EYEBALLS_DELAY_S,
            )
            await channel.opened()
            return channel
    except TimeoutError as error:
        raise NotReached(
            "TIMEOUT", f"{where} did not answer within {timeout_s:g} s: check the address and the way there"
        ) from error
    except OSError as error:
        raise _translate(error, where) from error
    except CompanionRefused as error:
        kind = _IDENTITY_REFUSALS.get(error.code)
        if kind is None:
            raise
        raise kind(f"{where} refused our certificate: {error}") from error


_IDENTITY_REFUSALS: Final = {kind.code: kind for kind in (IdentityError, Revoked)}
"""What a companion says in place of its Hello to a certificate that OpenSSL took and it does not."""


async def listen(
    host: str,
    port: int,
    *,
    identity: Identity | Credentials,
    make_hello: Callable[[], Hello],
    on_channel: Callable[[Channel], Awaitable[None]],
    max_connections: int,
    limits: Limits = DEFAULT_LIMITS,
) -> Listener:
    """Accept devices at `host:port` (0: any free port); `on_channel` runs for each until it returns or is cancelled.

    `make_hello` is asked per connection. At most `max_connections` channels are open, a further device is refused with
    OVERLOADED. Beside them at most `MAX_STRANGERS` sockets have not shown yet who they are; they have 5 s to do so.
    IdentityError for files that cannot serve, ChannelError when the address cannot be had.
    """
    credentials = credentials_of(identity, "companion")
    credentials.context()  # what cannot serve is said now
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        sock = socket.create_server(address[:2], family=family, backlog=ACCEPT_BACKLOG)
    except OSError as error:
        raise ChannelError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    sock.setblocking(False)
    return Listener(sock, credentials, make_hello, on_channel, max_connections, limits)


def _tune(sock: Any) -> str:
    """Set the socket's options as far as this kernel has them; the congestion control now in use."""
    idle_s, interval_s, probes = KEEPALIVE_S
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOTSENT_LOWAT_BYTES),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes),
    ):
        sock.setsockopt(level, option, value)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION_CONTROL.encode())
    except OSError:
        pass  # not built into this kernel, or not allowed to users: its default stays
    name: bytes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.rstrip(b"\0").decode()


def _translate(error: Exception, where: str) -> IsthmusError:
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
