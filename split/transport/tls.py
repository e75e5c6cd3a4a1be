"""The device's side of TLS: `dial`. And the channel of both sides: one session over one or two connections.

With two, what is urgent never waits in a buffer or queue behind what is big: CONTROL and URGENT go over the first, the
lane `urgent`, NORMAL and BULK over the second, `bulk`, as soon as it is there. Nothing waits for it: until then, and
where it cannot be had, all goes over the first. The session ends with the first of its connections.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from split.errors import CompanionRefused, ConnectionLost, IdentityError, IsthmusError, NotReached, Revoked
from split.identity.contexts import Identity
from split.identity.credentials import Credentials, credentials_of
from split.transport.channel import Buffer, Observation
from split.transport.endpoint import Endpoint
from split.transport.lane import Lane, translate
from split.transport.retry import Backoff
from split.wire.connection import Received, WireConnection
from split.wire.limits import CLOSE_FLUSH_S, DEFAULT_LIMITS, Limits
from split.wire.messages import Hello, Message, ModelChunk, Ping, Priority

_log = logging.getLogger("isthmus.transport")

HAPPY_EYEBALLS_DELAY_S: Final = 0.25
"""RFC 8305, section 8."""
SESSIONS_SINCE_MINOR: Final = 1
"""Wire protocol 1.1 has sessions of two connections."""
_IDENTITY_REFUSALS: Final = {kind.code: kind for kind in (IdentityError, Revoked)}
"""What a companion says in place of its Hello to a certificate that OpenSSL took and it does not."""
JOIN_FIRST_S: Final = 2.0
JOIN_CAP_S: Final = 60.0
"""Pauses before a second connection that was lost on the way is tried again."""
EARLY_UPLOADS: Final = 64
"""Digests remembered that began over the first connection; devices share a handful of models."""


class TlsChannel(Endpoint):
    """One end of a session; made by `dial` and `Listener`."""

    def __init__(self, first: Lane) -> None:
        super().__init__(first.connection)
        assert first.peer is not None, "a lane is made a channel once its peer is known"
        self._peer = first.peer
        self._first = first
        self._bulk: Lane | None = None
        self._joining: asyncio.Task[None] | None = None
        self._ending = ""
        """Why nothing is sent any more although the channel is not over: one connection was closed by the peer in good
        order, and what the peer sent on the other is still coming."""
        self._grace: asyncio.TimerHandle | None = None
        self._early_uploads: dict[str, None] = {}
        first.own(self)

    @property
    def may_be_joined(self) -> bool:
        """It lives, and its second connection is not there yet."""
        return self._bulk is None and self._closed_because is None and not self._ending

    def join(self, bulk: Lane) -> None:
        """`bulk` is the second connection from now on."""
        assert self.may_be_joined
        assert bulk.peer is not None, "a lane joins once its peer is known"
        self._bulk = bulk
        self._peer = replace(self.peer, bulk_serial=bulk.peer.serial)
        self._connections.append(bulk.connection)
        bulk.own(self)
        if self._holding:
            bulk.hold_reading(True)

    def expect(self, joining: asyncio.Task[None]) -> None:
        """This task makes the second connection and joins it; it is called off when the channel ends."""
        self._joining = joining

    # ---- Channel

    @property
    def ends(self) -> tuple[str, str] | None:
        return self._first.ends

    @property
    def sent_bytes(self) -> int:
        return sum(lane.link_bytes()[0] for lane in self._lanes)

    @property
    def received_bytes(self) -> int:
        return sum(lane.link_bytes()[1] for lane in self._lanes)

    @property
    def ahead_bytes(self) -> int:
        return self.queued_bytes + self._lanes[-1].waiting_bytes()

    def observe(self) -> Observation:
        return Observation(
            sent_bytes=self.sent_bytes,
            received_bytes=self.received_bytes,
            queued_bytes=self.queued_bytes,
            connections=tuple(facts for lane in self._lanes if (facts := lane.facts()) is not None),
        )

    def look_afresh(self, rtt_ms: float) -> None:
        self._lanes[-1].look_afresh(rtt_ms)

    # ---- LaneOwner

    def lane_received(self, messages: list[Received]) -> None:
        self._deliver(messages)

    def lane_moved(self) -> None:
        self._moved()

    def lane_over(self, lane: Lane, reason: str, cause: Exception | None) -> None:
        """The session ends with it: at once when it broke, else when the other one's last bytes have come, too."""
        if self._closed_because is not None:
            return
        if cause is None and any(other.over is None for other in self._lanes):
            self._ending = reason
            self._grace = asyncio.get_running_loop().call_later(CLOSE_FLUSH_S, self._over, reason, None)
        else:
            self._over(reason, cause)

    # ---- Endpoint

    @property
    def _lanes(self) -> tuple[Lane, ...]:
        return (self._first,) if self._bulk is None else (self._first, self._bulk)

    def _route(self, message: Message, priority: Priority) -> WireConnection:
        if self._ending:
            raise ConnectionLost(self._ending)
        early = isinstance(message, ModelChunk) and self._is_early_upload(message.digest)
        # A ping with weight, or for weight, measures a rate: of the connection on which tensors travel.
        weighs = isinstance(message, Ping) and (message.padding or message.pong_bytes)
        heavy = priority >= Priority.NORMAL or weighs
        lane = self._bulk if self._bulk is not None and heavy and not early else self._first
        return lane.connection

    def _is_early_upload(self, digest: str) -> bool:
        """Pieces of one model keep their order, so they stay on the connection where the first of them went."""
        if self._bulk is None and len(self._early_uploads) < EARLY_UPLOADS:
            self._early_uploads[digest] = None
        return digest in self._early_uploads

    def _pump(self) -> None:
        for lane in self._lanes:
            lane.pump()

    def _hold_reading(self, hold: bool) -> None:
        for lane in self._lanes:
            lane.hold_reading(hold)

    def _over(self, reason: str, cause: Exception | None) -> None:
        self._lost(reason, cause)
        self._call_off()
        for lane in self._lanes:
            lane.close()

    async def _end(self) -> None:
        self._call_off()
        for lane in self._lanes:
            lane.close()
        if self._joining is not None:
            await asyncio.wait((self._joining,))
        for lane in self._lanes:
            await lane.gone()

    def _call_off(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
        if self._joining is not None:
            self._joining.cancel()

    def _abort(self) -> None:
        for lane in self._lanes:
            lane.abort()


async def dial(
    host: str,
    port: int,
    *,
    identity: Identity | Credentials,
    hello: Hello,
    timeout_s: float,
    limits: Limits = DEFAULT_LIMITS,
    first: Sequence[tuple[Message, Sequence[Buffer]]] = (),
) -> TlsChannel:
    """An open channel to the companion at `host:port`, its certificate and role checked, the Hellos exchanged.

    `first`: messages with their payloads that go directly behind our Hello, as soon as TLS has verified the companion:
    their answers need no round trip more than its Hello. Only what every companion of 1.0 knows, and no more than
    `EARLY_BYTES` (LocalProtocolError); they are lost with the dial when it fails.
    Names with several addresses are tried as RFC 8305 says. All of it takes at most `timeout_s`; the second connection
    comes afterwards, to the very address that answered, where both sides speak 1.1. `hello` without session and lane.
    IdentityError: one of the certificates is wrong (the sentence says whose and why; trying again soon does not help);
    Revoked: ours was taken back. CompanionRefused: the companion's typed reason. NotReached: not reachable, not in
    time, or no TLS there (its code says which). ConnectionLost: it hung up before its Hello.
    """
    if hello.minor >= SESSIONS_SINCE_MINOR:
        hello = msgspec.structs.replace(hello, session=secrets.token_hex(16), lane="urgent")
    way = _Way(
        credentials=credentials_of(identity, "device"),
        host=host,
        where=f"the companion at {host}:{port}",
        timeout_s=timeout_s,
        limits=limits,
    )
    lane = await way.open(host, port, hello, first=first, happy_eyeballs_delay_s=HAPPY_EYEBALLS_DELAY_S)
    channel = TlsChannel(lane)
    if hello.session and channel.peer_hello.minor >= SESSIONS_SINCE_MINOR:
        channel.expect(asyncio.create_task(_join(channel, lane, way, hello), name="second connection"))
    return channel


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """How both connections of a session are made."""

    credentials: Credentials
    host: str
    where: str
    timeout_s: float
    limits: Limits

    async def open(
        self,
        host: str,
        port: int,
        hello: Hello,
        *,
        happy_eyeballs_delay_s: float | None,
        first: Sequence[tuple[Message, Sequence[Buffer]]] = (),
    ) -> Lane:
        """A connection with the Hellos exchanged, or the error in our words. `first` goes behind our Hello."""
        lane = Lane(hello, self.credentials, self.where, self.limits, greets_first=True)
        for message, payload in first:
            lane.connection.send(message, payload)
        try:
            async with asyncio.timeout(self.timeout_s):
                await asyncio.get_running_loop().create_connection(
                    lambda: lane,
                    host,
                    port,
                    ssl=self.credentials.context(),
                    server_hostname=self.host,
                    ssl_handshake_timeout=self.timeout_s,
                    ssl_shutdown_timeout=CLOSE_FLUSH_S,
                    happy_eyeballs_delay=happy_eyeballs_delay_s,
                )
                await lane.opened()
                return lane
        except TimeoutError as error:
            raise NotReached(
                "TIMEOUT",
                f"{self.where} did not answer within {self.timeout_s:g} s: check the address and the way there",
            ) from error
        except OSError as error:
            raise translate(error, self.where) from error
        except CompanionRefused as error:
            kind = _IDENTITY_REFUSALS.get(error.code)
            if kind is None:
                raise
            raise kind(f"{self.where} refused our certificate: {error}") from error


async def _join(channel: TlsChannel, first: Lane, way: _Way, hello: Hello) -> None:
    """The second connection of a session; without it, the first does all. Tried for as long as the session lives, for
    weeks maybe, unless the companion says no."""
    backoff, said = Backoff(first_s=JOIN_FIRST_S, cap_s=JOIN_CAP_S), False
    while channel.may_be_joined:
        try:
            host, port = first.peer_address
            bulk = await way.open(host, port, msgspec.structs.replace(hello, lane="bulk"), happy_eyeballs_delay_s=None)
        except IsthmusError as error:
            if not said:
                _log.warning("%s: one connection only, urgent requests wait behind big ones: %s", way.where, error)
            said = True
            if not isinstance(error, ConnectionLost):
                return
            await asyncio.sleep(backoff.failed())
            continue
        if channel.may_be_joined:
            channel.join(bulk)
            return
        bulk.close()
        await bulk.gone()
