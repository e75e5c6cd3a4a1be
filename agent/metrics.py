"""Prometheus metrics of the daemon: `isthmus_*`, base units, read from the journal when they are scraped.

A request pays nothing for them. Labels are bounded: models, placements, stages, error codes; never a request or a peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from agent.journal import Journal
from agent.totals import BUCKETS_MS, Totals
from split.transport.channel import LinkFacts, Observation

_OF_CONNECTION: Mapping[str, tuple[str, Callable[[LinkFacts], float]]] = {
    "isthmus_link_rtt_seconds": ("Round trip as TCP smooths it.", lambda one: one.rtt_ms / 1000),
    "isthmus_link_rtt_variation_seconds": ("Its mean deviation.", lambda one: one.rtt_var_ms / 1000),
    "isthmus_link_rate_bytes_per_second": ("What the peer acknowledged per second.", lambda one: one.rate_bytes_per_s),
    "isthmus_link_cwnd_bytes": ("Congestion window.", lambda one: one.cwnd_bytes),
    "isthmus_link_unacked_bytes": ("Sent and not acknowledged.", lambda one: one.unacked_bytes),
    "isthmus_link_unsent_bytes": ("In the kernel and not yet sent.", lambda one: one.unsent_bytes),
    "isthmus_link_retransmits": ("Segments sent again on this connection.", lambda one: one.retransmits),
}


class Metrics:
    """`gauges`: name → (help, function that reads it); `link`: the connection to the companion now, if there is one."""

    def __init__(
        self,
        journal: Journal,
        *,
        version: str,
        gauges: Mapping[str, tuple[str, Callable[[], float]]],
        link: Callable[[], Observation | None],
        rates: Callable[[], Mapping[tuple[str, str], float]] = dict,
    ) -> None:
        """`rates`: (model, codec) → what calibrated codecs send over what their curves say."""
        self._journal = journal
        self._version = version
        self._gauges = gauges
        self._link = link
        self._rates = rates
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        """The text format of a scrape."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """prometheus-client's question."""
        of_requests = _OfRequests()
        for model, totals in self._journal.totals.items():
            of_requests.add(model, totals)
        yield from of_requests.families()
        rates = GaugeMetricFamily(
            "isthmus_calibration_rate_ratio",
            "Bytes of calibrated codecs over what the calibration says: far above 1, live inputs do not fit it.",
            labels=["model", "codec"],
        )
        for of, ratio in self._rates().items():
            rates.add_metric([*of], ratio)
        yield rates
        for name, (text, read) in self._gauges.items():
            yield GaugeMetricFamily(name, text, value=read())
        if (link := self._link()) is not None:
            yield from _of_link(link)
        info = GaugeMetricFamily("isthmus_build_info", "Version.", labels=["version"])
        info.add_metric([self._version], 1)
        yield info


class _OfRequests:
    """What the journal counts of requests, as families with a sample for each model; made anew for each scrape."""

    def __init__(self) -> None:
        self.requests = CounterMetricFamily(
            "isthmus_requests", "Requests by what became of them.", labels=["model", "placement", "outcome"]
        )
        self.durations = HistogramMetricFamily(
            "isthmus_request_duration_seconds", "From received to answered.", labels=["model", "placement"]
        )
        self.stages = CounterMetricFamily(
            "isthmus_stage_duration_seconds", "Time spent, by stage.", labels=["model", "stage"]
        )
        self.fallbacks = CounterMetricFamily(
            "isthmus_fallbacks", "Requests that the device finished for the companion.", labels=["model"]
        )
        self.hedges = CounterMetricFamily(
            "isthmus_hedges",
            "Finishes that began here for requests sent to the companion, by who answered first.",
            labels=["model", "outcome"],
        )
        self.shadows = CounterMetricFamily(
            "isthmus_shadow_runs", "Answers of the companion's compared with the device's.", labels=["model", "result"]
        )
        self.checks = GaugeMetricFamily(
            "isthmus_fidelity_bound_ratio",
            "Mean distance of spot-checked answers to the unsplit model's, over the bound: above 1 it is broken.",
            labels=["model", "codec"],
        )
        self.unchecked = GaugeMetricFamily(
            "isthmus_unchecked_answers",
            "Answers over a lossy codec since the last one that was checked: above spot_check_every, none could be.",
            labels=["model", "codec"],
        )
        self.explored = CounterMetricFamily(
            "isthmus_explored_requests", "Requests whose plan was run to learn something.", labels=["model"]
        )
        self.ratios = HistogramMetricFamily(
            "isthmus_prediction_ratio",
            "Measured over predicted time of requests that ran as chosen, by stage and in total.",
            labels=["model", "stage"],
        )
        self.errors = SummaryMetricFamily(
            "isthmus_prediction_error_ratio",
            "Their absolute error over the measured time; sum over count is the MAPE.",
            labels=["model", "stage"],
        )
        self.energy = CounterMetricFamily(
            "isthmus_energy_joules",
            "Used above idle by answered requests: measured stages times the device's power, itself measured or not.",
            labels=["model", "measured"],
        )

    def add(self, model: str, totals: Totals) -> None:
        """Of one model's requests."""
        for agrees, count in totals.shadows.items():
            self.shadows.add_metric([model, "agreed" if agrees else "differed"], count)
        for placement, times in totals.placements.items():
            self.requests.add_metric([model, placement, "answered"], times.count)
            buckets = [
                ("+Inf" if edge_ms is None else repr(edge_ms / 1000), count)
                for edge_ms, count in zip((*BUCKETS_MS, None), times.cumulative(), strict=True)
            ]
            self.durations.add_metric([model, placement], buckets, times.sum_ms / 1000)
        for code, count in totals.failures.items():
            self.requests.add_metric([model, "none", code], count)
        for stage, ms in totals.stages_ms.items():
            self.stages.add_metric([model, stage], ms / 1000)
        self.fallbacks.add_metric([model], totals.fallbacks)
        for first, count in totals.finishes.items():
            self.hedges.add_metric([model, first], count)
        for codec, (_, _, ratio) in totals.checks.items():
            self.checks.add_metric([model, codec], ratio)
        for codec, answers in totals.unchecked.items():
            self.unchecked.add_metric([model, codec], answers)
        self.explored.add_metric([model], totals.explored)
        for stage, one in totals.predicted.items():
            edges = [("+Inf" if edge is None else repr(edge), n) for edge, n in one.edges()]
            self.ratios.add_metric([model, stage], edges, one.sum)
            self.errors.add_metric([model, stage], one.count, one.error_sum)
        for measured, joules in totals.joules.items():
            self.energy.add_metric([model, str(measured).lower()], joules)

    def families(self) -> tuple[Metric, ...]:
        """With all samples that were added."""
        return (
            self.requests,
            self.durations,
            self.stages,
            self.fallbacks,
            self.hedges,
            self.shadows,
            self.checks,
            self.unchecked,
            self.explored,
            self.ratios,
            self.errors,
            self.energy,
        )


def _of_link(link: Observation) -> Iterator[Metric]:
    """Of the connection there is now: what it counts begins anew with the next."""
    for name, (text, read) in _OF_CONNECTION.items():
        family = GaugeMetricFamily(name, text, labels=["lane", "congestion_control"])
        for one in link.connections:
            family.add_metric([one.lane, one.congestion_control], read(one))
        yield family
    yield GaugeMetricFamily("isthmus_link_queued_bytes", "Waiting for the link.", value=link.queued_bytes)
    yield GaugeMetricFamily("isthmus_link_sent_bytes", "Sent, with all headers and repetitions.", value=link.sent_bytes)
    yield GaugeMetricFamily("isthmus_link_received_bytes", "Received, with all headers.", value=link.received_bytes)
