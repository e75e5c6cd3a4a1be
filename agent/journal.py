"""The last requests and the sums over all of them: for `isthmus explain`, `status`, statistics and metrics.

Numbers and names, never tensors; the requests that can be explained are bounded by count.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from agent.intake import InferenceRequest
from agent.outcome import Outcome
from agent.quality import Ratios, compared
from agent.totals import Times, Totals
from split.errors import IsthmusError
from split.plan.kept import Kept
from split.plan.plan import Decision, Plan, PlanEstimate, RequestFacts
from split.plan.power import NO_POWER, Power, crossing_ms, used_joules

KEPT = 1024
"""Requests that can still be explained: some minutes of a busy camera, 3 KB each."""
COMPARED_KEPT = 128
"""Of them, the last ones with what was not chosen. What that is worked out from takes 9 KB a request with 100 plans,
29 where no other request has its sizes; to work it out for each takes a third of a millisecond on the event loop. So
all of them together stay under 8 MB."""
FORGOTTEN = f"what was not chosen is known of the last {COMPARED_KEPT} requests only"
_BUSY: Mapping[str, str | None] = {
    "queue": None,
    "activate": None,
    "network": None,
    "cloud_queue": None,
    "rest": None,
    "cloud_decode": "companion",
    "tail": "companion",
}
"""Stage → whom it keeps from the next request (None: nobody, or, for the link, counted apart); all others the
device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One finished request."""

    model: str
    received_at_s: float
    """Monotonic seconds of this host."""
    deadline_ms: float
    facts: RequestFacts
    decision: Decision
    total_ms: float
    ran: Plan | None = None
    fallback: str = ""
    stages_ms: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    sent: bool = False
    """As in `Outcome`."""
    doubled_ms: float = 0.0
    """As in `Outcome`."""
    joules: float | None = None
    """Used above idle, by measured stages; None where nothing is known of the device's power, or nothing came out."""
    power: Power = NO_POWER
    """Behind `joules`."""


def answered_entry(request: InferenceRequest, outcome: Outcome) -> Entry:
    """What is kept of an answered request: nothing that holds a tensor."""
    return Entry(
        model=request.model.name,
        received_at_s=request.received_at_s,
        deadline_ms=_deadline_ms(request),
        facts=request.facts,
        decision=outcome.decision,
        total_ms=outcome.total_ms,
        ran=outcome.ran,
        fallback=outcome.fallback,
        stages_ms=outcome.stages_ms,
        sent=outcome.sent,
        doubled_ms=outcome.doubled_ms,
    )


def _deadline_ms(request: InferenceRequest) -> float:
    return (request.deadline_at_s - request.received_at_s) * 1000


class Journal:
    """`power`: what the device draws at this moment (monotonic seconds), while this model runs."""

    def __init__(self, power: Callable[[float, str], Power] = lambda now_s, model: NO_POWER) -> None:
        self._power = power
        self.on_entry: Callable[[Entry], None] = lambda entry: None
        """Told of each finished request, when it is written down here."""
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        """The last `COMPARED_KEPT`."""
        self._older: OrderedDict[str, Entry] = OrderedDict()
        self.totals: dict[str, Totals] = {}

    def answered(self, request_id: str, entry: Entry) -> None:
        """`entry` as `answered_entry` makes it."""
        entry, totals = self._with_joules(entry), self._totals(entry.model)
        assert entry.ran is not None
        if entry.joules is not None:
            measured = entry.power.measured
            totals.joules[measured] = totals.joules.get(measured, 0.0) + entry.joules
            totals.recent_j.append(entry.joules)
        totals.placements.setdefault(str(entry.ran.placement), Times()).add(entry.total_ms)
        totals.fallbacks += bool(entry.fallback)
        if entry.doubled_ms > 0.0:
            totals.finishes["companion"] += 1
        elif entry.sent and entry.fallback:
            totals.finishes["device"] += 1
        totals.recent_ms.append(entry.total_ms)
        totals.recent_all_ms.append(entry.total_ms)
        totals.explored += entry.decision.tried
        chosen = entry.decision.chosen
        rtt_ms = entry.decision.link.get("rtt_ms", 0.0)
        up_ms, down_ms = crossing_ms(entry.stages_ms, chosen.stages_ms, rtt_ms, chosen.parts)
        totals.up_ms += up_ms
        totals.down_ms += down_ms
        if not entry.fallback and entry.ran == chosen.plan:
            for stage, measured_ms, predicted_ms in compared(entry.stages_ms, entry.total_ms, chosen):
                totals.predicted.setdefault(stage, Ratios()).add(measured_ms, predicted_ms)
        for stage, ms in entry.stages_ms.items():
            totals.stages_ms[stage] = totals.stages_ms.get(stage, 0.0) + ms
        self._keep(request_id, entry)

    def _with_joules(self, entry: Entry) -> Entry:
        power = self._power(entry.received_at_s + entry.total_ms / 1000, entry.model)
        if not power.source:
            return entry
        decision = entry.decision
        rtt_ms = decision.link.get("rtt_ms", 0.0)
        joules = used_joules(
            power,
            entry.stages_ms,
            decision.chosen.stages_ms,
            rtt_ms,
            entry.total_ms,
            parts=decision.chosen.parts,
            sent=entry.sent,
            doubled_ms=entry.doubled_ms,
        )
        return replace(entry, joules=joules, power=power)

    def failed(self, request: InferenceRequest, decision: Decision, error: IsthmusError, total_ms: float) -> None:
        """What is kept of a request that ended in `error`, `total_ms` after it came."""
        totals = self._totals(request.model.name)
        totals.failures[error.code] += 1
        totals.failures_ms += total_ms
        totals.recent_all_ms.append(math.inf)
        entry = Entry(
            model=request.model.name,
            received_at_s=request.received_at_s,
            deadline_ms=_deadline_ms(request),
            facts=request.facts,
            decision=decision,
            total_ms=total_ms,
            error=f"{error.code}: {error}",
        )
        self._keep(request.id, entry)

    def compared(self, model: str, *, agrees: bool) -> None:
        """The device ran the whole of a request that the companion had answered."""
        self._totals(model).shadows[agrees] += 1

    def checked(self, model: str, codec: str, kept: Kept) -> None:
        """The device ran the whole of a request that was answered over a lossy codec; `kept`: what is known now."""
        self._totals(model).checks[codec] = (kept.seen, kept.over, kept.mean_ratio)

    def unchecked(self, model: str, codec: str, answers: int) -> None:
        """So many answers over a lossy codec came since the last one that was checked."""
        self._totals(model).unchecked[codec] = answers

    def _totals(self, model: str) -> Totals:
        totals = self.totals.get(model)
        if totals is None:
            totals = self.totals[model] = Totals()
        totals.last_at_ms = time.time_ns() // 1_000_000
        return totals

    def _keep(self, request_id: str, entry: Entry) -> None:
        for entries in (self._entries, self._older):  # an id that came again
            entries.pop(request_id, None)
        self._entries[request_id] = entry
        if len(self._entries) > COMPARED_KEPT:
            older_id, older = self._entries.popitem(last=False)
            self._older[older_id] = _without_compared(older)
        if len(self._older) > KEPT - COMPARED_KEPT:
            self._older.popitem(last=False)
        self.on_entry(entry)

    # -- reading ------------------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Over all models: requests, failures, fallbacks."""
        totals = self.totals.values()
        failures = sum(each.failures.total() for each in totals)
        answered = sum(times.count for each in totals for times in each.placements.values())
        return {
            "requests": answered + failures,
            "failures": failures,
            "fallbacks": sum(each.fallbacks for each in totals),
        }

    def placements(self, model: str) -> dict[str, int]:
        """Answered requests by where they ran."""
        totals = self.totals.get(model)
        return {} if totals is None else {name: times.count for name, times in totals.placements.items()}

    def shadows(self, model: str) -> dict[str, int]:
        """Compared answers of the companion's; empty before the first."""
        totals = self.totals.get(model)
        if totals is None or not totals.shadows:
            return {}
        return {"agreed": totals.shadows[True], "differed": totals.shadows[False]}

    def checks(self, model: str) -> dict[str, dict[str, float]]:
        """Spot checks by codec, and the answers since the last one; empty before the first lossy answer."""
        totals = self.totals.get(model, Totals())
        found: dict[str, dict[str, float]] = {}
        for codec, unchecked in totals.unchecked.items():
            seen, over, ratio = totals.checks.get(codec, (0, 0, 0.0))
            found[codec] = {
                "checked": seen,
                "beyond_bound": over,
                "mean_of_bound": round(ratio, 4),
                "unchecked": unchecked,
            }
        return found

    def p50_ms(self, model: str) -> float | None:
        """Median of the last `RECENT` answers; None before the first."""
        totals = self.totals.get(model)
        return round(median(totals.recent_ms), 3) if totals and totals.recent_ms else None

    def measured(self, model: str) -> dict[str, float | None]:
        """For who holds it against a contract: latencies over the last `RECENT` requests (None where so many of them
        got no answer that there is no such latency), the share that got none, and the requests a second that the
        longest of device, link up, link down and companion would have allowed, by the means since the start."""
        totals = self.totals.get(model, Totals())
        recent = sorted(totals.recent_all_ms)
        count = sum(times.count for times in totals.placements.values())
        spent = {"device": 0.0, "up": totals.up_ms, "down": totals.down_ms, "companion": 0.0}
        for stage, ms in totals.stages_ms.items():
            if (where := _BUSY.get(stage, "device")) is not None:
                spent[where] += ms
        longest_ms = max(spent.values())
        return {
            "requests": count,
            "p50_ms": _finite(median(recent)) if recent else None,
            "p99_ms": _finite(recent[math.ceil(0.99 * len(recent)) - 1]) if recent else None,
            "failed_ratio": round(recent.count(math.inf) / len(recent), 4) if recent else None,
            "per_s": round(1000 * count / longest_ms, 3) if longest_ms else None,
        }

    def joules_mean(self, model: str) -> float | None:
        """Of the last `RECENT` answers whose joules are known; None before the first."""
        totals = self.totals.get(model)
        return fmean(totals.recent_j) if totals and totals.recent_j else None

    def statistics(self, model: str, version: str) -> dict[str, Any]:
        """Triton's `model_stats` element of one model."""
        totals = self.totals.get(model, Totals())
        count = sum(times.count for times in totals.placements.values())
        ms = totals.stages_ms
        inputs_ms = ms.get("image", 0.0) + ms.get("encode", 0.0)
        outputs_ms = ms.get("decode", 0.0)
        others_ms = sum(ms.values()) - inputs_ms - outputs_ms - ms.get("queue", 0.0) - ms.get("rest", 0.0)
        stages = {
            "success": (count, sum(times.sum_ms for times in totals.placements.values())),
            "fail": (totals.failures.total(), totals.failures_ms),
            "queue": (count, ms.get("queue", 0.0)),
            "compute_input": (count, inputs_ms),
            "compute_infer": (count, others_ms),
            "compute_output": (count, outputs_ms),
            "cache_hit": (0, 0.0),
            "cache_miss": (0, 0.0),
        }
        return {
            "name": model,
            "version": version,
            "last_inference": totals.last_at_ms,
            "inference_count": count,
            "execution_count": count,
            "inference_stats": {name: {"count": n, "ns": int(spent * 1e6)} for name, (n, spent) in stages.items()},
            "batch_stats": [],
            "memory_usage": [],
        }

    def explain(self, request_id: str) -> dict[str, Any] | None:
        """Everything known about one request, for the HTTP API; None when it is not (or no longer) known."""
        entry = self._entries.get(request_id) or self._older.get(request_id)
        if entry is None:
            return None
        decision = entry.decision
        return {
            "request_id": request_id,
            "model": entry.model,
            "received_at_s": entry.received_at_s,
            "chosen": as_json(decision.chosen),
            "runners_up": [as_json(one) for one in decision.runners_up],
            "candidates": decision.candidates,
            "reason": decision.reason,
            "why_not_split": decision.why_no_split() or None,
            "objective": {name: round(weight, 3) for name, weight in decision.objective.items()},
            "link": dict(decision.link),
            "ran": "" if entry.ran is None else str(entry.ran),
            "fallback": entry.fallback or None,
            "measured_ms": {stage: round(ms, 3) for stage, ms in entry.stages_ms.items()},
            "total_ms": round(entry.total_ms, 3),
            "deadline_ms": round(entry.deadline_ms, 1),
            "energy": _energy_json(entry),
            "error": entry.error or None,
        }


def _without_compared(entry: Entry) -> Entry:
    """The same, with its reason in words, and nothing that holds the plans that were not chosen."""
    reason = entry.decision.reason
    decision = replace(
        entry.decision,
        runners_up=(),
        reason_of=lambda: reason,
        why_no_split=lambda: FORGOTTEN,
        reply_decides=lambda: False,  # only the planner asks, of the last decision
    )
    return replace(entry, decision=decision)


def _finite(ms: float) -> float | None:
    return round(ms, 3) if ms < math.inf else None


def _energy_json(entry: Entry) -> dict[str, Any] | None:
    """What the request used, and how that is known; None where it is not."""
    if entry.joules is None:
        return None
    return {
        "used_j": round(entry.joules, 4),
        "predicted_j": round(entry.decision.chosen.energy_j, 4),
        "measured": entry.power.measured,
        "source": entry.power.source,
    }


def as_json(estimate: PlanEstimate) -> dict[str, Any]:
    """PLAN of DESIGN §7."""
    return {
        "placement": str(estimate.plan.placement),
        "cut": estimate.plan.cut,
        "codec": estimate.plan.codec,
        "predicted_ms": round(estimate.predicted_ms, 3),
        "stages_ms": {stage: round(ms, 3) for stage, ms in estimate.stages_ms.items()},
        "bytes": estimate.bytes,
        "fidelity": estimate.fidelity,
        "level": estimate.level,
        "allowed": estimate.allowed,
        "why_not": estimate.why_not or None,
        "parts": estimate.parts,
        "energy_j": round(estimate.energy_j, 4),
        "energy_measured": estimate.energy_measured,
        "money": estimate.money,
    }
