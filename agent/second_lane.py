"""Whether the second connection of a session still carries anything while the first one does.

Big requests go over it and pings over the first, so that a connection which dies alone (a middlebox forgot it, a path
of its own broke) would pass for a slow companion until TCP gives it up. A ping that goes there, too, tells.
"""

from __future__ import annotations

from typing import Final

from split.errors import IsthmusError
from split.transport.channel import Channel
from split.wire.messages import Ping, Priority

LANE_SILENCE_S: Final = 2.0
"""A ping unanswered there and nothing acknowledged, while the first connection is heard. Shorter than for a companion
of which nothing is heard at all: a broken path silences both, and a slow one goes on acknowledging."""
_WEIGHT: Final = b"\0"
"""A ping that carries weight travels where tensors do."""


class SecondLane:
    """Lives as long as one channel; may be asked before there is a second connection, and without one."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._asked = False
        self._heard_at_s = self._moved_at_s = 0.0
        self._acked_bytes = 0

    @property
    def is_there(self) -> bool:
        return self._channel.lanes > 1

    def heard(self, now_s: float) -> None:
        """Something came over it."""
        self._asked, self._heard_at_s = False, now_s

    def ask(self, nonce: int, now_s: float, *, unheard_s: float = 0.0) -> None:
        """Ping it where nothing came over it for so long and no answer is awaited already."""
        if not self.is_there or self._asked or now_s - self._heard_at_s < unheard_s:
            return
        try:
            self._channel.send(Ping(nonce=nonce, padding=_WEIGHT), priority=Priority.CONTROL)
        except IsthmusError:  # gone, or full: asked again with the next tick
            return
        self._asked, self._moved_at_s = True, now_s

    def is_silent(self, heard_at_s: float, now_s: float, *, patience: float = 1.0) -> bool:
        """Whether it has been silent for `patience` × LANE_SILENCE_S; `heard_at_s`: when the companion was heard last,
        over whichever connection. A system call while an answer is awaited."""
        if not self._asked:
            return False
        acked_bytes = sum(one.acked_bytes for one in self._channel.observe().connections if one.lane == "bulk")
        if acked_bytes != self._acked_bytes:
            self._acked_bytes, self._moved_at_s = acked_bytes, now_s
        return heard_at_s - self._moved_at_s > patience * LANE_SILENCE_S
