"""Connections to companions, made and hung up: the only place of the daemon that dials. What they are used for is the
uplink's.

It tries for ever, all companions at once, each a little after the one before, and the first that opens is taken. Each
has its own back-off, time allowed and last failure, which outlive a connection: an address that leads nowhere costs the
others nothing, and a wrong certificate is not shown again within a minute, unless our own files have changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agent.first_flight import Opening
from split.errors import IdentityError, IsthmusError
from split.transport.channel import Channel
from split.transport.retry import CAP_S, IDENTITY_RETRY_S, Backoff

log = logging.getLogger(__name__)

DIAL_TIMEOUT_S: Final = 2.0
"""For TCP, TLS and the Hellos together, three round trips: enough for a satellite (600 ms each)."""
DIAL_TIMEOUT_MAX_S: Final = 4.0
"""What it doubles to after each dial that ran out of it: round trips of up to 1.3 s."""
HANDSHAKES: Final = 3.0
"""A dial is given as many times what the last one took that opened, within the two bounds above."""
SPREAD_S: Final = 0.25
"""The first dials to all addresses start evenly over so long: RFC 8305's delay, whatever their number."""
SETUP_S: Final = 1.0
"""What a companion that holds the models needs until the first is shared: a golden run there and here."""
UNHEARD_S: Final = 1.0
"""The longest time left to a dial whose SYN was the last that got lost: TCP sends it after 0, 1 and 3 s, so that it is
sent again, or the dial has run out of its 2 or 4 s, so much later (between 1 and 3 s no pause follows)."""
BACK_RTT_S: Final = 0.25
BACK_WITHIN_S: Final = 5.0
"""I7: remote use is back so long after a fault ended, for round trips of up to `BACK_RTT_S`. At worst the last SYN was
just lost, then comes the longest pause, then the last address in turn, then five round trips (three to open, an offer
and a cut; to the companion used last these go with the dial) and the set-up: 1 + 1.5 + 0.25 + 1.25 + 1 s."""
assert UNHEARD_S + CAP_S + SPREAD_S + 5 * BACK_RTT_S + SETUP_S <= BACK_WITHIN_S
STABLE_S: Final = 1.0
"""A connection that lived so long was a good one: the back-off of its companion starts anew after it."""
IDENTITY_LOOK_S: Final = 1.0
"""While a wrong certificate waits out its minute, so often it is looked whether our files (the authority's, too) are
others now: with those, the next dial is worth its while at once."""
HANG_UP_S: Final = 3.0
"""What the daemon's end waits for connections that are being closed."""

SECURITY: Final = "SECURITY"

Dial = Callable[[str, float, Sequence[Opening]], Awaitable[Channel]]
"""Opens a channel to HOST:PORT, in so many seconds or not at all; the messages go directly behind our Hello."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """An open connection, and where it leads."""

    address: str
    channel: Channel
    asked: Sequence[Opening]
    """What went with the dial and is answered on the channel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreached:
    """A companion whose last dial failed."""

    address: str
    code: str
    """SECURITY: one of the certificates is wrong; TIMEOUT, REFUSED, TLS, UNREACHABLE as `NotReached` has them; or the
    code with which the companion refused."""
    why: str
    next_try_s: float
    """From now; it is not dialled before, and then only while there is no connection."""


@dataclass(slots=True, kw_only=True)
class _Place:
    """A companion's address and how dialling it went."""

    address: str
    backoff: Backoff
    timeout_s: float = DIAL_TIMEOUT_S
    not_before_s: float = 0.0
    code: str = ""
    """Of the last dial's failure; "" when it opened, or before the first."""
    why: str = ""
    shown: object = None
    """What our identity was when that dial began."""
    hurried: asyncio.Event = field(default_factory=asyncio.Event)

    async def turn(self, identity_is: Callable[[], object]) -> None:
        """Wait until it may be dialled."""
        while (left_s := self.not_before_s - _now()) > 0:
            if self.code == SECURITY:
                if identity_is() != self.shown:
                    self.backoff.succeeded()
                    break
                left_s = min(left_s, IDENTITY_LOOK_S)
            self.hurried.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self.hurried.wait()
        self.hurried.clear()

    def pause(self, at_least_s: float = 0.0) -> None:
        """Not again before the back-off, which grows, is over."""
        self.not_before_s = _now() + max(self.backoff.failed(), at_least_s)


class Dialler:
    """`on_failure` is told why, whenever a dial has failed and with it the last one of every companion. `backoff`: each
    companion gets one like it. `identity_is`: differs from what it was once our identity files have changed.
    `first_flight`: what an address is asked with its dial."""

    def __init__(
        self,
        *,
        companions: Sequence[str],
        dial: Dial,
        backoff: Backoff,
        on_failure: Callable[[str], None],
        identity_is: Callable[[], object] = lambda: None,
        first_flight: Callable[[str], Sequence[Opening]] = lambda address: (),
    ) -> None:
        self._places = [_Place(address=one, backoff=dataclasses.replace(backoff)) for one in companions]
        self._dial = dial
        self._on_failure = on_failure
        self._identity_is = identity_is
        self._first_flight = first_flight
        self._turn = 0
        """The place that the next opening begins with."""
        self._late: set[asyncio.Task[Any]] = set()
        """What may still open a connection that nobody needs any more. Not cancelled: asyncio's dialling loses a socket
        at the wrong moment, and each ends by itself in `DIAL_TIMEOUT_MAX_S`."""
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def unreached(self) -> list[Unreached]:
        """The companions that could not be reached when they were last dialled, and why."""
        now_s = _now()
        return [
            Unreached(address=one.address, code=one.code, why=one.why, next_try_s=max(one.not_before_s - now_s, 0.0))
            for one in self._places
            if one.code
        ]

    async def open(self) -> Opened:
        """A connection to whichever companion answers first, however long that takes."""
        count = len(self._places)
        order = [self._places[(self._turn + n) % count] for n in range(count)]
        reaching = [asyncio.create_task(self._reach(one, n * SPREAD_S / count)) for n, one in enumerate(order)]
        try:
            done, _ = await asyncio.wait(reaching, return_when=asyncio.FIRST_COMPLETED)
            n = next(n for n, task in enumerate(reaching) if task in done)
            self._turn = (self._turn + n + 1) % count
            return reaching.pop(n).result()
        finally:
            for task in reaching:
                self.call_off(task)

    def lost(self, address: str, lived_s: float) -> None:
        """A connection has ended after so long: its companion is dialled again after a pause, the others at once."""
        place = next(one for one in self._places if one.address == address)
        if lived_s > STABLE_S:
            place.backoff.succeeded()
        place.pause()

    def hurry(self) -> None:
        """The network has changed: no pause goes on, and beside what is being dialled each is dialled anew. But for a
        wrong certificate, which no other network mends."""
        for place in self._places:
            if place.code != SECURITY:
                place.backoff.succeeded()
                place.not_before_s = 0.0
                place.hurried.set()

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

    async def _reach(self, place: _Place, after_s: float) -> Opened:
        """Dial one companion, with its pauses, until it answers."""
        await asyncio.sleep(after_s)
        calls: set[asyncio.Task[Opened | None]] = set()
        try:
            while True:
                await place.turn(self._identity_is)
                calls.add(asyncio.create_task(self._call(place), name=f"dial {place.address}"))
                hurried = asyncio.create_task(place.hurried.wait())
                try:
                    done, _ = await asyncio.wait({hurried, *calls}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    hurried.cancel()
                for call in calls & done:
                    calls.discard(call)
                    if (opened := call.result()) is not None:
                        return opened
        finally:
            for call in calls:
                self._see_off(call)

    async def _call(self, place: _Place) -> Opened | None:
        """Dial once; None when it failed, whatever the failure: the next one may do."""
        began_s, shown = _now(), self._identity_is()
        asked = self._first_flight(place.address)
        try:
            channel = await self._dial(place.address, place.timeout_s, asked)
        except Exception as error:
            if not isinstance(error, IsthmusError | OSError):
                log.exception("companion=%s cannot be dialled", place.address)
            self._failed(place, error, shown)
            return None
        place.code = place.why = ""
        place.timeout_s = min(max(DIAL_TIMEOUT_S, HANDSHAKES * (_now() - began_s)), DIAL_TIMEOUT_MAX_S)
        return Opened(address=place.address, channel=channel, asked=asked)

    def _failed(self, place: _Place, error: Exception, shown: object) -> None:
        code = _code(error)
        why = str(error) or type(error).__name__
        if (code, why) != (place.code, place.why):  # every second the same would fill the log
            log.warning("companion=%s cannot connect: %s (%s)", place.address, why, code)
        place.code, place.why, place.shown = code, why, shown
        place.pause(IDENTITY_RETRY_S if code == SECURITY else 0.0)
        if code == "TIMEOUT":
            place.timeout_s = min(2 * place.timeout_s, DIAL_TIMEOUT_MAX_S)
        if all(one.code for one in self._places):
            self._on_failure(f"cannot connect: {'; '.join(f'{one.why} ({one.code})' for one in self._places)}")

    def _see_off(self, task: asyncio.Task[Any]) -> None:
        """Nobody waits for this task any more; a connection that it opens all the same is closed."""

        def ended(_: asyncio.Task[Any]) -> None:
            self._late.discard(task)
            if not task.cancelled() and task.exception() is None and isinstance(opened := task.result(), Opened):
                self.hang_up(opened.channel, "another connection is used")

        self._late.add(task)
        task.add_done_callback(ended)


def _code(error: Exception) -> str:
    """As `Unreached.code` says."""
    match error:
        case IdentityError():
            return SECURITY
        case IsthmusError(code=code):
            return code
        case OSError():
            return "UNREACHABLE"
    return "INTERNAL"


def _now() -> float:
    return asyncio.get_running_loop().time()
