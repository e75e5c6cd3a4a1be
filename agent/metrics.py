"""Prometheus metrics of the daemon: `isthmus_*`, base units, read from the journal when they are scraped.

A request pays nothing for them. Labels are bounded: models, placements, stages, error codes; never a request or a peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from agent.journal import BUCKETS_MS, Journal


class Metrics:
    """`gauges`: name → (help, function that reads it)."""

    def __init__(
        self, journal: Journal, *, version: str, gauges: Mapping[str, tuple[str, Callable[[], float]]]
    ) -> None:
        self._journal = journal
        self._version = version
        self._gauges = gauges
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        """The text format of a scrape."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """prometheus-client's question."""
        requests = CounterMetricFamily(
            "isthmus_requests", "Requests by what became of them.", labels=["model", "placement", "outcome"]
        )
        durations = HistogramMetricFamily(
            "isthmus_request_duration_seconds", "From received to answered.", labels=["model", "placement"]
        )
        stages = CounterMetricFamily(
            "isthmus_stage_duration_seconds", "Time spent, by stage.", labels=["model", "stage"]
        )
        fallbacks = CounterMetricFamily(
            "isthmus_fallbacks", "Requests that the device finished for the companion.", labels=["model"]
        )
        for model, totals in self._journal.totals.items():
            for placement, times in totals.placements.items():
                requests.add_metric([model, placement, "answered"], times.count)
                buckets = [
                    ("+Inf" if edge_ms is None else repr(edge_ms / 1000), count)
                    for edge_ms, count in zip((*BUCKETS_MS, None), times.cumulative(), strict=True)
                ]
                durations.add_metric([model, placement], buckets, times.sum_ms / 1000)
            for code, count in totals.failures.items():
                requests.add_metric([model, "none", code], count)
            for stage, ms in totals.stages_ms.items():
                stages.add_metric([model, stage], ms / 1000)
            fallbacks.add_metric([model], totals.fallbacks)
        yield from (requests, durations, stages, fallbacks)
        for name, (text, read) in self._gauges.items():
            yield GaugeMetricFamily(name, text, value=read())
        info = GaugeMetricFamily("isthmus_build_info", "Version.", labels=["version"])
        info.add_metric([self._version], 1)
        yield info
