"""The companion as the planner sees it, one at a time: the links to it, whether it answers, its queue, what is under
way to it, and what may still cross. What it can do for a model is that model's (`known_model.py`).

No I/O, no clock (`now_s` is passed in, monotonic seconds), one thread (the event loop's).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from agent.known_model import KnownModel
from split.plan.estimate import CloudQueue
from split.plan.link import Link
from split.plan.links import Links
from split.plan.objective import NO_BACKLOG, Backlog
from split.plan.observation import LinkEstimate, Metered, RemoteView
from split.plan.plan import Decision, Placement
from split.plan.power import Power, PowerModel
from split.plan.predict import REQUEST_METADATA_BYTES
from split.plan.probing import PROBE_BYTES, Probing
from split.plan.slow_start import SendWindow
from split.plan.underway import Underway

ANOTHER_RATIO: Final = 1.5
ANOTHER_MS: Final = 1.5
"""A round trip, or what the heaviest probe takes, that one ping moved by so much: the link is another one, or was not
known. What both times is shorter than that is jitter."""


class CompanionView:
    """The arguments are the planner's."""

    def __init__(
        self, *, probe_bytes_per_hour: int, probe_joules_per_hour: float, metered: Callable[[], Metered | None]
    ) -> None:
        self.metered = metered
        self.ahead_bytes: Callable[[], int] = lambda: 0
        self._probing = Probing(probe_bytes_per_hour)
        self._probe_joules_per_hour = probe_joules_per_hour
        self._heard_at_s = -math.inf
        self._link = Links()
        self._queue = CloudQueue()
        self._underway = Underway()
        self._lost = "no companion is connected yet"
        """Why there is no connection that takes requests; "" while there is one."""
        self._silent = ""
        """Why nothing is sent on it for the moment; "" otherwise."""
        self._back_at_s = -math.inf
        """When the last silence ended."""
        self._late: list[tuple[int, int, float, float]] = []
        """Requests that were given up in a silence, as `observe_late`."""
        self._before_late: Link | None = None
        """The link before requests were given up, while nothing was heard since."""
        self._excused = False
        """A silence has explained such already, and nothing has crossed the link since."""
        self._payload_bytes_max = math.inf
        self.pace = 1.0
        """How much longer it takes now than when it said so first, on this connection: another may lead to a companion
        that was started anew, whose piece of work is another one."""
        self._first_work_ms = 0.0

    # -- the connection -----------------------------------------------------------------------------------------------

    def connected(self, *, max_message_bytes: int, ahead_bytes: Callable[[], int], way: str) -> bool:
        """As `Planner.connected`; whether it is another way than before."""
        self._heard_again()
        if another_way := self._link.use(way):
            self._queue = CloudQueue()
        self.pace, self._first_work_ms = 1.0, 0.0
        self._lost = self._silent = ""
        self.ahead_bytes = ahead_bytes
        self._payload_bytes_max = max_message_bytes - REQUEST_METADATA_BYTES
        self._probing.connected()
        return another_way

    def lost(self, why: str) -> None:
        """As `Planner.companion_lost`."""
        self._lost, self._silent = why or "the companion is gone", ""

    def silent(self, why: str) -> None:
        """As `Planner.companion_silent`."""
        self._silent = why or "the companion is silent"

    def back(self, now_s: float) -> None:
        """As `Planner.companion_back`."""
        self._heard_again()
        self._silent, self._back_at_s = "", now_s
        self._probing.connected()

    @property
    def remote_reason(self) -> str:
        """Why no request may be sent now, whatever its model; "" when it may."""
        return self._lost or self._silent

    def paced(self, work_ms: float) -> float:
        """The pace, now that it says so."""
        self._first_work_ms = self._first_work_ms or work_ms
        self.pace = work_ms / self._first_work_ms
        return self.pace

    # -- requests under way -------------------------------------------------------------------------------------------

    def decided(self, now_s: float) -> None:
        """Somebody wanted to know about the link."""
        self._probing.decided(now_s)

    def began(self, request_id: str, decision: Decision, *, now_s: float) -> None:
        """As `Planner.began`."""
        chosen = decision.chosen
        if chosen.plan.placement is Placement.LOCAL:
            return
        self._underway.began(
            request_id,
            link_ms=chosen.bytes * 0.008 / decision.link["up_mbit_s"],
            companion_ms=chosen.stages_ms["cloud_decode"] + chosen.stages_ms["tail"],
            now_s=now_s,
        )

    def done(self, request_id: str) -> None:
        """It is answered or given up; unknown ids are ignored."""
        self._underway.done(request_id)

    def backlog(self, remote: RemoteView, edge_queue_ms: float, now_s: float) -> Backlog:
        """What waits before a new request on the device, the link and the companion."""
        if edge_queue_ms == 0.0 and not remote.ahead_bytes and self._underway.idle:
            return NO_BACKLOG
        ahead_ms = remote.ahead_bytes * remote.link.up_ms_per_byte
        return Backlog(
            device_ms=edge_queue_ms,
            link_ms=max(self._underway.link_ms(now_s), ahead_ms),
            companion_ms=self._underway.companion_ms(now_s),
        )

    # -- for a decision -----------------------------------------------------------------------------------------------

    def why_not(self, model: KnownModel, metered: Metered | None) -> str:
        """Why this model runs here only at this moment, the most lasting reason first; "" when it may be shared.
        `metered`: as it is now, which takes a while to ask."""
        if why := model.there.barred or (metered.used_up if metered is not None else "") or self.remote_reason:
            return why
        return model.there.awaited

    def metered_why_not(self, crossing_bytes: float) -> str:
        """As `Planner.metered_why_not`."""
        metered = self.metered()
        if metered is None or crossing_bytes <= metered.left_bytes:
            return ""
        return metered.used_up or (
            f"it would move {crossing_bytes:.0f} bytes, of this month's metered bytes {metered.left_bytes:.0f} are left"
        )

    def remote(self, model: KnownModel, metered: Metered | None, now_s: float) -> RemoteView:
        """What a remote plan of this model meets if it is sent now; `metered` as for `why_not`."""
        costs, there = model.costs, model.there
        beta = costs.cloud.ratio
        queue_ms, queue_sigma_ms = self._queue.at(now_s)
        return RemoteView(
            link=self._link.estimate(now_s),
            beta=beta,
            beta_sigma=costs.cloud.sigma,
            speed_ratio=costs.speed_ratio,
            image_ms=costs.cloud_image_ms * beta * costs.cloud_image.ratio,
            queue_ms=queue_ms,
            queue_sigma_ms=queue_sigma_ms,
            opened=there.opened,
            encoded_why_not=there.encoded_why_not,
            codecs_why_not=there.codecs_why_not,
            payload_bytes_max=self._payload_bytes_max,
            metered_left_bytes=math.inf if metered is None else metered.left_bytes,
            ahead_bytes=self.ahead_bytes(),
            rest_ms=costs.requests.there_ms,
        )

    # -- learning -----------------------------------------------------------------------------------------------------

    def observe_ping(self, rtt_ms: float, now_s: float, *, padding_bytes: int, pong_bytes: int) -> None:
        """As `Planner.observe_ping`."""
        if now_s - rtt_ms / 1000.0 < self._back_at_s:
            return
        self._before_late = None
        before = self.link(now_s)
        self._observe_link(padding_bytes, pong_bytes, rtt_ms, now_s)
        if _is_another(before, self.link(now_s)):
            self._probing.changed()

    def observe_transfer(
        self, up_bytes: int, down_bytes: int, network_ms: float, now_s: float, *, up_bytes_max: int
    ) -> None:
        """As `Planner.observe_transfer`."""
        if up_bytes_max > up_bytes:
            found = self._link.sent_estimate(network_ms, now_s)
            over_ms = network_ms - found.transfer_ms(up_bytes, down_bytes)
            may_be_bytes = min(max(over_ms / found.up_ms_per_byte, 0.0), up_bytes_max - up_bytes)
            up_bytes += round(may_be_bytes)
        self._observe_link(up_bytes, down_bytes, network_ms, now_s)
        self._probing.moved(up_bytes + down_bytes, now_s)
        self._heard_at_s, self._excused, self._before_late = now_s, False, None

    def observe_window(self, window: SendWindow | None) -> None:
        """As `Planner.observe_window`."""
        self._link.windowed(window)

    def observe_late(self, up_bytes: int, down_bytes: int, network_ms: float, now_s: float) -> None:
        """As `Planner.observe_late`."""
        if self.remote_reason:
            self._late.append((up_bytes, down_bytes, network_ms, now_s))
        else:
            if self._before_late is None:
                self._before_late = self._link.remembered()
            self._learn_late(up_bytes, down_bytes, network_ms, now_s)

    def _heard_again(self) -> None:
        """What was given up in the silence, or before it was known for one, is forgiven, or believed."""
        late, self._late = self._late, []
        before, self._before_late = self._before_late, None
        if self._excused:
            for one in late:
                self._learn_late(*one)
        elif before is not None and self.remote_reason:
            self._link.restore(before)
        self._excused = self._excused or bool(late) or before is not None

    def _learn_late(self, up_bytes: int, down_bytes: int, network_ms: float, now_s: float) -> None:
        if network_ms > self._link.sent_estimate(network_ms, now_s).transfer_ms(up_bytes, down_bytes):
            self._observe_link(up_bytes, down_bytes, network_ms, now_s, at_least=True)

    @property
    def heard_at_s(self) -> float:
        """When the last reply came that was observed."""
        return self._heard_at_s

    def observe_queue(self, queue_ms: float) -> None:
        """The reply that was observed as a transfer just before had waited so long at the companion."""
        self._queue.observe(queue_ms, self._heard_at_s)

    def _observe_link(
        self, up_bytes: int, down_bytes: int, network_ms: float, now_s: float, *, at_least: bool = False
    ) -> None:
        self._link.observe(up_bytes, down_bytes, network_ms, now_s, at_least=at_least)
        self._probing.carried(up_bytes, down_bytes, now_s)

    def probe_wanted(self, power: PowerModel, now_s: float) -> int:
        """As `Planner.probe_wanted`, where there is a model to decide for."""
        link = self.link(now_s)
        if not self._may_probe(power, link):
            return 0
        return self._probing.wanted(link, surprised=self._link.surprised, now_s=now_s)

    def looks_again_s(self, now_s: float) -> float:
        """As `Planner.looks_again_s`."""
        return self._probing.again_s(self.link(now_s), surprised=self._link.surprised, now_s=now_s)

    def pong_wanted(self, power: PowerModel, now_s: float) -> int:
        """As `Planner.pong_wanted`, where a model stays here for its reply."""
        link = self.link(now_s)
        if not self._may_probe(power, link):
            return 0
        return self._probing.pong_wanted(link, surprised=self._link.surprised, now_s=now_s)

    def _may_probe(self, power: PowerModel, link: LinkEstimate) -> bool:
        """Whether a probe may cost anything now; how much, the probing is told."""
        metered = self.metered()
        if self.remote_reason or (metered is not None and not metered.may_probe):
            return False
        by_meter = math.inf if metered is None else metered.probe_bytes_per_hour
        draws = at_rates(power, link, 0)
        up_j, down_j = draws.send_w * link.up_ms_per_byte / 1000.0, draws.receive_w * link.down_ms_per_byte / 1000.0
        by_joules = self._probe_joules_per_hour / up_j if up_j > 0.0 else math.inf
        dearer = down_j / up_j if by_joules < by_meter else 1.0
        self._probing.spend_at_most(min(by_meter, by_joules), down_byte_costs=max(dearer, 1.0))
        return True

    # -- status -------------------------------------------------------------------------------------------------------

    def link(self, now_s: float) -> LinkEstimate:
        """As estimated for what is sent now."""
        return self._link.estimate(now_s)

    def queue_ms(self, now_s: float) -> float:
        """Expected waiting time at the companion."""
        return self._queue.at(now_s)[0]

    def link_mapping(self, now_s: float) -> Mapping[str, float]:
        """For `isthmus status`: the estimate; empty where nothing was ever observed on the link in use."""
        return dict(self.link(now_s).as_mapping()) if self._link.observations else {}


def _is_another(before: LinkEstimate, after: LinkEstimate) -> bool:
    """Whether what was believed of a link has become so different that all of it is worth a look."""
    parts_ms = (before.rtt_ms, after.rtt_ms), (PROBE_BYTES * before.up_ms_per_byte, PROBE_BYTES * after.up_ms_per_byte)
    return before.age_s < math.inf and any(max(both) > max(ANOTHER_RATIO * min(both), ANOTHER_MS) for both in parts_ms)


def at_rates(power: PowerModel, link: LinkEstimate | None, threads: int) -> Power:
    """What the device draws on so many threads while bytes cross at the estimated rates; without a link none do."""
    if link is None:
        return power.at(0.0, 0.0, threads=threads)
    return power.at(0.008 / link.up_ms_per_byte, 0.008 / link.down_ms_per_byte, threads=threads)
