"""Learning that a way which was broken is open again sooner than TCP does.

Its timer doubles with each time that nothing is acknowledged: after a break of t, what waits on a connection is sent
again up to t later, and so are a dial's SYNs, in whole seconds. SYNs of our own, each with a timer of its own, find out
within a fifth of a second and a round trip; then a new connection is worth dialling beside the one that sleeps.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final

from split.transport.channel import Channel

Knock = Callable[[str, int, float], Awaitable[bool]]
"""As `split.transport.knock.knock`."""

EVERY_S: Final = 0.2
FOR_S: Final = 60.0
"""A way that stays broken for longer is left to the dials: 300 SYNs of 60 bytes."""
TIMEOUT_S: Final = 1.0
"""Of one knock: until the kernel would send its SYN again."""
TIMEOUTS: Final = 2
"""So often in a row TCP's timer ran out before nothing is taken to pass: once is what a lost tail looks like."""


class Knocking:
    """Of one channel, to this port of whoever is at its other end. `on_answer` is called when something answers."""

    def __init__(self, channel: Channel, port: int, knock: Knock, on_answer: Callable[[], None]) -> None:
        self._channel = channel
        self._port = port
        self._knock = knock
        self._on_answer = on_answer
        self._task: asyncio.Task[None] | None = None
        self.answered = False
        """The way is open, and yet nothing was acknowledged on the channel so far."""

    def look(self) -> bool:
        """Whether the channel is stuck: what was sent was sent again and again, and nothing acknowledged. No slow way
        does that, which goes on acknowledging. From now on there are knocks until something answers. A system call for
        each connection."""
        ends = self._channel.ends
        if ends is None or all(one.timeouts < TIMEOUTS for one in self._channel.observe().connections):
            self.close()
            return False
        if self._task is None:
            self._task = asyncio.create_task(self._until_answered(ends[1]), name="knocking")
        return True

    def close(self) -> None:
        """Nobody wants to know any more."""
        if self._task is not None:
            self._task.cancel()
        self._task, self.answered = None, False

    async def _until_answered(self, address: str) -> None:
        """One knock after the other, several under way where the round trip is long."""

        async def once() -> None:
            if await self._knock(address, self._port, TIMEOUT_S):
                found.set()

        loop, found, knocks = asyncio.get_running_loop(), asyncio.Event(), set[asyncio.Task[None]]()
        until_s = loop.time() + FOR_S
        try:
            while not found.is_set() and loop.time() < until_s:
                task = asyncio.create_task(once(), name="knock")
                knocks.add(task)
                task.add_done_callback(knocks.discard)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(EVERY_S):
                        await found.wait()
        finally:
            for task in tuple(knocks):
                task.cancel()
        if found.is_set():
            self.answered = True
            self._on_answer()
