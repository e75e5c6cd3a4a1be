"""What was decided, in numbers and sentences: a plan by stage, the constraint that bound, why not a split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, overload

import numpy as np

from split.plan.choose import Compared
from split.plan.constraints import never, not_now
from split.plan.observation import Observation
from split.plan.plan import LOCAL, Placement, PlanEstimate, RequestFacts
from split.plan.predict import REQUEST_METADATA_BYTES, Prediction
from split.plan.probing import PONG_BYTES
from split.plan.table import LOCAL_ROW, Column, PlanTable

RUNNERS_UP: Final = 5
REPLY_WEIGHS_MS: Final = 3.0
"""A reply that takes longer to come down, round trip apart: as `Link.DOWN_SHOWS_MS`."""

_STAGES_HERE: Final = dict.fromkeys(
    (
        *("queue", "activate", "image", "head", "encode", "up"),
        *("cloud_queue", "cloud_decode", "tail", "down", "decode", "rest", "overlap"),
    ),
    0.0,
)


def estimate(
    table: PlanTable,
    observation: Observation,
    facts: RequestFacts,
    prediction: Prediction,
    row: int,
    *,
    may_run: bool = False,
) -> PlanEstimate:
    """One plan of the table; `table` as for `predict`. `may_run`: it is known that nothing forbids it."""
    costs = table.costs[:, row]
    _, image_ms, encode_ms, _, up_ms, down_ms, decode_ms, encoded_ms, reply_ms, head_ms, tail_ms, _, *calls = (
        prediction.units * costs
    ).tolist()
    encode_call_ms, decode_call_ms, reply_call_ms = calls
    encode_ms, decode_ms, reply_ms = encode_ms + encode_call_ms, decode_ms + decode_call_ms, reply_ms + reply_call_ms
    opening_ms = float(observation.opening.run_ms[row]) if observation.opening is not None else 0.0
    cloud_queue_ms = half_rtt_ms = ahead_ms = window_ms = crossing_bytes = there_ms = 0.0
    up_bytes = float(costs[Column.UP])
    if (remote := observation.remote) is not None and costs[Column.REMOTE]:
        cloud_queue_ms, half_rtt_ms, there_ms = remote.queue_ms, remote.link.rtt_ms / 2.0, remote.rest_ms
        ahead_ms = remote.link.up_ms_per_byte * remote.ahead_bytes
        if costs[Column.ENCODED]:
            up_bytes = float(facts.encoded_bytes)
            up_ms = remote.link.up_ms_per_byte * up_bytes
            decode_ms += encoded_ms - up_ms
        if remote.link.slow_start is not None:
            window_ms = remote.link.slow_start.ms(up_bytes)
        crossing_bytes = up_bytes + float(costs[Column.DOWN]) + 2 * REQUEST_METADATA_BYTES
    why_not = "" if may_run else never(table, facts, row) or not_now(table, observation, facts, prediction, row)
    stages_ms = {
        "queue": observation.edge_queue_ms,
        "activate": opening_ms,
        "image": image_ms,
        "head": head_ms,
        "encode": encode_ms,
        "up": half_rtt_ms + ahead_ms + up_ms + window_ms,
        "cloud_queue": cloud_queue_ms,
        "cloud_decode": decode_ms,
        "tail": tail_ms,
        "down": half_rtt_ms + down_ms,
        "decode": reply_ms,
        "rest": observation.rest_ms + there_ms,
        "overlap": 0.0,
    }
    power, prices, companion_ms = observation.power, observation.prices, decode_ms + tail_ms
    energy_j = power.joules(
        compute_ms=opening_ms + image_ms + head_ms + encode_ms + reply_ms,
        send_ms=up_ms,
        receive_ms=down_ms,
        wait_ms=2 * half_rtt_ms + ahead_ms + window_ms + cloud_queue_ms + companion_ms + there_ms,
    )
    predicted_ms, risk_ms = float(prediction.mean_ms[row]), float(prediction.risk_ms[row])
    if row in prediction.parts:
        stages_ms["overlap"] = predicted_ms - sum(stages_ms.values())
    return PlanEstimate(
        plan=table.plans[row],
        predicted_ms=predicted_ms,
        risk_ms=risk_ms,
        sigma_ms=(risk_ms - predicted_ms) / table.objective.sigmas,
        stages_ms=stages_ms,
        bytes=round(up_bytes),
        fidelity=table.fidelity(row)[0],
        level=table.bounded.levels[row],
        allowed=not why_not,
        why_not=why_not,
        estimated=bool(table.doubt[row] > 1.0),
        parts=prediction.parts.get(row, 1),
        energy_j=energy_j,
        energy_measured=power.measured,
        money=prices.per_byte * crossing_bytes + prices.per_companion_ms * companion_ms,
    )


def setting_text(table: PlanTable, facts: RequestFacts, row: int) -> str:
    """How a codec with settings keeps to the bound, as `klt at level 128: 2.4 KB, kl 0.021, at most 0.031
    of 0.036 allowed`; "" for
    any other plan."""
    level, (found, high) = table.bounded.levels[row], table.fidelity(row)
    if level is None or found is None or high is None:
        return ""
    size, codec = float(table.costs[Column.UP, row]), table.plans[row].codec
    bound, measure = table.rows.bound if facts.fidelity is None else facts.fidelity, table.rows.measure
    off = f"{measure} {found:.2g}, at most {high:.2g} of {bound:.2g} allowed"
    return f"{codec} at level {level}: {size / 1000:.1f} KB, {off}"


def here(table: PlanTable, observation: Observation, facts: RequestFacts) -> PlanEstimate:
    """The local plan alone, by the same formula in scalars: without a companion there is nothing to compare."""
    slowdown = observation.slowdown
    whole_ms = slowdown * observation.alpha * table.whole_ms
    image_ms = slowdown * observation.image_ratio * observation.image_ms if facts.encoded_bytes else 0.0
    opening_ms = float(observation.opening.run_ms[LOCAL_ROW]) if observation.opening is not None else 0.0
    queue_ms, rest_ms, power = observation.edge_queue_ms, observation.rest_ms, observation.power
    predicted_ms, sigma_ms = queue_ms + opening_ms + image_ms + whole_ms + rest_ms, observation.alpha_sigma * whole_ms
    return PlanEstimate(
        plan=LOCAL,
        predicted_ms=predicted_ms,
        risk_ms=predicted_ms + table.objective.sigmas * sigma_ms,
        sigma_ms=sigma_ms,
        stages_ms=_STAGES_HERE
        | {"queue": queue_ms, "activate": opening_ms, "image": image_ms, "head": whole_ms, "rest": rest_ms},
        bytes=0,
        fidelity=None,
        allowed=True,
        energy_j=power.joules(compute_ms=opening_ms + image_ms + whole_ms, send_ms=0.0, receive_ms=0.0, wait_ms=0.0),
        energy_measured=power.measured,
    )


class RunnersUp(Sequence[PlanEstimate]):
    """The best rows but the chosen one, worked out when somebody reads them: that takes as long as a decision."""

    __slots__ = ("_chosen", "_compared", "_found")

    def __init__(self, compared: Compared, chosen: int) -> None:
        self._compared = compared
        self._chosen = chosen
        self._found: list[int] | None = None

    @property
    def _rows(self) -> list[int]:
        if self._found is None:
            self._found = [row for row in self._compared.ordered() if row != self._chosen][:RUNNERS_UP]
        return self._found

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> PlanEstimate: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[PlanEstimate, ...]: ...
    def __getitem__(self, index: int | slice) -> PlanEstimate | tuple[PlanEstimate, ...]:
        if isinstance(index, slice):
            return tuple(_estimate_of(self._compared, row) for row in self._rows[index])
        return _estimate_of(self._compared, self._rows[index])


def is_for_the_reply(compared: Compared, row: int) -> bool:
    """Whether the device's own plan, `row`, is better than another one only by what that one's reply takes to come down
    (`REPLY_WEIGHS_MS` at least, and no less than a pong that would tell): see `Decision.reply_decides`."""
    if row != LOCAL_ROW:
        return False
    reply_bytes, values = compared.table.costs[Column.DOWN], compared.value_ms
    down_ms = compared.prediction.units[Column.DOWN] * reply_bytes
    weighs = (down_ms > REPLY_WEIGHS_MS) & (reply_bytes >= PONG_BYTES)
    return bool((weighs & (values - down_ms < values[LOCAL_ROW])).any())


def _estimate_of(compared: Compared, row: int) -> PlanEstimate:
    return estimate(compared.table, compared.observation, compared.facts, compared.prediction, row)


def bound(compared: Compared, row: int) -> str:
    """The constraint that bound: the best plan that may not run, where it beats the chosen one; "" otherwise."""
    table, observation, facts = compared.table, compared.observation, compared.facts
    if observation.remote is None:
        return f"; {observation.remote_why_not}"
    values, mask = compared.score.value_ms, compared.mask
    if mask[int(values.argmin())]:
        return ""
    blocked = ~mask if facts.encoded_bytes else ~mask & table.sends_tensors
    other = int(np.where(blocked, values, np.inf).argmin())
    if not blocked[other] or values[other] >= values[row]:
        return ""
    why = never(table, facts, other) or not_now(table, observation, facts, compared.prediction, other)
    return f"; {table.labels[other]} would take {compared.prediction.mean_ms[other]:.1f} ms, but {why}" if why else ""


def why_not_split(compared: Compared, row: int) -> str:
    """Why the chosen `row` is no split, as a sentence: the best split and what it would take, or what forbids it; ""
    where a split was chosen."""
    table, observation, facts = compared.table, compared.observation, compared.facts
    if table.plans[row].placement is Placement.SPLIT:
        return ""
    splits = table.splits
    if not splits.any():
        return f"there is no split: {table.no_cuts_reason or 'no cut could be measured'}"
    if observation.remote is None:
        return f"no split: {observation.remote_why_not}"
    may = splits & compared.mask
    best = int(np.where(may if may.any() else splits, compared.score.value_ms, np.inf).argmin())
    label, predicted = table.labels[best], _estimate_of(compared, best)
    if not predicted.allowed:
        return f"no split is allowed: {predicted.why_not} ({label})"
    most = max(predicted.stages_ms, key=predicted.stages_ms.__getitem__)
    budget_ms, prediction = facts.budget_ms, compared.prediction
    said = (
        f"the best {label} would take {predicted.predicted_ms:.1f} ms, {predicted.stages_ms[most]:.1f} ms of it {most}"
        f"; {table.labels[row]} {prediction.mean_ms[row]:.1f} ms"
    )
    if prediction.risk_ms[best] > budget_ms:
        return f"{said}; it may take {prediction.risk_ms[best]:.1f} ms, over the budget of {budget_ms:.1f} ms"
    if prediction.way_out_ms[best] > budget_ms:
        return f"{said}; it would end here after {prediction.way_out_ms[best]:.1f} ms should the companion fail"
    return said
