"""What the daemon knows for deciding: per model its plans and drifts, the link, the companion. It learns from what
`serve` and `uplink` measured and answers with decisions.

No I/O, no clock (`now_s` is passed in, monotonic seconds), one thread (the event loop's). It decides and remembers;
it never sends, runs or opens anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from split.errors import UnknownModel
from split.graph.card import ModelCard
from split.ids import CutId
from split.plan.decide import decide
from split.plan.estimate import CloudQueue, Drift, Residual
from split.plan.exploring import Explorer
from split.plan.links import Links
from split.plan.objective import FREE, NO_BACKLOG, Backlog, Prices
from split.plan.observation import Flags, Floats, LinkEstimate, Metered, Observation, Opening, RemoteView
from split.plan.plan import LOCAL, Decision, Placement, Plan, RequestFacts
from split.plan.power import NO_POWER_MODEL, Power, PowerModel
from split.plan.probing import Probing
from split.plan.scaling import Ratio
from split.plan.score import REQUEST_METADATA_BYTES
from split.plan.slow_start import SendWindow
from split.plan.table import LOCAL_ROW, Column, PlanTable
from split.plan.underway import Underway
from split.profiles.contract import Contract
from split.profiles.measured import ModelProfile

WORTH_A_TABLE: Final = 0.01
"""A residual that moved a cost by less is not worth a new table (30 µs): measurements scatter by five times as much."""

FAR: Final = 100.0
"""A request that is expected to take so many times more or less than the profiled one teaches nothing about that: an
error of the prediction would be taken for one of the device, for all sizes."""

CLOCK_CHANGE: Final = 0.05
"""A clock that changed by less (relative) shows no more than runs scatter."""
CLOCK_SIGMA: Final = 0.5
"""How well a change of the clock tells the change of speed, relative: memory keeps its own."""

RECENT_CUTS: Final = 2
"""To be kept open: the one in use, and the one before it, to which a link that changes to and fro leads back."""

OpeningMs = Mapping[CutId | Placement, tuple[float, float]]
"""Cut, local or offload → ms to open what runs first on the device, and what finishes there; what is not in it is
open. Another object whenever something has changed."""
_ALL_OPEN: Final[OpeningMs] = {}


class Known(NamedTuple):
    """What is known of one model at this moment, for a record of what happened."""

    table: PlanTable
    """As profiled."""
    cloud_ms: Floats
    """Per plan, the companion's compute as it said itself; before it did, this device's."""
    alpha: float
    """Drift of the device's compute; of its codecs and pictures not."""
    beta: float
    """Drift of the companion's."""
    speed_ratio: float
    """Companion / device on the same work."""
    image_ms: float
    """Preparing an encoded input on the device, and at the companion."""
    cloud_image_ms: float
    cloud_queue_ms: float


@dataclass(slots=True, kw_only=True)
class _Model:
    """One model as the planner knows it."""

    profile: ModelProfile
    measured: PlanTable
    """As profiled."""
    table: PlanTable
    """As known now: residuals of the heads, the companion's own times for the tails."""
    groups: dict[CutId | Placement, Flags]
    """Rows that share a segment: all codecs of one cut, of offload."""
    cloud_ms: Floats
    """Per plan, the companion's compute as it said itself (or by its speed), before residuals."""
    opened: Flags
    edge: Drift = field(default_factory=Drift)
    image: Drift = field(default_factory=lambda: Drift(prior_sigma=0.5))
    codec: Drift = field(default_factory=lambda: Drift(prior_sigma=0.3))
    cloud: Drift = field(default_factory=lambda: Drift(prior_sigma=0.2))
    head_residuals: dict[CutId | Placement, Residual] = field(default_factory=dict)
    tail_residuals: dict[CutId | Placement, Residual] = field(default_factory=dict)
    reply: Drift = field(default_factory=lambda: Drift(prior_sigma=0.5))
    """Of decoding replies here."""
    cloud_image: Drift = field(default_factory=lambda: Drift(prior_sigma=0.5))
    """Of decoding pictures there."""
    ready: bool = False
    not_ready: str = ""
    """Why it is not ready yet, where that is known."""
    speed_ratio: float = 1.0
    cloud_image_ms: float = 0.0
    forbidden: str = ""
    encoded_why_not: str = ""
    cuts_not_open: dict[CutId, str] = field(default_factory=dict)
    """Cuts that the companion does not hold open, and why."""
    incumbent: int = LOCAL_ROW
    """Before the first choice, remote plans must beat local as if it had been chosen."""
    decisions: int = 0
    recent_cuts: tuple[CutId, ...] = ()
    opening_ms: Callable[[], OpeningMs]
    explorer: Explorer | None
    """None for class gold, whose requests try nothing out."""
    _opening_known: OpeningMs | None = None
    _opening: Opening | None = None

    def opening(self) -> Opening | None:
        """What is to be opened now, per plan; worked out when something has opened or closed."""
        known = self.opening_ms()
        if known is not self._opening_known:
            both = np.array([known.get(_segment(plan), (0.0, 0.0)) for plan in self.table.plans])
            self._opening = Opening(run_ms=both[:, 0], finish_ms=both[:, 1]) if both.any() else None
            self._opening_known = known
        return self._opening

    def decided(self, decision: Decision) -> None:
        self.decisions += 1
        for cut in (decision.chosen.plan.cut, decision.worth_opening):
            if cut is not None and self.recent_cuts[:1] != (cut,):
                self.recent_cuts = (cut, *(other for other in self.recent_cuts if other != cut))[:RECENT_CUTS]


class Planner:
    """All models of one daemon and one companion at a time.

    `slowdown`: `emulation.slowdown`, what the worker stretches every device stage by.
    `probe_bytes_per_hour`, `probe_joules_per_hour`: what probes and pings may cost while nothing else informs about
    the link.
    `metered`: asked at each decision, what may still cross the link this month; None where nothing is metered.
    `prices`: what bytes on the link and the companion's time cost.
    `power`, `battery_low`: asked at each decision, what the device draws, and whether its battery is nearly empty.
    """

    def __init__(
        self,
        *,
        slowdown: float = 1.0,
        probe_bytes_per_hour: int = 2_000_000,
        probe_joules_per_hour: float = math.inf,
        metered: Callable[[], Metered | None] = lambda: None,
        prices: Prices = FREE,
        power: Callable[[], PowerModel] = lambda: NO_POWER_MODEL,
        battery_low: Callable[[], bool] = lambda: False,
    ) -> None:
        self._metered = metered
        self._prices = prices
        self._power_model = power
        self._battery_low = battery_low
        self._slowdown = slowdown
        self._probing = Probing(probe_bytes_per_hour)
        self._probe_joules_per_hour = probe_joules_per_hour
        self._heard_at_s = -math.inf
        self._clock: tuple[bool | None, float | None] = (None, None)
        """Whether the device is throttled, and what its clock may rise to / its highest."""
        self._models: dict[str, _Model] = {}
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
        """Requests that were given up meanwhile, as `observe_late`."""
        self._excused = False
        """A silence has explained such already, and nothing has crossed the link since."""
        self._payload_bytes_max = math.inf
        self._ahead_bytes: Callable[[], int] = lambda: 0

    # -- models -------------------------------------------------------------------------------------------------------

    def add_model(
        self,
        name: str,
        card: ModelCard,
        profile: ModelProfile,
        contract: Contract,
        opening_ms: Callable[[], OpeningMs] = lambda: _ALL_OPEN,
    ) -> None:
        """Know this model from now on (again: from scratch, the companion must be ready anew).

        `opening_ms`: asked at each decision, what is not open here and what opening it takes.
        """
        table = PlanTable.build(card, profile, contract)
        groups: dict[CutId | Placement, list[bool]] = {}
        for key in {_segment(plan) for plan in table.plans}:
            groups[key] = [_segment(plan) == key for plan in table.plans]
        self._models[name] = _Model(
            profile=profile,
            opening_ms=opening_ms,
            measured=table,
            table=table,
            groups={key: np.array(rows) for key, rows in groups.items()},
            cloud_ms=table.costs[Column.TAIL],
            opened=_only_local(table),
            explorer=Explorer(~_only_local(table)) if contract.behaviour.service_class != "gold" else None,
        )

    def recent_cuts(self, name: str) -> tuple[int, Sequence[CutId]]:
        """How often was decided so far, and the cuts that were chosen or worth opening lately, the last one first.
        UnknownModel without `add_model`."""
        model = self._model(name)
        return model.decisions, model.recent_cuts

    def remove_model(self, name: str) -> None:
        """Forget it; unknown names are ignored."""
        self._models.pop(name, None)

    # -- decisions ----------------------------------------------------------------------------------------------------

    def decide(self, name: str, facts: RequestFacts, *, edge_queue_ms: float, now_s: float) -> Decision:
        """Choose the plan of one request. UnknownModel without `add_model`; InvalidRequest for a forced plan that may
        never run."""
        model = self._model(name)
        observation = self._observation(model, edge_queue_ms, now_s)
        decision = decide(model.table, observation, facts, self._explorer(model, observation))
        if facts.mode is None and facts.cut is None and facts.codec is None and not decision.tried:
            model.incumbent = model.table.row_of[decision.chosen.plan]
            model.decided(decision)
        self._probing.decided(now_s)
        return decision

    def began(self, request_id: str, decision: Decision, *, now_s: float) -> None:
        """A request is carried out as decided; until `done` its work on link and companion counts as backlog."""
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

    def finish_ms(self, name: str, cut: CutId | None, facts: RequestFacts) -> float:
        """Expected device time of what is missing of a request, the tail of `cut` or (None) the whole; drift and
        slowdown in, queue and picture not."""
        model = self._model(name)
        rows = model.groups.get(cut) if cut is not None else None
        if rows is None:
            base = model.table.at(facts.sizes).whole_ms
        else:
            base = float(model.measured.at(facts.sizes).costs[Column.TAIL, int(rows.argmax())])
        return base * model.edge.ratio * self._slowdown

    def as_profiled_ms(
        self, name: str, facts: RequestFacts, plan: Plan, stage: str, measured_ms: float
    ) -> float | None:
        """What a stage that took `measured_ms` for this request would have taken at the profiled sizes: what is learned
        (`observe_edge`, `observe_cloud`) holds for those. None where the request's sizes are too far from them to tell.
        `stage`: one of `observe_edge`, or tail for the companion's.
        """
        model = self._model(name)
        ratios = model.table.scaling.at(facts.sizes)
        if ratios is None or stage == "image" or plan not in model.table.row_of:
            return measured_ms
        row = {"encode": Ratio.UP, "tail": Ratio.TAIL, "local_tail": Ratio.TAIL}.get(stage, Ratio.HEAD)
        ratio = float(ratios[row, model.table.row_of[plan]])
        return measured_ms / ratio if 1.0 / FAR <= ratio <= FAR else None

    def image_ms(self, name: str) -> float:
        """Expected device time to prepare an encoded input; drift and slowdown in."""
        model = self._model(name)
        return model.profile.image_ms * model.image.ratio * self._slowdown

    def prepare_ms(self, name: str, plan: Plan, facts: RequestFacts) -> float:
        """Expected device time before a request's bytes leave: head and encoding; drift and slowdown in, queue not."""
        model = self._model(name)
        row = model.table.row_of[plan]
        head_ms, encode_ms = model.table.at(facts.sizes).costs[[Column.HEAD, Column.ENCODE], row].tolist()
        return float(head_ms * model.edge.ratio + encode_ms * model.codec.ratio) * self._slowdown

    def reply_bytes(self, name: str, plan: Plan, facts: RequestFacts) -> int:
        """What the companion's reply to this plan will weigh; 0 where the model's plans are others by now."""
        table = self._model(name).table
        row = table.row_of.get(plan)
        return 0 if row is None else round(float(table.at(facts.sizes).costs[Column.DOWN, row]))

    def local_only_reason(self, name: str) -> str:
        """Why this model runs on the device only at this moment; "" when the companion may be used."""
        return self._why_local(self._model(name))

    @property
    def battery_low(self) -> bool:
        """Whether no energy is to be spent on being faster."""
        return self._battery_low()

    # -- the companion ------------------------------------------------------------------------------------------------

    def connected(self, *, max_message_bytes: int, ahead_bytes: Callable[[], int] = lambda: 0, way: str = "") -> None:
        """A new connection, to a companion that takes messages of this size: it must make every model ready anew.

        `ahead_bytes`: asked at each decision, what other requests have still to send before a new one's turn.
        `way`: what tells this link from others (both ends' addresses); what was learned there stays, as uncertain as
        it has become. Its rate is worth a look.
        """
        self._heard_again()
        if self._link.use(way):
            self._queue = CloudQueue()
        self._lost = self._silent = ""
        self._ahead_bytes = ahead_bytes
        self._payload_bytes_max = max_message_bytes - REQUEST_METADATA_BYTES
        self._probing.connected()
        for model in self._models.values():
            self._not_ready(model)

    def companion_lost(self, why: str) -> None:
        """The connection is gone, or takes no new request (a sentence says why): local plans only until the next."""
        self._lost, self._silent = why or "the companion is gone", ""

    def companion_silent(self, why: str) -> None:
        """Nothing is heard on the connection (a sentence says why): local plans only, what is ready stays so."""
        self._silent = why or "the companion is silent"

    def companion_back(self, now_s: float) -> None:
        """The silent connection speaks again: its rate is worth a look."""
        self._heard_again()
        self._back_at_s = now_s
        self._silent = ""
        self._probing.connected()

    def companion_ready(self, name: str, whole_ms: float, image_ms: float) -> None:
        """The companion runs this model, compared and found equal: offload may be used; an earlier ban is lifted."""
        model = self._model(name)
        self._not_ready(model)
        speed = whole_ms / model.profile.whole_ms if whole_ms > 0.0 and model.profile.whole_ms > 0.0 else 1.0
        model.ready, model.speed_ratio = True, speed
        model.cloud_image_ms = image_ms if image_ms > 0.0 else model.profile.image_ms * speed
        model.cloud_ms = model.measured.costs[Column.TAIL] * speed
        model.cloud, model.cloud_image = Drift(prior_sigma=0.2), Drift(prior_sigma=0.5)
        model.tail_residuals.clear()
        if (rows := model.groups.get(Placement.OFFLOAD)) is not None:
            model.opened = model.opened | rows
        model.table = model.table.with_compute(tail_ms=model.cloud_ms)

    def companion_not_ready(self, name: str, why: str) -> None:
        """This model could not be made ready so far (a sentence says why). Unknown names are ignored."""
        if (model := self._models.get(name)) is not None:
            model.not_ready = why

    def segment_ready(self, name: str, cut: CutId, tail_ms: float) -> None:
        """The companion holds this cut's tail open, compared and found equal: its splits may be used."""
        model = self._model(name)
        model.cuts_not_open.pop(cut, None)
        if (rows := model.groups.get(cut)) is None:
            return  # a cut of the card that was never measured here: no plan uses it
        model.opened = model.opened | rows
        if tail_ms > 0.0:
            model.cloud_ms = np.where(rows, tail_ms, model.cloud_ms)
            model.table = model.table.with_compute(tail_ms=np.where(rows, tail_ms, model.table.costs[Column.TAIL]))

    def segment_not_ready(self, name: str, cut: CutId, why: str) -> None:
        """This cut is not open there (a sentence says why), the model's others may be. Unknown names are ignored."""
        if (model := self._models.get(name)) is not None:
            model.cuts_not_open[cut] = why

    def forbid_remote(self, name: str, why: str | None) -> None:
        """This model may not be shared with the companion, or (None) may again. Unknown names are ignored."""
        if (model := self._models.get(name)) is not None:
            model.forbidden = why or ""

    def forbid_encoded(self, name: str, why: str | None) -> None:
        """Encoded inputs of this model may not travel to this companion, or (None) may again; as above."""
        if (model := self._models.get(name)) is not None:
            model.encoded_why_not = why or ""

    # -- learning -----------------------------------------------------------------------------------------------------

    def observe_ping(self, rtt_ms: float, now_s: float, *, padding_bytes: int = 0) -> None:
        """A ping came back; `padding_bytes`: the weight that it carried up. One that was out during a silence says how
        long that was, not what the link is like."""
        if now_s - rtt_ms / 1000.0 < self._back_at_s:
            return
        self._observe_link(padding_bytes, 0, rtt_ms, now_s)

    def observe_transfer(
        self, up_bytes: int, down_bytes: int, network_ms: float, now_s: float, *, up_bytes_max: int = 0
    ) -> None:
        """A request and its reply crossed the link; `network_ms` is without the companion's own time.

        `up_bytes`: its payload and what is known to have been before it; `up_bytes_max`: what may have been, where
        others were under way. What any number in between explains teaches nothing.
        """
        if up_bytes_max > up_bytes:
            found = self._link.sent_estimate(network_ms, now_s)
            over_ms = network_ms - found.transfer_ms(up_bytes, down_bytes)
            may_be_bytes = min(max(over_ms / found.up_ms_per_byte, 0.0), up_bytes_max - up_bytes)
            up_bytes += round(may_be_bytes)
        self._observe_link(up_bytes, down_bytes, network_ms, now_s)
        self._heard_at_s = now_s
        self._excused = False

    def observe_window(self, window: SendWindow | None) -> None:
        """What the kernel says of TCP's window where payloads travel; None: nothing."""
        self._link.windowed(window)

    def observe_late(self, up_bytes: int, down_bytes: int, network_ms: float, now_s: float) -> None:
        """A request was given up: the link took at least `network_ms` for it and the reply that was to come, what the
        companion was expected to need taken off. Without it a link that became too slow to answer in time would never
        teach anything; without the reply's bytes, what they take would be put down to the round trip.

        While nothing at all is heard it is no slow link that kept it, but one that is away. When it is back it is taken
        for what it was, the first time: after two silences in a row without a reply between them, it was the link."""
        if self._silent or self._lost:
            self._late.append((up_bytes, down_bytes, network_ms, now_s))
            return
        self._learn_late(up_bytes, down_bytes, network_ms, now_s)

    def _learn_late(self, up_bytes: int, down_bytes: int, network_ms: float, now_s: float) -> None:
        if network_ms > self._link.sent_estimate(network_ms, now_s).transfer_ms(up_bytes, down_bytes):
            self._observe_link(up_bytes, down_bytes, network_ms, now_s)

    def observe_reply(
        self, digest: str, codec: str, *, down_bytes: int, decode_ms: float, cloud_decode_ms: float
    ) -> None:
        """A reply of `down_bytes` was decoded here in `decode_ms` (slowdown not in), its request's payload over there
        in `cloud_decode_ms`: with codec `encoded` that was the picture."""
        for model in self._models.values():
            if model.profile.digest != digest:
                continue
            model.reply.observe(decode_ms, model.table.reply_ms_per_byte * down_bytes)
            if codec == "encoded":
                model.cloud_image.observe(cloud_decode_ms, model.cloud_image_ms)

    def observe_cloud(self, name: str, plan: Plan, queue_ms: float | None, tail_ms: float | None) -> None:
        """A reply told how long this plan's rest waited (None: for earlier parts of its own request) and computed at
        the companion (None: at sizes that tell nothing); it was observed as a transfer just before, which says when."""
        if queue_ms is not None:
            self._queue.observe(queue_ms, self._heard_at_s)
        model = self._models.get(name)
        if tail_ms is None or model is None or plan not in model.table.row_of or plan.placement is Placement.LOCAL:
            return
        row, key = model.table.row_of[plan], _segment(plan)
        known_ms = model.table.costs[Column.TAIL]
        model.cloud.observe(tail_ms, float(known_ms[row]))
        residual = model.tail_residuals.setdefault(key, Residual())
        residual.observe(tail_ms, float(model.cloud_ms[row]) * model.cloud.ratio)
        now_ms = float(model.cloud_ms[row]) * residual.ratio
        if abs(now_ms - float(known_ms[row])) > WORTH_A_TABLE * now_ms:
            better_ms = np.where(model.groups[key], model.cloud_ms * residual.ratio, known_ms)
            model.table = model.table.with_compute(tail_ms=better_ms)

    def observe_edge(self, name: str, plan: Plan, stage: str, measured_ms: float) -> None:
        """A device stage took `measured_ms` (slowdown in).

        `stage`: head, whole (plan LOCAL), local_tail (the finish of a split on the device), image, encode.
        """
        model = self._models.get(name)
        if model is None or plan not in model.table.row_of:
            return
        row, key = model.table.row_of[plan], _segment(plan)
        match stage:
            case "head" | "whole":
                known_ms, profiled_ms = model.table.costs[Column.HEAD], model.measured.costs[Column.HEAD]
                model.edge.observe(measured_ms, float(known_ms[row]) * self._slowdown)
                estimated = bool(model.measured.doubt[row] > 1.0)
                residual = model.head_residuals.setdefault(key, Residual(estimated=estimated))
                residual.observe(measured_ms, float(profiled_ms[row]) * model.edge.ratio * self._slowdown)
                now_ms = float(profiled_ms[row]) * residual.ratio
                proven = residual.proven and model.table.doubt[row] > 1.0
                if proven or abs(now_ms - float(known_ms[row])) > WORTH_A_TABLE * now_ms:
                    better_ms = np.where(model.groups[key], profiled_ms * residual.ratio, known_ms)
                    model.table = model.table.with_compute(
                        head_ms=better_ms, proven=model.groups[key] if proven else None
                    )
            case "local_tail":
                model.edge.observe(measured_ms, float(model.measured.costs[Column.TAIL, row]) * self._slowdown)
            case "image":
                model.image.observe(measured_ms, model.profile.image_ms * self._slowdown)
            case "encode":
                model.codec.observe(measured_ms, float(model.table.costs[Column.ENCODE, row]) * self._slowdown)
            case _:
                raise AssertionError(f"stage {stage!r} is no device stage that is learned")

    def observe_sensors(self, *, throttled: bool | None, frequency_ratio: float | None) -> None:
        """What the device's sensors say now, as `Sensors` has it. None: not known here.

        A throttle that begins or ends, or another clock, means that the device's speed is another one: the next two
        runs teach it. (The temperature says nothing by itself: what is hot and not throttled runs as before.)
        """
        was_throttled, was_ratio = self._clock
        self._clock = (throttled, frequency_ratio)
        factor = 1.0
        if frequency_ratio and was_ratio:
            factor = was_ratio / frequency_ratio
        flipped = throttled is not None and was_throttled is not None and throttled != was_throttled
        if flipped or abs(math.log(factor)) > CLOCK_CHANGE:
            for model in self._models.values():
                model.edge.unsettle(CLOCK_SIGMA, factor=factor)

    def observe_total(self, name: str, plan: Plan, measured_ms: float, predicted_ms: float) -> None:
        """A request that ran as this plan took so long in all."""
        model = self._models.get(name)
        if model is not None and model.explorer is not None and plan in model.table.row_of:
            model.explorer.observe(model.table.row_of[plan], measured_ms, predicted_ms)

    def probe_wanted(self, now_s: float) -> int:
        """Bytes of padding of a ping that would be worth its cost now; 0: none. What is returned counts as sent."""
        metered = self._metered()
        if not self._models or self._lost or self._silent or (metered is not None and not metered.may_probe):
            return 0
        link = self._link.estimate(now_s)
        by_meter = math.inf if metered is None else metered.probe_bytes_per_hour
        joules_per_byte = _at_rates(self._power_model(), link, 0).send_w * link.up_ms_per_byte / 1000.0
        by_joules = self._probe_joules_per_hour / joules_per_byte if joules_per_byte > 0.0 else math.inf
        self._probing.spend_at_most(min(by_meter, by_joules))
        return self._probing.wanted(link, surprised=self._link.surprised, now_s=now_s)

    def power(self, now_s: float, name: str | None = None) -> Power:
        """What the device draws above idle while this model runs (None or unknown: on all threads), at the link's
        rates as estimated now."""
        model = self._models.get(name) if name is not None else None
        threads = 0 if model is None else model.profile.threads
        return _at_rates(self._power_model(), self._link.estimate(now_s), threads)

    # -- status -------------------------------------------------------------------------------------------------------

    def snapshot(self, now_s: float) -> dict[str, Any]:
        """For `isthmus status`: the link, why there is no companion, and each model's drifts."""
        link = self._link.estimate(now_s)
        return {
            "link": dict(link.as_mapping()) if self._link.observations else {},
            "remote_reason": self._lost or self._silent,
            "models": {name: self._model_snapshot(model) for name, model in self._models.items()},
        }

    def known(self, name: str, now_s: float) -> Known | None:
        """What a record says of a model beside a request; None without `add_model`."""
        model = self._models.get(name)
        if model is None:
            return None
        return Known(
            table=model.measured,
            cloud_ms=model.cloud_ms,
            alpha=model.edge.ratio,
            beta=model.cloud.ratio,
            speed_ratio=model.speed_ratio,
            image_ms=model.profile.image_ms,
            cloud_image_ms=model.cloud_image_ms,
            cloud_queue_ms=self._queue.at(now_s)[0],
        )

    def _model_snapshot(self, model: _Model) -> Mapping[str, object]:
        return {
            "plans": len(model.table),
            "allowed_now": int(np.count_nonzero(model.opened & model.table.allowed[0])),
            "edge_drift": model.edge.ratio,
            "cloud_drift": model.cloud.ratio,
            "local_only_reason": self._why_local(model),
            "cuts_not_open": dict(model.cuts_not_open),
            "self_difference": model.profile.self_difference,
            "tried": {} if model.explorer is None else model.explorer.as_mapping(),
        }

    # -- inside -------------------------------------------------------------------------------------------------------

    def _model(self, name: str) -> _Model:
        model = self._models.get(name)
        if model is None:
            raise UnknownModel(f"the planner does not know model {name!r}; it is not ready")
        return model

    def metered_why_not(self, crossing_bytes: float) -> str:
        """Why so many bytes may not cross the link now; "" when they may."""
        metered = self._metered()
        if metered is None or crossing_bytes <= metered.left_bytes:
            return ""
        return metered.used_up or (
            f"it would move {crossing_bytes:.0f} bytes, of this month's metered bytes {metered.left_bytes:.0f} are left"
        )

    def _why_local(self, model: _Model) -> str:
        """Why this model runs here only at this moment, the most lasting reason first; "" when it may be shared."""
        metered = self._metered()
        if why := model.forbidden or (metered.used_up if metered is not None else "") or self._lost or self._silent:
            return why
        return "" if model.ready else model.not_ready or "the companion is not ready for this model yet"

    def _explorer(self, model: _Model, observation: Observation) -> Explorer | None:
        """None where nothing is tried now: class gold, nearly no metered bytes or battery left."""
        metered = self._metered()
        scarce = observation.battery_low or (metered is not None and not metered.may_probe)
        return None if scarce else model.explorer

    def _not_ready(self, model: _Model) -> None:
        """Nothing that an earlier connection said about it holds."""
        model.ready, model.not_ready, model.forbidden = False, "", ""
        model.opened = _only_local(model.table)
        model.cuts_not_open.clear()

    def _observation(self, model: _Model, edge_queue_ms: float, now_s: float) -> Observation:
        why_not = self._why_local(model)
        model.edge.rest(now_s)
        model.cloud.rest(now_s)
        remote, power = None if why_not else self._remote(model, now_s), self._power_model()
        return Observation(
            edge_queue_ms=edge_queue_ms,
            slowdown=self._slowdown,
            alpha=model.edge.ratio,
            alpha_sigma=model.edge.sigma,
            image_ms=model.profile.image_ms,
            image_ratio=model.image.ratio,
            codec_ratio=model.codec.ratio,
            reply_ratio=model.reply.ratio,
            remote=remote,
            remote_why_not=why_not,
            incumbent=model.incumbent,
            opening=model.opening(),
            power=_at_rates(power, None if remote is None else remote.link, model.profile.threads),
            prices=self._prices,
            battery_low=self._battery_low(),
            backlog=NO_BACKLOG if remote is None else self._backlog(remote, edge_queue_ms, now_s),
        )

    def _backlog(self, remote: RemoteView, edge_queue_ms: float, now_s: float) -> Backlog:
        ahead_ms = remote.ahead_bytes * remote.link.up_ms_per_byte
        return Backlog(
            device_ms=edge_queue_ms,
            link_ms=max(self._underway.link_ms(now_s), ahead_ms),
            companion_ms=self._underway.companion_ms(now_s),
        )

    def _observe_link(self, up_bytes: int, down_bytes: int, network_ms: float, now_s: float) -> None:
        self._link.observe(up_bytes, down_bytes, network_ms, now_s)
        self._probing.carried(up_bytes, now_s)

    def _heard_again(self) -> None:
        """What was given up while nothing was heard is forgiven, or believed."""
        late, self._late = self._late, []
        if self._excused:
            for one in late:
                self._learn_late(*one)
        self._excused = self._excused or bool(late)

    def _remote(self, model: _Model, now_s: float) -> RemoteView:
        queue_ms, queue_sigma_ms = self._queue.at(now_s)
        metered = self._metered()
        return RemoteView(
            link=self._link.estimate(now_s),
            beta=model.cloud.ratio,
            beta_sigma=model.cloud.sigma,
            speed_ratio=model.speed_ratio,
            image_ms=model.cloud_image_ms * (model.cloud_image if model.cloud_image.count else model.cloud).ratio,
            queue_ms=queue_ms,
            queue_sigma_ms=queue_sigma_ms,
            opened=model.opened,
            encoded_why_not=model.encoded_why_not,
            payload_bytes_max=self._payload_bytes_max,
            metered_left_bytes=math.inf if metered is None else metered.left_bytes,
            ahead_bytes=self._ahead_bytes(),
        )


def _at_rates(power: PowerModel, link: LinkEstimate | None, threads: int) -> Power:
    """What the device draws on so many threads while bytes cross at the estimated rates; without a link none do."""
    if link is None:
        return power.at(0.0, 0.0, threads=threads)
    return power.at(0.008 / link.up_ms_per_byte, 0.008 / link.down_ms_per_byte, threads=threads)


def _segment(plan: Plan) -> CutId | Placement:
    """What the plan runs, whatever the codec."""
    return plan.placement if plan.cut is None else plan.cut


def _only_local(table: PlanTable) -> Flags:
    return np.array([plan is LOCAL for plan in table.plans])
