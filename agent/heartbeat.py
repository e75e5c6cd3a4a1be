"""Whether one connection still carries anything, and what its round trips say of the link: pings while requests wait or
the planner wants to know.

    connected ── a reply is late, a ping is unanswered ─────► silent ── each is heard ──────► connected
        │        or the way there has become another one         │
        │                                                       │
        │ Goodbye                                               │ another connection opened, dialled beside this one
        ▼                                                       ▼
    leaving ── no reply is awaited any more ──► hung up ◄───────┘

It says when the connection is over, and gives the one that takes its place; what is sent over it is the uplink's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import Callable
from typing import Final

from agent.dialler import Dialler, Opened
from agent.knocking import Knock, Knocking
from agent.planner import Planner
from agent.second_lane import SecondLane
from agent.waiting import Waiting
from split.errors import IsthmusError
from split.plan.probing import PING_BYTES
from split.plan.slow_start import SendWindow
from split.transport.channel import Channel, Incoming, LinkFacts
from split.transport.pacing import PROBING_SEGMENTS
from split.wire.messages import PONG_BYTES_SINCE_MINOR, Ping, Priority

log = logging.getLogger(__name__)

TICK_S: Final = 0.25
"""Heartbeat while requests wait or a probe is due (evidence: a silent peer must be noticed within a second)."""
SILENCE_S: Final = 5.0
"""A ping unanswered and nothing heard for so long: another connection is dialled beside this one.

A way that was broken for t < 5 s heals: TCP sends again within t (its timer doubles), and after 5 s the dial is under
way, so that remote use is back within min(t, 5 − t) ≤ 2.5 s; `dialler.py` sums up what follows a longer break.
Not shorter, or a slow link would pass for a dead one: up to 112 KiB are ahead of a ping (a frame of 64, and 16 each in
TLS, beneath it and unsent in the kernel), which take 5 s at 180 kbit/s."""
PINGS_OUT: Final = 4
"""Unanswered pings at once; more would tell nothing more."""


def send_window(connection: LinkFacts, now_s: float) -> SendWindow | None:
    """TCP's window for the planner; None where the kernel says nothing of one that would last."""
    if connection.cwnd_bytes <= (PROBING_SEGMENTS * connection.segment_bytes if not connection.restarts else 0):
        return None
    threshold = connection.threshold_bytes
    return SendWindow(
        window_bytes=connection.cwnd_bytes,
        threshold_bytes=math.inf if threshold is None else threshold,
        segment_bytes=connection.segment_bytes,
        timeout_s=connection.timeout_ms / 1000,
        restarts=connection.restarts,
        sent_at_s=now_s - connection.silent_ms / 1000,
    )


class Heartbeat:
    """Of one connection, as long as that lives; made when it has begun."""

    def __init__(
        self,
        opened: Opened,
        *,
        planner: Planner,
        waiting: Waiting,
        dialler: Dialler,
        silence_s: float,
        knock: Knock | None,
        source_towards: Callable[[str], str | None],
        on_silence: Callable[[], None],
    ) -> None:
        """`silence_s`: SILENCE_S, or more where one connection after the other is replaced. `knock`, `source_towards`,
        `on_silence`: as of the uplink."""
        self._channel: Channel = opened.channel
        self._address = opened.address
        self._planner = planner
        self._waiting = waiting
        self._dialler = dialler
        self._silence_s = silence_s
        self._source_towards = source_towards
        self._on_silence = on_silence
        self._second = SecondLane(self._channel)
        self._knocking: Knocking | None = None
        """None: a way that is open again is found by TCP alone."""
        if knock is not None:
            port = int(opened.address.rpartition(":")[2])
            self._knocking = Knocking(self._channel, port, knock, self._passes_again)
        self._pongs_weigh = self._channel.peer_hello.minor >= PONG_BYTES_SINCE_MINOR
        """The companion sends padding down where it is asked to."""
        self._pings: dict[int, tuple[float, int, bool]] = {}
        """Nonce → when it was sent, its padding in bytes, and whether nothing else was under way; the oldest first."""
        self._nonces = itertools.count(1)
        self._heard_at_s = self._now()
        self._suspected = False
        self._unheard: set[bool] = set()
        """Of a companion that is suspected: the connections (True: the second) over which nothing came since."""
        self._no_way = self._moved = False
        """There was no way to the companion for a time; it is another one than this connection's."""
        self._changed = asyncio.Event()
        self.leaving = False
        """The companion said goodbye: nothing new on this connection."""
        self.state = "connected"

    def begin(self) -> None:
        """The first ping."""
        self._note_window()
        self._ping(0)

    def close(self) -> None:
        if self._knocking is not None:
            self._knocking.close()

    # -- what happens -------------------------------------------------------------------------------------------------

    def heard(self, incoming: Incoming) -> None:
        """Something came."""
        self._heard_at_s = self._now()
        if incoming.bulk:
            self._second.heard(self._heard_at_s)
        self._unheard.discard(incoming.bulk)
        if self._suspected and not self._unheard:
            self._suspected, self.state = False, "connected"
            self._planner.companion_back(self._heard_at_s)

    def replied(self, *, usable: bool) -> None:
        """It was a reply."""
        self._note_window()
        if usable and not self._waiting.unanswered:
            self._probe()  # where it was a surprise: a stall, or another link?

    def pong(self, nonce: int, received_at_s: float, pong_bytes: int) -> None:
        """It was the answer to a ping, with so many bytes of padding."""
        if (ping := self._pings.pop(nonce, None)) is not None:
            sent_at_s, padding, alone = ping
            if alone:  # among requests it has waited behind their bytes, which is not the link's round trip
                rtt_ms = (received_at_s - sent_at_s) * 1000
                self._planner.observe_ping(rtt_ms, self._now(), padding_bytes=padding, pong_bytes=pong_bytes)
            heavy = padding > 0  # those may travel on another connection; on one, answers keep their order
            for older in [n for n, (_, size, _) in self._pings.items() if n < nonce and (size > 0) == heavy]:
                del self._pings[older]  # that answer will not come
        self._note_window()
        self._changed.set()  # where it was a surprise, the next ping tells what it was

    def goodbye(self, reason: str) -> None:
        """Nothing new goes there, whatever it still says; what was sent may still be answered."""
        self.leaving, self.state = True, f"goodbye: {reason}"
        self._planner.companion_lost(f"companion {self._address} says goodbye: {reason}")

    def suspect(self, why: str) -> None:
        """No new request goes there until something is heard again, over each connection."""
        if self._suspected or self.leaving:
            return
        self._suspected, self.state = True, "silent"
        self._unheard = {False, True} if self._channel.lanes > 1 else {False}
        self._planner.companion_silent(f"the companion {self._address} {why}")
        self._ping(0)
        self._second.ask(next(self._nonces), self._now())

    def network_changed(self) -> None:
        """As `Uplink.network_changed`, of the way to this companion."""
        if (ends := self._channel.ends) is None:
            return
        here, there = ends
        leads_from = self._source_towards(there)
        if leads_from is None:
            self._no_way = True
        elif leads_from != here or self._no_way:  # after a gap even the old way waits for TCP's timer, which has grown
            self._moved = True
            self._changed.set()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _ping(self, padding: int, pong_bytes: int = 0) -> None:
        nonce = next(self._nonces)
        if padding > PING_BYTES:
            self._channel.look_afresh(self._planner.rtt_ms(self._now()))
        try:
            ping = Ping(nonce=nonce, padding=bytes(padding), pong_bytes=pong_bytes)
            self._channel.send(ping, priority=Priority.CONTROL)
        except IsthmusError:  # gone, or full: the next tick asks again
            return
        self._pings[nonce] = (self._now(), padding, not self._waiting.unanswered)

    def _note_window(self) -> None:
        """Tell the planner what TCP may send at once where payloads travel."""
        connections = self._channel.observe().connections
        if connections and (window := send_window(connections[-1], self._now())) is not None:
            self._planner.observe_window(window)

    def _probe(self) -> None:
        """Ping where the planner wants to know more of the link."""
        if self._pongs_weigh and (pong_bytes := self._planner.pong_wanted(self._now())) > 0:
            self._ping(PING_BYTES, pong_bytes)
        elif (padding := self._planner.probe_wanted(self._now())) > 0:
            self._ping(padding)

    async def run(self) -> Opened | str:
        """The heartbeat, supervised: the connection ends with it, or nothing would notice a silent companion."""
        try:
            return await self._beat()
        except Exception:
            log.exception("companion=%s the heartbeat failed", self._address)
            return "lost: the heartbeat of this side failed, the daemon's log says why"

    async def _beat(self) -> Opened | str:
        """Ping while requests wait or the planner wants to know. Ends with why to hang up, or, after a silence
        or a change of the network, with the connection that another dial made."""
        successor: asyncio.Task[Opened] | None = None
        try:
            while True:
                if successor is not None:
                    await asyncio.wait((successor,), timeout=TICK_S)
                else:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(min(TICK_S, self._planner.looks_again_s(self._now()))):
                            await self._changed.wait()
                self._changed.clear()
                now_s = self._now()
                silent = self._unanswered_s(now_s) > self._silence_s or self._is_second_silent(now_s)
                if self.leaving and (silent or not self._waiting.unanswered):
                    return self.state
                if successor is not None and successor.done():
                    opened, successor = successor.result(), None
                    return opened
                replace = silent or self._moved or self._is_open_and_stuck()
                if replace and successor is None:
                    self.suspect("is reached another way now" if self._moved else "does not answer in time")
                    self._on_silence()
                    successor = asyncio.create_task(self._dialler.open(), name="dial beside")
                elif not replace and successor is not None:
                    self._dialler.call_off(successor)
                    successor = None
                if self._waiting.unanswered or self._suspected:
                    self._second.ask(next(self._nonces), now_s, unheard_s=TICK_S)
                if len(self._pings) >= PINGS_OUT:
                    continue
                if (self._waiting.unanswered or self._suspected) and now_s - self._heard_at_s > TICK_S:
                    self._ping(0)
                elif not self._waiting.unanswered:
                    self._probe()
        finally:
            if successor is not None:
                self._dialler.call_off(successor)

    def _is_open_and_stuck(self) -> bool:
        """Whether the way is open again, and the connection waits for TCP's timer. One that is stuck is suspected."""
        if self._knocking is None or not (self._pings or self._waiting.unanswered or self._suspected):
            return False
        if self._knocking.look():
            self.suspect("acknowledges nothing")
        return self._knocking.answered

    def _passes_again(self) -> None:
        """Something answered at the companion's address: whatever is being dialled is dialled anew."""
        self._dialler.hurry()
        self._changed.set()

    def _is_second_silent(self, now_s: float) -> bool:
        """Whether the second connection alone is silent; later where one connection after the other is replaced."""
        return self._second.is_silent(self._heard_at_s, now_s, patience=self._silence_s / SILENCE_S)

    def _unanswered_s(self, now_s: float) -> float:
        """For how long nothing was heard although a ping is out; 0 without one."""
        if not self._pings:
            return 0.0
        oldest_s, _, _ = next(iter(self._pings.values()))
        return now_s - max(self._heard_at_s, oldest_s)
