"""The companion's side of TLS: `listen`. Strangers become connections, connections become sessions or join one.

Bounds: sockets that have not shown yet who they are (`MAX_STRANGERS`, each for `HELLO_TIMEOUT_S`), and sessions
(`max_sessions`), each of at most two connections.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Final

from split.errors import ChannelError, IdentityError, IsthmusError, Revoked
from split.identity.contexts import Identity, refusals
from split.identity.credentials import Credentials, credentials_of
from split.transport.channel import Channel
from split.transport.lane import Lane, translate
from split.transport.tls import TlsChannel
from split.wire.limits import CLOSE_FLUSH_S, DEFAULT_LIMITS, HELLO_TIMEOUT_S, Limits
from split.wire.messages import Hello

_log = logging.getLogger("isthmus.transport")

ACCEPT_BACKLOG: Final = 128
MAX_STRANGERS: Final = 128
"""Sockets that have not shown yet who they are; one more takes the place of the oldest. So whoever wants to keep
devices out by opening sockets must open this many within the time of one handshake, again and again."""
ACCEPT_RETRY_S: Final = 1.0
"""Pause after the operating system refused a socket (too many open files)."""

MakeRoom = Callable[[str], bool]
"""Asked with a device's name when all places are taken: whether one of its own older sessions is ending for it."""


class Listener:
    """A listening companion; made by `listen`."""

    def __init__(
        self,
        sock: socket.socket,
        credentials: Credentials,
        make_hello: Callable[[], Hello],
        on_channel: Callable[[Channel], Awaitable[None]],
        max_sessions: int,
        make_room: MakeRoom,
        limits: Limits,
    ) -> None:
        self._sock = sock
        self._credentials = credentials
        self._make_hello = make_hello
        self._on_channel = on_channel
        self._max_sessions = max_sessions
        self._make_room = make_room
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._serving: set[asyncio.Task[None]] = set()
        self._strangers: dict[asyncio.Task[None], str] = {}
        """Of those, the ones without a place in a session, oldest first, and where they come from."""
        self._sessions: set[TlsChannel] = set()
        self._named: dict[tuple[str, str], TlsChannel] = {}
        """(device's name, session) → those of them that have a name and may get, or have, a second connection."""
        self._pause: asyncio.TimerHandle | None = None
        self.port: int = sock.getsockname()[1]
        """The port listened on, also where 0 was asked for."""
        self.refused = 0
        """Connections that did not become a channel or a part of one: over the bound, no identity, no Hello in time, no
        such session."""
        self._loop.add_reader(sock, self._accept)

    async def stop_accepting(self) -> None:
        """Take no new connections; those that are open go on (the first step of a rolling restart)."""
        if self._pause is not None:
            self._pause.cancel()
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._sock.close()

    async def close(self) -> None:
        """Stop accepting, end every handler, close every channel."""
        await self.stop_accepting()
        for task in self._serving:
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving)

    def _accept(self) -> None:
        """One socket is waiting. A callback, not a task: cancelled at the wrong moment, `sock_accept` loses one."""
        try:
            sock, address = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            _log.warning("a connection could not be accepted (%s); trying again in %g s", error, ACCEPT_RETRY_S)
            self._loop.remove_reader(self._sock)
            self._pause = self._loop.call_later(ACCEPT_RETRY_S, self._loop.add_reader, self._sock, self._accept)
            return
        sock.setblocking(False)
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            self._refuse(f"{self._strangers.pop(oldest)} made room: {MAX_STRANGERS} others wait to say who they are")
            oldest.cancel()
        where = f"the device at {address[0]}"
        handed_over = asyncio.Event()
        task = asyncio.create_task(self._serve(sock, where, handed_over), name=f"serve {address[0]}")
        self._serving.add(task)
        self._strangers[task] = where

        def left(_: asyncio.Task[None]) -> None:
            self._serving.discard(task)
            self._strangers.pop(task, None)
            if not handed_over.is_set():  # a task cancelled before its first step runs nothing of its own
                sock.close()

        task.add_done_callback(left)

    async def _serve(self, sock: socket.socket, where: str, handed_over: asyncio.Event) -> None:
        """One accepted socket: handshake, Hello, then what it is for."""
        handed_over.set()
        lane = Lane(self._make_hello(), self._credentials, where, self._limits, greets_first=False)
        why: list[ssl.SSLError] = []
        refusals.set(why)
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                await self._loop.connect_accepted_socket(
                    lambda: lane,
                    sock,
                    ssl=self._credentials.context(),
                    ssl_handshake_timeout=HELLO_TIMEOUT_S,
                    ssl_shutdown_timeout=CLOSE_FLUSH_S,
                )
                await lane.opened()
        except (OSError, IsthmusError) as error:  # TimeoutError is an OSError
            self._refuse(str(translate(why[0] if why else error, where)))
            if isinstance(error, IdentityError):
                await lane.gone()  # what it was told leaves first
            return
        hello = lane.connection.peer_hello
        assert lane.peer is not None
        assert hello is not None
        if hello.lane == "bulk":
            await self._join(lane, (lane.peer.name, hello.session), where)
        else:
            await self._hold_session(lane, (lane.peer.name, hello.session), where)

    async def _join(self, lane: Lane, key: tuple[str, str], where: str) -> None:
        """A second connection: part of its session from now on, which also closes it."""
        channel = self._named.get(key)
        if channel is None or not channel.may_be_joined:
            await self._turn_away(
                lane, where, "UNKNOWN_SESSION", "this device has no session of that name here with one connection"
            )
            return
        assert lane.peer is not None
        if self._credentials.is_revoked(lane.peer.serial):  # since its handshake: who revokes knows only who is in
            await self._turn_away(
                lane, where, Revoked.code, "the certificate was revoked: enrol anew, with a new token"
            )
            return
        self._is_no_stranger()
        channel.join(lane)
        lane.greet()
        await lane.ended()

    async def _hold_session(self, lane: Lane, key: tuple[str, str], where: str) -> None:
        device, session = key
        if key in self._named:
            await self._turn_away(
                lane, where, "UNKNOWN_SESSION", "this session is open already; a new one has its own name"
            )
            return
        full = len(self._sessions) >= self._max_sessions
        if full and (len(self._sessions) >= 2 * self._max_sessions or not self._make_room(device)):
            bound = f"{self._max_sessions} sessions are open here, the bound (limits.connections)"
            await self._turn_away(lane, where, "OVERLOADED", f"{bound}; try again later")
            return
        self._is_no_stranger()
        channel = TlsChannel(lane)
        self._sessions.add(channel)
        if session:
            self._named[key] = channel
        lane.greet()
        try:
            await self._on_channel(channel)
        except Exception:
            _log.exception("serving %s (%s) failed", device, where)
        finally:
            self._named.pop(key, None)
            try:
                await channel.close("this side is done with the connection")
            finally:
                self._sessions.discard(channel)

    def _is_no_stranger(self) -> None:
        """The running connection has its place. Not before: what is turned away takes a moment to go, and a device that
        comes again and again must not pile up."""
        task = asyncio.current_task()
        assert task is not None
        self._strangers.pop(task, None)

    async def _turn_away(self, lane: Lane, where: str, code: str, why: str) -> None:
        self._refuse(f"{where}: {why}")
        await lane.refuse(code, why)

    def _refuse(self, why: str) -> None:
        self.refused += 1
        _log.debug("refused: %s", why)


async def listen(
    host: str,
    port: int,
    *,
    identity: Identity | Credentials,
    make_hello: Callable[[], Hello],
    on_channel: Callable[[Channel], Awaitable[None]],
    max_sessions: int,
    make_room: MakeRoom = lambda device: False,
    limits: Limits = DEFAULT_LIMITS,
) -> Listener:
    """Accept devices at `host:port` (0: any free port); `on_channel` runs for each session until it returns or is
    cancelled.

    `make_hello` is asked per connection. At most `max_sessions` are open; beyond them `make_room` is asked, and where
    it says no, the device is refused with OVERLOADED. Beside them at most `MAX_STRANGERS` sockets have not shown yet
    who they are; they have 5 s to do so. IdentityError for files that cannot serve, ChannelError when the address
    cannot be had.
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
    return Listener(sock, credentials, make_hello, on_channel, max_sessions, make_room, limits)
