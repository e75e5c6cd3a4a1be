"""All plans of one model on one device as numpy columns, with what the contract says about each. Built once per model;
nothing in it changes with the state of link or load.

Row 0 is local. What was not measured is not in the table (no cost) or not allowed (no fidelity).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Final

import numpy as np

from split.graph.card import CutCard, ModelCard
from split.graph.growth import batch_dim
from split.ids import CutId
from split.plan.estimate import Drift
from split.plan.message_cost import MessageCosts
from split.plan.objective import Objective
from split.plan.observation import Flags, Floats
from split.plan.plan import LOCAL, LOSSLESS_CODECS, Placement, Plan
from split.plan.scaling import Ratio, Scaling
from split.profiles.contract import PRIVACY_ORDER, Contract
from split.profiles.measured import CodecCosts, ModelProfile

LOCAL_ROW: Final = 0
"""`PlanTable` puts local first."""


class Column(IntEnum):
    """Rows of `PlanTable.costs`: what each plan costs per unit of state (see `predict.py` for the units)."""

    ALL = 0
    """1 everywhere: the edge queue."""
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
        [_S, _U, _D, _U, _U, _D, _S, _S, Ratio.HEAD, Ratio.TAIL],
        [_S, _S, _S, _U, _D, _D, _S, _D, Ratio.HEAD, Ratio.TAIL],
    )
)
"""The same for the rows of `PlanTable.spread`, the product of two."""
_SPREAD_HEAD, _SPREAD_TAIL = 8, 9

ESTIMATE_SIGMA: Final = 0.06
"""Relative scatter of an estimated head: its mean error is held under 5 % (`scripts/bench costmodel`), a mean error is
0.8 σ."""
_ESTIMATED: Final = 1.0 + (ESTIMATE_SIGMA / Drift.NOISE) ** 2
"""What σ² of a head is multiplied by where its time is estimated: relative to the least σ of a measurement."""


SCALED_KEPT_MAX: Final = 32
"""Tables at other sizes that one table keeps, 20 KB each for 100 plans: making one takes 25 µs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTable:
    """Columns over the plans of one model. Times are ms of this device without `emulation.slowdown` and drift."""

    plans: tuple[Plan, ...]
    row_of: Mapping[Plan, int]
    costs: Floats
    """[Column, plan]"""
    spread: Floats
    """[10, plan]: 1·remote, up, down, up², up·down, down², encoded, encoded·down, head², tail²: what σ² is made of."""
    fidelity: tuple[float | None, ...]
    allowed: tuple[Flags, Flags, Flags]
    """What the contract allows, per privacy level in the order of `PRIVACY_ORDER`."""
    why_not: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
    """The constraint behind each False, as a sentence; "" where allowed."""
    labels: tuple[str, ...]
    """The plans in words."""
    sends_tensors: Flags
    """Plans that do not need the input to have come encoded."""
    reply_ms_per_byte: float
    """What decoding a reply costs on this device."""
    scaling: Scaling
    """What other sizes than the profiled ones do to the costs."""
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
    _at: dict[tuple[int, ...], PlanTable] = field(default_factory=dict, init=False, repr=False, compare=False)
    """This table at the sizes asked for last."""

    @property
    def whole_ms(self) -> float:
        """The whole model on the device: the head of row 0."""
        return float(self.costs[Column.HEAD, 0])

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
        """The same plans with coding times as they were learned; `profiled`: the table they were learned against."""
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
        found[Column.REPLY] = costs.reply.ratio * profiled.costs[Column.REPLY]
        found[Column.REPLY_CALL] = costs.reply.call_ms * found[Column.REMOTE]
        return replace(self, costs=found)

    def at(self, sizes: tuple[int, ...]) -> PlanTable:
        """The same plans for a request of these sizes of the model's open dims (`ModelCard.growth`); () stands for the
        profiled ones. Estimates of the link's, the device's and the companion's state apply to it as to this one."""
        if (known := self._at.get(sizes)) is not None:
            return known
        ratios = self.scaling.at(sizes)
        if ratios is None:
            return self
        while len(self._at) >= SCALED_KEPT_MAX:
            del self._at[next(iter(self._at))]
        found = self._at[sizes] = replace(
            self,
            costs=self.costs * ratios[_GROWS],
            spread=self.spread * (ratios[_SPREAD_GROWS[0]] * ratios[_SPREAD_GROWS[1]]),
        )
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
        costs_of = {cut.cut: cut for cut in profile.cuts}
        private = {spec.name for spec in contract.data.inputs if spec.privacy != "any"}
        # A local-only input forbids all that is computed from it; which tensors are is not known, so everything.
        local_only = contract.strictest_privacy() == "local-only"
        contract_level = 2 if local_only else PRIVACY_ORDER.index(contract.data.privacy)
        rows = [_Row(plan=LOCAL, head_ms=profile.whole_ms, finish_ms=0.0)]
        for cut in card.cuts:
            measured = costs_of.get(cut.id)
            if measured is None:
                continue
            down = _down_bytes(card, profile, cut)
            rows += [
                _Row(
                    plan=Plan(placement=Placement.SPLIT, cut=cut.id, codec=codec.codec),
                    head_ms=measured.head_ms,
                    tail_ms=measured.tail_ms,
                    finish_ms=measured.tail_ms,
                    codec=codec,
                    down=down,
                    depth=cut.compute_share,
                    weight_bytes=cut.head_weight_bytes,
                    raw_inputs=cut.shown_inputs,
                    doubt=_ESTIMATED if measured.estimated else 1.0,
                )
                for codec in measured.codecs
            ]
        every_input = tuple(spec.name for spec in card.inputs)
        rows += [
            _Row(
                plan=Plan(placement=Placement.OFFLOAD, codec=codec.codec),
                tail_ms=profile.whole_ms,
                finish_ms=profile.whole_ms,
                codec=codec,
                down=profile.output_bytes,
                raw_inputs=every_input,
            )
            for codec in profile.input_codecs
            if codec.codec != "encoded"
        ]
        if contract.encoded():
            rows.append(
                _Row(
                    plan=Plan(placement=Placement.OFFLOAD, codec="encoded"),
                    tail_ms=profile.whole_ms,
                    finish_ms=profile.whole_ms,
                    down=profile.output_bytes,
                    raw_inputs=every_input,
                )
            )
        raw = next((codec for codec in profile.input_codecs if codec.codec == "raw"), None)
        reply_ms_per_byte = raw.decode_ms / raw.bytes if raw is not None and raw.bytes > 0 else 0.0
        reasons = tuple(
            tuple(_why_not(row, max(level, contract_level), private, contract, runs_on) for row in rows)
            for level in range(3)
        )
        assert len(reasons) == 3
        behaviour = contract.behaviour
        objective = Objective.of(
            behaviour.weights, behaviour.service_class, throughput_min_per_s=behaviour.throughput_min_per_s
        )
        return PlanTable(
            plans=tuple(row.plan for row in rows),
            row_of={row.plan: i for i, row in enumerate(rows)},
            costs=_costs(rows, reply_ms_per_byte),
            spread=_spread(rows),
            fidelity=tuple(row.fidelity(contract) for row in rows),
            allowed=(_flags(reasons[0]), _flags(reasons[1]), _flags(reasons[2])),
            why_not=reasons,
            labels=tuple(str(row.plan) for row in rows),
            sends_tensors=np.array([row.plan.codec != "encoded" for row in rows]),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    plan: Plan
    finish_ms: float
    head_ms: float = 0.0
    tail_ms: float = 0.0
    codec: CodecCosts | None = None
    down: int = 0
    depth: float = 0.0
    weight_bytes: int = 0
    """Of the head."""
    raw_inputs: tuple[str, ...] = ()
    """Model inputs that can be read off what travels."""
    doubt: float = 1.0

    @property
    def up(self) -> int:
        return self.codec.bytes if self.codec is not None else 0

    def fidelity(self, contract: Contract) -> float | None:
        """By the contract's measure; None for a lossless plan and for one not measured."""
        if self.plan.codec is None or self.plan.codec in LOSSLESS_CODECS or self.codec is None:
            return None
        return self.codec.fidelity.get(contract.data.fidelity.measure)


def _why_not(row: _Row, level: int, private: set[str], contract: Contract, runs_on: Sequence[str] | None) -> str:
    """The first constraint of the contract that forbids this plan at this privacy level; "" when none does."""
    codec, usable = row.plan.codec, contract.resource.accelerators
    if row.plan.placement is not Placement.OFFLOAD and runs_on is not None and not set(usable) & set(runs_on):
        return f"resource.accelerators is {', '.join(usable)}: the device runs models on {', '.join(runs_on)}"
    if codec is None:
        return ""
    if level == 2:
        return "privacy is local-only: nothing may leave the device"
    leaking = [name for name in row.raw_inputs if level == 1 or name in private]
    if leaking:
        return f"privacy is no-raw-input: input {', '.join(map(repr, leaking))} could be read off what leaves"
    data = contract.data
    if row.depth < data.depth_min_ratio:
        return (
            f"depth_min_ratio is {data.depth_min_ratio:g}: only {row.depth:.3g} of the compute would be done "
            "before something leaves the device"
        )
    most = contract.resource.memory_bytes
    if most is not None and row.weight_bytes > most:
        return f"resource.memory_bytes is {most}: the weights of this head alone take {row.weight_bytes}"
    if codec not in data.codecs:
        return f"the contract does not allow codec {codec} (allowed: {', '.join(data.codecs) or 'none'})"
    if codec in LOSSLESS_CODECS:
        return ""
    found = row.fidelity(contract)
    if found is None:
        return f"fidelity not measured ({data.fidelity.measure} of codec {codec}); run isthmus profile"
    # `not <=` and not `>`: a NaN is no measurement that holds a bound.
    if not found <= data.fidelity.bound:
        return f"fidelity {data.fidelity.measure} {found:.4g} is over the contract's bound {data.fidelity.bound:g}"
    return ""


def _flags(reasons: tuple[str, ...]) -> Flags:
    return np.array([not reason for reason in reasons])


def _costs(rows: list[_Row], reply_ms_per_byte: float) -> Floats:
    costs = np.zeros((len(Column), len(rows)))
    for i, row in enumerate(rows):
        encoded = row.plan.codec == "encoded"
        costs[Column.ALL, i] = 1.0
        costs[Column.IMAGE, i] = 0.0 if encoded else 1.0
        costs[Column.ENCODED, i] = 1.0 if encoded else 0.0
        costs[Column.REMOTE, i] = 0.0 if row.plan is LOCAL else 1.0
        costs[Column.ENCODE, i] = row.codec.encode_ms if row.codec is not None else 0.0
        costs[Column.CLOUD_DECODE, i] = row.codec.decode_ms if row.codec is not None else 0.0
        costs[Column.UP, i] = row.up
        costs[Column.DOWN, i] = row.down
        costs[Column.REPLY, i] = row.down * reply_ms_per_byte
        costs[Column.HEAD, i] = row.head_ms
        costs[Column.TAIL, i] = row.tail_ms
        costs[Column.FINISH, i] = row.finish_ms
    return costs


def _spread(rows: list[_Row]) -> Floats:
    spread = np.zeros((10, len(rows)))
    for i, row in enumerate(rows):
        u, d, e = float(row.up), float(row.down), float(row.plan.codec == "encoded")
        remote = 0.0 if row.plan is LOCAL else 1.0
        spread[:, i] = (remote, u, d, u * u, u * d, d * d, e, e * d, row.head_ms**2 * row.doubt, row.tail_ms**2)
    return spread


def _down_bytes(card: ModelCard, profile: ModelProfile, cut: CutCard) -> int:
    """Bytes of the outputs made in the tail: their share of what was measured for all outputs."""
    sizes = {spec.name: spec.nbytes(profile.dims) for spec in card.outputs}
    share = sum(sizes[name] for name in cut.tail_outputs) / (sum(sizes.values()) or 1)
    return round(profile.output_bytes * share)
