"""From connections to sessions: who may come in, who is here, how all are sent home. One per companion."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Final

from cloud.companion import Companion
from cloud.session import Session
from split.transport.channel import Channel

log = logging.getLogger(__name__)

SESSIONS_PER_DEVICE: Final = 4
"""One, a second that is dialled beside a silent one, and what a link that comes and goes has left: a dead session is
noticed only by its heartbeat, and until then it takes one of `limits.connections`."""


class Reception:
    """Given to a listener as `on_channel`; knows every session that lives."""

    def __init__(self, companion: Companion) -> None:
        self._companion = companion
        self._sessions: dict[Session, str] = {}
        """With the device's name, oldest first."""
        self._ending: set[asyncio.Task[None]] = set()
        """What closes displaced ones; in bounded time, as every close."""
        self.leaving = False
        self._revoked: Collection[int] = ()

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    async def receive(self, channel: Channel) -> None:
        """Serve one connection to its end. A bug met while serving it ends this session and no other."""
        peer = channel.peer
        if peer.role != "device" or self.leaving:
            reason = "the companion is leaving" if self.leaving else f"a companion serves devices, not a {peer.role}"
            log.warning("turned away peer=%s reason=%r", peer.name, reason)
            await channel.close(reason)
            return
        session = Session(channel, self._companion)
        self._sessions[session] = peer.name
        self._displace(peer.name)
        if not peer.serials.isdisjoint(self._revoked):  # since its handshake
            asyncio.get_running_loop().call_soon(session.end_as_revoked)
        try:
            await session.run()
        except Exception:
            log.exception("session failed device=%s", peer.name)
        finally:
            self._sessions.pop(session, None)
            await channel.close("the session has ended")

    def make_room(self, device: str) -> bool:
        """All places are taken and this device wants one more: its oldest session, if it has any, ends for that."""
        own = self._of(device)
        if own:
            self._end(own[0], device, f"all places are taken here; a newer connection of {device} takes this one's")
        return bool(own)

    def _displace(self, device: str) -> None:
        """The oldest session of a device that has too many is ended: most likely nobody is at its other end."""
        own = self._of(device)
        if len(own) > SESSIONS_PER_DEVICE:
            what = f"{device} has more than {SESSIONS_PER_DEVICE} sessions here; a newer one takes this one's place"
            self._end(own[0], device, what)

    def _of(self, device: str) -> list[Session]:
        return [session for session, name in self._sessions.items() if name == device]

    def _end(self, session: Session, device: str, reason: str) -> None:
        log.warning("displaced a session device=%s reason=%r", device, reason)
        del self._sessions[session]  # a third one coming now displaces the next
        session.goodbye(reason)
        task = asyncio.create_task(session.close(reason), name=f"displace {device}")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def tell_pace(self, work_ms: float, since_s: float) -> None:
        """Each device is told, as `Session.tell_pace`."""
        for session in tuple(self._sessions):
            session.tell_pace(work_ms, since_s)

    def revoke(self, serials: Collection[int]) -> None:
        """The certificates that are not good any more: whoever has shown one is sent away at once."""
        self._revoked = serials
        for session in tuple(self._sessions):
            if not session.serials.isdisjoint(serials):
                session.end_as_revoked()

    async def send_home(self, reason: str, *, within_s: float) -> None:
        """Goodbye to all; requests under way get `within_s` to be answered, then every session is closed."""
        self.leaving = True
        sessions = tuple(self._sessions)
        for session in sessions:
            session.goodbye(reason)
        try:
            async with asyncio.timeout(within_s):
                await asyncio.gather(*(session.drained() for session in sessions))
        except TimeoutError:
            log.warning("requests unanswered after %.1f s; closing all the same", within_s)
        await asyncio.gather(*(session.close(reason) for session in sessions), *self._ending)
