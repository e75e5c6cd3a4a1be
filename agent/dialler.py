"""Connections to companions, made and hung up: the only place of the daemon that dials. What they are used for is the
uplink's.

It tries for ever. All companions are dialled in one round, each a little after the one before, and the first that opens
is taken: an address that leads nowhere costs the others nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from split.errors import ConnectionLost, IdentityError, IsthmusError
from split.transport.channel import Channel
from split.transport.retry import CAP_S, IDENTITY_RETRY_S, Backoff

log = logging.getLogger(__name__)

DIAL_TIMEOUT_S: Final = 2.0
"""For TCP, TLS and the Hellos together, three round trips: enough for a satellite (600 ms each)."""
SPREAD_S: Final = 0.25
"""The addresses of a round start evenly over so long: RFC 8305's delay, whatever their number."""
SETUP_S: Final = 1.0
"""What a companion that holds the models needs until the first is shared: an offer, a golden run, an answer."""
BACK_WITHIN_S: Final = 5.0
"""I7: remote use is back so long after a fault ended. At worst a round began just before that and must time out, then
comes the longest pause, then the last address in turn, then the set-up: 2.25 + 1.5 + 0.25 + 1 s."""
assert (SPREAD_S + DIAL_TIMEOUT_S) + CAP_S + SPREAD_S + SETUP_S <= BACK_WITHIN_S
HANG_UP_S: Final = 3.0
"""What the daemon's end waits for connections that are being closed."""

Dial = Callable[[str], Awaitable[Channel]]
"""Opens a channel to HOST:PORT, in `DIAL_TIMEOUT_S` or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """An open connection, and where it leads."""

    address: str
    channel: Channel


class Dialler:
    """`on_failure` is told, after each round in which none answered, why."""

    def __init__(
        self, *, companions: Sequence[str], dial: Dial, backoff: Backoff, on_failure: Callable[[str], None]
    ) -> None:
        self._companions = tuple(companions)
        self._dial = dial
        self._backoff = backoff
        self._on_failure = on_failure
        self._turn = 0
        """The address that the next round begins with."""
        self._identity_refused = False
        self._late: set[asyncio.Task[Any]] = set()
        """What may still open a connection that nobody needs any more. Not cancelled: asyncio's dialling loses a socket
        at the wrong moment, and each ends by itself in `DIAL_TIMEOUT_S`."""
        self._closing: set[asyncio.Task[None]] = set()

    async def open(self) -> Opened:
        """A connection to whichever companion answers first, however long that takes."""
        while (opened := await self._round()) is None:
            await self.pause()
        return opened

    async def pause(self) -> None:
        """Between a failure and the next try; longer with each until `worked`."""
        delay_s = max(self._backoff.failed(), IDENTITY_RETRY_S if self._identity_refused else 0.0)
        log.info("next try to connect in %.1f s", delay_s)
        await asyncio.sleep(delay_s)

    def worked(self) -> None:
        """The connection was a good one: the pauses start over."""
        self._backoff.succeeded()

    def hang_up(self, channel: Channel, why: str) -> None:
        """Close it, beside whatever comes next: closing towards a dead peer takes seconds."""
        task = asyncio.create_task(channel.close(why), name="hang up")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def call_off(self, opening: asyncio.Task[Any]) -> None:
        """End a task that opens a connection: it is not needed any more."""
        opening.cancel()
        self._see_off(opening)

    async def close(self) -> None:
        """The daemon ends: no dial goes on, and a bounded wait until all is closed."""
        for task in self._late:
            task.cancel()
        try:
            async with asyncio.timeout(HANG_UP_S):
                while ending := self._late | self._closing:
                    await asyncio.wait(ending)
        except TimeoutError:
            for closing in self._closing:
                closing.cancel()

    async def _round(self) -> Opened | None:
        """Every address once; None when none answers."""
        count = len(self._companions)
        addresses = [self._companions[(self._turn + n) % count] for n in range(count)]
        over = asyncio.Event()
        calls = [
            asyncio.create_task(self._call(address, n * SPREAD_S / count, over), name=f"dial {address}")
            for n, address in enumerate(addresses)
        ]
        pending = set(calls)
        try:
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for call in calls:
                    if call in done and isinstance(opened := call.result(), Opened):
                        calls.remove(call)
                        self._turn = (self._companions.index(opened.address) + 1) % count
                        self._identity_refused = False
                        return opened
        finally:
            over.set()
            for call in calls:
                self._see_off(call)
        errors = [call.result() for call in calls]
        self._identity_refused = all(isinstance(error, IdentityError) for error in errors)
        why = f"cannot connect: {'; '.join(str(error) or 'timed out' for error in errors)}"
        log.warning("companion=%s %s", ",".join(addresses), why)
        self._on_failure(why)
        return None

    async def _call(self, address: str, after_s: float, over: asyncio.Event) -> Opened | Exception:
        """One address; whatever the failure, the next one or the next round may do."""
        await asyncio.sleep(after_s)
        if over.is_set():
            return ConnectionLost("another companion answered before this one was dialled")
        try:
            return Opened(address=address, channel=await self._dial(address))
        except Exception as error:
            if not isinstance(error, IsthmusError | OSError):
                log.exception("companion=%s cannot be dialled", address)
            return error

    def _see_off(self, task: asyncio.Task[Any]) -> None:
        """Nobody waits for this task any more; a connection that it opens all the same is closed."""

        def ended(_: asyncio.Task[Any]) -> None:
            self._late.discard(task)
            if not task.cancelled() and task.exception() is None and isinstance(opened := task.result(), Opened):
                self.hang_up(opened.channel, "another connection is used")

        self._late.add(task)
        task.add_done_callback(ended)
