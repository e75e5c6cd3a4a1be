"""The device's side of the channel: one connection to a companion, and the requests that wait on it.

It keeps a connection (`dialler.py` makes them, `heartbeat.py` says when one is over), has every model shared over it
(`openings.py`), sends requests and hands replies back (`waiting.py`). It never decides and never runs a model; what it
learns goes to the planner. A dead or silent companion fails nothing here: `serve` is told and finishes the waiting
requests on the device, and those that may be sent again are, when the next connection (to whichever companion) can
answer them before that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from agent.dialler import Dial, Dialler, Opened, Unreached
from agent.first_flight import FirstFlight, Opening
from agent.golden import Golden
from agent.heartbeat import SILENCE_S, Heartbeat
from agent.interfaces import source_towards
from agent.knocking import Knock
from agent.openings import Openings, are_times
from agent.planner import Planner
from agent.served_model import ServedModel
from agent.waiting import Asked, Waiting
from split.codec.klt import calibration_key
from split.errors import (
    ChannelError,
    ConnectionLost,
    IsthmusError,
    RemoteProtocolError,
)
from split.ids import KLT
from split.transport.channel import Buffer, Channel, Incoming, Observation
from split.transport.retry import Backoff
from split.wire.messages import (
    NO_CALIBRATION,
    RENEW_SINCE_MINOR,
    Goodbye,
    Infer,
    ModelNeed,
    ModelReady,
    Pace,
    Pong,
    Priority,
    Refused,
    Renew,
    Renewed,
    Reply,
    SegmentReady,
)

log = logging.getLogger(__name__)

SILENCE_MAX_S: Final = 20.0
"""What SILENCE_S doubles to while one connection after the other is replaced: then the link is slow, not dead."""
SETTLED_S: Final = 60.0
"""A connection that lived so long shows that SILENCE_S is enough."""


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
        self._heartbeat: Heartbeat | None = None
        """Of the connection there is."""
        self._openings: Openings | None = None
        self._models: dict[str, ServedModel] = {}
        self._waiting = Waiting(planner)
        self._silence_s = SILENCE_S
        self._source_towards = source_towards
        self._task: asyncio.Task[None] | None = None
        self.address = companions[0] if companions else ""
        self._state = "connecting" if companions else "no companion configured"
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
    def state(self) -> str:
        """How the connection is, or why there is none."""
        return self._heartbeat.state if self._heartbeat is not None else self._state

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
        if self._heartbeat is None or self._heartbeat.leaving:
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
        beat = self._heartbeat
        if channel is None or beat is None or beat.leaving or channel.peer_hello.minor < RENEW_SINCE_MINOR:
            return False
        try:
            channel.send(Renew(request=request))
        except IsthmusError:  # gone, or full: asked again later
            return False
        return True

    def suspect(self, why: str = "does not answer in time") -> None:
        """A reply is late: no new request goes there until something is heard again, over each connection."""
        if self._heartbeat is not None:
            self._heartbeat.suspect(why)

    def network_changed(self) -> None:
        """Interfaces, addresses or routes are others now: no back-off goes on, and where the way to the companion has
        become another one, another connection is made beside the one that there is."""
        self._dialler.hurry()
        if self._heartbeat is not None:
            self._heartbeat.network_changed()

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
            self._state = why
            self._planner.companion_lost(why)

    async def _live_with(self, opened: Opened) -> Opened | None:
        """Use this connection until it ends; the one that has taken its place, if any."""
        channel = self._channel = opened.channel
        self.address, self.connects = opened.address, self.connects + 1
        heartbeat = self._heartbeat = Heartbeat(
            opened,
            planner=self._planner,
            waiting=self._waiting,
            dialler=self._dialler,
            silence_s=self._silence_s,
            knock=self._knock,
            source_towards=lambda there: self._source_towards(there),
            on_silence=lambda: self.on_silence(),
        )
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
        heartbeat.begin()
        receiving = asyncio.create_task(self._receive(channel, heartbeat), name="receive")
        watching = asyncio.create_task(heartbeat.run(), name="heartbeat")
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
            heartbeat.close()
            self._channel = self._heartbeat = self._openings = None
            self._state = why
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

    async def _receive(self, channel: Channel, heartbeat: Heartbeat) -> str:
        """Take what comes until the connection ends; why it did."""
        try:
            while True:
                self._take(await channel.receive(), heartbeat)
        except ChannelError as error:
            return f"lost: {error}"
        except Exception:  # a bug of ours must not end remote use for ever
            log.exception("companion=%s the connection is given up", self.address)
            return "lost: an internal error, the daemon's log says more"

    def _take(self, incoming: Incoming, heartbeat: Heartbeat) -> None:
        heartbeat.heard(incoming)
        match incoming.message:
            case Reply() as reply:
                heartbeat.replied(usable=self._waiting.take(reply, incoming))
            case Refused(request_id=request_id) as refused if request_id:
                key = self._waiting.refuse(refused)
                if refused.code == NO_CALIBRATION and key:
                    self._calibrate_again(refused, key)
            case ModelNeed() | ModelReady() | SegmentReady() | Refused() as answer:
                if self._openings is not None:
                    self._openings.take(answer)
            case Pong(nonce=nonce, padding=padding):
                heartbeat.pong(nonce, incoming.received_at_s, len(padding))
            case Pace(work_ms=work_ms, since_ms=since_ms):
                if not are_times(work_ms, since_ms) or work_ms <= 0.0:
                    raise RemoteProtocolError(f"a companion's work takes more than 0 ms, not {work_ms}, {since_ms}")
                self._planner.companion_paced(work_ms, since_ms / 1000.0, self._now())
            case Renewed() as renewed:
                self.on_renewed(renewed)
            case Goodbye(reason=reason):
                heartbeat.goodbye(reason)
                if self._openings is not None:
                    self._openings.stop()
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
                    self._openings.calibrate_again(model)
