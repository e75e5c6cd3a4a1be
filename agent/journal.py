"""The last requests, for `isthmus explain`, `status` and the metrics: numbers and names, never tensors; bounded."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from agent.intake import InferenceRequest
from agent.metrics import Metrics
from split.errors import IsthmusError
from split.plan.plan import Decision, PlanEstimate

KEPT = 1024
"""Requests that can still be explained: some minutes of a busy camera, under 2 MB."""
RECENT = 256
"""Latencies behind the medians of `status`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One finished request."""

    model: str
    deadline_ms: float
    decision: Decision
    ran: str
    fallback: str
    stages_ms: Mapping[str, float]
    total_ms: float
    error: str


_INPUT_STAGES = frozenset({"image", "encode"})
_OUTPUT_STAGES = frozenset({"decode"})
"""Triton's compute_input and compute_output; all other stages but the queue are its compute_infer."""


@dataclass(slots=True)
class _Totals:
    """Of one model since the daemon started, nanoseconds."""

    last_ms: int = 0
    success: int = 0
    success_ns: int = 0
    failed: int = 0
    failed_ns: int = 0
    queue_ns: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0

    def add(self, stages_ms: Mapping[str, float], total_ms: float) -> None:
        self.last_ms = time.time_ns() // 1_000_000
        self.success += 1
        self.success_ns += int(total_ms * 1e6)
        for stage, ms in stages_ms.items():
            ns = int(ms * 1e6)
            if stage == "queue":
                self.queue_ns += ns
            elif stage in _INPUT_STAGES:
                self.input_ns += ns
            elif stage in _OUTPUT_STAGES:
                self.output_ns += ns
            else:
                self.infer_ns += ns


class Journal:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._placements: dict[str, Counter[str]] = {}
        self._recent_ms: dict[str, deque[float]] = {}
        self._totals: dict[str, _Totals] = {}
        self.requests = 0
        self.failures = 0
        self.fallbacks = 0

    def answered(
        self,
        request: InferenceRequest,
        decision: Decision,
        *,
        ran: str,
        fallback: str,
        stages_ms: Mapping[str, float],
        total_ms: float,
    ) -> None:
        name = request.model.name
        self.requests += 1
        self.fallbacks += bool(fallback)
        placement = ran.split()[0]
        self._placements.setdefault(name, Counter())[placement] += 1
        self._recent_ms.setdefault(name, deque(maxlen=RECENT)).append(total_ms)
        self._totals.setdefault(name, _Totals()).add(stages_ms, total_ms)
        self._metrics.answered(name, placement, bool(fallback), stages_ms, total_ms)
        self._keep(request, decision, ran, fallback, stages_ms, total_ms, "")

    def failed(self, request: InferenceRequest, decision: Decision, error: IsthmusError, total_ms: float) -> None:
        self.requests += 1
        self.failures += 1
        totals = self._totals.setdefault(request.model.name, _Totals())
        totals.failed += 1
        totals.failed_ns += int(total_ms * 1e6)
        self._metrics.failed(request.model.name, error.code)
        self._keep(request, decision, "", "", {}, total_ms, f"{error.code}: {error}")

    def _keep(
        self,
        request: InferenceRequest,
        decision: Decision,
        ran: str,
        fallback: str,
        stages_ms: Mapping[str, float],
        total_ms: float,
        error: str,
    ) -> None:
        self._entries[request.id] = Entry(
            model=request.model.name,
            deadline_ms=(request.deadline_at_s - request.received_at_s) * 1000,
            decision=decision,
            ran=ran,
            fallback=fallback,
            stages_ms=stages_ms,
            total_ms=total_ms,
            error=error,
        )
        if len(self._entries) > KEPT:
            self._entries.popitem(last=False)

    def placements(self, model: str) -> dict[str, int]:
        return dict(self._placements.get(model, {}))

    def p50_ms(self, model: str) -> float | None:
        recent = self._recent_ms.get(model)
        return round(median(recent), 3) if recent else None

    def statistics(self, model: str, version: str) -> dict[str, Any]:
        """Triton's `model_stats` element of one model."""
        totals = self._totals.get(model, _Totals())
        count = totals.success
        stages = {
            "success": (count, totals.success_ns),
            "fail": (totals.failed, totals.failed_ns),
            "queue": (count, totals.queue_ns),
            "compute_input": (count, totals.input_ns),
            "compute_infer": (count, totals.infer_ns),
            "compute_output": (count, totals.output_ns),
            "cache_hit": (0, 0),
            "cache_miss": (0, 0),
        }
        return {
            "name": model,
            "version": version,
            "last_inference": totals.last_ms,
            "inference_count": count,
            "execution_count": count,
            "inference_stats": {name: {"count": n, "ns": ns} for name, (n, ns) in stages.items()},
            "batch_stats": [],
            "memory_usage": [],
        }

    def explain(self, request_id: str) -> dict[str, Any] | None:
        """Everything known about one request, for the HTTP API; None when it is not (or no longer) known."""
        entry = self._entries.get(request_id)
        if entry is None:
            return None
        decision = entry.decision
        return {
            "request_id": request_id,
            "model": entry.model,
            "chosen": as_json(decision.chosen),
            "runners_up": [as_json(one) for one in decision.runners_up],
            "candidates": decision.candidates,
            "reason": decision.reason,
            "link": dict(decision.link),
            "ran": entry.ran,
            "fallback": entry.fallback or None,
            "measured_ms": {stage: round(ms, 3) for stage, ms in entry.stages_ms.items()},
            "total_ms": round(entry.total_ms, 3),
            "deadline_ms": round(entry.deadline_ms, 1),
            "error": entry.error or None,
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
        "allowed": estimate.allowed,
        "why_not": estimate.why_not or None,
    }
