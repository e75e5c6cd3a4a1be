"""All plans of one model on one device as numpy columns, with what the contract says about each. Built once per model;
nothing in it changes with the state of link or load.

Row 0 is local. What was not measured is not in the table (no cost) or not allowed (no fidelity).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from enum import IntEnum
from typing import Final

import numpy as np

from split.graph.card import ModelCard
from split.graph.growth import batch_dim
from split.ids import CutId
from split.plan.calibrated_sizes import CalibratedSizes
from split.plan.measured_rows import measured_rows
from split.plan.message_cost import MessageCosts
from split.plan.objective import Objective
from split.plan.observation import Flags, Floats
from split.plan.plan import LOCAL, Placement, Plan
from split.plan.rows import Row, Rows, Within
from split.plan.scaling import Ratio, Scaling
from split.plan.values import value
from split.profiles.contract import Contract
from split.profiles.measured import ModelProfile

LOCAL_ROW: Final = 0
"""`PlanTable` puts local first."""


class Column(IntEnum):
    """Rows of `PlanTable.costs`: what each plan costs per unit of state (see `predict.py` for the units)."""

    ALL = 0
    """1 everywhere: the edge queue, and what every request takes beside its stages."""
    IMAGE = 1
    """1 where the device decodes a picture that came encoded."""
    ENCODE = 2
    """ms"""
    REMOTE = 3
    """1 where something travels."""
    UP = 4
    """Payload bytes up; 0 for encoded, whose size the request brings."""
    DOWN = 5
    """Payload bytes down."""
    CLOUD_DECODE = 6
    """ms on this device"""
    ENCODED = 7
    """1 where the input travels encoded."""
    REPLY = 8
    """ms to decode the reply"""
    HEAD = 9
    """ms of device compute: the head, or the whole for local; 0 for offload."""
    TAIL = 10
    """ms of cloud compute: the tail, or the whole for offload; 0 for local. As measured here until `with_compute`."""
    FINISH = 11
    """ms of device compute that would still be missing if the companion failed: the tail, or the whole for offload."""
    ENCODE_CALL = 12
    """ms of encoding whatever the size, see `message_cost.py`; 0 as profiled, like the other two."""
    DECODE_CALL = 13
    """ms at the companion; 0 for encoded."""
    REPLY_CALL = 14
    """ms on this device."""


_GROWS: Final = np.array(
    [
        {
            Column.ENCODE: Ratio.UP,
            Column.UP: Ratio.UP,
            Column.CLOUD_DECODE: Ratio.UP,
            Column.DOWN: Ratio.DOWN,
            Column.REPLY: Ratio.DOWN,
            Column.HEAD: Ratio.HEAD,
            Column.TAIL: Ratio.TAIL,
            Column.FINISH: Ratio.TAIL,
        }.get(column, Ratio.SAME)
        for column in Column
    ]
)
"""How each column grows with a request's sizes."""

_S, _U, _D = Ratio.SAME, Ratio.UP, Ratio.DOWN
_SPREAD_GROWS: Final = np.array(
    (
        [_S, _U, _D, _U, _U, _D, _S, _S, Ratio.HEAD, Ratio.TAIL, _U],
        [_S, _S, _S, _U, _D, _D, _S, _D, Ratio.HEAD, Ratio.TAIL, _U],
    )
)
"""The same for the rows of `PlanTable.spread`, the product of two."""
_SPREAD_UP, _SPREAD_DOWN, _SPREAD_UP2, _SPREAD_UP_DOWN, _SPREAD_DOWN2, _SPREAD_ENCODED_DOWN = 1, 2, 3, 4, 5, 7
_SPREAD_HEAD, _SPREAD_TAIL, _SPREAD_SIGMA2 = 8, 9, 10

SCALED_KEPT_MAX: Final = 32
"""Tables at other sizes that one table keeps, 20 KB each for 100 plans: making one takes 25 µs."""

BOUND_TABLES_MAX: Final = 4
"""Tables within other bounds that one keeps, each with its own at other sizes: making one takes 15 µs, since what it is
made of is kept (`Rows`)."""


@value(frozen=True, slots=True, kw_only=True)
class PlanTable:
    """Columns over the plans of one model. Times are ms of this device without `emulation.slowdown` and drift."""

    plans: tuple[Plan, ...]
    row_of: Mapping[Plan, int]
    costs: Floats
    """[Column, plan]"""
    spread: Floats
    """[11, plan]: 1·remote, up, down, up², up·down, down², encoded, encoded·down, head², tail², σ² of up: what σ² of
    the latency is made of."""
    rows: Rows
    """Where all that depends on the bound of fidelity comes from."""
    bounded: Within
    """Which setting of each codec keeps to that bound, and what the contract allows and why not; its bytes as
    calibrated."""
    up_ratio: Floats
    """[plan]: what is sent over what was calibrated, as learned; 1 where nothing was."""
    with_codec: Mapping[str, Flags]
    """Codec → its rows."""
    labels: tuple[str, ...]
    """The plans in words."""
    sends_tensors: Flags
    """Plans that do not need the input to have come encoded."""
    reply_ms_per_byte: float
    """What decoding a reply costs on this device."""
    scaling: Scaling
    """What other sizes than the profiled ones do to the costs."""
    calibrated: CalibratedSizes
    """Which sizes the settings of codecs were measured near."""
    batch_dim: int | None
    """Number of the open dim over which a request may be served in parts; None where rows depend on each other."""
    splits: Flags
    offloads: Flags
    finishes_here: bool
    """Whether the contract wants an answer of the device where the companion fails."""
    doubt: Floats
    """[plan]: what σ² of the head is multiplied by, 1 where it was measured, more where it is estimated. (A tail is
    used only after its companion has measured it.)"""
    objective: Objective
    """As the contract weighs."""
    unloaded: Objective
    """With the weights where nothing waits and neither energy nor money is known."""
    cuts: frozenset[CutId]
    """Every cut of the card, measured or not."""
    no_cuts_reason: str = ""
    """Why there is none."""
    _within: dict[int, PlanTable] = field(default_factory=dict, init=False, repr=False, compare=False)
    """This table within the bounds asked for last, by their range."""
    _at: dict[tuple[int, ...], PlanTable] = field(default_factory=dict, init=False, repr=False, compare=False)
    """This table at the sizes asked for last."""

    @property
    def whole_ms(self) -> float:
        """The whole model on the device: the head of row 0."""
        return float(self.costs[Column.HEAD, 0])

    def fidelity(self, row: int) -> tuple[float | None, float | None]:
        """By the contract's measure, in the mean and at most; None for a lossless plan and for what is not measured."""
        return self.rows.fidelity(self.bounded, row)

    @property
    def allowed(self) -> tuple[Flags, Flags, Flags]:
        """What the contract allows, per privacy level in the order of `PRIVACY_ORDER`."""
        return self.bounded.allowed

    def why_not(self, level: int, row: int, bound: float | None = None) -> str:
        """The constraint that forbids this plan at a privacy level, as a sentence; "" where it is allowed. `bound`: the
        request's of fidelity, where it has its own."""
        return self.rows.why_not(self.bounded, level, row, bound)

    def __len__(self) -> int:
        return len(self.plans)

    def with_compute(
        self, *, head_ms: Floats | None = None, tail_ms: Floats | None = None, proven: Flags | None = None
    ) -> PlanTable:
        """The same plans with better known compute times, one entry per plan; None leaves a side as it is.

        `proven`: plans whose head is no estimate any more.
        """
        costs, spread = self.costs.copy(), self.spread.copy()
        doubt = self.doubt if proven is None else np.where(proven, 1.0, self.doubt)
        if head_ms is not None:
            costs[Column.HEAD], spread[_SPREAD_HEAD] = head_ms, head_ms * head_ms * doubt
            costs[Column.FINISH, self.offloads] = head_ms[0]
        if tail_ms is not None:
            costs[Column.TAIL], spread[_SPREAD_TAIL] = tail_ms, tail_ms * tail_ms
        return replace(self, costs=costs, spread=spread, doubt=doubt)

    def with_messages(self, profiled: PlanTable, costs: MessageCosts) -> PlanTable:
        """The same plans with coding times and replies' bytes as they were learned; `profiled`: the table they were
        learned against."""
        found = self.costs.copy()
        coding = [Column.ENCODE, Column.ENCODE_CALL, Column.CLOUD_DECODE, Column.DECODE_CALL]
        found[coding] = profiled.costs[coding]
        for learned, column, call in (
            (costs.encode, Column.ENCODE, Column.ENCODE_CALL),
            (costs.decode, Column.CLOUD_DECODE, Column.DECODE_CALL),
        ):
            for codec, cost in learned.items():
                rows = np.array([plan.codec == codec for plan in self.plans])
                found[column, rows] = cost.ratio * profiled.costs[column, rows]
                found[call, rows] = cost.call_ms
        down_ratio = costs.reply_bytes.ratio
        found[Column.DOWN] = down_ratio * profiled.costs[Column.DOWN]
        found[Column.REPLY] = down_ratio * costs.reply.ratio * profiled.costs[Column.REPLY]
        found[Column.REPLY_CALL] = costs.reply.call_ms * found[Column.REMOTE]
        up_ratio = np.ones(len(self))
        for codec, rate in costs.rates.items():
            if (of_codec := self.with_codec.get(codec)) is not None:
                up_ratio[of_codec] = rate.ratio
        spread = self.spread.copy()
        down = found[Column.DOWN]
        spread[_SPREAD_DOWN], spread[_SPREAD_DOWN2] = down, down * down
        spread[_SPREAD_ENCODED_DOWN] = down * found[Column.ENCODED]
        _send(found, spread, self.bounded, up_ratio)
        return replace(self, costs=found, spread=spread, up_ratio=up_ratio)

    def within(self, bound: float | None) -> PlanTable:
        """The same plans for a request that asks for this fidelity, closer than the contract's bound (None: for that
        bound): codecs with settings then send what a closer one takes."""
        if bound is None or (key := self.rows.key(bound)) == self.bounded.key:
            return self
        if (known := self._within.get(key)) is not None:
            return known
        while len(self._within) >= BOUND_TABLES_MAX:
            del self._within[next(iter(self._within))]
        costs, spread, bounded = self.costs.copy(), self.spread.copy(), self.rows.within(key)
        _send(costs, spread, bounded, self.up_ratio)
        found = self._within[key] = replace(self, costs=costs, spread=spread, bounded=bounded)
        return found

    def at(self, sizes: tuple[int, ...]) -> PlanTable:
        """The same plans for a request of these sizes of the model's open dims (`ModelCard.growth`); () stands for the
        profiled ones. Estimates of the link's, the device's and the companion's state apply to it as to this one."""
        if (known := self._at.get(sizes)) is not None:
            return known
        ratios, bounded = self.scaling.at(sizes), self.bounded
        if sizes and self.calibrated.are_far(sizes):
            bounded = bounded.at_other_sizes()
        if ratios is None:
            return self if bounded is self.bounded else replace(self, bounded=bounded)
        while len(self._at) >= SCALED_KEPT_MAX:
            del self._at[next(iter(self._at))]
        costs, spread = ratios.take(_GROWS, axis=0), ratios.take(_SPREAD_GROWS[0], axis=0)
        costs *= self.costs
        spread *= ratios.take(_SPREAD_GROWS[1], axis=0)
        spread *= self.spread
        found = self._at[sizes] = replace(self, costs=costs, spread=spread, bounded=bounded)
        return found

    @staticmethod
    def build(
        card: ModelCard, profile: ModelProfile, contract: Contract, runs_on: Sequence[str] | None = None
    ) -> PlanTable:
        """All measured plans of `card`, in the order local, splits in topological order, offloads.

        The profile must be the card's (same digest); its codecs need not be the contract's. `runs_on`: what the
        device runs models on, in the words of `resource.accelerators`; None: on one of those that the contract names.
        """
        assert card.digest == profile.digest, (card.digest, profile.digest)
        rows = measured_rows(card, profile, contract)
        reply_ms_per_byte = _reply_ms_per_byte(profile)
        bounds = Rows(rows, contract, runs_on)
        bounded = bounds.within(bounds.key(bounds.bound))
        behaviour = contract.behaviour
        objective = Objective.of(
            behaviour.weights, behaviour.service_class, throughput_min_per_s=behaviour.throughput_min_per_s
        )
        return PlanTable(
            plans=tuple(row.plan for row in rows),
            row_of={row.plan: i for i, row in enumerate(rows)},
            costs=_costs(rows, bounded, reply_ms_per_byte),
            spread=_spread(rows, bounded),
            rows=bounds,
            bounded=bounded,
            up_ratio=np.ones(len(rows)),
            with_codec={
                codec: np.array([row.plan.codec == codec for row in rows])
                for codec in {row.plan.codec for row in rows}
                if codec is not None
            },
            labels=tuple(str(row.plan) for row in rows),
            sends_tensors=np.array([row.plan.codec != "encoded" for row in rows]),
            calibrated=CalibratedSizes(profile.calibrated_sizes, batch_dim(card.inputs, card.outputs)),
            batch_dim=batch_dim(card.inputs, card.outputs) if profile.rows_apart else None,
            splits=np.array([row.plan.placement is Placement.SPLIT for row in rows]),
            offloads=np.array([row.plan.placement is Placement.OFFLOAD for row in rows]),
            finishes_here=behaviour.fallback.strategy != "fail",
            reply_ms_per_byte=reply_ms_per_byte,
            scaling=Scaling(card, profile, [row.plan for row in rows]),
            doubt=np.array([row.doubt for row in rows]),
            objective=objective,
            unloaded=objective.at(energy_known=False, priced=False, battery_low=False, waiting=0.0),
            cuts=frozenset(cut.id for cut in card.cuts),
            no_cuts_reason=card.no_cuts_reason,
        )


def _costs(rows: list[Row], bounded: Within, reply_ms_per_byte: float) -> Floats:
    costs = np.zeros((len(Column), len(rows)))
    for i, row in enumerate(rows):
        encoded = row.plan.codec == "encoded"
        costs[Column.ALL, i] = 1.0
        costs[Column.IMAGE, i] = 0.0 if encoded else 1.0
        costs[Column.ENCODED, i] = 1.0 if encoded else 0.0
        costs[Column.REMOTE, i] = 0.0 if row.plan is LOCAL else 1.0
        costs[Column.ENCODE, i] = row.codec.encode_ms if row.codec is not None else 0.0
        costs[Column.CLOUD_DECODE, i] = row.codec.decode_ms if row.codec is not None else 0.0
        costs[Column.UP, i] = bounded.up[i]
        costs[Column.DOWN, i] = row.down
        costs[Column.REPLY, i] = row.down * reply_ms_per_byte
        costs[Column.HEAD, i] = row.head_ms
        costs[Column.TAIL, i] = row.tail_ms
        costs[Column.FINISH, i] = row.finish_ms
    return costs


def _spread(rows: list[Row], bounded: Within) -> Floats:
    spread = np.zeros((11, len(rows)))
    for i, row in enumerate(rows):
        u, d, e = float(bounded.up[i]), float(row.down), float(row.plan.codec == "encoded")
        remote, sigma = 0.0 if row.plan is LOCAL else 1.0, float(bounded.up_sigma[i])
        compute = (row.head_ms**2 * row.doubt, row.tail_ms**2)
        spread[:, i] = (remote, u, d, u * u, u * d, d * d, e, e * d, *compute, sigma * sigma)
    return spread


def _send(costs: Floats, spread: Floats, bounded: Within, up_ratio: Floats) -> None:
    """Write what is sent, and all that follows from it, into columns that are at profiled sizes."""
    up, sigma = bounded.up * up_ratio, bounded.up_sigma * up_ratio
    costs[Column.UP] = spread[_SPREAD_UP] = up
    spread[_SPREAD_UP2], spread[_SPREAD_UP_DOWN], spread[_SPREAD_SIGMA2] = up * up, up * costs[Column.DOWN], sigma**2


def _reply_ms_per_byte(profile: ModelProfile) -> float:
    """As decoding an uncoded input took; 0 where none was measured."""
    raw = next((codec for codec in profile.input_codecs if codec.codec == "raw"), None)
    return raw.decode_ms / raw.bytes if raw is not None and raw.bytes > 0 else 0.0
