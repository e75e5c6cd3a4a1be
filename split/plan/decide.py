"""The decision: the prediction of all plans (`predict.py`), masks for what may not run, one named comparison.

Held against the deadline are a plan's risk and its way out, which it must have where any has one. Pure: nothing is
remembered here (the last choice comes in as `incumbent`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, overload

import numpy as np

from split.errors import InvalidRequest
from split.ids import CutId
from split.plan.observation import Flags, Floats, Observation
from split.plan.parting import in_parts
from split.plan.plan import LOCAL, Decision, Placement, PlanEstimate, RequestFacts
from split.plan.predict import QUANTILE_SIGMAS, Prediction, payload_bytes, predict
from split.plan.table import Column, PlanTable
from split.profiles.contract import PRIVACY_ORDER

RUNNERS_UP: Final = 5
REQUEST_METADATA_BYTES: Final = 4096
"""What a request's message has beside its payload: ids, the names of outputs, how to prepare a picture."""

CLIMB_RATIO: Final = 0.03
CLIMB_MS: Final = 0.2
CLIMB_SIGMAS: Final = 0.25
"""What a plan other than the incumbent must gain, see `_must_gain_ms`."""

_STAGES_HERE: Final = dict.fromkeys(
    (
        *("queue", "activate", "image", "head", "encode", "up"),
        *("cloud_queue", "cloud_decode", "tail", "down", "decode", "overlap"),
    ),
    0.0,
)

LOCAL_ROW: Final = 0
"""`PlanTable` puts local first."""


def decide(table: PlanTable, observation: Observation, facts: RequestFacts) -> Decision:
    """Choose the plan of one request.

    Least predicted among the allowed plans whose risk and whose way out fit the budget; where none is, among those
    whose risk fits; the least risk when none does. A forced mode,
    cut or codec is respected: InvalidRequest, naming the constraint, when it can never run; local, with the reason,
    when only the companion is missing for it.
    """
    as_built, table = table, table.at(facts.sizes)
    if observation.remote is None and (facts.mode, facts.cut, facts.codec) == (None, None, None):
        here = _here(table, observation, facts)
        if here.risk_ms <= facts.budget_ms:
            label = table.labels[LOCAL_ROW]
            return Decision(
                chosen=here,
                runners_up=(),
                reason=f"{label} is expected first, in {here.predicted_ms:.1f} ms; {observation.remote_why_not}",
                candidates=len(table),
            )
    prediction = in_parts(as_built, observation, facts, predict(table, observation, facts))
    mask = _may_run(table, observation, facts)
    forced = facts.mode is not None or facts.cut is not None
    prefix = suffix = ""
    if forced or facts.codec is not None:
        wish = _wished(table, facts)
        prefix = f"{_wish_text(facts)} was asked for; "
        mask = mask & wish
        if not mask.any():
            mask = _only_local(len(table))
            suffix = f"; {_not_now(table, observation, facts, _possible(table, facts, wish)[0])}"
    # Row numbers, least predicted first, what may not run at the end.
    order = np.where(mask, prediction.mean_ms, np.inf).argsort().tolist()[: int(np.count_nonzero(mask))]
    row, why = _best(table, prediction, order, facts.budget_ms, None if forced else observation.incumbent)
    if not forced:
        suffix = _bound(table, observation, facts, prediction, row, mask)
    return Decision(
        chosen=_estimate(table, observation, facts, prediction, row),
        runners_up=_RunnersUp(
            table, observation, facts, prediction, [other for other in order[: RUNNERS_UP + 1] if other != row]
        ),
        reason=prefix + why + suffix,
        candidates=len(table),
        worth_opening=None if forced else _worth_opening(table, observation, facts, prediction, mask, row),
        link=observation.remote.link.as_mapping() if observation.remote is not None else {},
    )


def estimate_all(table: PlanTable, observation: Observation, facts: RequestFacts) -> tuple[PlanEstimate, ...]:
    """Every plan of the table, in its order, forbidden ones with their reason. Needs a companion in the observation."""
    assert observation.remote is not None
    as_built, table = table, table.at(facts.sizes)
    prediction = in_parts(as_built, observation, facts, predict(table, observation, facts))
    return tuple(_estimate(table, observation, facts, prediction, row) for row in range(len(table)))


# -- what may run -------------------------------------------------------------------------------------------------


def _may_run(table: PlanTable, observation: Observation, facts: RequestFacts) -> Flags:
    """Contract, privacy, companion, segment, size, metered bytes, form of the input; local always may."""
    remote = observation.remote
    if remote is None:
        return _only_local(len(table))
    mask: Flags = table.allowed[_level(facts)] & remote.opened
    mask &= table.costs[Column.UP] <= remote.payload_bytes_max
    if not 0 < facts.encoded_bytes <= remote.payload_bytes_max or remote.encoded_why_not:
        mask &= table.sends_tensors
    if remote.metered_left_bytes < math.inf:
        mask &= _crossing_bytes(table, facts) <= remote.metered_left_bytes
    return mask


def _crossing_bytes(table: PlanTable, facts: RequestFacts) -> Floats:
    """What each plan moves over the link, request and reply with their metadata; 0 for local."""
    units = np.zeros(len(Column))
    units[[Column.UP, Column.DOWN]] = 1.0
    units[Column.ENCODED], units[Column.REMOTE] = facts.encoded_bytes, 2 * REQUEST_METADATA_BYTES
    moved: Floats = units @ table.costs
    return moved


def _level(facts: RequestFacts) -> int:
    return PRIVACY_ORDER.index(facts.privacy)


def _only_local(plans: int) -> Flags:
    mask = np.zeros(plans, dtype=np.bool_)
    mask[LOCAL_ROW] = True
    return mask


def _never(table: PlanTable, facts: RequestFacts, row: int) -> str:
    """Why this plan can never run for this request, whatever the companion does; "" when it can."""
    why = table.why_not[_level(facts)][row]
    if not why and table.plans[row].codec == "encoded" and not facts.encoded_bytes:
        return "the input came as tensors, not encoded"
    return why


def _not_now(table: PlanTable, observation: Observation, facts: RequestFacts, row: int) -> str:
    """Why the companion cannot run this plan at this moment; "" when it can."""
    plan, remote = table.plans[row], observation.remote
    if row == LOCAL_ROW:
        return ""
    if remote is None:
        return observation.remote_why_not
    if not remote.opened[row]:
        part = "cut" if plan.placement is Placement.SPLIT else "model"
        return f"the companion has not opened this {part} yet"
    if (size := payload_bytes(table, facts, row)) > remote.payload_bytes_max:
        return f"its payload has {size:.0f} bytes, the companion takes at most {remote.payload_bytes_max:.0f}"
    if (moved := float(_crossing_bytes(table, facts)[row])) > remote.metered_left_bytes:
        return (
            f"it would move {moved:.0f} bytes, of this month's metered bytes {remote.metered_left_bytes:.0f} are left"
        )
    return remote.encoded_why_not if plan.codec == "encoded" else ""


# -- forced plans -------------------------------------------------------------------------------------------------


def _wished(table: PlanTable, facts: RequestFacts) -> Flags:
    """The plans that the caller asked for, at least one of which may run sometime; InvalidRequest otherwise.

    A codec alone says only how something travels, if anything does: local stays among the wished.
    """
    mode = Placement.SPLIT if facts.cut is not None and facts.mode is None else facts.mode
    if facts.cut is not None and mode is not Placement.SPLIT:
        raise InvalidRequest(f"cut {facts.cut!r} was asked for together with mode {mode}; a cut goes with mode split")
    if facts.cut is not None and facts.cut not in table.cuts:
        raise InvalidRequest(f"the model has no cut {facts.cut!r}; isthmus cuts lists the {len(table.cuts)} it has")
    if mode is Placement.LOCAL:
        if facts.codec is not None:
            raise InvalidRequest(f"codec {facts.codec!r} was asked for together with mode local, where nothing travels")
        return _only_local(len(table))
    wish: Flags = np.array(
        [
            mode in (None, plan.placement) and facts.cut in (None, plan.cut) and facts.codec in (None, plan.codec)
            for plan in table.plans
        ]
    )
    if not wish.any():
        raise InvalidRequest(f"{_wish_text(facts)} was asked for, but {_why_no_plan(table, facts, mode)}")
    if not _possible(table, facts, wish):
        why = _never(table, facts, int(wish.argmax()))
        raise InvalidRequest(f"{_wish_text(facts)} was asked for, but {why}")
    if mode is None:
        wish[LOCAL_ROW] = True
    return wish


def _why_no_plan(table: PlanTable, facts: RequestFacts, mode: Placement | None) -> str:
    """Why no plan of the table is of this kind, and what to do."""
    if mode is Placement.SPLIT and not table.cuts:
        return f"the model cannot be cut ({table.no_cuts_reason or 'it has no cut'}); ask for local or offload"
    if facts.codec == "encoded":
        if mode is Placement.SPLIT:
            return "only whole inputs travel encoded, as they came; ask for mode offload"
        return "the model's contract has no input that comes encoded (data.inputs.encoded); send tensors, as raw"
    of_kind = [plan for plan in table.plans if plan.placement is mode and facts.cut in (None, plan.cut)]
    if mode is Placement.SPLIT and not of_kind:
        which = "that cut was" if facts.cut is not None else f"all {len(table.cuts)} cuts of the model were"
        return (
            f"{which} left out when this device measured the model: the halves do not open here, or do not give what "
            "the whole gives; isthmus check shows which and how far they are off"
        )
    codecs = dict.fromkeys(plan.codec for plan in (of_kind or table.plans) if plan.codec not in (None, "encoded"))
    return f"it would save no byte there and was not measured; there are {', '.join(map(str, codecs)) or 'no codecs'}"


def _possible(table: PlanTable, facts: RequestFacts, wish: Flags) -> list[int]:
    return [row for row in np.flatnonzero(wish).tolist() if not _never(table, facts, row)]


def _wish_text(facts: RequestFacts) -> str:
    mode = facts.mode or (Placement.SPLIT if facts.cut is not None else "a plan")
    at = f" at {facts.cut}" if facts.cut is not None else ""
    codec = f" with codec {facts.codec}" if facts.codec is not None else ""
    return f"{mode}{at}{codec}"


# -- the comparison -----------------------------------------------------------------------------------------------


def _best(
    table: PlanTable, prediction: Prediction, order: list[int], budget_ms: float, incumbent: int | None
) -> tuple[int, str]:
    """The row to run and why. `order`: rows that may run, least predicted first. `incumbent`: what a challenger must
    beat; None compares without stickiness."""
    mean, risk, way_out = prediction.mean_ms, prediction.risk_ms, prediction.way_out_ms
    row = next((row for row in order if risk[row] <= budget_ms and way_out[row] <= budget_ms), None)
    if row is None:
        return _best_chance(table, prediction, order, budget_ms)
    taken = float(mean[row])
    first, late = order[0], ""
    if row != first and risk[first] > budget_ms:
        late = f"; {table.labels[first]} may take {risk[first]:.1f} ms, over the budget"
    elif row != first:
        late = f"; {table.labels[first]} would end here after {way_out[first]:.1f} ms should the companion fail"
    gone = incumbent is None or incumbent not in order or max(risk[incumbent], way_out[incumbent]) > budget_ms
    if incumbent is None or gone or row == incumbent:
        return row, f"{table.labels[row]} is expected first, in {taken:.1f} ms{late}"
    kept = float(mean[incumbent])
    if kept - taken < _must_gain_ms(prediction, incumbent, row):
        return incumbent, (
            f"{table.labels[incumbent]} is expected in {kept:.1f} ms; {table.labels[row]} ({taken:.1f} ms) gains "
            f"too little for a change{late}"
        )
    return (
        row,
        f"{table.labels[row]} is expected first, in {taken:.1f} ms ({table.labels[incumbent]}: {kept:.1f} ms){late}",
    )


def _best_chance(table: PlanTable, prediction: Prediction, order: list[int], budget_ms: float) -> tuple[int, str]:
    """The row to run where none is sure to be answered in time whatever the companion does, and why."""
    mean, risk, way_out = prediction.mean_ms, prediction.risk_ms, prediction.way_out_ms
    row = next((row for row in order if risk[row] <= budget_ms), None)
    if row is not None:
        return row, (
            f"{table.labels[row]} is expected in {mean[row]:.1f} ms; no plan is sure to be answered here within "
            f"{budget_ms:.1f} ms should the companion fail (this one after {way_out[row]:.1f} ms)"
        )
    row = min(order, key=risk.__getitem__)
    return row, (
        f"no plan is sure to meet the budget of {budget_ms:.1f} ms; {table.labels[row]} has the least risk: "
        f"expected in {mean[row]:.1f} ms, {risk[row]:.1f} ms at worst"
    )


def _must_gain_ms(prediction: Prediction, incumbent: int, challenger: int) -> float:
    """How much faster the challenger must be expected than the incumbent (which may run and fits the deadline).

    Asymmetric. Back to local: nothing, at once, since local needs nobody. To any other plan: 3 % and 0.2 ms (below
    that, two predictions cannot be told apart and a change of segments costs caches), and a quarter of the uncertainty
    that the change would add: after an outage or a long silence the link is uncertain, and remote is used again when
    there is evidence for it, not hope. An incumbent that misses the deadline or may not run any more never gets here.
    """
    if challenger == LOCAL_ROW:
        return 0.0
    sigma = (prediction.risk_ms - prediction.mean_ms) / QUANTILE_SIGMAS
    added = max(float(sigma[challenger] - sigma[incumbent]), 0.0)
    return max(CLIMB_RATIO * float(prediction.mean_ms[incumbent]), CLIMB_MS, CLIMB_SIGMAS * added)


def _worth_opening(
    table: PlanTable, observation: Observation, facts: RequestFacts, prediction: Prediction, mask: Flags, row: int
) -> CutId | None:
    """The cut that would be taken instead of `row` if all its halves were open: a request does not wait for what only
    later ones gain, but they shall find it open. None where there is none."""
    opening = observation.opening
    if opening is None:
        return None
    way_out_ms = prediction.way_out_ms - opening.run_ms - observation.slowdown * opening.finish_ms
    fits = mask & (np.maximum(prediction.risk_ms - opening.run_ms, way_out_ms) <= facts.budget_ms)
    open_ms = prediction.mean_ms - opening.run_ms
    other = int(np.where(fits, open_ms, np.inf).argmin())
    if not fits[other] or opening.run_ms[other] + opening.finish_ms[other] == 0.0:
        return None
    gains_ms = float(prediction.mean_ms[row] - open_ms[other])
    return table.plans[other].cut if other == row or gains_ms >= _must_gain_ms(prediction, row, other) else None


def _bound(
    table: PlanTable, observation: Observation, facts: RequestFacts, prediction: Prediction, row: int, mask: Flags
) -> str:
    """The constraint that bound: the fastest plan that may not run, where it beats the chosen one; "" otherwise."""
    if observation.remote is None:
        return f"; {observation.remote_why_not}"
    mean = prediction.mean_ms
    if mask[int(mean.argmin())]:
        return ""
    blocked = ~mask if facts.encoded_bytes else ~mask & table.sends_tensors
    other = int(np.where(blocked, mean, np.inf).argmin())
    if not blocked[other] or mean[other] >= mean[row]:
        return ""
    why = _never(table, facts, other) or _not_now(table, observation, facts, other)
    return f"; {table.labels[other]} would take {mean[other]:.1f} ms, but {why}" if why else ""


def _here(table: PlanTable, observation: Observation, facts: RequestFacts) -> PlanEstimate:
    """The local plan alone, by the same formula in scalars: without a companion there is nothing to compare."""
    slowdown = observation.slowdown
    whole_ms = slowdown * observation.alpha * table.whole_ms
    image_ms = slowdown * observation.image_ratio * observation.image_ms if facts.encoded_bytes else 0.0
    opening_ms = float(observation.opening.run_ms[LOCAL_ROW]) if observation.opening is not None else 0.0
    predicted_ms = observation.edge_queue_ms + opening_ms + image_ms + whole_ms
    return PlanEstimate(
        plan=LOCAL,
        predicted_ms=predicted_ms,
        risk_ms=predicted_ms + QUANTILE_SIGMAS * observation.alpha_sigma * whole_ms,
        stages_ms=_STAGES_HERE
        | {"queue": observation.edge_queue_ms, "activate": opening_ms, "image": image_ms, "head": whole_ms},
        bytes=0,
        fidelity=None,
        allowed=True,
    )


# -- explanation --------------------------------------------------------------------------------------------------


class _RunnersUp(Sequence[PlanEstimate]):
    """The rows below the chosen one, as estimates only when somebody reads them: six would double a decision's time."""

    __slots__ = ("_from", "_rows")

    def __init__(
        self,
        table: PlanTable,
        observation: Observation,
        facts: RequestFacts,
        prediction: Prediction,
        rows: list[int],
    ) -> None:
        self._from = (table, observation, facts, prediction)
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> PlanEstimate: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[PlanEstimate, ...]: ...
    def __getitem__(self, index: int | slice) -> PlanEstimate | tuple[PlanEstimate, ...]:
        if isinstance(index, slice):
            return tuple(_estimate(*self._from, row) for row in self._rows[index])
        return _estimate(*self._from, self._rows[index])


def _estimate(
    table: PlanTable, observation: Observation, facts: RequestFacts, prediction: Prediction, row: int
) -> PlanEstimate:
    parts = (prediction.units * table.costs[:, row]).tolist()
    remote = observation.remote
    queue_ms = half_rtt_ms = ahead_ms = link_up_ms = 0.0
    if remote is not None and parts[Column.REMOTE]:
        queue_ms, half_rtt_ms = remote.queue_ms, remote.link.rtt_ms / 2.0
        ahead_ms = remote.link.up_ms_per_byte * remote.ahead_bytes
        if parts[Column.ENCODED]:
            link_up_ms = remote.link.up_ms_per_byte * facts.encoded_bytes
    plan = table.plans[row]
    why_not = _never(table, facts, row) or _not_now(table, observation, facts, row)
    stages_ms = {
        "queue": parts[Column.ALL],
        "activate": float(observation.opening.run_ms[row]) if observation.opening is not None else 0.0,
        "image": parts[Column.IMAGE],
        "head": parts[Column.HEAD],
        "encode": parts[Column.ENCODE],
        "up": half_rtt_ms + ahead_ms + parts[Column.UP] + link_up_ms,
        "cloud_queue": queue_ms,
        "cloud_decode": parts[Column.CLOUD_DECODE] + parts[Column.ENCODED] - link_up_ms,
        "tail": parts[Column.TAIL],
        "down": half_rtt_ms + parts[Column.DOWN],
        "decode": parts[Column.REPLY],
        "overlap": 0.0,
    }
    if row in prediction.parts:
        stages_ms["overlap"] = float(prediction.mean_ms[row]) - sum(stages_ms.values())
    return PlanEstimate(
        plan=plan,
        predicted_ms=float(prediction.mean_ms[row]),
        risk_ms=float(prediction.risk_ms[row]),
        stages_ms=stages_ms,
        bytes=round(payload_bytes(table, facts, row)),
        fidelity=table.fidelity[row],
        allowed=not why_not,
        why_not=why_not,
        estimated=bool(table.doubt[row] > 1.0),
        parts=prediction.parts.get(row, 1),
    )
