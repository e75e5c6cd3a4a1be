"""One connected device, over any channel: what it says goes to those who answer it, what it offers and opens to
`openings.py`, what it asks to `requests.py`. A session begins and ends here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from cloud.companion import Companion
from cloud.openings import MAX_TEXT, Openings
from cloud.requests import Requests
from split.errors import ConnectionLost, Overloaded, RemoteProtocolError, Revoked
from split.transport.channel import Buffer, Channel, Incoming
from split.wire.messages import (
    PACE_SINCE_MINOR,
    Cancel,
    Goodbye,
    Infer,
    Message,
    ModelChunk,
    ModelOffer,
    Pace,
    Ping,
    Pong,
    Priority,
    Refused,
    Renew,
    Renewed,
    SegmentOpen,
)

log = logging.getLogger(__name__)

MAX_NAME = 128
"""Characters of a request id, digest or cut; a digest, the longest, has 71."""


class Session:
    """Serves one device until its channel ends; `run` once, `goodbye` and `drained` from outside."""

    def __init__(self, channel: Channel, companion: Companion) -> None:
        self._channel = channel
        self._companion = companion
        self._device = channel.peer.name
        self._invalid_messages = 0
        """As far as they are counted."""
        self._pace_ms = 0.0
        """As the device was told last."""
        self._cut_off = False
        self._renewing = False
        self._group = asyncio.TaskGroup()
        """Owner of all tasks of this session."""
        self._openings = Openings(self._device, companion, self._group, self._send)
        self._requests = Requests(channel, companion, self._group, self._openings, self._send)

    async def run(self) -> None:
        """Until the channel is closed, by either side. Raises nothing of the peer's making."""
        device = self._device
        log.info("session opened device=%s agent=%r", device, self._channel.peer_hello.agent)
        self._companion.metrics.sessions.inc()
        try:
            async with self._group:
                try:
                    await self._serve()
                finally:
                    self._cut_off = True  # nothing is started any more
                    self._openings.cancel()
                    self._requests.end()
        finally:
            self._companion.metrics.sessions.dec()
            self._openings.release()
            self._count_invalid()
            log.info("session closed device=%s reason=%r", device, self._channel.closed_because or "")

    def goodbye(self, reason: str) -> None:
        """Tell the device that nothing new is taken; what is under way goes on."""
        self._requests.leaving = reason
        self._send(Goodbye(reason=reason), priority=Priority.CONTROL)

    def tell_pace(self, work_ms: float, since_s: float) -> None:
        """The device is told what a piece of work takes here now, unless it knows; `since_s` ago it was as before."""
        if work_ms != self._pace_ms and self._channel.peer_hello.minor >= PACE_SINCE_MINOR and not self._cut_off:
            since_s = since_s if self._pace_ms else 0.0
            self._pace_ms = work_ms
            self._send(Pace(work_ms=work_ms, since_ms=since_s * 1000.0), priority=Priority.CONTROL)

    async def drained(self) -> None:
        """Wait until no request is under way."""
        await self._requests.idle.wait()

    async def close(self, reason: str) -> None:
        """Send what is queued, then end the session."""
        await self._channel.close(reason)

    @property
    def serials(self) -> frozenset[int]:
        """Of the certificates that the device has shown, one for each connection."""
        return self._channel.peer.serials

    def end_as_revoked(self) -> None:
        """The device's certificate was taken back: it is told so, and nothing of it goes on."""
        shown = ", ".join(f"{serial:x}" for serial in sorted(self.serials))
        log.warning("session ended device=%s reason='its certificate was revoked' serials=%r", self._device, shown)
        last = Refused(code=Revoked.code, message="your certificate was revoked: enrol anew, with a new token")
        self._send(last, priority=Priority.CONTROL)
        if not self._cut_off:
            self._cut_off = True
            self._group.create_task(self._channel.close("the device's certificate was revoked"))

    async def _serve(self) -> None:
        while True:
            try:
                incoming = await self._channel.receive()
                self._count_invalid()
                await self._take(incoming)
            except ConnectionLost:
                return
            except RemoteProtocolError as error:
                log.warning("session broken device=%s error=%r", self._device, str(error))
                last = Refused(code="PROTOCOL_ERROR", message=str(error)[:MAX_TEXT])
                self._send(last, priority=Priority.CONTROL)
                await self._channel.close(str(error))
                return

    def _count_invalid(self) -> None:
        count = self._channel.invalid_messages
        self._companion.metrics.invalid_messages.inc(count - self._invalid_messages)
        self._invalid_messages = count

    async def _take(self, incoming: Incoming) -> None:
        match incoming.message:
            case Infer(request_id=name, digest=digest, cut=cut) as infer:
                _check_name(name)
                _check_name(digest)
                _check_name(cut)
                self._requests.begin(infer, incoming)
            case Cancel(request_id=name) as cancel:
                _check_name(name)
                self._requests.cancel(cancel)
            case ModelOffer(digest=digest) as offer:
                _check_name(digest)
                await self._openings.take(offer, incoming.payload)
            case ModelChunk(digest=digest) as chunk:
                _check_name(digest)
                await self._openings.take(chunk, incoming.payload)
            case SegmentOpen(digest=digest, cut=cut) as wanted:
                _check_name(digest)
                _check_name(cut)
                await self._openings.take(wanted, incoming.payload)
            case Renew(request=request):
                self._begin_renewal(request)
            case Ping(nonce=nonce):
                self._send(Pong(nonce=nonce), priority=Priority.CONTROL)
            case Pong():
                pass
            case Goodbye(reason=reason):
                log.info("goodbye device=%s reason=%r", self._device, reason)
            case other:
                raise RemoteProtocolError(f"a device does not send {type(other).__name__}")

    def _begin_renewal(self, request: str) -> None:
        renewals = self._companion.renewals
        if renewals is None or self._renewing:
            why = "one renewal at a time" if self._renewing else "this companion renews no certificates"
            self._send(Renewed(message=why))
            return
        self._renewing = True

        async def renew() -> None:
            try:
                self._send(await renewals.answer(self._channel.peer, request))
            finally:
                self._renewing = False

        self._group.create_task(renew())

    # -- sending -------------------------------------------------------------------------------------------------------

    def _send(self, message: Message, payload: Sequence[Buffer] = (), *, priority: Priority = Priority.NORMAL) -> None:
        """Queue a message. A device that is gone needs none; one that does not read is cut off: what it is owed must
        not pile up here. TooLarge when the device takes no message of that size."""
        try:
            self._channel.send(message, payload, priority=priority)
        except ConnectionLost:
            return
        except Overloaded as error:
            log.warning("cut off device=%s error=%r", self._device, str(error))
            if not self._cut_off:
                self._cut_off = True
                self._group.create_task(self._channel.close("the device does not read what it is sent"))


def _check_name(name: str) -> None:
    """What a message is about goes into the answer; without it, or with a book in its place, there can be none."""
    if not 0 < len(name) <= MAX_NAME:
        raise RemoteProtocolError(f"an id, digest or cut has 1 to {MAX_NAME} characters, one with {len(name)} came")
