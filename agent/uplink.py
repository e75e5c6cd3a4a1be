"""The device's side of the channel: one connection to a companion, and the requests that wait on it.

It keeps a connection (`dialler.py` makes them), has every model shared over it (`openings.py`), sends requests and
hands replies back (`waiting.py`), pings. It never decides and never runs a model; what it learns goes to the planner. A
dead or silent companion fails nothing here: `serve` is told and finishes the waiting requests on the device, and those
that may be sent again are, when the next connection (to whichever companion) can answer them before that.

    connected ── a reply is late, a ping is unanswered ─────► silent ── each is heard ──────► connected
        │        or the way there has become another one         │
        │                                                       │
        │ Goodbye                                               │ another connection opened, dialled beside this one
        ▼                                                       ▼
    leaving ── no reply is awaited any more ──► hung up ◄───────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from agent.dialler import Dial, Dialler, Opened, Unreached
from agent.first_flight import FirstFlight, Opening
from agent.golden import Golden
from agent.interfaces import source_towards
from agent.knocking import Knock, Knocking
from agent.openings import KLT, Openings, are_times
from agent.planner import Planner
from agent.second_lane import SecondLane
from agent.served_model import ServedModel
from agent.waiting import Asked, Waiting
from split.codec.klt import calibration_key
from split.errors import (
    ChannelError,
    ConnectionLost,
    IsthmusError,
    RemoteProtocolError,
)
from split.plan.probing import PING_BYTES
from split.plan.slow_start import SendWindow
from split.transport.channel import Buffer, Channel, Incoming, LinkFacts, Observation
from split.transport.pacing import PROBING_SEGMENTS
from split.transport.retry import Backoff
from split.wire.messages import (
    NO_CALIBRATION,
    RENEW_SINCE_MINOR,
    Goodbye,
    Infer,
    ModelNeed,
    ModelReady,
    Pace,
    Ping,
    Pong,
    Priority,
    Refused,
    Renew,
    Renewed,
    Reply,
    SegmentReady,
)

log = logging.getLogger(__name__)

TICK_S: Final = 0.25
"""Heartbeat while requests wait or a probe is due (evidence: a silent peer must be noticed within a second)."""
SILENCE_S: Final = 5.0
"""A ping unanswered and nothing heard for so long: another connection is dialled beside this one.

A way that was broken for t < 5 s heals: TCP sends again within t (its timer doubles), and after 5 s the dial is under
way, so that remote use is back within min(t, 5 − t) ≤ 2.5 s; `dialler.py` sums up what follows a longer break.
Not shorter, or a slow link would pass for a dead one: up to 112 KiB are ahead of a ping (a frame of 64, and 16 each in
TLS, beneath it and unsent in the kernel), which take 5 s at 180 kbit/s."""
SILENCE_MAX_S: Final = 20.0
"""What it doubles to while one connection after the other is replaced: then the link is slow, not dead."""
SETTLED_S: Final = 60.0
"""A connection that lived so long shows that SILENCE_S is enough."""
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


class Uplink:
    """Lives as long as the daemon. All methods are called on its event loop."""

    def __init__(
        self,
        *,
        companions: Sequence[str],
        dial: Dial,
        planner: Planner,
        golden: Golden,
        backoff: Backoff,
        knock: Knock | None = None,
        source_towards: Callable[[str], str | None] = source_towards,
        identity_is: Callable[[], object] = lambda: None,
    ) -> None:
        self.on_silence: Callable[[], None] = lambda: None
        """Called each time that another connection is about to be dialled beside one on which nothing is heard."""
        self.on_renewed: Callable[[Renewed], None] = lambda renewed: None
        """Called with the answer to `ask_renewal`."""
        self._dialler = Dialler(
            companions=companions,
            dial=dial,
            backoff=backoff,
            on_failure=self._not_connected,
            identity_is=identity_is,
            first_flight=self._first_flight,
        )
        self._flight = FirstFlight()
        self._planner = planner
        self._golden = golden
        self._draw = backoff.draw
        self._knock = knock
        """None: a way that is open again is found by TCP alone."""
        self._channel: Channel | None = None
        self._second: SecondLane | None = None
        self._knocking: Knocking | None = None
        self._openings: Openings | None = None
        self._models: dict[str, ServedModel] = {}
        self._waiting = Waiting(planner)
        self._pings: dict[int, tuple[float, int, bool]] = {}
        """Nonce → when it was sent, its padding in bytes, and whether nothing else was under way; the oldest first."""
        self._nonces = itertools.count(1)
        self._heard_at_s = 0.0
        self._silence_s = SILENCE_S
        self._suspected = False
        self._unheard: set[bool] = set()
        """Of a companion that is suspected: the connections (True: the second) over which nothing came since."""
        self._leaving = False
        """The companion said goodbye: nothing new on this connection."""
        self._source_towards = source_towards
        self._no_way = self._moved = False
        """There was no way to the companion for a time; it is another one than this connection's."""
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.address = companions[0] if companions else ""
        self.state = "connecting" if companions else "no companion configured"
        self.connects = 0

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self.address:
            self._task = asyncio.create_task(self._keep_connected(), name="uplink")
        else:
            self._planner.companion_lost(self.state)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._dialler.close()
        self._waiting.close("the device is going")

    def serve_model(self, model: ServedModel) -> None:
        """From now on this model may be shared with a companion."""
        self._models[model.name] = model
        self._flight.forget(model.digest)  # the profile may be another one, and with it the golden inputs
        if self._openings is not None:
            self._openings.begin(model)

    def recalibrated(self, model: ServedModel) -> None:
        """A model that is served has another calibration: that alone is brought to the companion."""
        self._models[model.name] = model
        if self._openings is not None:
            self._openings.recalibrated(model)

    def drop_model(self, model: ServedModel) -> None:
        self._models.pop(model.name, None)
        self._flight.forget(model.digest)
        if self._openings is not None:
            self._openings.drop(model.name)

    @property
    def observation(self) -> Observation | None:
        """The link as the kernel sees it now; None without a connection."""
        return self._channel.observe() if self._channel is not None else None

    @property
    def peer(self) -> str:
        return self._channel.peer.name if self._channel is not None else ""

    @property
    def unreached(self) -> list[Unreached]:
        """Companions that could not be reached when they were last dialled."""
        return self._dialler.unreached

    @property
    def inflight(self) -> int:
        return self._waiting.inflight

    # -- requests -----------------------------------------------------------------------------------------------------

    def infer(
        self,
        message: Infer,
        payload: Sequence[Buffer],
        *,
        priority: Priority,
        network_ms: float = 0.0,
        cloud_ms: float = 0.0,
        reply_bytes: int = 0,
        attempts: int = 1,
        made: Mapping[str, str] = MappingProxyType({}),
    ) -> Asked:
        """Send one request, as `Waiting.send`. Raises ConnectionLost at once when there is no companion."""
        if self._channel is None or self._leaving:
            raise ConnectionLost(f"no companion: {self.state}")
        return self._waiting.send(
            message,
            payload,
            priority=priority,
            network_ms=network_ms,
            cloud_ms=cloud_ms,
            reply_bytes=reply_bytes,
            attempts=attempts,
            made=made,
        )

    def abandon(self, request_id: str) -> None:
        """Nobody waits any more: unsent bytes are dropped, the companion is told."""
        self._waiting.abandon(request_id)

    def ask_renewal(self, request: str) -> bool:
        """Ask the companion that is connected for a new certificate; False where none is that knows of it."""
        channel = self._channel
        if channel is None or self._leaving or channel.peer_hello.minor < RENEW_SINCE_MINOR:
            return False
        try:
            channel.send(Renew(request=request))
        except IsthmusError:  # gone, or full: asked again later
            return False
        return True

    def suspect(self, why: str = "does not answer in time") -> None:
        """A reply is late: no new request goes there until something is heard again, over each connection."""
        if self._channel is not None and not self._suspected and not self._leaving:
            self._suspected, self.state = True, "silent"
            self._unheard = {False, True} if self._channel.lanes > 1 else {False}
            self._planner.companion_silent(f"the companion {self.address} {why}")
            self._ping(0)
            if self._second is not None:
                self._second.ask(next(self._nonces), self._now())

    def network_changed(self) -> None:
        """Interfaces, addresses or routes are others now: no back-off goes on, and where the way to the companion has
        become another one, another connection is made beside the one that there is."""
        self._dialler.hurry()
        if self._channel is None or (ends := self._channel.ends) is None:
            return
        here, there = ends
        leads_from = self._source_towards(there)
        if leads_from is None:
            self._no_way = True
        elif leads_from != here or self._no_way:  # after a gap even the old way waits for TCP's timer, which has grown
            self._moved = True
            self._changed.set()

    # -- connection ---------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _keep_connected(self) -> None:
        opened = await self._dialler.open()
        while True:
            began_at_s = self._now()
            successor = await self._live_with(opened)
            lived_s = self._now() - began_at_s
            if successor is None:
                self._silence_s = SILENCE_S
                self._dialler.lost(opened.address, lived_s)
                successor = await self._dialler.open()
            else:
                self._silence_s = SILENCE_S if lived_s > SETTLED_S else min(2 * self._silence_s, SILENCE_MAX_S)
            opened = successor

    def _first_flight(self, address: str) -> Sequence[Opening]:
        """What the companion that was used last is asked with the dial; another one is not made to open for nothing
        what it is asked for anyway if it is taken."""
        if address != self.address:
            return ()
        return self._flight.pack((one.digest, self._planner.recent_cuts(one.name)[1]) for one in self._models.values())

    def _not_connected(self, why: str) -> None:
        """No companion can be reached. Beside a connection that is only silent so far, that changes nothing."""
        if self._channel is None:
            self.state = why
            self._planner.companion_lost(why)

    async def _live_with(self, opened: Opened) -> Opened | None:
        """Use this connection until it ends; the one that has taken its place, if any."""
        channel = self._channel = opened.channel
        self._second = SecondLane(channel)
        if self._knock is not None:
            port = int(opened.address.rpartition(":")[2])
            self._knocking = Knocking(channel, port, self._knock, self._passes_again)
        self.address, self.state, self.connects = opened.address, "connected", self.connects + 1
        self._suspected = self._leaving = self._no_way = self._moved = False
        self._heard_at_s = self._now()
        self._pings.clear()
        self._waiting.begin(channel)
        self._planner.connected(
            max_message_bytes=channel.peer_hello.max_message_bytes,
            ahead_bytes=self._waiting.ahead_bytes,
            way=f"{opened.address} {channel.ends[0] if channel.ends is not None else ''}",
            peer=channel.peer.name,
        )
        log.info("companion=%s connected as %s (%s)", self.address, channel.peer.name, channel.peer_hello.runtime)
        openings = self._openings = Openings(
            channel,
            planner=self._planner,
            golden=self._golden,
            draw=self._draw,
            on_open=self._waiting.send_again,
            flight=self._flight,
            asked=opened.asked,
        )
        for model in self._models.values():
            openings.begin(model)
        self._note_window()
        self._ping(0)
        receiving = asyncio.create_task(self._receive(channel), name="receive")
        watching = asyncio.create_task(self._watch(), name="heartbeat")
        successor: Opened | None = None
        why = "the device is going"
        try:
            await asyncio.wait((receiving, watching), return_when=asyncio.FIRST_COMPLETED)
            match (watching if watching.done() else receiving).result():
                case Opened() as successor:
                    why = "lost: nothing was heard, and dialling anew worked"
                case why:
                    pass
        finally:
            if self._knocking is not None:
                self._knocking.close()
            self._channel = self._second = self._openings = self._knocking = None
            self.state = why
            self._waiting.lose(f"companion {self.address} {why}")
            self._planner.companion_lost(f"companion {self.address} {why}")
            self._dialler.hang_up(channel, why)
            receiving.cancel()
            if not watching.cancel() and successor is None:
                self._dialler.call_off(watching)  # it had just ended with a connection that nobody takes
            await asyncio.wait((receiving, watching))
            await openings.close()
        log.warning("companion=%s %s", opened.address, why)
        return successor

    async def _receive(self, channel: Channel) -> str:
        """Take what comes until the connection ends; why it did."""
        try:
            while True:
                self._take(await channel.receive())
        except ChannelError as error:
            return f"lost: {error}"
        except Exception:  # a bug of ours must not end remote use for ever
            log.exception("companion=%s the connection is given up", self.address)
            return "lost: an internal error, the daemon's log says more"

    def _take(self, incoming: Incoming) -> None:
        self._heard_at_s = self._now()
        if incoming.bulk and self._second is not None:
            self._second.heard(self._heard_at_s)
        self._unheard.discard(incoming.bulk)
        if self._suspected and not self._unheard:
            self._suspected, self.state = False, "connected"
            self._planner.companion_back(self._heard_at_s)
        match incoming.message:
            case Reply() as reply:
                taken = self._waiting.take(reply, incoming)
                self._note_window()
                if taken and not self._waiting.unanswered:
                    self._probe()  # where it was a surprise: a stall, or another link?
            case Refused(request_id=request_id) as refused if request_id:
                key = self._waiting.refuse(refused)
                if refused.code == NO_CALIBRATION and key:
                    self._calibrate_again(refused, key)
            case ModelNeed() | ModelReady() | SegmentReady() | Refused() as answer:
                if self._openings is not None:
                    self._openings.take(answer)
            case Pong(nonce=nonce):
                if (ping := self._pings.pop(nonce, None)) is not None:
                    sent_at_s, padding, alone = ping
                    if alone:  # among requests it has waited behind their bytes, which is not the link's round trip
                        rtt_ms = (incoming.received_at_s - sent_at_s) * 1000
                        self._planner.observe_ping(rtt_ms, self._now(), padding_bytes=padding)
                    heavy = padding > 0  # those may travel on another connection; on one, answers keep their order
                    for older in [n for n, (_, size, _) in self._pings.items() if n < nonce and (size > 0) == heavy]:
                        del self._pings[older]  # that answer will not come
                self._note_window()
                self._changed.set()  # where it was a surprise, the next ping tells what it was
            case Pace(work_ms=work_ms, since_ms=since_ms):
                if not are_times(work_ms, since_ms) or work_ms <= 0.0:
                    raise RemoteProtocolError(f"a companion's work takes more than 0 ms, not {work_ms}, {since_ms}")
                self._planner.companion_paced(work_ms, since_ms / 1000.0, self._now())
            case Renewed() as renewed:
                self.on_renewed(renewed)
            case Goodbye(reason=reason):
                self._take_goodbye(reason)
            case other:
                raise RemoteProtocolError(f"a companion does not send {type(other).__name__}")

    def _calibrate_again(self, refused: Refused, key: bytes) -> None:
        """The companion cannot read codec klt of a model (it has put the calibration away, or never had this one): no
        request goes so until it has it again. One that was coded with a former calibration says nothing of the
        present one."""
        for model in self._models.values():
            calibration = model.sidecar.calibration
            if calibration is not None and calibration_key(calibration.digest) == key:
                self._planner.codec_not_ready(model.name, KLT, refused.message)
                if self._openings is not None:
                    self._openings.calibrate(model)

    def _take_goodbye(self, reason: str) -> None:
        """Nothing new goes there, whatever it still says; what was sent may still be answered."""
        self._leaving, self.state = True, f"goodbye: {reason}"
        self._planner.companion_lost(f"companion {self.address} says goodbye: {reason}")
        if self._openings is not None:
            self._openings.stop()

    # -- heartbeat ----------------------------------------------------------------------------------------------------

    def _ping(self, padding: int) -> None:
        if self._channel is None:
            return
        nonce = next(self._nonces)
        if padding > PING_BYTES:
            self._channel.look_afresh(self._planner.rtt_ms(self._now()))
        try:
            self._channel.send(Ping(nonce=nonce, padding=bytes(padding)), priority=Priority.CONTROL)
        except IsthmusError:  # gone, or full: the next tick asks again
            return
        self._pings[nonce] = (self._now(), padding, not self._waiting.unanswered)

    def _note_window(self) -> None:
        """Tell the planner what TCP may send at once where payloads travel."""
        connections = self._channel.observe().connections if self._channel is not None else ()
        if connections and (window := send_window(connections[-1], self._now())) is not None:
            self._planner.observe_window(window)

    def _probe(self) -> None:
        """Ping where the planner wants to know more of the link."""
        if (padding := self._planner.probe_wanted(self._now())) > 0:
            self._ping(padding)

    async def _watch(self) -> Opened | str:
        """The heartbeat, supervised: the connection ends with it, or nothing would notice a silent companion."""
        try:
            return await self._beat()
        except Exception:
            log.exception("companion=%s the heartbeat failed", self.address)
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
                        async with asyncio.timeout(TICK_S):
                            await self._changed.wait()
                self._changed.clear()
                now_s = self._now()
                silent = self._unanswered_s(now_s) > self._silence_s or self._is_second_silent(now_s)
                if self._leaving and (silent or not self._waiting.unanswered):
                    return self.state
                if successor is not None and successor.done():
                    opened, successor = successor.result(), None
                    return opened
                replace = silent or self._moved or self._is_open_and_stuck()
                if replace and successor is None:
                    self.suspect("is reached another way now" if self._moved else "does not answer in time")
                    self.on_silence()
                    successor = asyncio.create_task(self._dialler.open(), name="dial beside")
                elif not replace and successor is not None:
                    self._dialler.call_off(successor)
                    successor = None
                if self._second is not None and (self._waiting.unanswered or self._suspected):
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
        if self._second is None:
            return False
        return self._second.is_silent(self._heard_at_s, now_s, patience=self._silence_s / SILENCE_S)

    def _unanswered_s(self, now_s: float) -> float:
        """For how long nothing was heard although a ping is out; 0 without one."""
        if not self._pings:
            return 0.0
        oldest_s, _, _ = next(iter(self._pings.values()))
        return now_s - max(self._heard_at_s, oldest_s)
