"""Prometheus metrics of the daemon: `isthmus_*`, base units. One registry of its own, so that tests start from zero.

Labels are bounded: models, placements, stages, error codes; never a request or a peer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Metrics:
    def __init__(self, *, version: str) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "isthmus_requests",
            "Requests by what became of them.",
            ["model", "placement", "outcome"],
            registry=self._registry,
        )
        self._duration = Histogram(
            "isthmus_request_duration_seconds",
            "From received to answered.",
            ["model", "placement"],
            buckets=SECONDS,
            registry=self._registry,
        )
        self._stages = Counter(
            "isthmus_stage_duration_seconds", "Time spent, by stage.", ["model", "stage"], registry=self._registry
        )
        self._fallbacks = Counter(
            "isthmus_fallbacks",
            "Requests that the device finished for the companion.",
            ["model"],
            registry=self._registry,
        )
        Gauge("isthmus_build_info", "Version.", ["version"], registry=self._registry).labels(version).set(1)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A value read when it is asked for."""
        Gauge(name, text, registry=self._registry).set_function(read)

    def answered(
        self, model: str, placement: str, fell_back: bool, stages_ms: Mapping[str, float], total_ms: float
    ) -> None:
        self._requests.labels(model, placement, "answered").inc()
        self._duration.labels(model, placement).observe(total_ms / 1000)
        for stage, ms in stages_ms.items():
            self._stages.labels(model, stage).inc(ms / 1000)
        if fell_back:
            self._fallbacks.labels(model).inc()

    def failed(self, model: str, code: str) -> None:
        self._requests.labels(model, "none", code).inc()

    def render(self) -> bytes:
        """The text format of a scrape."""
        return generate_latest(self._registry)
