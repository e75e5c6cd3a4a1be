"""What may run: contract, privacy, companion, segment, size, metered bytes, battery, the form of the input, and what
the caller asked for. A plan that may not is never chosen, and there is a sentence for each.

Local always may where nothing else can: somebody must answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from split.errors import InvalidRequest
from split.ids import KLT
from split.plan.observation import Flags, Observation, RemoteView
from split.plan.plan import OF_PICTURES, WITH_LEVELS, Placement, Plan, RequestFacts
from split.plan.predict import Prediction, crossing_units, sent_bytes
from split.plan.table import LOCAL_ROW, PlanTable
from split.profiles.contract import PRIVACY_ORDER


def may_run(table: PlanTable, observation: Observation, facts: RequestFacts, prediction: Prediction) -> Flags:
    """[plan]; `table` as for `predict`."""
    if observation.remote is None:
        return only_local(len(table))
    mask = table.allowed[_level(facts)]
    if not facts.encoded_bytes:
        mask = mask & table.sends_tensors
    for meets, _ in _demands(table, observation, observation.remote, facts, prediction):
        mask = mask & meets
    return mask if mask[LOCAL_ROW] or mask.any() else only_local(len(table))


def only_local(plans: int) -> Flags:
    """[plan]"""
    mask = np.zeros(plans, dtype=np.bool_)
    mask[LOCAL_ROW] = True
    return mask


def never(table: PlanTable, facts: RequestFacts, row: int) -> str:
    """Why this plan can never run for this request, whatever the companion does; "" when it can."""
    why = table.why_not(_level(facts), row, facts.fidelity)
    if not why and table.plans[row].codec == "encoded" and not facts.encoded_bytes:
        return "the input came as tensors, not encoded"
    return why


def not_now(table: PlanTable, observation: Observation, facts: RequestFacts, prediction: Prediction, row: int) -> str:
    """Why this plan cannot run at this moment; "" when it can."""
    if row == LOCAL_ROW:
        return ""
    if observation.remote is None:
        return observation.remote_why_not
    for meets, why_not in _demands(table, observation, observation.remote, facts, prediction):
        if not meets[row]:
            return why_not(row)
    return ""


def _demands(
    table: PlanTable, observation: Observation, remote: RemoteView, facts: RequestFacts, prediction: Prediction
) -> Iterator[tuple[Flags, Callable[[int], str]]]:
    """What this moment asks of a plan: which meet it, and why a row that does not may not run. Local meets each."""
    yield remote.opened, lambda row: f"the companion has not opened this {_part(table.plans[row])} yet"
    sent, most = sent_bytes(table, facts), remote.payload_bytes_max
    if sent[sent.argmax()] > most:
        yield sent <= most, lambda row: f"its payload has {sent[row]:.0f} bytes, the companion takes at most {most:.0f}"
    if (left := remote.metered_left_bytes) < math.inf:
        moved = np.array(crossing_units(facts)).dot(table.costs)  # 0 for local
        yield (
            moved <= left,
            lambda row: f"it would move {moved[row]:.0f} bytes, of this month's metered bytes {left:.0f} are left",
        )
    if why_not := remote.encoded_why_not:
        yield table.sends_tensors, lambda row: why_not
    for codec, why in remote.codecs_why_not.items():
        if (rows := table.with_codec.get(codec)) is not None:
            yield ~rows, partial(_said, why)
    if observation.battery_low and table.allowed[_level(facts)][LOCAL_ROW]:
        energy_j = prediction.energy_j
        assert energy_j is not None
        here = energy_j[LOCAL_ROW]
        yield (
            energy_j <= here,
            lambda row: f"the battery is low, and it would take {energy_j[row]:.3g} J, running here {here:.3g} J",
        )


def _said(why: str, row: int) -> str:
    return why


def _part(plan: Plan) -> str:
    return "cut" if plan.placement is Placement.SPLIT else "model"


def _level(facts: RequestFacts) -> int:
    return PRIVACY_ORDER.index(facts.privacy)


# -- forced plans -------------------------------------------------------------------------------------------------


def wished(table: PlanTable, facts: RequestFacts) -> Flags:
    """The plans that the caller asked for, at least one of which may run sometime; InvalidRequest otherwise.

    A codec alone says only how something travels, if anything does: local stays among the wished.
    """
    mode = Placement.SPLIT if facts.cut is not None and facts.mode is None else facts.mode
    if facts.cut is not None and mode is not Placement.SPLIT:
        raise InvalidRequest(f"cut {facts.cut!r} was asked for together with mode {mode}; a cut goes with mode split")
    if facts.cut is not None and facts.cut not in table.cuts:
        raise InvalidRequest(f"the model has no cut {facts.cut!r}; isthmus cuts lists the {len(table.cuts)} it has")
    if mode is Placement.LOCAL and facts.codec is not None:
        raise InvalidRequest(f"codec {facts.codec!r} was asked for together with mode local, where nothing travels")
    wish: Flags = np.array(
        [
            mode in (None, plan.placement) and facts.cut in (None, plan.cut) and facts.codec in (None, plan.codec)
            for plan in table.plans
        ]
    )
    if not wish.any():
        raise InvalidRequest(f"{wish_text(facts)} was asked for, but {_why_no_plan(table, facts, mode)}")
    if all(never(table, facts, row) for row in np.flatnonzero(wish).tolist()):
        raise InvalidRequest(f"{wish_text(facts)} was asked for, but {never(table, facts, int(wish.argmax()))}")
    if mode is None:
        wish[LOCAL_ROW] = True
    return wish


def why_unmet(
    table: PlanTable, observation: Observation, facts: RequestFacts, prediction: Prediction, wish: Flags
) -> str:
    """Why none of the plans asked for can run at this moment."""
    rows = [row for row in np.flatnonzero(wish).tolist() if not never(table, facts, row)]
    return not_now(table, observation, facts, prediction, rows[0])


def wish_text(facts: RequestFacts) -> str:
    """What was asked for, in words."""
    mode = facts.mode or (Placement.SPLIT if facts.cut is not None else "a plan")
    at = f" at {facts.cut}" if facts.cut is not None else ""
    codec = f" with codec {facts.codec}" if facts.codec is not None else ""
    return f"{mode}{at}{codec}"


def _why_no_plan(table: PlanTable, facts: RequestFacts, mode: Placement | None) -> str:
    """Why no plan of the table is of this kind, and what to do."""
    if mode is Placement.SPLIT and not table.cuts:
        return f"the model cannot be cut ({table.no_cuts_reason or 'it has no cut'}); ask for local or offload"
    if facts.codec in OF_PICTURES:
        if mode is Placement.SPLIT:
            return f"only whole inputs travel as pictures ({facts.codec}); ask for mode offload"
        if "encoded" not in table.with_codec:
            return "the model's contract has no input that comes encoded (data.inputs.encoded); send tensors, as raw"
    if facts.codec in WITH_LEVELS:
        if facts.codec == KLT and mode is Placement.OFFLOAD:
            return "only what crosses at a cut travels as klt; ask for mode split"
        return "the model has no calibration for it here; isthmus calibrate makes one"
    of_kind = [plan for plan in table.plans if plan.placement is mode and facts.cut in (None, plan.cut)]
    if mode is Placement.SPLIT and not of_kind:
        which = "that cut was" if facts.cut is not None else f"all {len(table.cuts)} cuts of the model were"
        return (
            f"{which} left out when this device measured the model: the halves do not open here, or do not give what "
            "the whole gives; isthmus check shows which and how far they are off"
        )
    codecs = dict.fromkeys(plan.codec for plan in (of_kind or table.plans) if plan.codec not in (None, "encoded"))
    return f"it would save no byte there and was not measured; there are {', '.join(map(str, codecs)) or 'no codecs'}"
