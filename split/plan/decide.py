"""The decision of one request: the prediction of all plans (`predict.py`), what may run (`constraints.py`), what each
is worth (`score.py`), the comparison (`choose.py`), and the words for it (`explain.py`).

Pure: nothing is remembered here (the last choice comes in as `incumbent`).
"""

from __future__ import annotations

from functools import partial

from split.plan.choose import Compared
from split.plan.constraints import may_run, only_local, why_unmet, wish_text, wished
from split.plan.explain import RunnersUp, bound, estimate, here, is_for_the_reply, setting_text, why_not_split
from split.plan.exploring import Explorer
from split.plan.observation import Observation
from split.plan.parting import in_parts
from split.plan.plan import Decision, PlanEstimate, RequestFacts
from split.plan.predict import predict
from split.plan.table import LOCAL_ROW, PlanTable


def decide(
    table: PlanTable, observation: Observation, facts: RequestFacts, explorer: Explorer | None = None
) -> Decision:
    """Choose the plan of one request; `explorer` may try another near the best where the request leaves the choice.

    The least value among the allowed plans whose risk and whose way out fit the budget; where none is, among those
    whose risk fits; the least risk when none does. A forced mode, cut or codec is respected: InvalidRequest, naming the
    constraint, when it can never run; local, with the reason, when it cannot run now.
    """
    as_built = table.within(facts.fidelity)
    table = as_built.at(facts.sizes)
    if observation.remote is None and (facts.mode, facts.cut, facts.codec) == (None, None, None):
        chosen = here(table, observation, facts)
        if chosen.risk_ms <= facts.budget_ms:
            label, alone = table.labels[LOCAL_ROW], observation.remote_why_not
            return Decision(
                chosen=chosen,
                runners_up=(),
                reason_of=lambda: f"{label} is expected first, in {chosen.predicted_ms:.1f} ms; {alone}",
                candidates=len(table),
                why_no_split=lambda: f"no split: {alone}",
            )
    prediction = in_parts(as_built, observation, facts, predict(table, observation, facts))
    mask = may_run(table, observation, facts, prediction)
    forced = facts.mode is not None or facts.cut is not None
    prefix = suffix = ""
    if forced or facts.codec is not None:
        wish = wished(table, facts)
        prefix = f"{wish_text(facts)} was asked for; "
        mask = mask & wish
        if not mask.any():
            mask = only_local(len(table))
            suffix = f"; {why_unmet(table, observation, facts, prediction, wish)}"
    compared = Compared.of(table, observation, facts, prediction, mask)
    best, why = compared.best(None if forced else observation.incumbent)
    row, explored = best, None
    if explorer is not None and not prefix:
        explored = explorer.choose(best, compared.value_ms, compared.leisurely)
    if explored is not None:
        row = explored.row

    def reason() -> str:
        said = (
            why() if explored is None else f"{table.labels[row]} runs instead of {table.labels[best]}, {explored.why}"
        )
        setting = setting_text(table, facts, row)
        return prefix + said + (f" ({setting})" if setting else "") + (suffix if forced else bound(compared, best))

    return Decision(
        chosen=estimate(table, observation, facts, prediction, row, may_run=row != LOCAL_ROW),
        runners_up=RunnersUp(compared, row),
        reason_of=reason,
        candidates=len(table),
        worth_opening=None if forced else compared.worth_opening(best),
        link=observation.remote.link.as_mapping() if observation.remote is not None else {},
        objective=compared.score.objective.as_mapping(),
        why_no_split=partial(why_not_split, compared, row),
        reply_decides=partial(is_for_the_reply, compared, row),
        tried=explored is not None and explored.cost_ms > 0.0,
    )


def estimate_all(table: PlanTable, observation: Observation, facts: RequestFacts) -> tuple[PlanEstimate, ...]:
    """Every plan of the table, in its order, forbidden ones with their reason. Needs a companion in the observation."""
    assert observation.remote is not None
    as_built = table.within(facts.fidelity)
    table = as_built.at(facts.sizes)
    prediction = in_parts(as_built, observation, facts, predict(table, observation, facts))
    return tuple(estimate(table, observation, facts, prediction, row) for row in range(len(table)))
