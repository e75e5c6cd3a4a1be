"""What one model costs on each of its plans, as known now: the table as profiled, and on top of it what was learned of
the device's and the companion's times, of coding and of replies. Of the link it knows nothing, and it chooses nothing.

No I/O, no clock, one thread (the event loop's), as the planner.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from split.errors import ModelUnavailable
from split.ids import CutId
from split.plan.estimate import Drift, Residual
from split.plan.message_cost import MessageCost, MessageCosts
from split.plan.observation import Flags, Floats
from split.plan.pace import PacedDrift
from split.plan.plan import WITH_LEVELS, Placement, Plan, RequestFacts
from split.plan.rate import Rate
from split.plan.rest import Rest
from split.plan.scaling import Ratio
from split.plan.table import Column, PlanTable
from split.profiles.measured import ModelProfile

WORTH_A_TABLE: Final = 0.01
"""A residual that moved a cost by less is not worth a new table (30 µs): measurements scatter by five times as much."""

REST_S: Final = 1.0
"""So often residuals are let rest: they return with a time constant of thirty times as much."""

FAR: Final = 100.0
"""A request that is expected to take so many times more or less than the profiled one teaches nothing about that: an
error of the prediction would be taken for one of the device, for all sizes."""

TELLS_MS: Final = 5.0 * Residual.CALL_MS
"""From here on a tail tells what its run met there; of a shorter one a call's own share would pass for a load."""

CLOUD_SIGMA: Final = 0.2
"""How well a companion's own times, told when it is ready, are known before a reply: relative."""

CLOCK_SIGMA: Final = 0.5
"""How well a change of the clock tells the change of speed, relative: memory keeps its own."""

_GROWS: Final = {"encode": Ratio.UP, "cloud_decode": Ratio.UP, "tail": Ratio.TAIL, "local_tail": Ratio.TAIL}
"""How a stage grows with a request's sizes, if not as the head."""


class Alike(NamedTuple):
    """Rows of another table, of the same model's same segments."""

    known: Flags
    """[row here]: whether there is one."""
    rows: NDArray[np.intp]
    """[row here]: which one, 0 where there is none."""

    def taken(self, theirs: NDArray[Any], ours: NDArray[Any]) -> NDArray[Any]:
        """[row here] of what is `theirs` per row there, and `ours` where there is none."""
        return np.where(self.known, theirs[self.rows], ours)


@dataclass(slots=True, kw_only=True)
class LearnedCosts:
    """Made by `of`."""

    profile: ModelProfile
    slowdown: float
    """`emulation.slowdown`, in every device time that comes in or goes out."""
    measured: PlanTable
    """As profiled."""
    table: PlanTable
    """As known now: residuals of the heads, the companion's own times for the tails, what coding takes."""
    groups: dict[CutId | Placement, Flags]
    """Rows that share a segment: all codecs of one cut, of offload."""
    cloud_ms: Floats
    """Per plan, the companion's compute as it said itself (or by its speed), before residuals."""
    edge: Drift = field(default_factory=Drift)
    image: Drift = field(default_factory=lambda: Drift(prior_sigma=0.5))
    messages: MessageCosts = field(default_factory=MessageCosts)
    requests: Rest = field(default_factory=Rest)
    """What they take beside their stages."""
    cloud: PacedDrift = field(default_factory=lambda: PacedDrift(prior_sigma=CLOUD_SIGMA))
    head_residuals: dict[CutId | Placement, Residual] = field(default_factory=dict)
    tail_residuals: dict[CutId | Placement, Residual] = field(default_factory=dict)
    cloud_image: Drift = field(default_factory=lambda: Drift(prior_sigma=0.5))
    """Of decoding pictures there, beside `cloud`: whatever keeps that machine busy slows both."""
    speed_ratio: float = 1.0
    """Companion / device on the same work."""
    cloud_image_ms: float = 0.0
    """Of preparing an encoded input there, before residuals."""
    _rested_at_s: float = -math.inf
    _pace_when_ready: float = 1.0

    @classmethod
    def of(cls, profile: ModelProfile, table: PlanTable, slowdown: float) -> LearnedCosts:
        """As profiled, nothing learned yet."""
        return cls(
            profile=profile,
            slowdown=slowdown,
            measured=table,
            table=table,
            groups=_groups(table),
            cloud_ms=table.costs[Column.TAIL],
        )

    def recalibrated(self, profile: ModelProfile, now: PlanTable) -> Alike:
        """The segments are the same, the codecs' rows are others: `now`, as profiled. Rows before of its segments."""
        before, first = self.table, {key: int(rows.argmax()) for key, rows in self.groups.items()}
        found = [first.get(segment_of(plan)) for plan in now.plans]
        alike = Alike(np.array([row is not None for row in found]), np.array([row or 0 for row in found]))
        for codec in WITH_LEVELS:
            self.messages.rates.pop(codec, None)
        costs, learned = now.costs, before.costs
        self.cloud_ms = alike.taken(self.cloud_ms, costs[Column.TAIL] * self.speed_ratio)
        self.profile, self.measured, self.groups = profile, now, _groups(now)
        self.table = now.with_compute(
            head_ms=alike.taken(learned[Column.HEAD], costs[Column.HEAD]),
            tail_ms=alike.taken(learned[Column.TAIL], self.cloud_ms),
            proven=alike.known & (before.doubt[alike.rows] == 1.0),
        ).with_messages(now, self.messages)
        return alike

    # -- what is expected ---------------------------------------------------------------------------------------------

    def finish_ms(self, cut: CutId | None, facts: RequestFacts) -> float:
        """As `Planner.finish_ms`."""
        rows = self.groups.get(cut) if cut is not None else None
        if rows is None:
            base = self.table.at(facts.sizes).whole_ms
        else:
            base = float(self.measured.at(facts.sizes).costs[Column.TAIL, int(rows.argmax())])
        return base * self.edge.ratio * self.slowdown

    def as_profiled_ms(self, facts: RequestFacts, plan: Plan, stage: str, measured_ms: float) -> float | None:
        """As `Planner.as_profiled_ms`."""
        ratios = self.table.scaling.at(facts.sizes)
        is_picture = stage == "image" or (stage == "cloud_decode" and plan.codec == "encoded")
        if ratios is None or is_picture or plan not in self.table.row_of:
            return measured_ms
        ratio = float(ratios[_GROWS.get(stage, Ratio.HEAD), self.table.row_of[plan]])
        if not 1.0 / FAR <= ratio <= FAR:
            return None
        if (cost := self._message_cost(stage, plan)) is None:
            return measured_ms / ratio
        stretch = self.slowdown if stage == "encode" else 1.0
        return cost.at_profiled(measured_ms / stretch, ratio) * stretch

    def image_ms(self) -> float:
        """As `Planner.image_ms`."""
        return self.profile.image_ms * self.image.ratio * self.slowdown

    def prepare_ms(self, plan: Plan, facts: RequestFacts) -> float:
        """As `Planner.prepare_ms`."""
        row = self.table.row_of.get(plan)
        if row is None:  # of a former calibration: but for the coding it takes as long as its segment's other plans
            if (rows := self.groups.get(segment_of(plan))) is None:
                raise ModelUnavailable(f"the model was loaded anew meanwhile, and {plan} is none of its plans any more")
            row = int(rows.argmax())
        columns = [Column.HEAD, Column.ENCODE, Column.ENCODE_CALL]
        head_ms, encode_ms, call_ms = self.table.at(facts.sizes).costs[columns, row].tolist()
        return float(head_ms * self.edge.ratio + encode_ms + call_ms) * self.slowdown

    def reply_bytes(self, plan: Plan, facts: RequestFacts) -> int:
        """As `Planner.reply_bytes`."""
        row = self.table.row_of.get(plan)
        return 0 if row is None else round(float(self.table.at(facts.sizes).costs[Column.DOWN, row]))

    # -- the companion's own word -------------------------------------------------------------------------------------

    def companion_ready(self, whole_ms: float, image_ms: float, pace: float) -> None:
        """As `Planner.companion_ready`; `pace`: the companion's when it measured these times, as it says."""
        speed = whole_ms / self.profile.whole_ms if whole_ms > 0.0 and self.profile.whole_ms > 0.0 else 1.0
        self.speed_ratio, self._pace_when_ready = speed, pace
        self.cloud_image_ms = image_ms if image_ms > 0.0 else self.profile.image_ms * speed
        self.cloud_ms = self.measured.costs[Column.TAIL] * speed
        self.cloud, self.cloud_image = PacedDrift(prior_sigma=CLOUD_SIGMA), Drift(prior_sigma=0.5)
        self.tail_residuals.clear()
        self.messages.decode.clear()
        self.table = self.table.with_compute(tail_ms=self.cloud_ms).with_messages(self.measured, self.messages)

    def segment_ready(self, rows: Flags, tail_ms: float) -> None:
        """The tail of these plans takes the companion so long; 0.0: it does not say."""
        if tail_ms > 0.0:
            tail_ms /= self.cloud.pace  # measured now, and compared with what was measured when the model was ready
            self.cloud_ms = np.where(rows, tail_ms, self.cloud_ms)
            self.table = self.table.with_compute(tail_ms=np.where(rows, tail_ms, self.table.costs[Column.TAIL]))

    def companion_paced(self, pace: float, from_s: float) -> None:
        """The companion, which is ready with the model, has another pace since some time after `from_s`."""
        self.cloud.paced(pace / self._pace_when_ready, from_s)

    # -- learning -----------------------------------------------------------------------------------------------------

    def observe_sent(self, facts: RequestFacts, plan: Plan, level: int | None, sent_bytes: int) -> bool:
        """As `Planner.observe_sent`."""
        row = self.table.row_of.get(plan)
        if row is None or level is None or plan.codec is None:
            return False
        calibrated = self.measured.within(facts.fidelity).at(facts.sizes)
        if calibrated.bounded.levels[row] != level:  # decided before the model was loaded anew
            return False
        rate = self.messages.rates.setdefault(plan.codec, Rate())
        changed = rate.observe(sent_bytes, float(calibrated.costs[Column.UP, row]))
        if rate.moved():
            self.table = self.table.with_messages(self.measured, self.messages)
        return changed

    def observe_reply_bytes(self, facts: RequestFacts, plan: Plan, down_bytes: int) -> None:
        """As `Planner.observe_reply_bytes`."""
        if (row := self.table.row_of.get(plan)) is None:
            return
        weighs = self.messages.reply_bytes
        weighs.observe(down_bytes, float(self.measured.at(facts.sizes).costs[Column.DOWN, row]))
        if weighs.moved():
            self.table = self.table.with_messages(self.measured, self.messages)

    def observe_reply(self, *, down_bytes: int, decode_ms: float) -> None:
        """As `Planner.observe_reply`."""
        self._learn_message(self.messages.reply, decode_ms, self.table.reply_ms_per_byte * down_bytes)

    def observe_cloud(self, plan: Plan, tail_ms: float | None, decode_ms: float | None, now_s: float) -> None:
        """The companion decoded this plan's payload in `decode_ms` and computed `tail_ms` for it, as it said at
        `now_s`. Nothing is learned of local, or of plans of an earlier time under this name."""
        if plan not in self.table.row_of or plan.placement is Placement.LOCAL:
            return
        known_ms = float(self.table.costs[Column.TAIL, self.table.row_of[plan]])
        drift = self.cloud.ratio if tail_ms is None else self._observe_tail(plan, tail_ms, now_s)
        if decode_ms is None:
            return
        if plan.codec == "encoded":
            # Beside the tail of the same run: the drift takes one late run for a stall, and what a load did to both
            # would stay with the pictures for good.
            if tail_ms is not None and known_ms > TELLS_MS:
                drift = tail_ms / known_ms
            self.cloud_image.observe(decode_ms, self.cloud_image_ms * drift)
        elif (cost := self._message_cost("cloud_decode", plan)) is not None:
            here_ms = float(self.measured.costs[Column.CLOUD_DECODE, self.table.row_of[plan]])
            self._learn_message(cost, decode_ms, here_ms * drift * self.speed_ratio)

    def _observe_tail(self, plan: Plan, tail_ms: float, now_s: float) -> float:
        """The companion's drift as it was for this run."""
        row, key = self.table.row_of[plan], segment_of(plan)
        known_ms = self.table.costs[Column.TAIL]
        drift = self.cloud.observe(tail_ms, float(known_ms[row]), now_s)
        residual = self.tail_residuals.setdefault(key, Residual())
        residual.observe(tail_ms, float(self.cloud_ms[row]) * drift)
        now_ms = float(self.cloud_ms[row]) * residual.ratio
        if abs(now_ms - float(known_ms[row])) > WORTH_A_TABLE * now_ms:
            better_ms = np.where(self.groups[key], self.cloud_ms * residual.ratio, known_ms)
            self.table = self.table.with_compute(tail_ms=better_ms)
        return drift

    def observe_edge(self, plan: Plan, stage: str, measured_ms: float) -> None:
        """As `Planner.observe_edge`; nothing is learned of plans of an earlier time under this name."""
        if plan not in self.table.row_of:
            return
        row, key = self.table.row_of[plan], segment_of(plan)
        match stage:
            case "head" | "whole":
                known_ms, profiled_ms = self.table.costs[Column.HEAD], self.measured.costs[Column.HEAD]
                # So short a head tells what a call costs, not how fast the device is.
                tells = stage == "whole" or float(profiled_ms[row]) > Residual.CALL_MS
                expected_ms = float(known_ms[row]) * self.slowdown
                drift = self.edge.observe(measured_ms, expected_ms) if tells else self.edge.ratio
                estimated = bool(self.measured.doubt[row] > 1.0)
                residual = self.head_residuals.setdefault(key, Residual(estimated=estimated))
                residual.observe(measured_ms / self.slowdown, float(profiled_ms[row]) * drift)
                now_ms = float(profiled_ms[row]) * residual.ratio
                proven = residual.proven and self.table.doubt[row] > 1.0
                if proven or abs(now_ms - float(known_ms[row])) > WORTH_A_TABLE * now_ms:
                    better_ms = np.where(self.groups[key], profiled_ms * residual.ratio, known_ms)
                    self.table = self.table.with_compute(head_ms=better_ms, proven=self.groups[key] if proven else None)
            case "local_tail":
                self.edge.observe(measured_ms, float(self.measured.costs[Column.TAIL, row]) * self.slowdown)
            case "image":
                self.image.observe(measured_ms, self.profile.image_ms * self.slowdown)
            case "encode":
                if (cost := self._message_cost(stage, plan)) is not None:
                    profiled_ms = float(self.measured.costs[Column.ENCODE, row])
                    self._learn_message(cost, measured_ms / self.slowdown, profiled_ms)
            case _:
                raise AssertionError(f"stage {stage!r} is no device stage that is learned")

    def _message_cost(self, stage: str, plan: Plan) -> MessageCost | None:
        """Of `encode` or `cloud_decode`; None for other stages, for local, and for pictures decoded over there."""
        learned = {"encode": self.messages.encode, "cloud_decode": self.messages.decode}.get(stage)
        if learned is None or plan.codec is None or (stage == "cloud_decode" and plan.codec == "encoded"):
            return None
        return learned.setdefault(plan.codec, MessageCost())

    def _learn_message(self, cost: MessageCost, measured_ms: float, profiled_ms: float) -> None:
        """A payload was coded; both times without slowdown."""
        cost.observe(measured_ms, profiled_ms)
        if cost.moved(profiled_ms):
            self.table = self.table.with_messages(self.measured, self.messages)

    def observe_rest(self, plan: Plan, measured_ms: float) -> None:
        """As `Planner.observe_rest`."""
        self.requests.observe(measured_ms, travelled=plan.placement is not Placement.LOCAL)

    def rest(self, now_s: float) -> None:
        """It is `now_s`, and a request is decided: what was measured some time ago has aged."""
        self.edge.rest(now_s)
        self.cloud.rest(now_s)
        self.cloud_image.rest(now_s)
        seconds = now_s - self._rested_at_s
        if seconds < REST_S:
            return
        self._rested_at_s = now_s
        if seconds < math.inf:
            heads = self._rested(self.head_residuals, self.measured.costs[Column.HEAD], Column.HEAD, seconds)
            tails = self._rested(self.tail_residuals, self.cloud_ms, Column.TAIL, seconds)
            if heads is not None or tails is not None:
                self.table = self.table.with_compute(head_ms=heads, tail_ms=tails)
            for rate in self.messages.rates.values():
                rate.rest(seconds)
            moved = [rate.moved() for rate in self.messages.rates.values()]
            if any(moved):
                self.table = self.table.with_messages(self.measured, self.messages)

    def _rested(
        self, residuals: Mapping[CutId | Placement, Residual], base_ms: Floats, column: Column, seconds: float
    ) -> Floats | None:
        """Times with the residuals after so much rest; None where that is worth no table."""
        known_ms = found_ms = self.table.costs[column]
        for key, residual in residuals.items():
            residual.rest(seconds)
            rows = self.groups[key]
            row = int(rows.argmax())
            now_ms = float(base_ms[row]) * residual.ratio
            if abs(now_ms - float(known_ms[row])) > WORTH_A_TABLE * now_ms:
                found_ms = np.where(rows, base_ms * residual.ratio, found_ms)
        return None if found_ms is known_ms else found_ms

    def unsettle(self, factor: float) -> None:
        """The device's speed is another one, probably by `factor`."""
        self.edge.unsettle(CLOCK_SIGMA, factor=factor)


def segment_of(plan: Plan) -> CutId | Placement:
    """What the plan runs, whatever the codec."""
    return plan.placement if plan.cut is None else plan.cut


def _groups(table: PlanTable) -> dict[CutId | Placement, Flags]:
    """Segment → its rows."""
    keys = [segment_of(plan) for plan in table.plans]
    return {key: np.array([one == key for one in keys]) for key in keys}
