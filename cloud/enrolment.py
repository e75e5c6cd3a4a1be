"""Where devices enrol: a listener of its own, open only while a one-time token lives. The lines are those of
`split/identity/enrolment.py`.

Whoever comes here is a stranger. So each connection has one line each way, 16 KiB and 10 s; a token that is no good
costs its sender a second; of 32 connections at once the oldest makes room. The companion sets the device's name.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable
from typing import Final

from cloud.register import Register
from cloud.tokens import TokenStore
from split.errors import IdentityError, IsthmusError, TokenRefused
from split.identity.contexts import Identity, enrolment_server_context
from split.identity.enrolment import (
    CONVERSATION_S,
    MAX_LINE_BYTES,
    AskAuthority,
    AuthorityIs,
    Enrol,
    Enrolled,
    Line,
    NotEnrolled,
    decode_line,
    encode_line,
)
from split.profiles.address import HostPort

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""A token made by another process opens the listener within so long."""
MAX_CONNECTIONS: Final = 32
WRONG_TOKEN_S: Final = 1.0
"""What a wrong token costs. With the bound on connections: 32 guesses a second at 160 bits."""
_NAME_BYTES: Final = 4
"""Random, of a name that is made up: two of a thousand devices get the same one with a chance of 10⁻⁴."""


class Enrolment:
    """`days`: how long a certificate made here is good. `now_s`: the time by which tokens expire."""

    def __init__(
        self,
        place: HostPort,
        *,
        identity: Identity,
        register: Register,
        tokens: TokenStore,
        days: float,
        now_s: Callable[[], float],
    ) -> None:
        self._place = place
        self._identity = identity
        self._register = register
        self._tokens = tokens
        self._days = days
        self._now_s = now_s
        self._sock: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._talking: dict[asyncio.Task[None], None] = {}
        """Oldest first."""
        self._failure = ""
        self.port = 0
        """Listened on; 0 while closed."""

    async def run(self) -> None:
        """Open while a token lives, closed else, until cancelled."""
        try:
            while True:
                try:
                    self.look()
                except OSError as error:
                    self._fail(f"the join tokens cannot be looked at: {error}")
                await asyncio.sleep(LOOK_S)
        finally:
            await self.close()

    def look(self) -> None:
        """Open or close, as the tokens are now."""
        live = self._tokens.live(self._now_s())
        if live and self._sock is None:
            self._open(live)
        elif not live and self._sock is not None:
            log.info("no join token lives any more: enrolment on %s is closed", self._place)
            self._shut()

    async def close(self) -> None:
        self._shut()
        for task in tuple(self._talking):
            task.cancel()
        if self._talking:
            await asyncio.wait(tuple(self._talking))

    def _open(self, live: int) -> None:
        try:
            found = socket.getaddrinfo(self._place.host, self._place.port, type=socket.SOCK_STREAM)
            family, _, _, _, address = found[0]
            sock = socket.create_server((str(address[0]), int(address[1])), family=family, backlog=MAX_CONNECTIONS)
        except OSError as error:
            self._fail(
                f"enroll_listen: cannot listen on {self._place}: {error.strerror or error}; {live} join tokens wait"
            )
            return
        sock.setblocking(False)
        self._sock, self._failure, self.port = sock, "", sock.getsockname()[1]
        log.info("enrolment is open on %s:%d while join tokens live (%d)", self._place.host, self.port, live)
        self._accepting = asyncio.create_task(self._accept(sock), name="enrolment")

    def _fail(self, why: str) -> None:
        """Said once, not every second."""
        if why != self._failure:
            log.error("%s", why)
        self._failure = why

    def _shut(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
        if self._sock is not None:
            self._sock.close()
        self._sock, self._accepting, self.port = None, None, 0

    async def _accept(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                stranger, address = await loop.sock_accept(sock)
            except OSError as error:
                log.warning("a connection for enrolment could not be accepted (%s)", error)
                await asyncio.sleep(LOOK_S)
                continue
            if len(self._talking) >= MAX_CONNECTIONS:
                next(iter(self._talking)).cancel()
            task = asyncio.create_task(self._talk(stranger, address[0]), name=f"enrol {address[0]}")
            self._talking[task] = None
            task.add_done_callback(lambda done: self._talking.pop(done, None))
            await asyncio.sleep(0)  # it begins: a task cancelled before its first step would leave its socket open

    async def _talk(self, sock: socket.socket, where: str) -> None:
        """One connection to its end. Nothing that comes here may disturb anything else."""
        writer: asyncio.StreamWriter | None = None
        try:
            context = enrolment_server_context(self._identity)
        except IdentityError as error:  # half a new pair lies there just now
            log.warning("enrolment peer=%s cannot be served: %s", where, error)
            sock.close()
            return
        try:
            async with asyncio.timeout(CONVERSATION_S):
                reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
                protocol = asyncio.StreamReaderProtocol(reader)
                loop = asyncio.get_running_loop()
                transport, _ = await loop.connect_accepted_socket(
                    lambda: protocol,
                    sock,
                    ssl=context,
                    ssl_handshake_timeout=CONVERSATION_S / 2,
                    ssl_shutdown_timeout=1.0,
                )
                writer = asyncio.StreamWriter(transport, protocol, reader, loop)
                writer.write(encode_line(await self._answer(await reader.readline(), where)))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, ValueError, ssl.SSLError, IsthmusError) as error:  # ValueError: a line that is too long
            log.info("enrolment peer=%s gave up: %s", where, error or type(error).__name__)
        except Exception:
            log.exception("enrolment peer=%s failed", where)
        finally:
            if writer is not None:  # before that, the socket is asyncio's to close
                writer.transport.abort()

    async def _answer(self, data: bytes, where: str) -> Line:
        match decode_line(data):
            case AskAuthority():
                return AuthorityIs(authority=await asyncio.to_thread(self._register.authority.read_text))
            case Enrol() as wanted:
                try:
                    return await asyncio.to_thread(self._enrol, wanted, where)
                except TokenRefused as error:
                    log.warning("enrolment peer=%s refused: %s (%s)", where, error, error.code)
                    await asyncio.sleep(WRONG_TOKEN_S)
                    return NotEnrolled(code=error.code, message=str(error))
                except IdentityError as error:
                    log.warning("enrolment peer=%s refused: %s", where, error)
                    return NotEnrolled(code=error.code, message=str(error))
            case other:
                raise IdentityError(f"a device does not send {type(other).__name__}")

    def _enrol(self, wanted: Enrol, where: str) -> Enrolled:
        """What fails before a certificate is issued costs no token."""
        from split.identity.certificates import request_key

        request_key(wanted.request)
        name = self._tokens.use(wanted.secret, now_s=self._now_s()) or f"device-{os.urandom(_NAME_BYTES).hex()}"
        try:
            chain = self._register.sign(wanted.request, name, "device", days=self._days, now_s=self._now_s())
        except BaseException:
            try:
                self._tokens.give_back(wanted.secret)
            except IdentityError as error:
                log.warning("enrolment peer=%s: %s", where, error)
            raise
        log.info("enrolled device=%s peer=%s", name, where)
        return Enrolled(name=name, chain=chain.decode())
