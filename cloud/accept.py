"""From connections to sessions: who may come in, who is here, how all are sent home. One per companion."""

from __future__ import annotations

import asyncio
import logging

from cloud.companion import Companion
from cloud.session import Session
from split.transport.channel import Channel

log = logging.getLogger(__name__)


class Reception:
    """Given to a listener as `on_channel`; knows every session that lives."""

    def __init__(self, companion: Companion) -> None:
        self._companion = companion
        self._sessions: set[Session] = set()
        self.leaving = False

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
        self._sessions.add(session)
        try:
            await session.run()
        except Exception:
            log.exception("session failed device=%s", peer.name)
        finally:
            self._sessions.discard(session)
            await channel.close("the session has ended")

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
        await asyncio.gather(*(session.close(reason) for session in sessions))
